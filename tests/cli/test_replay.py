import json
import re
import shlex
import shutil
import tomllib
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoTokenizer

from monge import api
from monge.cli import tune as tuning
from monge.core.errors import OptionError
from monge.core.sampling_rules import SamplingRules
from monge.prompts import Prompt
from monge.replay.file import read_log
from monge.replay.log import LawLog, LoggedText, Masses, ModelIdentity
from tests.heads.readers.published import eagle3


@pytest.fixture(scope="session")
def logged(tiny_paths, tmp_path_factory):
    """A log of the tiny pair, made by the command."""
    from typer.testing import CliRunner

    from monge.cli.app import app

    folder = tmp_path_factory.mktemp("log")
    (folder / "mine.txt").write_text("One and two.\nThree.\n")
    target, draft = tiny_paths
    command = f"replay record --target {target} --draft {draft} --out {folder}/run.mlog"
    command += f" --file {folder}/mine.txt --temperature 1 --max-new-tokens 8 --ignore-eos --json"
    result = CliRunner().invoke(app, command.split(), catch_exceptions=False)
    assert result.exit_code == 0, result.stderr
    return folder / "run.mlog", result


def test_log_says_what_it_holds(logged):
    path, result = logged
    assert f"{path}: 2 texts of " in result.stdout
    assert "16 tokens, complete laws, costs of model, ngram, none" in result.stdout
    assert f"next: monge replay run {path}" in result.stdout
    found = json.loads(result.stdout.splitlines()[-1])
    assert found["tokens"] == 16
    assert found["bytes"] == path.stat().st_size


def test_replay_compares_what_fits_and_says_why_the_rest_does_not(
    run, logged, tiny_paths, tmp_path
):
    path, _ = logged
    choices = "--tree chain(2) --verifier single_draft --verifier layer --verifier rrs_without_replacement"
    files = ("--draft", tiny_paths[1], "--out", tmp_path, "--check-target", tiny_paths[0])
    result = run("replay", "run", path, *choices.split(), *files, "--repeats", 1, "--json")
    assert result.exit_code == 0, result.stderr
    document = json.loads(result.stdout.splitlines()[-1])
    assert json.loads((tmp_path / "replay.json").read_text()) == document
    found = document["replayed"][0]
    assert found["configuration"] == {"tree": "chain(2)", "verifier": "single_draft"}
    assert 1.0 <= found["block_efficiency"]["low"] <= found["block_efficiency"]["mean"] <= 3.0
    assert list(found["tags"]) == ["mine"]
    assert "chain(2) single_draft" in result.stdout
    assert "chain(2) layer: replay: Layer cannot be replayed here" in result.stdout
    assert len(document["refused"]) == 1


def test_compact_logs_without_costs_count_rounds(run, tiny_paths, tmp_path):
    target, draft = tiny_paths
    path = tmp_path / "small.mlog"
    models = ("--target", target, "--draft", draft, "--out", path)
    limits = "--prompts-per-task 1 --max-new-tokens 4 --temperature 1 --top 8 --ignore-eos"
    result = run("replay", "record", *models, *limits.split(), "--no-costs")
    assert result.exit_code == 0, result.stderr
    assert "the 8 most probable tokens of each law, the rest as one, no costs" in result.stdout
    replayed = ("--draft", draft, "--tree", "chain(2)", "--repeats", 1, "--out", tmp_path)
    result = run("replay", "run", path, *replayed)
    assert result.exit_code == 0, result.stderr
    assert "compact log: rejected candidates stand in" in result.stdout
    found = json.loads((tmp_path / "replay.json").read_text())["replayed"][0]
    assert found["tokens_per_s"] is None
    assert set(found["tags"]) == {"gsm8k", "humaneval", "prose"}


@pytest.fixture
def tune(run, tiny_paths, tmp_path):
    """`monge tune` on one prompt: its result, what it writes, and the arguments that it recommends."""
    (tmp_path / "mine.txt").write_text("One and two.\n")

    def call(*arguments, target=tiny_paths[0]):
        files = ("--prompts", tmp_path / "mine.txt", "--out", tmp_path / "out")
        result = run("tune", "--target", target, *files, "--repeats", 1, *arguments)
        assert result.exit_code == 0, result.stderr
        document = json.loads((tmp_path / "out" / "tune.json").read_text())
        (use,) = [line for line in result.stdout.splitlines() if line.startswith("use it:")]
        words = shlex.split(use.removeprefix("use it:   monge ").replace("PROMPT", "Once"))
        assert (tried := run(*words, "--max-new-tokens", 2)).exit_code == 0, tried.stderr
        return result, document, words

    return call


def drafters(document):
    return {one["configuration"]["drafter"].partition("(")[0] for one in document["replayed"]}


