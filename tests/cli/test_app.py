import importlib
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

import monge
from monge.bench.runner import Settings
from monge.cli.app import BENCH, COMMANDS, REPLAY, TRAIN
from monge.cli.early import TABLES, check_early, names_of
from monge.cli.lazy import Command
from monge.engine.backends.registry import BACKENDS


def test_version(run):
    result = run("--version")
    assert result.exit_code == 0
    assert result.stdout.startswith("monge ")
    # As the metadata says it: some builds add a label to `torch.__version__`.
    assert f"torch {version('torch')}, " in result.stdout


def test_module_is_the_command():
    result = subprocess.run(
        [sys.executable, "-m", "monge", "--version"], capture_output=True, text=True, timeout=120
    )
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.startswith("monge ")


def test_no_command_shows_the_commands(run):
    result = run()
    assert all(command in result.output for command in ("generate", "list", "demo", "bench"))


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (
            ["generate"],
            [
                "Examples",
                "Models",
                "Speculation",
                "Sampling",
                "Default: 128.",
                "Default: auto.",
                "monge generate",
            ],
        ),
        (
            ["bench", "decode"],
            ["Examples", "Measuring", "--quick", "Default: 1, 4, 8.", "prompt lookup"],
        ),
        (["list"], ["--json"]),
        (["demo"], ["built-in pair"]),
    ],
    ids=lambda value: " ".join(value) if len(value) < 3 else "",
)
def test_help_is_worth_reading(run, monkeypatch, command, words):
    monkeypatch.setenv("COLUMNS", "160")
    shown = run(*command, "--help").output
    assert [word for word in words if word not in shown] == []


def commands(table, words=()):
    """Every lazy command, by the words that a user types."""
    for name, command in table.items():
        if isinstance(command, Command):
            yield (*words, name), command


LAZY = dict(
    [
        *commands(COMMANDS),
        *commands(REPLAY, ["replay"]),
        *commands(TRAIN, ["train"]),
        *commands(BENCH, ["bench"]),
    ]
)


@pytest.mark.parametrize("words", LAZY, ids=" ".join)
def test_lists_say_what_the_command_says(words):
    """The table repeats the first line of the docstring, because reading that line would import the module."""
    doc = LAZY[words].function().__doc__
    assert doc is not None
    assert doc.splitlines()[0] == LAZY[words].help


def test_every_group_lists_lazy_commands():
    assert {name for name, command in COMMANDS.items() if not isinstance(command, Command)} == {
        "replay",
        "train",
        "bench",
    }


@pytest.mark.parametrize(
    "arguments",
    [
        ["--version"],
        ["--help"],
        ["generat"],
        ["bench", "--help"],
        ["bench", "speed"],
        ["replay"],
        ["log"],
    ],
    ids=" ".join,
)
def test_what_runs_no_model_imports_no_torch(arguments):
    code = f"""
import sys
from monge.cli.app import app
try:
    app({arguments!r})
except SystemExit:
    print("loaded:", *sorted({{"torch", "transformers", "numpy"}} & set(sys.modules)))
"""
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120
    )
    assert result.stdout.splitlines()[-1].strip() == "loaded:", result.stdout + result.stderr


def test_names_and_files_are_refused_before_torch_is_imported(tmp_path):
    config = tmp_path / "monge.toml"
    config.write_text('verifier = "blok"')
    wrong = {
        "generate Once --verifier rss": "did you mean 'rrs'?",
        "generate Once --tree=chian(3)": "did you mean 'chain'?",
        "chat --drafter ngrams": "did you mean 'ngram'?",
        "serve --controller fixd": "did you mean 'fixed'?",
        "batch --draft-backend compild": "did you mean 'compiled'?",
        "generate Once --target smolm2": "did you mean 'smollm2'?",
        "serve ./nowhere": "no folder './nowhere'",
        "tune --draft nowhere.gguf": "no file 'nowhere.gguf'",
        "generate --prompts nowhere.txt": "cannot read prompts from 'nowhere.txt'",
        "train shape --out head --data nowhere.txt": "cannot read prompts from 'nowhere.txt'",
        "certify nowhere.json": "nowhere.json: no such file",
        "replay run nowhere.mlog": "nowhere.mlog: no such file",
        "generate Once --config nowhere.toml": "cannot read the configuration 'nowhere.toml'",
        f"generate Once --config {config}": "did you mean 'block'?",
    }
    code = f"""
import sys
from monge.cli.app import app
for arguments in {list(wrong)!r}:
    try:
        app(arguments.split())
    except SystemExit as error:
        print(error.code, *sorted({{"torch", "transformers"}} & set(sys.modules)))
"""
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, cwd=tmp_path
    )
    assert result.stdout.splitlines() == ["2"] * len(wrong), result.stderr
    said = result.stderr.splitlines()
    assert len(said) == len(wrong)
    assert [
        line for line, words in zip(said, wrong.values(), strict=True) if words not in line
    ] == []


