import json
import shlex
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

import monge
from monge.backends.registry import BACKENDS
from monge.cli import demo
from monge.cli.app import app
from monge.cli.lazy import check_early, names_of


def test_version(run):
    result = run("--version")
    assert result.exit_code == 0
    assert result.stdout.startswith("monge ")
    # As the metadata says it: some builds add a label to `torch.__version__`.
    assert f"torch {version('torch')}, " in result.stdout
    module = [sys.executable, "-m", "monge", "--version"]
    assert subprocess.run(module, capture_output=True, text=True).stdout == result.stdout


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("", "generate list demo bench"),
        ("generate", "Examples Models Speculation Sampling 128. auto. --trace"),
        ("bench decode", "Examples Measuring --quick 1, 4, 8. lookup"),
        ("list", "--json"),
        ("demo", "built-in pair"),
    ],
)
def test_help_is_worth_reading(run, monkeypatch, command, words):
    monkeypatch.setenv("COLUMNS", "160")
    shown = run(*command.split(), *(["--help"] if command else [])).output
    assert [word for word in words.split() if word not in shown] == []
    assert "--no-quick" not in shown


def commands(group, words=()):
    """Every command, by the words that a user types, and what lists say of it."""
    for name in group.commands:
        one = group.get_command(None, name)
        if hasattr(one, "commands"):
            yield from commands(one, (*words, name))
        else:
            yield (*words, name), one.help


@pytest.mark.parametrize(("words", "listed"), list(commands(typer.main.get_command(app))))
def test_lists_say_what_the_command_says(run, monkeypatch, words, listed):
    """They read it from the source, because importing the modules takes seconds."""
    monkeypatch.setenv("COLUMNS", "200")
    result = run(*words, "--help")
    assert result.exit_code == 0
    assert listed.endswith(".")
    assert listed in result.output