BACKEND = "--dtype float64 --device cpu --attention eager --backend eager"


def test_tune_ends_with_a_command_that_runs(tune, tiny_paths):
    asked = f"--max-new-tokens 6 --temperature 1 --confirm --json {BACKEND}".split()
    result, document, words = tune("--draft", tiny_paths[1], *asked)
    assert json.loads(result.stdout.splitlines()[-1]) == document
    speeds = [found["tokens_per_s"]["mean"] for found in document["replayed"]]
    assert speeds == sorted(speeds, reverse=True)
    assert document["predicted_best"] == document["replayed"][0]["configuration"]
    measured = sorted(document["measured"], key=lambda one: one["tokens_per_s"])
    assert len(measured) in {3, 4}
    assert document["best"] == measured[-1]["configuration"]
    assert f"python:   monge.load(target={tiny_paths[0]!r}, " in result.stdout
    assert BACKEND in " ".join(words)
    assert "device='cpu', attention='eager', backend='eager'" in result.stdout


def test_what_the_clock_says_goes_before_what_was_predicted(tune, tiny_paths, monkeypatch):
    slow, fast = {"drafter": "model", "tree": "chain(8, 'top')"}, {"drafter": "none"}
    measured = [
        {"label": "slow", "configuration": slow, "tokens_per_s": 1.0},
        {"label": "fast", "configuration": fast, "tokens_per_s": 2.0},
    ]
    monkeypatch.setattr(tuning, "_confirmed", lambda *_, **__: measured)
    monkeypatch.setattr(tuning, "FREE", ())
    limits = ("--max-new-tokens", 2, "--confirm")
    result, document, words = tune("--draft", tiny_paths[1], *limits)
    assert "measured: slow: 1.0 tokens/s, 0.50 times plain decoding" in result.stdout
    assert "best by the clock: none" in result.stdout
    assert words[-2:] == ["--drafter", "none"]
    assert document["best"] == fast


def test_tune_writes_a_file_that_every_door_takes(tune, tiny_paths, tmp_path, monkeypatch):
    monkeypatch.setattr(tuning, "FREE", ("suffix",))
    config = tmp_path / "monge.toml"
    result, _, words = tune("--max-new-tokens", 2, "--save", config)
    settings = tomllib.loads(config.read_text())
    assert settings["target"] == str(tiny_paths[0])
    assert settings["drafter"].partition("(")[0] in {"none", "ngram", "suffix"}
    assert words == ["generate", "Once", "--config", str(config)]
    *_, python, expected = result.stdout.splitlines()
    assert python == f"python:   monge.load(config={str(config)!r})"
    assert re.fullmatch(r"expected: [\d.]+ times plain decoding, 95% interval .*", expected)
    assert "monge train eagle3 --target" in result.stdout


def test_heads_and_other_drafters_are_timed_and_tried_where_the_target_runs(
    run, tune, tiny_paths, tmp_path
):
    head = eagle3(32, 4096).write(tmp_path / "eagle3")
    asked = ["--draft", head, "--drafter", "suffix(width=1)", "--drafter", "pool('ngram', 'head')"]
    asked += ["--max-new-tokens", 4, "--json"]
    files = ("--prompts", tmp_path / "mine.txt", "--out", tmp_path / "run.mlog")
    result = run("replay", "record", "--target", tiny_paths[0], *asked, *files)
    assert result.exit_code == 0, result.stderr
    timed = json.loads(result.stdout.splitlines()[-1])["costs"]
    assert timed == ["head", "ngram", "none", "suffix"]
    _, document, _ = tune(*asked)
    tried = {"none", "ngram", "head", "pool", "suffix"}
    assert drafters(document) == tried
    assert not document["refused"]


def test_a_chat_model_is_tuned_on_messages_and_with_the_head_that_ships_for_it(
    tune, tiny_paths, tmp_path, monkeypatch
):
    target = shutil.copytree(tiny_paths[0], tmp_path / "chat model")
    tokenizer = AutoTokenizer.from_pretrained(target)
    tokenizer.chat_template = "{% for m in messages %}Asked: {{ m.content }}\n{% endfor %}"
    tokenizer.save_pretrained(target)
    head = eagle3(32, 4096).write(tmp_path / "eagle3")
    named = SimpleNamespace(of=lambda _: SimpleNamespace(head=str(head)))
    monkeypatch.setattr(tuning, "ModelSource", named)
    monkeypatch.setattr(tuning, "FREE", ())
    result, document, words = tune("--max-new-tokens", 4, target=target)
    assert "prompts are written as messages" in result.stderr
    (text,) = read_log(tmp_path / "out" / "run.mlog").texts
    assert tokenizer.decode(text.prompt_ids) == "Asked: One and two.\n"
    assert drafters(document) == {"none", "ngram", "head"}
    assert "monge train" not in result.stdout, "there is a head"
    assert words[-1] == "--chat"


