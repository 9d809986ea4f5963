"""`monge batch` as its users type it: every row once, in order, whatever ends the command."""

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from typing import Any

import pytest

from monge.cli import batch as room
from monge.cli.batch import ROW_OPTIONS, RowRules, decode_rows
from monge.control.latency import Latency
from tests.serve.served import toy_decoder

OPTIONS = ("--max-new-tokens", 8, "--temperature", 0.9, "--seed", 1)
LIKE_OPTIONS = {"max_new_tokens": 8, "temperature": 0.9, "seed": 1}
PROMPTS = [f"Number {number} of many" for number in range(10)]


@pytest.fixture
def batch(run, tiny_paths, tmp_path):
    (tmp_path / "in.jsonl").write_text('{"question": "A", "id": 1}\n{"question": 5}\n')
    files = (tmp_path / "in.jsonl", tmp_path / "out.jsonl")
    models = ("--target", tiny_paths[0], "--draft", tiny_paths[1], "--prompt-field", "question")
    return lambda *arguments: run("batch", *files, *models, *arguments)


@pytest.fixture
def toys(run, tmp_path, monkeypatch):
    """The command on ten rows, or on those that are given, decoded by tables."""
    monkeypatch.setattr("monge.api.load", lambda **_: toy_decoder())
    rows = [{"prompt": text, "id": f"row-{text[7]}"} for text in PROMPTS]

    def invoke(*arguments, rows=rows, source="in.jsonl", output="out.jsonl"):
        lines = [row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows]
        (tmp_path / source).write_bytes(b"\n".join(lines))
        return run("batch", tmp_path / source, tmp_path / output, *OPTIONS, *arguments)

    return invoke


