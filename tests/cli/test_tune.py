"""`monge tune`: what it decodes, what it recommends, and what it refuses."""

import json
import re
import shlex
import shutil
import tomllib
from types import SimpleNamespace

import pytest
from transformers import AutoTokenizer

from monge.bench.arms import named_arm
from monge.bench.runner import Measurement
from monge.cli import tune as tuning
from tests.heads.readers.published import eagle3

NONE, DEFAULTS = "drafter=none", ""
MODEL = "drafter=model, tree=chain(8, 'top'), controller=fixed(max_depth=2)"
SUFFIX = "drafter=suffix, controller=goodput"


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


@pytest.fixture
def few(monkeypatch):
    """Let the grid hold these settings only."""
    return lambda *settings: monkeypatch.setattr(tuning, "grid", lambda **_: list(settings))


@pytest.fixture
def clocked(monkeypatch):
    """Let settings be as fast as this says: seconds of a text of eight tokens."""

    def set_seconds(*measured):
        def search(pair, plain, arms, work, *, on_call):
            return [
                Measurement(arm=named_arm(settings), work=work, seconds=[seconds], num_tokens=[8])
                for settings, seconds in measured
            ]

        monkeypatch.setattr(tuning, "search", search)

    return set_seconds


def drafters(document):
    tried = [*document["measured"]]
    return {one["settings"].get("drafter", "").partition("(")[0] for one in tried}


BACKEND = "--dtype float64 --device cpu --attention eager --backend eager"


def test_tune_ends_with_a_command_that_runs(tune, tiny_paths, few):
    few(DEFAULTS, MODEL, SUFFIX, "drafter=head", "drafter=ngram")
    asked = f"--max-new-tokens 6 --temperature 1 --top-p 0.9 --json {BACKEND}".split()
    result, document, words = tune("--draft", tiny_paths[1], *asked)
    assert json.loads(result.stdout.splitlines()[-1]) == document
    measured = document["measured"]
    assert len(measured) == 5
    texts = [one["num_texts"] for one in measured]
    assert texts == sorted(texts, reverse=True)
    speeds = [one["tokens_per_s"] for one in measured if one["num_texts"] == max(texts)]
    assert len(speeds) == 4, "three settings and plain decoding reach the last round"
    assert speeds == sorted(speeds, reverse=True)
    assert document["best"] == measured[0]["settings"]
    (plain,) = [one for one in measured if one["label"] == "none"]
    assert plain["speedup"] == {"mean": 1.0, "low": 1.0, "high": 1.0}
    assert plain["tokens_a_round"] == 1.0
    (refused,) = document["refused"]
    assert refused["label"] == "head"
    assert f"head: {refused['reason']}" in result.stdout
    assert BACKEND in " ".join(words)
    assert " ".join(words).endswith("--temperature 1.0 --top-p 0.9")
    assert f"python:   monge.load(target={tiny_paths[0]!r}, " in result.stdout
    assert "device='cpu', attention='eager', backend='eager'" in result.stdout


def test_the_whole_grid_runs_on_a_pair(tune, tiny_paths):
    result, document, _ = tune("--draft", tiny_paths[1], "--max-new-tokens", 2)
    assert drafters(document) == {"", "none", "ngram", "suffix", "model"}
    assert not document["refused"]
    assert len(document["measured"]) == 27
    assert "19 slower settings are in the JSON file" in result.stdout


@pytest.mark.parametrize(
    ("fastest", "parts"),
    [
        (MODEL, ["--draft", "DRAFT", *["--drafter", "model", "--tree"], "chain(8, 'top')"]),
        (DEFAULTS, ["--draft", "DRAFT"]),
        (SUFFIX, ["--drafter", "suffix", "--controller", "goodput"]),
        (NONE, ["--drafter", "none"]),
    ],
    ids=["model", "defaults", "suffix", "none"],
)
def test_the_fastest_is_recommended_with_the_draft_that_it_takes(
    tune, tiny_paths, clocked, fastest, parts
):
    others = [one for one in (NONE, MODEL, SUFFIX) if one != fastest]
    clocked((fastest, 1.0), *((one, 2.0) for one in others))
    result, document, words = tune("--draft", tiny_paths[1], "--max-new-tokens", 2)
    named = [tiny_paths[1] if word == "DRAFT" else word for word in parts]
    start = ["generate", "Once", "--target", str(tiny_paths[0]), *map(str, named)]
    assert words[: len(start)] == start
    assert ("--draft" in words) is ("--draft" in parts)
    assert document["best"] == named_arm(fastest).settings
    mean = "1.00" if fastest == NONE else "2.00"
    last = f"measured: {mean} times plain decoding, 95% interval over prompts {mean} to {mean}"
    assert result.stdout.splitlines()[-1] == last
    shown = re.findall(r"^(\S.*?) +│ +(\S+) │ (\S+ \S+) │", result.stdout, re.MULTILINE)
    assert shown[0][1:] == ("8.0", f"{mean} {mean}-{mean}")