BAD_INPUT = {
    "replay run nowhere.mlog": "no such file; make a log with `monge replay record",
    "replay run LOG --repeats 0": "--repeats must be at least 1",
    "replay run LOG --check-target DRAFT": "the log was made with",
    "replay run FOLDER": ": a folder, not a log; name the file in it",
    "replay run LOG --out FILE": "is a file; name a folder",
    "replay record --file nowhere.txt": "cannot read prompts",
    "replay record --prompts-per-task 0": "must be at least 1; got 0",
    "replay record --out FOLDER": "is a folder; name a file in it",
    "replay record --out FILE/run.mlog": "is a file; name a folder",
    f"replay record --seed {2**64}": "seed must be a whole number of at least -2^63",
    "replay record --backend quick": "unknown backend 'quick'",
    "tune --out FILE": "is a file; name a folder",
    "tune --max-prompts 0": "--max-prompts must be at least 1; got 0",
    "tune --backend quick": "unknown backend 'quick'",
}


@pytest.mark.parametrize(("command", "message"), BAD_INPUT.items())
def test_bad_input(run, logged, tiny_paths, tmp_path, command, message):
    (tmp_path / "file").write_text("")
    places = {
        "LOG": logged[0],
        "DRAFT": tiny_paths[1],
        "FOLDER": tmp_path,
        "FILE": tmp_path / "file",
    }
    words = " ".join(command.split())
    if "replay run" not in command:
        words += f" --target {tiny_paths[0]}" + ("" if "--out" in command else " --out FOLDER/out")
    for name, path in places.items():
        words = words.replace(name, str(path))
    result = run(*words.split())
    assert result.exit_code == 2
    assert result.stderr.startswith("error: ")
    assert message in result.stderr


def test_rounds_are_timed_in_the_backend_that_was_asked_for(run, tiny_paths, tmp_path, monkeypatch):
    asked, path, make = [], tmp_path / "fast.mlog", api.as_sequence_model
    monkeypatch.setattr(
        api, "as_sequence_model", lambda *a, backend: asked.append(backend) or make(*a)
    )
    models = ("--target", tiny_paths[0], "--out", path)
    limits = "--prompts-per-task 1 --max-new-tokens 2 --no-costs --ignore-eos --backend compiled"
    result = run("replay", "record", *models, *limits.split())
    assert result.exit_code == 0, result.stderr
    assert asked == ["compiled"]
    assert read_log(path).about["backend"] == "compiled"


def test_a_log_that_nothing_can_answer_fails(run, logged, tiny_paths, tmp_path):
    arguments = ["--tree", "fixed_width((2, 1))", "--verifier", "traversal", "--out", tmp_path]
    result = run("replay", "run", logged[0], "--draft", tiny_paths[1], *arguments)
    assert result.exit_code == 2
    assert "on trees it decides by target laws off the text" in result.stdout


def test_a_log_alone_holds_no_hidden_states(run, logged, tmp_path):
    head = eagle3(32, 4096).write(tmp_path / "eagle3")
    result = run("replay", "run", logged[0], "--draft", head)
    assert result.exit_code == 2
    assert "reads hidden states of the target, and a log holds none" in result.stderr
    result = run("replay", "record", "--no-costs", "--drafter", "suffix")
    assert "--drafter says whose rounds are timed" in result.stderr


def test_nothing_is_concluded_from_texts_that_end_at_once(capsys):
    def text(task, length):
        masses = Masses(probs=torch.full((length, 2), 0.5, dtype=torch.float64))
        ids = {"prompt_ids": (1,), "token_ids": (0,) * length, "max_new_tokens": 20}
        return LoggedText(tag=task, **ids, masses=masses, vocab_size=2)

    def log(*texts):
        identity = ModelIdentity(name="m", vocab_size=2, tokenizer="t")
        return LawLog(model=identity, rules=SamplingRules(), texts=texts)

    prompts = [Prompt(task=task, text=name) for task, name in (("a", "1"), ("b", "2"), ("a", "3"))]
    found, shown = tuning._without_short(log(text("a", 9), text("a", 1), text("b", 20)), prompts)
    assert [len(one.token_ids) for one in found.texts] == [9, 20]
    assert [one.text for one in shown] == ["1", "2"]
    assert "1 of 3 texts ended within 8 tokens and are left out" in capsys.readouterr().err
    with pytest.raises(OptionError, match="1 of 1 texts ended within 8 tokens.*--prompts"):
        tuning._without_short(log(text("a", 7)), prompts[:1])
