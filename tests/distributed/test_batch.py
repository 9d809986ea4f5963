"""Offline batches: every row once, in order, whatever is killed and however the work is cut."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from typing import Any

import pytest

from monge.control.latency import Latency
from monge.core.errors import OptionError
from monge.distributed import batch
from monge.distributed.batch import BatchJob, decode_here, run_batch
from monge.distributed.files import RowFile
from monge.distributed.rows import ROW_OPTIONS, RowRules, Shard, decode_shard
from monge.options import LoadOptions
from tests.bench.tiny import save_pair
from tests.serve.served import toy_decoder

OPTIONS = {"max_new_tokens": 8, "temperature": 0.9}
PROMPTS = [f"Number {number} of many" for number in range(10)]


@pytest.fixture
def job(tmp_path, tables):
    """A job over ten rows, in shards of three, decoded by tables."""
    path = tmp_path / "in.jsonl"
    rows = [{"prompt": text, "id": f"row-{text[7]}"} for text in PROMPTS]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def make(output="out.jsonl", source=path, **settings):
        options = settings.pop("options", OPTIONS) | {"seed": settings.pop("seed", 1)}
        settings = {"options": options, "shard_rows": 3} | settings
        return BatchJob(source=RowFile(source), output=tmp_path / output, **settings)

    return make


def run(job, decode=decode_here):
    """Run a job; return its counts and its progress."""
    told = []
    return run_batch(job, decode, lambda *progress: told.append(progress)), told


def interrupt(job, *numbers):
    """Lose the workers after some shards, decoded in this order."""

    def decode(shards, load, rules):
        known = {shard.number: shard for shard in shards}
        for number in numbers:
            yield number, decode_shard(toy_decoder(), known[number], rules)
        raise ConnectionError("gone")

    with pytest.raises(ConnectionError):
        run(job, decode)


def rows_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def parts_of(job):
    return job.output.with_name(f"{job.output.name}.parts")


@pytest.fixture
def interrupted(job):
    """A run with stored shards 0 and 2, and the bytes that it is to write."""
    run(whole := job("whole.jsonl"))
    interrupt(cut := job(), 0, 2)
    return cut, parts_of(cut), whole.output.read_bytes()


def test_rows_keep_their_order_and_ids_and_have_the_texts_of_generate(job):
    counts, told = run(made := job())
    rows = rows_of(made.output)
    assert [(row["row"], row["id"]) for row in rows] == [(n, f"row-{n}") for n in range(10)]
    alone = toy_decoder().generate(PROMPTS, seed=1, **OPTIONS)
    assert [(row["token_ids"], row["seed"], row["finish_reason"]) for row in rows] == [
        (list(one.token_ids), one.seed, one.finish_reason) for one in alone
    ]
    assert counts == (10, 0)
    assert told == [(0, 10), (3, 10), (6, 10), (9, 10), (10, 10)]
    assert not parts_of(made).exists()


def test_a_run_goes_on_where_it_was(job):
    run(whole := job("whole.jsonl"))
    interrupt(cut := job(), 3, 1)
    assert not cut.output.exists()
    _, told = run(cut)
    assert told == [(4, 10), (7, 10), (10, 10)]
    assert cut.output.read_bytes() == whole.output.read_bytes()


def test_without_a_seed_a_run_goes_on_and_every_row_has_one_of_its_own(job):
    interrupt(job(seed=None), 0)
    _, told = run(made := job(seed=None))
    assert told[0] == (3, 10)
    rows = rows_of(made.output)
    assert len({row["seed"] for row in rows}) == 10
    for prompt, row in zip(PROMPTS, rows, strict=True):
        (again,) = toy_decoder().generate([prompt], seed=row["seed"], **OPTIONS)
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
    rules = RowRules(options={"temperature": 1.0, "max_new_tokens": 2, "seed": seed})
    (line,) = decode_shard(decoder, Shard(0, 0, (f'{{"prompt": "once"{own}}}'.encode(),)), rules)
    assert (json.loads(line)["seed"] is not None) is is_told


def test_other_settings_do_not_go_on_with_a_run(job):
    interrupt(job(), 0)
    with pytest.raises(OptionError, match=r"other settings: options was .* --restart"):
        run(job(options={"max_new_tokens": 9}))
    for seed in (2, None):
        with pytest.raises(OptionError, match=f"seed was 1 and is {seed}"):
            run(job(seed=seed))
    _, told = run(made := job(seed=2, restart=True))
    assert (rows_of(made.output)[0]["seed"], told[0]) == (2, (0, 10))


def test_two_processes_do_not_write_one_output(job):
    def decode(*_):
        with pytest.raises(OptionError, match="another process is writing"):
            run(job())
        raise ConnectionError

    with pytest.raises(ConnectionError):
        run(job(), decode)


def test_an_existing_output_is_kept_until_it_is_to_be_overwritten(interrupted, job):
    cut, _, expected = interrupted
    cut.output.write_text("precious")
    with pytest.raises(OptionError, match="is there already"):
        run(cut)
    assert cut.output.read_text() == "precious"
    _, told = run(job(overwrite=True))
    assert told[0] == (6, 10), "the finished shards were to be kept"
    assert cut.output.read_bytes() == expected


def test_an_output_that_comes_during_the_run_is_kept(job):
    made = job()

    def decode(*given):
        yield from decode_here(*given)
        made.output.write_text("precious")

    with pytest.raises(OptionError, match="is there already"):
        run(made, decode)
    assert made.output.read_text() == "precious"
    _, told = run(job(overwrite=True))
    assert told == [(10, 10)], "nothing was to be decoded twice"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"output": "out.csv"}, "the output must be a"),
        ({"output": "in.jsonl"}, "the same file"),
        ({"output": "folder.jsonl", "overwrite": True}, r"folder.jsonl' is a directory"),
        ({"shard_rows": 0}, "at least 1 row"),
        ({"load": LoadOptions(tree=object())}, "tree must be written as text"),
        ({"load": LoadOptions(controller=(object(),))}, "controller must be written as text"),
        ({"options": {"max_new_tokens": -1}}, "max_new_tokens must be at least 1; got -1"),
        ({"options": {"stop": ("",)}}, "a stop string is empty"),
        ({"options": {"stop": ""}}, "a stop string is empty"),
        ({"options": {"temperature": -1.0}}, "temperature must be finite"),
        ({"options": {"top_k": 0}}, "top_k must be at least 1"),
        ({"options": {"top_p": 0.0}}, "top_p must lie in"),
        ({"options": {"min_p": 2.0}}, "min_p must lie in"),
        ({"options": {"tempratur": 1.0}}, "unknown option 'tempratur'; did you mean 'temperature'"),
        ({"options": {"repetition_penalty": 0.0}}, "repetition_penalty must be positive"),
        ({"seed": 1 << 64}, re.escape(f"at least -2^63 and less than 2^64; got {1 << 64}")),
        ({"seed": -(1 << 63) - 1}, r"seed must be a whole number of at least -2\^63"),
    ],
    ids=lambda value: value if isinstance(value, str) else ",".join(value),
)
def test_invalid_jobs_are_refused_at_once(job, tmp_path, settings, message):
    (tmp_path / "folder.jsonl").mkdir()
    with pytest.raises(OptionError, match=message):
        job(**settings)


def test_a_command_that_fails_on_every_row_does_not_bind_the_corrected_one(job):
    wrong = job(options=OPTIONS | {"max_new_tokens": 3000})
    expected = r"none of 10 rows could be decoded, .*; the first one: .*context"
    with pytest.raises(OptionError, match=expected):
        run(wrong)
    assert not wrong.output.exists()
    run(job())
    assert len(rows_of(wrong.output)) == 10


def test_a_start_that_fails_does_not_bind_the_corrected_one(job, monkeypatch):
    def failing(_):
        raise OptionError("unknown drafter 'bogus'")

    with monkeypatch.context() as patched:
        patched.setattr(batch, "load_decoder", failing)
        with pytest.raises(OptionError, match="bogus"):
            run(made := job(load=LoadOptions(drafter="bogus")))
    assert not parts_of(made).exists()
    run(job(load=LoadOptions(drafter="ngram")))
    assert len(rows_of(made.output)) == 10


@pytest.mark.parametrize(
    "damage",
    [
        lambda line: line[: len(line) // 2],
        lambda _: b"\n",
        lambda _: b"[1]\n",
        lambda _: b'[2, "{}", "{}"]\n',
        lambda _: b"\0\xff",
    ],
    ids=["cut", "empty", "no rows", "no results", "no text"],
)
@pytest.mark.parametrize("place", [1, 2])
def test_damaged_shards_are_decoded_again(interrupted, damage, place):
    cut, parts, expected = interrupted
    lines = parts.read_bytes().splitlines(keepends=True)
    lines[place] = damage(lines[place])
    parts.write_bytes(b"".join(lines))
    _, told = run(cut)
    assert told[0] == ((0, 10) if place == 1 else (3, 10))
    assert cut.output.read_bytes() == expected


@pytest.mark.parametrize("text", [b"", b'{"seed"', b"[]", b"{}"])
def test_shards_of_unknown_settings_are_not_continued(interrupted, job, text):
    cut, parts, expected = interrupted
    _, *shards = parts.read_bytes().splitlines(keepends=True)
    parts.write_bytes(b"".join([text + b"\n", *shards]))
    with pytest.raises(OptionError, match=r"settings are damaged.* --restart"):
        run(cut)
    assert len(parts.read_bytes().splitlines()) == 3
    run(job(restart=True))
    assert cut.output.read_bytes() == expected


def test_settings_without_a_shard_bind_no_run(job):
    made = job()
    parts_of(made).write_text(json.dumps({"seed": 5}) + "\n")
    run(made)
    assert rows_of(made.output)[0]["seed"] == 1


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


def test_bad_rows_have_their_errors_and_the_others_are_decoded(job, tmp_path):
    source = tmp_path / "bad.jsonl"
    good = json.dumps({"prompt": PROMPTS[1], "id": {"any": "\ud800"}}).encode()
    source.write_bytes(b"\n".join([*BAD, b"", b"  ", good]))
    (_, num_errors), _ = run(made := job(source=source))
    *bad, last = rows_of(made.output)
    assert num_errors == len(BAD) == len(bad)
    for row, message in zip(bad, BAD.values(), strict=True):
        assert message in row["error"]
        assert (row["text"], row["token_ids"], row["finish_reason"]) == (None, None, "error")
    assert (last["row"], last["id"], last["error"]) == (len(BAD), {"any": "\ud800"}, None)


def test_rows_have_options_of_their_own(job, tmp_path):
    own = {"seed": 7, "max_new_tokens": 3, "temperature": 0.0, "top_k": 5, "top_p": 1}
    own |= {"stop": ["zzz"], "ignore_eos": True}
    rows = ({"prompt": "A", **own}, {"prompt": "A", "seed": None})
    (source := tmp_path / "own.jsonl").write_text("\n".join(map(json.dumps, rows)))
    run(made := job(source=source))
    first, second = rows_of(made.output)
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
    "logit_bias": {"5": 100, "6": None},
    "allowed_token_ids": [3, 4],
    "bad_words": ["a", "e"],
}


def test_a_row_takes_every_option_that_has_a_text_form(job, tmp_path):
    # A grammar needs a tokenizer of `transformers`: tests of the command have one.
    assert ROW_VALUES.keys() | {"grammar"} == ROW_OPTIONS.keys()
    rows = [{"prompt": "A", "seed": 1} | {name: value} for name, value in ROW_VALUES.items()]
    (source := tmp_path / "every.jsonl").write_text("\n".join(map(json.dumps, rows)))
    run(made := job(source=source))
    for row, sent in zip(rows_of(made.output), rows, strict=True):
        options: dict[str, Any] = (
            {"seed": 1}
            | OPTIONS
            | sent
            | ({"logit_bias": {5: 100}} if "logit_bias" in sent else {})
        )
        (expected,) = toy_decoder().generate([options.pop("prompt")], **options)
        assert (row["error"], row["token_ids"]) == (None, list(expected.token_ids)), sent


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("in.txt", "x", "the input must be a .jsonl or .parquet file; got 'in.txt'"),
        ("in.jsonl", "\n\n", "holds no rows"),
        ("missing.jsonl", None, "no file"),
    ],
)
def test_invalid_inputs(job, tmp_path, name, text, message):
    (source := tmp_path / "bad" / name).parent.mkdir()
    if text is not None:
        source.write_text(text)
    with pytest.raises(OptionError, match=message):
        run(job(source=source))


def test_parquet_says_what_jsonl_says(job, tmp_path):
    pyarrow = pytest.importorskip("pyarrow", reason="Parquet needs the extra `distributed`")
    parquet = pytest.importorskip("pyarrow.parquet")
    columns = {
        "prompt": [*PROMPTS, None],
        "id": list(range(11)),
        "max_new_tokens": [None, 3, *[None] * 9],
    }
    parquet.write_table(pyarrow.table(columns), tmp_path / "in.parquet")
    (_, num_errors), _ = run(table := job("out.parquet", source=tmp_path / "in.parquet"))
    run(lines := job("lines.jsonl", source=tmp_path / "in.parquet"))
    assert parquet.read_table(table.output).to_pylist() == rows_of(lines.output)
    assert num_errors == 1
    assert rows_of(lines.output)[4]["id"] == 4
    (tmp_path / "broken.parquet").write_bytes(b"no table")
    with pytest.raises(OptionError, match="as Parquet"):
        RowFile(tmp_path / "broken.parquet")
    with pytest.raises(OptionError, match="has no column 'question'; it has prompt, id"):
        RowFile(tmp_path / "in.parquet", "question")


def test_parquet_ids_of_several_kinds_are_json(job, tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet", reason="Parquet needs the extra `distributed`")
    rows = [json.dumps({"prompt": "A", "id": row_id}) for row_id in (1, "one", None, [2])]
    (source := tmp_path / "mixed.jsonl").write_text("\n".join(rows))
    run(made := job("out.parquet", source=source))
    assert parquet.read_table(made.output)["id"].to_pylist() == ["1", '"one"', None, "[2]"]


@pytest.mark.slow
def test_a_killed_command_is_started_again(tmp_path):
    target, draft = save_pair(tmp_path / "pair")
    source = tmp_path / "long.jsonl"
    source.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in PROMPTS * 8))
    killed, whole = tmp_path / "killed.jsonl", tmp_path / "whole.jsonl"
    options = f"--target {target} --draft {draft} --max-new-tokens 40 --temperature 1 --seed 5"

    def command(output):
        words = ["batch", source, output, *options.split(), "--shard-rows", 4]
        return [sys.executable, "-m", "monge", *map(str, words)]

    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command(killed), env=environment, stderr=subprocess.DEVNULL)
    parts = tmp_path / "killed.jsonl.parts"
    while not parts.exists() or parts.read_bytes().count(b"\n") < 4:
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not killed.exists()
    settings = {"env": environment, "capture_output": True, "timeout": 200, "check": True}
    done = subprocess.run(command(killed), text=True, **settings)
    assert "going on after" in done.stderr
    subprocess.run(command(whole), **settings)
    assert killed.read_bytes() == whole.read_bytes()
    assert [row["row"] for row in rows_of(killed)] == list(range(80))