def rows_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_rows_and_their_errors(batch, tmp_path):
    result = batch("--max-new-tokens", 4, "--seed", 3)
    assert result.exit_code == 1, "a pipeline is to notice"
    assert result.stdout == ""
    assert "2 rows in" in result.stderr
    assert "1 of 2 rows could not be decoded" in result.stderr
    first, second = rows_of(tmp_path / "out.jsonl")
    assert (first["id"], first["seed"], len(first["token_ids"])) == (1, 3, 4)
    assert "'question' must be text" in second["error"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--workers", 2], "need --ray"),
        (["--drafter", "nonsense"], "unknown drafter 'nonsense'"),
        (["--max-new-tokens", -1], "max_new_tokens must be at least 1; got -1"),
        (["--max-new-tokens", 1 << 40], "none of 2 rows could be decoded, so nothing was written"),
        (["--stop", ""], "a stop string is empty"),
        (["--prompt-field", "q"], "'q' must be text or a list of token ids; got nothing"),
        (["--seed", 1 << 64], "seed must be a whole number of at least -2^63"),
    ],
)
def test_options_that_cannot_be(batch, tmp_path, arguments, message):
    result = batch(*arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    left = [path.name for path in tmp_path.iterdir()]
    assert left == ["in.jsonl"], "it stands in the way of the right command"


def test_a_grammar_of_the_command_and_one_of_a_row(run, tmp_path):
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text('{"prompt": "A"}\n{"prompt": "A", "grammar": "choice:red|blue"}\n')
    result = run("batch", source, output, "--seed", 1, "--grammar", "choice:yes|no")
    assert result.exit_code == 0, result.stderr
    first, second = (row["text"] for row in rows_of(output))
    assert first in {"yes", "no"}
    assert second in {"red", "blue"}


def test_rows_keep_their_order_and_ids_and_have_the_texts_of_generate(toys, tmp_path, monkeypatch):
    assert toys().exit_code == 0
    rows = rows_of(tmp_path / "out.jsonl")
    assert [(row["row"], row["id"]) for row in rows] == [(n, f"row-{n}") for n in range(10)]
    alone = toy_decoder().generate(PROMPTS, **LIKE_OPTIONS)
    assert [(row["token_ids"], row["seed"], row["finish_reason"]) for row in rows] == [
        (list(one.token_ids), one.seed, one.finish_reason) for one in alone
    ]
    monkeypatch.setattr(room, "_BLOCK_ROWS", 3)
    toys(output="blocks.jsonl")
    assert (tmp_path / "blocks.jsonl").read_bytes() == (tmp_path / "out.jsonl").read_bytes()


@pytest.mark.parametrize("cut", [0, 1, 9, 30, -1], ids=str)
@pytest.mark.parametrize("place", [0, 4, 9])
def test_a_command_goes_on_after_the_rows_that_are_there(toys, tmp_path, place, cut):
    """However much of the next row was written when it was killed."""
    toys()
    output = tmp_path / "out.jsonl"
    whole = output.read_bytes()
    lines = whole.splitlines(keepends=True)
    output.write_bytes(b"".join(lines[:place]) + lines[place][:cut])
    result = toys()
    assert result.exit_code == 0, result.stderr
    assert ("going on after" in result.stderr) == (place > 0)
    assert output.read_bytes() == whole


def test_a_command_that_is_interrupted_says_how_to_go_on(toys, tmp_path, monkeypatch):
    def interrupted(*given):
        for place, line in enumerate(decode_rows(*given)):
            if place == 3:
                raise KeyboardInterrupt
            yield line

    with monkeypatch.context() as patch:
        patch.setattr(room, "decode_rows", interrupted)
        result = toys()
    assert result.exit_code == 130
    assert "3 of 10 rows are in" in result.stderr
    assert len(rows_of(tmp_path / "out.jsonl")) == 3
    assert "going on after 3 of 10 rows" in toys().stderr
    assert len(rows_of(tmp_path / "out.jsonl")) == 10


def test_without_a_seed_every_row_has_one_of_its_own(run, toys, tmp_path):
    toys()
    run("batch", tmp_path / "in.jsonl", tmp_path / "free.jsonl", *OPTIONS[:-2])
    rows = rows_of(tmp_path / "free.jsonl")
    assert len({row["seed"] for row in rows}) == 10
    for prompt, row in zip(PROMPTS, rows, strict=True):
        (again,) = toy_decoder().generate([prompt], **{**LIKE_OPTIONS, "seed": row["seed"]})
        assert row["token_ids"] == list(again.token_ids)


@pytest.mark.parametrize(
    ("controller", "seed", "own", "is_told"),
    [
        (None, None, "", False),
        (None, 3, "", True),
        (None, None, ', "seed": 4', True),
        ("goodput", 3, "", False),
        ("fixed", 3, "", True),
    ],
)
def test_a_row_has_its_seed_only_where_that_gives_the_text_again(controller, seed, own, is_told):
    """Unless it is seeded or another controller is named, `goodput` plans by the clock."""
    costs = Latency.linear(plain=1.0, node=0.1, draft=0.1)
    decoder = toy_decoder(controller=controller, latency=costs)
    rules = RowRules({"temperature": 1.0, "max_new_tokens": 2, "seed": seed}, "prompt")
    (line,) = decode_rows(decoder, rules, 0, (f'{{"prompt": "once"{own}}}'.encode(),))
    assert (json.loads(line)["seed"] is not None) is is_told


def test_two_processes_do_not_write_one_output(toys, tmp_path):
    with (tmp_path / "out.jsonl").open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        result = toys()
    assert result.exit_code == 2
    assert "another process is writing" in result.stderr


FINISHED = '{{"row": {0}, "id": "row-{0}", "options": "OPTIONS", "error": null}}\n'


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("precious", 1),
        ("precious\n", 1),
        ("\n", 1),
        ('{"row": 0, "id": "row-1", "text": ""}\n', 1),
        (FINISHED.format(0) + '{"row": 2, "id": "row-2", ', 2),
        ("".join(map(FINISHED.format, range(11))), 11),
    ],
    ids=["text", "a line", "an empty line", "another id", "another row", "more rows"],
)
def test_a_file_that_is_no_output_of_these_rows_is_kept(toys, tmp_path, text, line):
    toys()
    output = tmp_path / "out.jsonl"
    text = text.replace("OPTIONS", rows_of(output)[0]["options"])
    output.write_text(text)
    result = toys()
    assert result.exit_code == 2
    assert f"line {line} of" in result.stderr
    assert "--overwrite" in result.stderr
    assert output.read_text() == text
    assert toys("--overwrite").exit_code == 0
    assert len(rows_of(output)) == 10


