"""Offline batches: every row once, in order, whatever is killed and however the work is cut."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from monge.control.latency import Latency
from monge.core.errors import OptionError
from monge.distributed.files import RowFile
from monge.distributed.rows import RowRules, read_row
from tests.bench.tiny import save_pair
from tests.distributed.batches import OPTIONS, PROMPTS, Interrupted, rows_of, run
from tests.serve.served import toy_decoder


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return save_pair(tmp_path_factory.mktemp("batch_pair"))


def test_rows_keep_their_order_and_ids_and_have_the_texts_of_generate(job):
    report, told = run(made := job())
    rows = rows_of(made.output)
    assert [(row["row"], row["id"]) for row in rows] == [
        (number, f"row-{number}") for number in range(10)
    ]
    alone = toy_decoder().generate(PROMPTS, seed=1, **OPTIONS)
    assert [row["token_ids"] for row in rows] == [list(result.token_ids) for result in alone]
    assert [(row["seed"], row["finish_reason"]) for row in rows] == [
        (one.seed, one.finish_reason) for one in alone
    ]
    assert (report.num_rows, report.num_errors) == (10, 0)
    assert told == [(0, 10), (3, 10), (6, 10), (9, 10), (10, 10)]
    assert not made.output.with_name("out.jsonl.parts").exists()


def test_a_run_goes_on_where_it_was(job):
    run(whole := job("whole.jsonl"))
    with pytest.raises(ConnectionError):
        run(cut := job(), Interrupted(3, 1))
    assert not cut.output.exists()
    _, told = run(cut)
    assert told == [(4, 10), (7, 10), (10, 10)]
    assert cut.output.read_bytes() == whole.output.read_bytes()


def test_without_a_seed_a_run_goes_on_and_every_row_has_one_of_its_own(job):
    with pytest.raises(ConnectionError):
        run(job(seed=None), Interrupted(0))
    _, told = run(made := job(seed=None))
    assert told[0] == (3, 10)
    rows = rows_of(made.output)
    assert len({row["seed"] for row in rows}) == 10
    for prompt, row in zip(PROMPTS, rows, strict=True):
        (again,) = toy_decoder().generate([prompt], seed=row["seed"], **OPTIONS)
        assert row["token_ids"] == list(again.token_ids)


@pytest.mark.parametrize(
    ("seed", "own", "planner"),
    [(None, "", "goodput"), (3, "", "fixed"), (None, ', "seed": 4', "fixed")],
)
def test_only_rows_without_a_seed_are_planned_by_the_clock(seed, own, planner):
    decoder = toy_decoder(controller=None, latency=Latency.linear(plain=1.0, node=0.1, draft=0.1))
    rules = RowRules(seed=seed, options={"temperature": 1.0}, prompt_field="prompt")
    row = read_row(f'{{"prompt": "once"{own}}}'.encode(), 0, decoder, rules)
    assert (row.session.request.controller or decoder.components.controller_name) == planner
    assert (json.loads(row.as_json())["seed"] is None) is (planner == "goodput")


def test_other_settings_do_not_go_on_with_a_run(job):
    with pytest.raises(ConnectionError):
        run(job(), Interrupted(0))
    with pytest.raises(OptionError, match=r"other settings: options was .* --restart"):
        run(job(options={"max_new_tokens": 9}))
    with pytest.raises(OptionError, match=r"seed was 1 and is 2"):
        run(job(seed=2))
    with pytest.raises(OptionError, match=r"seed was 1 and is None"):
        run(job(seed=None))
    _, told = run(made := job(seed=2, restart=True))
    assert (rows_of(made.output)[0]["seed"], told[0]) == (2, (0, 10))


def test_two_processes_do_not_write_one_output(job):
    busy = Interrupted(0)
    stream = busy.decode

    def decode(shards, spec, rules):
        with pytest.raises(OptionError, match="another process is writing"):
            run(job())
        return stream(shards, spec, rules)

    busy.decode = decode
    with pytest.raises(ConnectionError):
        run(job(), busy)


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
    b'{"prompt": "x", "max_new_tokens": 5000}': "exceeds the target's context of 400 tokens",
    b'{"prompt": "x", "temperature": "hot"}': "'temperature' must be int or float; got str",
    b'{"prompt": "x", "top_k": true}': "'top_k' must be int; got bool",
    b'{"prompt": "x", "temperature": -1}': "temperature must be finite and >= 0",
    b'{"prompt": "x", "seed": 18446744073709551616}': "seed must be a whole number of at least "
    "-2^63 and less than 2^64",
    b'{"prompt": "x", "stop": [1]}': "'stop' must be a text or a list of texts",
}


def test_bad_rows_are_told_and_the_others_decoded(job, tmp_path):
    source = tmp_path / "bad.jsonl"
    good = json.dumps({"prompt": PROMPTS[1], "id": {"any": "\ud800"}}).encode()
    source.write_bytes(b"\n".join([*BAD, b"", b"  ", good]))
    report, _ = run(made := job(source=source))
    *bad, last = rows_of(made.output)
    assert report.num_errors == len(BAD) == len(bad)
    for row, message in zip(bad, BAD.values(), strict=True):
        assert message in row["error"]
        assert (row["text"], row["token_ids"], row["finish_reason"]) == (None, None, "error")
    assert (last["row"], last["id"], last["error"]) == (len(BAD), {"any": "\ud800"}, None)


def test_rows_have_options_of_their_own(job, tmp_path):
    source = tmp_path / "own.jsonl"
    own = {
        "seed": 7,
        "max_new_tokens": 3,
        "temperature": 0.0,
        "top_k": 5,
        "top_p": 1,
        "stop": ["zzz"],
        "ignore_eos": True,
    }
    source.write_text(
        json.dumps({"prompt": "A", **own}) + "\n" + json.dumps({"prompt": "A", "seed": None})
    )
    run(made := job(source=source))
    first, second = rows_of(made.output)
    assert (first["seed"], len(first["token_ids"])) == (7, 3)
    assert second["seed"] not in {None, 7}


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("in.txt", "x", "the input must be a .jsonl or .parquet file; got 'in.txt'"),
        ("in.jsonl", "\n\n", "holds no rows"),
        ("missing.jsonl", None, "no file"),
    ],
)
def test_inputs_that_cannot_be(job, tmp_path, name, text, message):
    source = tmp_path / "bad" / name
    source.parent.mkdir()
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
    report, _ = run(tables := job("out.parquet", source=tmp_path / "in.parquet"))
    run(lines := job("lines.jsonl", source=tmp_path / "in.parquet"))
    assert parquet.read_table(tables.output).to_pylist() == rows_of(lines.output)
    assert report.num_errors == 1
    assert rows_of(lines.output)[4]["id"] == 4
    (tmp_path / "broken.parquet").write_bytes(b"no table")
    with pytest.raises(OptionError, match="as Parquet"):
        RowFile(tmp_path / "broken.parquet")
    with pytest.raises(OptionError, match="has no column 'question'; it has prompt, id"):
        RowFile(tmp_path / "in.parquet", "question")


def test_parquet_ids_of_several_kinds_are_json(job, tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet", reason="Parquet needs the extra `distributed`")
    source = tmp_path / "mixed.jsonl"
    source.write_text(
        "\n".join(json.dumps({"prompt": "A", "id": row_id}) for row_id in (1, "one", None, [2]))
    )
    run(made := job("out.parquet", source=source))
    assert parquet.read_table(made.output)["id"].to_pylist() == ["1", '"one"', None, "[2]"]


@pytest.mark.slow
def test_a_killed_command_is_started_again(tmp_path, tiny):
    source = tmp_path / "long.jsonl"
    source.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in PROMPTS * 8))
    command = [
        sys.executable,
        "-m",
        "monge",
        "batch",
        str(source),
        str(tmp_path / "killed.jsonl"),
        "--target",
        tiny[0],
    ]
    command += [
        "--draft",
        tiny[1],
        "--max-new-tokens",
        "40",
        "--temperature",
        "1",
        "--seed",
        "5",
        "--shard-rows",
        "4",
    ]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)
    parts = tmp_path / "killed.jsonl.parts"
    while not parts.exists() or parts.read_bytes().count(b"\n") < 4:
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (tmp_path / "killed.jsonl").exists()
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=200, check=True
    )
    assert "going on after" in done.stderr
    command[5] = str(tmp_path / "whole.jsonl")
    subprocess.run(command, env=environment, capture_output=True, timeout=200, check=True)
    assert (tmp_path / "killed.jsonl").read_bytes() == (tmp_path / "whole.jsonl").read_bytes()
    assert [row["row"] for row in rows_of(tmp_path / "killed.jsonl")] == list(range(80))


@pytest.mark.parametrize(
    ("controller", "is_told"), [("goodput", False), ("fixed", True), (None, True)]
)
def test_a_row_tells_its_seed_only_where_that_gives_the_text_again(controller, is_told):
    decoder = toy_decoder(
        controller=controller, latency=Latency.linear(plain=1.0, node=0.1, draft=0.1)
    )
    rules = RowRules(seed=3, options={"temperature": 1.0}, prompt_field="prompt")
    row = json.loads(read_row(b'{"prompt": "once"}', 0, decoder, rules).as_json())
    assert row["error"] is None
    assert (row["seed"] is not None) is is_told
