"""What a batch must not do to files.

Replace what is there, believe what is damaged, or stand in its own way.
"""

import json
import re

import pytest

from monge.core.errors import OptionError
from monge.distributed.batch import ThisProcess
from monge.distributed.spec import DecoderSpec
from tests.distributed.batches import OPTIONS, Interrupted, rows_of, run


def parts_of(job):
    return job.output.with_name(f"{job.output.name}.parts")


@pytest.fixture
def interrupted(job):
    """A run of which the shards 0 and 2 are there, and the bytes that it is to write."""
    run(whole := job("whole.jsonl"))
    with pytest.raises(ConnectionError):
        run(cut := job(), Interrupted(0, 2))
    return cut, parts_of(cut), whole.output.read_bytes()


class Then:
    """Workers after whom something else happens, before anything is written."""

    def __init__(self, happens):
        self.happens = happens

    def decode(self, shards, spec, rules):
        yield from ThisProcess().decode(shards, spec, rules)
        self.happens()


def test_an_output_that_is_there_is_kept(job):
    made = job()
    made.output.write_text("precious")
    with pytest.raises(OptionError, match="is there already"):
        run(made)
    assert made.output.read_text() == "precious"
    run(job(overwrite=True))
    assert len(rows_of(made.output)) == 10


def test_nor_does_an_unfinished_run_replace_it(interrupted, job):
    cut, parts, expected = interrupted
    cut.output.write_text("precious")
    with pytest.raises(OptionError, match="is there already"):
        run(cut)
    assert cut.output.read_text() == "precious"
    _, told = run(job(overwrite=True))
    assert told[0] == (6, 10), "the finished shards were to be kept"
    assert cut.output.read_bytes() == expected
    parts.touch()
    with pytest.raises(OptionError, match="is there already"):
        run(cut)
    assert cut.output.read_bytes() == expected


def test_nor_does_a_run_during_which_it_came(job):
    made = job()
    with pytest.raises(OptionError, match="is there already"):
        run(made, Then(lambda: made.output.write_text("precious")))
    assert made.output.read_text() == "precious"
    _, told = run(job(overwrite=True))
    assert told == [(10, 10)], "nothing was to be decoded twice"


def test_outputs_that_cannot_be(job, tmp_path):
    with pytest.raises(OptionError, match="the output must be a"):
        job("out.csv")
    with pytest.raises(OptionError, match="the same file"):
        job("in.jsonl")
    with pytest.raises(OptionError, match="at least 1 row"):
        job(shard_rows=0)
    with pytest.raises(OptionError, match="must be written as text"):
        DecoderSpec(options={"tree": object()})
    (tmp_path / "folder.jsonl").mkdir()
    with pytest.raises(OptionError, match=r"folder.jsonl' is a directory"):
        job("folder.jsonl", overwrite=True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_new_tokens": -1}, "max_new_tokens must be at least 1; got -1"),
        ({"stop": ("",)}, "a stop string is empty"),
        ({"stop": ""}, "a stop string is empty"),
        ({"temperature": -1.0}, "temperature must be finite"),
        ({"top_k": 0}, "top_k must be at least 1"),
        ({"top_p": 0.0}, "top_p must lie in"),
        ({"min_p": 2.0}, "min_p must lie in"),
    ],
)
def test_options_that_fit_no_row_are_refused_at_once(job, options, message):
    with pytest.raises(OptionError, match=message):
        job(options=options)


@pytest.mark.parametrize("seed", [1 << 64, -(1 << 63) - 1])
def test_a_seed_out_of_range_is_refused_at_once(job, seed):
    with pytest.raises(
        OptionError,
        match=re.escape(
            f"seed must be a whole number of at least -2^63 and less than 2^64; got {seed}"
        ),
    ):
        job(seed=seed)


def test_a_command_that_fails_on_every_row_does_not_stand_in_the_way_of_the_right_one(job):
    wrong = job(options=OPTIONS | {"max_new_tokens": 3000})
    with pytest.raises(
        OptionError,
        match=r"none of 10 rows could be decoded, .*; the first one: "
        r".*context",
    ):
        run(wrong)
    assert not wrong.output.exists()
    run(job())
    assert len(rows_of(wrong.output)) == 10


def test_nor_does_a_start_that_fails(job, monkeypatch):
    def failing(_):
        raise OptionError("unknown drafter 'bogus'")

    with monkeypatch.context() as patched:
        patched.setattr(DecoderSpec, "load", failing)
        with pytest.raises(OptionError, match="bogus"):
            run(made := job(spec=DecoderSpec(options={"drafter": "bogus"})))
    assert not parts_of(made).exists()
    run(job(spec=DecoderSpec(options={"drafter": "ngram"})))
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
    assert told[0] in {(3, 10), (0, 10)}, "a line that is cut takes the next one along"
    assert cut.output.read_bytes() == expected


@pytest.mark.parametrize("text", [b"", b'{"seed"', b"[]", b"{}"])
def test_shards_of_unknown_settings_are_not_gone_on_with(interrupted, job, text):
    cut, parts, expected = interrupted
    _, *shards = parts.read_bytes().splitlines(keepends=True)
    parts.write_bytes(b"".join([text + b"\n", *shards]))
    with pytest.raises(OptionError, match=r"settings are damaged.* --restart"):
        run(cut)
    assert len(parts.read_bytes().splitlines()) == 3
    run(job(restart=True))
    assert cut.output.read_bytes() == expected


def test_settings_without_a_shard_bind_nobody(job):
    made = job()
    parts_of(made).write_text(json.dumps({"seed": 5}) + "\n")
    run(made)
    assert rows_of(made.output)[0]["seed"] == 1