@pytest.mark.parametrize(
    "arguments",
    [("--temperature", 0.8), ("--seed", 2), ("--verifier", "block"), ("--grammar", "json")],
    ids=str,
)
@pytest.mark.parametrize("num_rows", [4, 10])
def test_rows_of_other_options_are_not_mixed(toys, tmp_path, arguments, num_rows):
    toys()
    output = tmp_path / "out.jsonl"
    output.write_bytes(b"".join(output.read_bytes().splitlines(keepends=True)[:num_rows]))
    before = output.read_bytes()
    result = toys(*arguments)
    assert result.exit_code == 2
    assert "line 1 of" in result.stderr
    assert "was made with other options" in result.stderr
    assert output.read_bytes() == before
    assert toys("--batch-size", 2).exit_code == 0, "texts do not depend on it"
    assert len(rows_of(output)) == 10
    assert toys("--overwrite", "--temperature", 0.8).exit_code == 0


def test_a_finished_output_is_left_as_it_is(toys, tmp_path):
    toys(rows=[b"not json", {"prompt": "A"}])
    before = (tmp_path / "out.jsonl").read_bytes()
    result = toys(rows=[b"not json", {"prompt": "A"}])
    assert result.exit_code == 1, "the status is that of the rows"
    assert "has its 2 rows already; --overwrite decodes them anew" in result.stderr
    assert (tmp_path / "out.jsonl").read_bytes() == before


BAD = {
    b"not json": "not JSON",
    b'{"prompt": "\xff"}': "not JSON",
    b"[1, 2]": "a row must be an object; got list",
    b'{"text": "x"}': "'prompt' must be text or a list of token ids; got nothing",
    b'{"prompt": {"a": 1}}': "got dict",
    b'{"prompt": [3, 1.5]}': "'prompt': token ids must be integers; got 1.5 at place 1",
    b'{"prompt": [true]}': "'prompt': token ids must be integers; got true at place 0",
    b'{"prompt": [-1]}': "token ids must lie in",
    b'{"prompt": ""}': "the prompt is empty",
    b'{"prompt": "x", "max_new_tokens": 5000}': "exceeds the target's context length of 400 tokens",
    b'{"prompt": "x", "temperature": "hot"}': "'temperature' must be int or float; got str",
    b'{"prompt": "x", "top_k": true}': "'top_k' must be int; got bool",
    b'{"prompt": "x", "temperature": -1}': "temperature must be finite and >= 0",
    b'{"prompt": "x", "seed": 18446744073709551616}': "less than 2^64",
    b'{"prompt": "x", "stop": [1]}': "'stop' must be a text or a list of texts",
    b'{"prompt": "x", "bad_words": [1]}': "'bad_words' must be a text or a list of texts",
    b'{"prompt": "x", "stop_token_ids": 3}': "'stop_token_ids' must be list; got int",
    b'{"prompt": "x", "logit_bias": [1]}': "'logit_bias' must be dict; got list",
    b'{"prompt": "x", "logit_bias": {"x": 1}}': "'logit_bias': keys must be token ids; got 'x'",
    b'{"prompt": "x", "min_tokens": -1}': "min_tokens must be a whole number of at least 0; got -1",
    b'{"prompt": "x", "repetition_penalty": 0}': "repetition_penalty must be positive",
    b'{"prompt": "x", "grammar": "json", "ignore_eos": true}': "ignore_eos: a grammar says where",
    b'{"prompt": "x", "grammar": "/etc/rules.json"}': "'grammar': a row may say json, regex:...",
}


