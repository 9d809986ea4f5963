"""Recorded figures are measured again and compared, and a figure that is too low fails."""

import ast
import json
import subprocess

import pytest

from lab.command import app_of
from lab.gates import __main__ as gates
from lab.gates import house

ARMS = [{"world": "w", "controller": "c", "ratio": 1.2, "speed": {"mean": 2.0}}]


@pytest.fixture
def run(monkeypatch, tmp_path):
    from typer.testing import CliRunner

    def invoke(recorded, *arguments, code=0, **bounds):
        told = json.dumps({"arms": ARMS})
        line = f"import sys; print('noise'); print({told!r}); sys.exit({code})"
        arm, bounds = {"arm": {"world": "w"}}, bounds or {"share": 0.95}
        figures = [
            arm | {"field": field, "recorded": value} | bounds for field, value in recorded.items()
        ]
        path = tmp_path / "baselines.json"
        path.write_text(json.dumps({"one": {"command": ["-c", line], "figures": figures}}))
        monkeypatch.setattr(gates, "BASELINES", path)
        return CliRunner().invoke(app_of(gates.main), list(arguments))

    return invoke


@pytest.mark.parametrize(("ratio", "code", "word"), [(1.25, 0, "holds"), (1.3, 1, "fails")])
def test_figures(run, ratio, code, word):
    result = run({"ratio": ratio, "speed.mean": 1.9})
    assert result.exit_code == code
    assert result.stdout.count(word) == 2 - code


@pytest.mark.parametrize(
    ("name", "bound", "is_held"),
    [("most", 1.2, True), ("most", 1.1, False), ("least", 1.2, True), ("least", 1.3, False)],
)
def test_absolute_bounds(run, name, bound, is_held):
    result = run({"ratio": 9.0}, **{name: bound})
    assert (result.exit_code == 0) == is_held


def test_what_cannot_be_measured_is_named(run):
    assert "ended with 3" in run({"ratio": 1.0}, code=3).stderr
    assert "there is no 'two'" in run({"ratio": 1.0}, "--gate", "two").stderr


def test_the_recorded_gates_can_be_read():
    for gate in json.loads(gates.BASELINES.read_text()).values():
        assert gate["command"]
        for figure in gate["figures"]:
            assert figure["recorded"] >= 0
            assert figure.keys() & set(gates.BOUNDS)


@pytest.mark.parametrize(
    ("ceilings", "code"),
    [
        ({"x": {"ceiling": 3, "plan": 2}}, 0),
        ({"x": {"ceiling": 2, "plan": 2}}, 1),
        ({}, 1),
        ({"x": {"ceiling": 3, "plan": 2}, "y": {"ceiling": 9, "plan": 9}}, 1),
    ],
    ids=["below", "above", "no ceiling", "no count"],
)
def test_a_count_above_its_ceiling_fails(monkeypatch, tmp_path, ceilings, code):
    path = tmp_path / "ceilings.json"
    path.write_text(json.dumps(ceilings))
    monkeypatch.setattr(house, "CEILINGS", path)
    monkeypatch.setattr(house, "counts", lambda: {"x": 3})
    monkeypatch.setattr("sys.argv", ["house"])
    if code:
        with pytest.raises(SystemExit, match="1"):
            house.main()
    else:
        house.main()


def raised(before: dict[str, dict[str, int]], after: dict[str, dict[str, int]]) -> list[str]:
    """Return the counts whose ceiling is higher than it was."""
    names = before.keys() & after.keys()
    return [name for name in names if after[name]["ceiling"] > before[name]["ceiling"]]


def test_a_ceiling_is_raised_by_a_commit_of_its_own():
    def git(*arguments):
        options = {"cwd": house.ROOT, "check": True, "capture_output": True, "text": True}
        return subprocess.run(["git", *arguments], **options).stdout

    path = house.CEILINGS.relative_to(house.ROOT).as_posix()
    try:
        commits = git("log", "--no-merges", "--diff-filter=M", "--format=%H", "--", path).split()
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("no history of this checkout")
    for commit in commits:
        before, after = (json.loads(git("show", f"{one}:{path}")) for one in (f"{commit}~", commit))
        if raised(before, after):
            changed = git("show", "--format=", "--name-only", commit).split()
            assert set(changed) <= {path, "CHANGELOG.md"}, (commit, raised(before, after))


def test_lines_of_code():
    imports = '"""A docstring."""\n\nimport os\nfrom a import (\n    b,\n)\n'
    assert house.lines_of_code(imports + "\n# why\nx = (\n    1\n)\n") == 3


HOUSE = {
    "a.py": "from monge import b\nclass A:\n    def __getattr__(self, name): ...\n",
    "b.py": "def f():\n    from monge.a import A\n    one = 1\nclass A: ...\n",
    "verify/c.py": "class C:\n    programs = 1\n    def emit(self):\n" + "        f()\n" * 6,
    "d.py": 'CODE = "import os\\nprint()"\ndraws.uniform()\nx = Iid\n',
    "e.py": '"""One, one or one of none."""\n',
}


@pytest.mark.parametrize(
    ("name", "places"),
    [
        ("circles of imports", ["a.py <-> b.py"]),
        ("classes with __getattr__", ["a.py:2 A"]),
        ("class names that occur twice", ["A"]),
        ("vague variables", ["b.py:3 one"]),
        ("rules with two sources", ["verify/c.py:1 C.emit"]),
        ("constants that are Python source", ["d.py:1"]),
        ("dropped uniforms", ["d.py:2"]),
        ("files that name one way of drawing", ["d.py"]),
        ('"one" in docstrings', ["e.py:1", "e.py:1"]),
    ],
)
def test_what_the_house_counts(monkeypatch, name, places):
    sources = {path: ast.parse(text) for path, text in HOUSE.items()}
    monkeypatch.setattr(house, "modules", lambda: sources)
    assert list(house.LISTS[name]()) == places


def test_files_of_a_round_are_those_that_it_enters():
    entered = list(house.files_of_a_round())
    assert "engine/loop.py" in entered
    assert "cli/app.py" not in entered