def test_tune_writes_a_file_that_every_door_takes(tune, tiny_paths, tmp_path, clocked):
    clocked((SUFFIX, 1.0), (NONE, 2.0))
    config = tmp_path / "monge.toml"
    result, _, words = tune("--max-new-tokens", 2, "--save", config)
    settings = tomllib.loads(config.read_text())
    assert settings == {"target": str(tiny_paths[0]), **named_arm(SUFFIX).settings}
    assert "# measured: 2.00 times plain decoding" in config.read_text()
    assert words == ["generate", "Once", "--config", str(config)]
    assert f"python:   monge.load(config={str(config)!r})" in result.stdout
    assert "monge train eagle3 --target" in result.stdout


def test_heads_and_other_drafters_are_tried(tune, tmp_path, monkeypatch):
    head = eagle3(32, 4096).write(tmp_path / "eagle3")
    monkeypatch.setattr("monge.bench.tune._CONTROLLERS", ("goodput",))
    asked = ["--draft", head, "--drafter", "pool('ngram', 'head')", "--max-new-tokens", 2]
    result, document, _ = tune(*asked)
    assert drafters(document) == {"", "none", "ngram", "suffix", "head", "pool"}
    assert not document["refused"]
    assert "monge train" not in result.stdout, "there is a head"


def test_a_chat_model_is_tuned_on_messages_and_with_the_head_that_ships_for_it(
    tune, tiny_paths, tmp_path, monkeypatch, few
):
    target = shutil.copytree(tiny_paths[0], tmp_path / "chat model")
    tokenizer = AutoTokenizer.from_pretrained(target)
    tokenizer.chat_template = "{% for m in messages %}Asked: {{ m.content }}\n{% endfor %}"
    tokenizer.save_pretrained(target)
    head = eagle3(32, 4096).write(tmp_path / "eagle3")
    named = SimpleNamespace(of=lambda _: SimpleNamespace(head=str(head)))
    monkeypatch.setattr(tuning, "ModelSource", named)
    few("drafter=head")
    asked, search = [], tuning.search
    monkeypatch.setattr(tuning, "search", lambda *a, **o: asked.append(a[3]) or search(*a, **o))
    result, document, words = tune("--max-new-tokens", 4, target=target)
    assert "prompts are written as messages" in result.stderr
    assert [tokenizer.decode(ids) for ids in asked[0].prompts] == ["Asked: One and two.\n"]
    assert drafters(document) == {"none", "head"}
    assert words[-1] == "--chat"


def test_texts_that_end_at_once_are_left_out(run, tiny_paths, tmp_path, monkeypatch, clocked):
    clocked((NONE, 1.0))
    (tmp_path / "mine.txt").write_text("One\nTwo\nThree\n")
    files = ("--prompts", tmp_path / "mine.txt", "--out", tmp_path / "out")
    monkeypatch.setattr(tuning, "lengths", lambda *_, **__: [9, 1, 20])
    result = run("tune", "--target", tiny_paths[0], *files)
    assert result.exit_code == 0, result.stderr
    assert "1 of 3 texts ended within 8 tokens and are left out" in result.stderr
    assert "1 setting, 2 prompts, greedy" in result.stdout
    monkeypatch.setattr(tuning, "lengths", lambda *_, **__: [7, 1, 2])
    result = run("tune", "--target", tiny_paths[0], *files)
    assert result.exit_code == 2
    assert "3 of 3 texts ended within 8 tokens" in result.stderr
    assert "--prompts" in result.stderr


BAD_INPUT = {
    "--out FILE": "is a file; name a folder",
    "--save FOLDER": "is a folder; name a file in it",
    "--max-prompts 0": "--max-prompts must be at least 1; got 0",
    "--repeats 0": "--repeats must be at least 1; got 0",
    "--backend quick": "unknown backend 'quick'",
    "--drafter sufix": "did you mean 'suffix'?",
    "--prompts nowhere.txt": "cannot read prompts",
    "--top-p 2": "top_p must lie in (0, 1]",
}


@pytest.mark.parametrize(("arguments", "message"), BAD_INPUT.items())
def test_bad_input(run, tiny_paths, tmp_path, arguments, message):
    (tmp_path / "file").write_text("")
    words = arguments.replace("FILE", str(tmp_path / "file")).replace("FOLDER", str(tmp_path))
    result = run("tune", "--target", tiny_paths[0], *words.split())
    assert result.exit_code == 2
    assert result.stderr.startswith("error: ")
    assert message in result.stderr
