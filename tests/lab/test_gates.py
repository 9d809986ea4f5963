"""Recorded figures are measured again and compared, and a figure that is too low fails."""

import ast
import json

import pytest

from lab.command import app_of
from lab.gates import __main__ as gates
from lab.gates import house

ARMS = [{"world": "w", "controller": "c", "ratio": 1.2, "speed": {"mean": 2.0}}]


@pytest.fixture
def run(monkeypatch, tmp_path):
    from typer.testing import CliRunner

    def invoke(recorded, *arguments, code=0, **bounds):
        line = (
            f"import sys; print('noise'); print({json.dumps({'arms': ARMS})!r}); sys.exit({code})"
        )
        figures = [
            {"arm": {"world": "w"}, "field": field, "recorded": value, "share": 0.95}
            for field, value in recorded.items()
        ]
        for figure in figures if bounds else ():
            del figure["share"]
            figure.update(bounds)
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
    ("bounds", "is_held"),
    [
        ({"most": 1.2}, True),
        ({"most": 1.1}, False),
        ({"least": 1.2}, True),
        ({"least": 1.3}, False),
    ],
)
def test_absolute_bounds(run, bounds, is_held):
    result = run({"ratio": 9.0}, **bounds)
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


def test_a_count_may_fall_but_not_grow(run, tmp_path):
    result = run({"ratio": 1.1}, goal=1.0)
    assert result.exit_code == 1
    path = tmp_path / "baselines.json"
    assert json.loads(path.read_text())["one"]["figures"][0]["recorded"] == 1.1
    assert run({"ratio": 3}, goal=1.0).exit_code == 0
    assert json.loads(path.read_text())["one"]["figures"][0]["recorded"] == 1


HOUSE = {
    "a.py": "from monge import b\nclass A:\n    def __getattr__(self, name): ...\n",
    "b.py": "def f():\n    from monge.a import A\n    one = 1\nclass A: ...\n",
    "verify/c.py": "class C:\n    programs = 1\n    def emit(self):\n" + "        f()\n" * 6,
}


@pytest.mark.parametrize(
    ("name", "places"),
    [
        ("circles of imports", ["a.py <-> b.py"]),
        ("classes with __getattr__", ["a.py:2 A"]),
        ("class names that occur twice", ["A"]),
        ("vague variables", ["b.py:3 one"]),
        ("rules with two sources", ["verify/c.py:1 C.emit"]),
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
