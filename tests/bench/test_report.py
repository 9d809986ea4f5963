import gzip
import json
import subprocess

import pytest
from rich.console import Console

from monge.bench.arms import HostArm, named_arm
from monge.bench.provenance import busy_note, commit_of
from monge.bench.report import arm_record, best_assisted, summary, write_rounds
from monge.bench.runner import Measurement, Workload
from monge.cli.bench_decode import table
from monge.core.context import DraftPlan
from monge.core.verdict import StageTimes, StepRecord

TIMES = StageTimes(draft_s=0.1, score_s=0.5, verify_s=0.1, commit_s=0.1, total_s=1.0, forward_s=0.6)


def step(num_accepted, depth=3):
    return StepRecord(
        plan=DraftPlan(),
        num_nodes=4,
        depth=depth,
        num_accepted=num_accepted,
        examined=(1,) * (num_accepted + 1),
        next_kind="correction",
        token_ids=(1,) * (num_accepted + 1),
        times=TIMES,
    )


def measured(arm, seconds, temperature=0.0, records=(), completion=tuple(range(30))):
    return Measurement(
        arm=arm,
        work=Workload(prompts=((1,),), max_new_tokens=60, temperature=temperature),
        seconds=list(seconds),
        num_tokens=[60] * len(seconds),
        records=list(records),
        completions=[completion] * len(seconds),
    )


def assisted(name):
    return HostArm(
        name=name, family="assisted", assistant={0.0: {"num_assistant_tokens": 2}}, max_batch_size=1
    )


@pytest.fixture
def measurements():
    rows = []
    for temperature, speed in ((0.0, 1.0), (1.0, 4.0)):
        rounds, seconds = [step(1), step(3)], (1.0 * speed, 2.0 * speed)
        rows += [
            measured(HostArm(name="transformers", family="plain"), (4.0, 8.0), temperature),
            measured(assisted("transformers assisted"), (3.0, 7.0), temperature),
            measured(assisted("transformers assisted tuned"), (2.0, 4.0), temperature),
            measured(named_arm("monge:"), seconds, temperature, rounds),
        ]
    return rows


def test_summary_pools_by_geometric_mean(measurements):
    figures = summary(measurements, batch_size=1)
    assert figures["greedy"]["speedup_over_plain"] == pytest.approx(4.0)
    assert figures["sampled"]["speedup_over_plain"] == pytest.approx(1.0)
    assert figures["speedup_over_plain"] == pytest.approx(2.0)
    assert figures["greedy"]["best_assisted"] == "transformers assisted tuned"
    assert figures["greedy"]["speedup_over_assisted"] == pytest.approx(2.0)
    assert figures["speedup_over_assisted"] == pytest.approx(1.0)
    assert figures["block_efficiency"] == pytest.approx(3.0)
    assert figures["engine_efficiency"] == pytest.approx(0.6)
    for measurement in measurements:
        if measurement.arm.name == "transformers":
            measurement.fail("RuntimeError: out of memory")
    figures = summary(measurements, batch_size=1)
    assert figures["speedup_over_plain"] is None, "a side is missing"
    assert figures["speedup_over_assisted"] is not None


def test_arm_record(measurements):
    record = arm_record(measurements[3], measurements)
    assert record["tokens_per_s"]["values"] == (60.0, 30.0)
    assert record["ratio_to_plain"]["median"] == pytest.approx(4.0)
    assert record["acceptance_by_depth"] == [1.0, 0.5, 1.0, 0.0]
    assert record["seconds_per_round"]["other_s"] == pytest.approx(0.2)
    assert record["same_as_plain_share"] == 1.0
    assert record["degenerate_share"] == 0.0
    json.dumps(record)
    looping = measured(named_arm("loop:"), (1.0, 1.0), completion=(5,) * 30)
    record = arm_record(looping, measurements)
    assert record["degenerate_share"] == 1.0
    assert record["same_as_plain_share"] == 0.0


def test_a_failed_arm_has_no_numbers(measurements):
    measurements[2].fail("ValueError: broken")
    records = [arm_record(measurement, measurements) for measurement in measurements[:4]]
    record = records[2]
    assert record["failure"] == "ValueError: broken"
    assert set(record) == {"arm", "family", "settings", "temperature", "batch_size", "failure"}
    assert record["settings"] == {"assistant": {"num_assistant_tokens": 2}}
    best = best_assisted(measurements, 0.0, 1)
    assert best is not None
    assert best.arm.name == "transformers assisted"
    console = Console(width=140)
    with console.capture() as capture:
        console.print(table(records, "title"))
    lines = capture.get().splitlines()
    assert any("assisted tuned" in line and "failed" in line for line in lines)
    assert any("monge" in line and "4.00" in line and "3.00" in line for line in lines)


def test_rounds_are_written_raw(measurements, tmp_path):
    write_rounds(measurements, tmp_path / "rounds.jsonl.gz")
    with gzip.open(tmp_path / "rounds.jsonl.gz", "rt") as file:
        rounds = [json.loads(line) for line in file]
    assert [entry["num_accepted"] for entry in rounds] == [1, 3, 1, 3]
    assert {entry["arm"] for entry in rounds} == {"monge"}


def git(folder, *arguments):
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
    subprocess.run(
        ["git", "-C", str(folder), *identity, *arguments], check=True, capture_output=True
    )


def test_commit_and_dirt(tmp_path, monkeypatch):
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert commit_of(tmp_path) == {"commit": None, "dirty": None}
    git(tmp_path, "init", "-q")
    (tmp_path / "a").write_text("1")
    git(tmp_path, "add", "a")
    git(tmp_path, "commit", "-qm", "one")
    clean = commit_of(tmp_path)
    assert (len(clean["commit"]), clean["dirty"]) == (40, False)
    (tmp_path / "a").write_text("2")
    assert commit_of(tmp_path) == clean | {"dirty": True}


@pytest.mark.parametrize(("load", "is_busy"), [(0.5, False), (3.0, False), (3.5, True)])
def test_busy_machine_is_named(monkeypatch, load, is_busy):
    monkeypatch.setattr("os.getloadavg", lambda: (load, 0.0, 0.0))
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    assert (busy_note() is not None) == is_busy