@pytest.mark.parametrize("kind", TABLES)
def test_early_checks_know_the_names_of_every_registry(kind):
    registries = {
        "verifier": monge.VERIFIERS,
        "drafter": monge.DRAFTERS,
        "tree": monge.TREES,
        "controller": monge.CONTROLLERS,
        "backend": BACKENDS,
    }
    assert names_of(kind) == set(registries[kind])


@pytest.mark.parametrize(
    "arguments",
    [
        ["x", "--help", "--verifier", "rss"],
        ["x", "--target", "smollm2", "--draft", "smollm2-head"],
        ["x", "--draft", "built-in", "--tree", "fixed_width((4, 2))", "--controller", "goodput"],
        ["x", "--", "--verifier", "rss"],
        ["x", "--config", "CONFIG", "--verifier", "block"],
        ["x", "--verifier"],
        ["--stop", "--tree"],
    ],
)
def test_early_checks_refuse_nothing_that_may_be_right(arguments, tmp_path):
    config = tmp_path / "monge.toml"
    config.write_text('verifier = "blok"\ntarget = "nowhere"')
    check_early([str(config) if one == "CONFIG" else one for one in arguments])


def test_the_laboratory_has_its_commands():
    root = Path(__file__).parents[2] / "lab"
    found = {path.parent.name for path in root.glob("*/__main__.py")}
    assert found
    readme = (root / "README.md").read_text()
    assert [name for name in (*found, "matrix") if f"`python -m lab.{name}`" not in readme] == []


@pytest.mark.parametrize(
    ("obstacle", "raced"), [(None, ["eager", "compiled"]), ("there is no compiler", ["eager"])]
)
def test_demo(run, monkeypatch, obstacle, raced):
    module = importlib.import_module("monge.cli.demo")
    monkeypatch.setenv("COLUMNS", "140")
    monkeypatch.setattr(module, "NEW_TOKENS", 6)
    monkeypatch.setattr(module, "SETTINGS", Settings(max_new_tokens=4, repeats=1, batch_sizes=(1,)))
    # The built-in pair takes a minute to compile: what is timed here is the eager pair, twice.
    backends, load = [], module.load_pair
    monkeypatch.setattr(module, "load_pair", lambda *, backend: backends.append(backend) or load())
    monkeypatch.setattr(module, "obstacle", lambda name: "its package is not installed")
    monkeypatch.setattr(module, "compiler_obstacle", lambda: obstacle)
    result = run("demo")
    assert result.exit_code == 0
    assert result.stdout.count("Question: ") == 2
    assert "def " in result.stdout
    for row in (
        "transformers ",
        "transformers assisted",
        "monge none",
        "monge bench decode --quick",
    ):
        assert row in result.stdout
    assert backends == raced
    assert result.stdout.count("as fast as transformers.generate") == 2 * len(raced)
    assert ("is several times faster; there is no compiler" in result.stdout) is (
        obstacle is not None
    )
    assert result.stderr.count("6 tokens in ") == 4


def test_a_quick_demo_compiles_nothing(run, monkeypatch):
    module = importlib.import_module("monge.cli.demo")
    monkeypatch.setattr(module, "NEW_TOKENS", 6)
    monkeypatch.setattr(module, "QUICK", Settings(max_new_tokens=4, repeats=1, batch_sizes=(1,)))
    backends, load = [], module.load_pair
    monkeypatch.setattr(module, "load_pair", lambda *, backend: backends.append(backend) or load())
    monkeypatch.setattr(module, "obstacle", lambda name: "its package is not installed")
    result = run("demo", "--quick")
    assert result.exit_code == 0
    assert backends == ["eager"]
    assert result.stdout.count("as fast as transformers.generate") == 2