def test_bad_rows_have_their_errors_and_the_others_are_decoded(toys, tmp_path):
    good = {"prompt": PROMPTS[1], "id": {"any": "\ud800"}}
    asked = [*BAD, b"", b"  ", good]
    assert toys(rows=asked).exit_code == 1
    *bad, last = rows_of(tmp_path / "out.jsonl")
    assert len(BAD) == len(bad)
    for row, message in zip(bad, BAD.values(), strict=True):
        assert message in row["error"]
        assert (row["text"], row["token_ids"], row["finish_reason"]) == (None, None, "error")
    assert (last["row"], last["id"], last["error"]) == (len(BAD), {"any": "\ud800"}, None)
    assert "has its" in toys(rows=asked).stderr, "it knows its rows again"


def test_rows_have_options_of_their_own(toys, tmp_path):
    own = {"seed": 7, "max_new_tokens": 3, "temperature": 0.0, "top_k": 5, "top_p": 1}
    own |= {"stop": ["zzz"], "ignore_eos": True}
    toys(rows=({"prompt": "A", **own}, {"prompt": "A", "seed": None}))
    first, second = rows_of(tmp_path / "out.jsonl")
    assert (first["seed"], len(first["token_ids"])) == (7, 3)
    assert second["seed"] not in {None, 7}


ROW_VALUES = {
    "max_new_tokens": 3,
    "temperature": 0.5,
    "top_k": 2,
    "top_p": 0.3,
    "min_p": 0.9,
    "min_tokens": 8,
    "repetition_penalty": 3.0,
    "presence_penalty": 2.0,
    "frequency_penalty": 2.0,
    "seed": 7,
    "stop": ["a", "e", "o"],
    "stop_token_ids": list(range(15)),
    "ignore_eos": True,
    "logit_bias": {"5": 100},
    "allowed_token_ids": [3, 4],
    "bad_words": ["a", "e"],
}


def test_a_row_takes_every_option_that_has_a_text_form(toys, tmp_path):
    assert ROW_VALUES.keys() | {"grammar"} == ROW_OPTIONS.keys()  # tables have no grammar
    rows = [{"prompt": "A", "seed": 1} | {name: value} for name, value in ROW_VALUES.items()]
    toys(rows=rows)
    for row, sent in zip(rows_of(tmp_path / "out.jsonl"), rows, strict=True):
        options: dict[str, Any] = LIKE_OPTIONS | sent
        if "logit_bias" in sent:
            options["logit_bias"] = {5: 100}
        (expected,) = toy_decoder().generate([options.pop("prompt")], **options)
        assert (row["error"], row["token_ids"]) == (None, list(expected.token_ids)), sent


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"source": "in.txt"}, "the input must be a .jsonl file; got 'in.txt'"),
        ({"output": "out.parquet"}, "the output must be a .jsonl file; got 'out.parquet'"),
        ({"output": "in.jsonl"}, "input and output are the same file"),
        ({"output": "folder.jsonl"}, "cannot write"),
        ({"rows": [b"", b" "]}, "holds no rows"),
    ],
    ids=str,
)
def test_files_that_cannot_be(toys, tmp_path, files, message):
    (tmp_path / "folder.jsonl").mkdir()
    result = toys(**files)
    assert result.exit_code == 2
    assert message in result.stderr


@pytest.mark.slow
def test_a_killed_command_is_started_again(tiny_paths, tmp_path):
    source = tmp_path / "long.jsonl"
    source.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in PROMPTS * 8))
    killed, whole = tmp_path / "killed.jsonl", tmp_path / "whole.jsonl"
    models = ("--target", tiny_paths[0], "--draft", tiny_paths[1])
    options = ["--max-new-tokens", "40", "--temperature", "1", "--seed", "5"]

    def command(output):
        words = ["batch", source, output, *models, *options]
        return [sys.executable, "-m", "monge", *map(str, words)]

    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command(killed), env=environment, stderr=subprocess.DEVNULL)
    while not killed.exists() or killed.read_bytes().count(b"\n") < 4:
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert len(killed.read_bytes().splitlines()) < 80
    settings = {"env": environment, "capture_output": True, "timeout": 200, "check": True}
    done = subprocess.run(command(killed), text=True, **settings)
    assert "going on after" in done.stderr
    subprocess.run(command(whole), **settings)
    assert killed.read_bytes() == whole.read_bytes()
    assert [row["row"] for row in rows_of(killed)] == list(range(80))