@pytest.mark.parametrize(
    "command",
    [
        *("--version", "--help", "generat", "bench --help", "bench speed", "train", "log"),
        *("batch --help", "chat --help", "generate --help", "serve --help"),
        *("generate Once --taget x", "chat --temperature x", "serve --portt 3"),
    ],
)
def test_what_runs_no_model_imports_no_torch(command):
    code = f"""
import sys
from monge.cli.app import app
try:
    app({command.split()!r})
except SystemExit:
    print("loaded:", *sorted({{"torch", "transformers", "numpy"}} & set(sys.modules)))
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout.splitlines()[-1].strip() == "loaded:", result.stdout + result.stderr


def test_names_and_files_are_refused_before_torch_is_imported(tmp_path):
    config = tmp_path / "monge.toml"
    config.write_text('verifier = "blok"')
    wrong = {
        "generate Once --verifier blok": "did you mean 'block'?",
        "generate Once --tree=chian(3)": "did you mean 'chain'?",
        "chat --drafter ngrams": "did you mean 'ngram'?",
        "serve --controller fixd": "did you mean 'fixed'?",
        "batch --draft-backend compild": "did you mean 'compiled'?",
        "generate Once --target smolm2": "did you mean 'smollm2'?",
        "serve ./nowhere": "no folder './nowhere'",
        "tune --draft nowhere.gguf": "no file 'nowhere.gguf'",
        "generate --prompts nowhere.txt": "cannot read prompts from 'nowhere.txt'",
        "train shape --out head --data nowhere.txt": "cannot read prompts from 'nowhere.txt'",
        "generate Once --top-p 3": "top_p must lie in (0, 1]; got 3.0",
        "generate Once --verifier rrs --top-p 4": "top_p must lie in (0, 1]; got 4.0",
        "chat --temperature -1": "temperature must be finite and >= 0",
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
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert result.stdout.splitlines() == ["2"] * len(wrong), result.stderr
    said = zip(result.stderr.splitlines(), wrong.values(), strict=True)
    assert [line for line, words in said if words not in line] == []


def test_a_flag_is_taken_by_its_former_name_and_a_prompt_is_left_alone():
    wrong = ["--temperature", "-1"]
    result = CliRunner().invoke(app, ["generate", "Once", "--exact-numerics", *wrong])
    assert "--exact-numerics is --batch-invariant now" in result.stderr
    assert "temperature must be" in result.stderr
    result = CliRunner().invoke(app, ["generate", *wrong, "--", "--exact-numerics"])
    assert "--batch-invariant" not in result.stderr
    assert "temperature must be" in result.stderr


@pytest.mark.parametrize("kind", ["verifier", "drafter", "tree", "controller", "backend"])
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
        ["x", "--help", "--verifier", "blok"],
        ["x", "--target", "smollm2", "--draft", "smollm2-head"],
        ["x", "--draft", "built-in", "--tree", "fixed_width((4, 2))", "--controller", "goodput"],
        ["x", "--", "--verifier", "blok"],
        ["x", "--config", "CONFIG", "--verifier", "block"],
        ["--tree", "CONFIG"],
        ["x", "--verifier"],
        ["--stop", "--tree"],
    ],
)
def test_early_checks_refuse_nothing_that_may_be_right(arguments, tmp_path):
    config = tmp_path / "monge.toml"
    config.write_text('verifier = "blok"\ntarget = "nowhere"')
    check_early([str(config) if one == "CONFIG" else one for one in arguments], "generate")


def test_the_laboratory_has_its_commands():
    root = Path(__file__).parents[2] / "lab"
    found = {path.parent.name for path in root.glob("*/__main__.py")}
    assert found
    readme = (root / "README.md").read_text()
    assert [name for name in found if f"`python -m lab.{name}`" not in readme] == []


@pytest.mark.parametrize(
    ("missing", "compiler", "arguments", "shown"),
    [
        ("not installed", None, [], ["generate"] * 4 + ["bench", "bench --backend compiled"]),
        ("not installed", "there is no compiler", [], ["generate"] * 4 + ["bench"]),
        (None, None, [], ["chat", "bench"]),
        (None, None, ["--quick"], ["chat", "bench"]),
    ],
)
def test_demo_shows_what_is_there(run, monkeypatch, tmp_path, missing, compiler, arguments, shown):
    monkeypatch.setenv("MONGE_CACHE", str(tmp_path))
    ran, run_command = [], demo._run

    def note(words, *_):
        if words[0] == "generate" and not ran:
            run_command(words)
        ran.append(words)
        if words[0] == "bench":
            arms = [{"arm": "monge", "temperature": 0.0, "same_as_plain_share": 1.0}]
            document = {"speedup_over_plain": 1.254, "block_efficiency": 2.0, "arms": arms}
            folder = Path(words[words.index("--out") + 1])
            (folder / "result.json").write_text(json.dumps(document))

    monkeypatch.setattr(demo, "why_no_model", lambda name: missing)
    monkeypatch.setattr(demo, "why_no_compiler", lambda: compiler)
    monkeypatch.setattr(demo, "_run", note)
    result = run("demo", *arguments)
    assert result.exit_code == 0
    assert ("$ monge generate 'Question: " in result.stdout) is bool(missing)
    assert [words[0] + " --backend compiled" * ("compiled" in words) for words in ran] == shown
    assert ("is several times faster; there is no compiler" in result.stdout) is bool(compiler)
    assert (
        "wrote 1.25 times as many tokens a second as transformers, 2.00 for each" in result.stdout
    )
    assert "and the same greedy texts." in result.stdout
    target = "" if missing else " --chat --target smollm2"
    assert f"monge bench decode --quick{target}" in result.stdout


@pytest.mark.parametrize(
    ("missing", "arguments"), [(None, []), (None, ["--quick"]), ("not installed", ["--quick"])]
)
def test_what_the_demo_hands_out_is_a_command(run, monkeypatch, tmp_path, missing, arguments):
    """The commands that it runs, too: their files are there behind it."""
    monkeypatch.setenv("MONGE_CACHE", str(tmp_path))
    (tmp_path / "demo").mkdir()
    document = {"speedup_over_plain": 1.0, "block_efficiency": 1.0, "arms": []}
    (tmp_path / "demo" / "result.json").write_text(json.dumps(document))
    ran = []
    monkeypatch.setattr(demo, "why_no_model", lambda name: missing)
    monkeypatch.setattr(demo, "_run", lambda words, *_: ran.append(words))
    monkeypatch.setattr(sys, "argv", ["/my tools/monge"])
    monkeypatch.setattr(demo.shutil, "which", lambda name: None)
    *_, end = run("demo", *arguments).stdout.partition("To go on:")
    handed = [shlex.split(line)[1:] for line in end.splitlines() if line]
    assert [words[0] for words in handed] == ["/my tools/monge"] * 6
    for words in (*ran, *(words[1:] for words in handed)):
        with pytest.raises(SystemExit) as ended:
            typer.main.get_command(app).main(
                ["--help"] if words == ["--help"] else [*words, "--help"]
            )
        assert ended.value.code == 0
        check_early(words[1:], words[0])


def test_the_demo_run_as_a_module_hands_out_modules(monkeypatch):
    monkeypatch.setattr(sys, "argv", [demo.__file__.replace("cli/demo", "__main__")])
    assert demo._program() == f"{sys.executable} -m monge"
