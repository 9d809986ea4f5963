"""Capacity by simulation: closed forms of queues, conservation, and the command."""

import json
import math

import pytest
from typer.testing import CliRunner

from lab.capacity import simulation
from lab.capacity.plan import Effort, Goal, plan
from lab.capacity.simulation import Machine, Step, Work, simulate
from monge.core.draws import SeededDraws
from monge.core.errors import OptionError
from monge.replay.costs import RoundCosts

ONE_STEP = [Work(10, (Step(0, 0, 1),))]


def draws(seed=0):
    return SeededDraws(seed)


def machine(max_batch_size=1, *, plain=0.01, row=0.0, node=0.0, draft=0.0, prefill=(0.0, 0.0)):
    """`plain + row * rows + node * drafted nodes` seconds a round."""
    batches = {
        batch: {0: plain + row * batch, 64: plain + row * batch + 64 * node}
        for batch in (1, max(max_batch_size, 2))
    }
    costs = RoundCosts(batches, {batch: {0: 0.0, 64: 64 * draft} for batch in batches})
    return Machine(costs, prefill, max_batch_size)


def test_one_request_alone_takes_its_rounds():
    work = Work(100, (Step(4, 4, 3), Step(4, 4, 5), Step(0, 0, 1)))
    one = machine(plain=0.01, node=0.001, draft=0.002, prefill=(0.1, 0.001))
    found = simulate([work], one, rate_per_s=math.inf, num_requests=1, draws=draws())
    first = 0.1 + 0.1 + 0.01 + 4 * 0.001 + 4 * 0.002
    assert found["first_token_s"]["p50"] == pytest.approx(first)
    assert found["token_s"]["p99"] == pytest.approx((0.022 + 0.01) / 6)
    assert found["tokens_per_s"] == pytest.approx(9 / (first + 0.032))
    assert found["busy"] == pytest.approx(1.0)


@pytest.mark.usefixtures("unchecked_types")
@pytest.mark.parametrize("load", [0.3, 0.6])
def test_waiting_is_that_of_the_queue_with_constant_service(load, monkeypatch):
    """Pollaczek and Khinchine: a mean wait of `load / (2 (1 - load))` services."""
    waits = []
    monkeypatch.setattr(
        simulation, "percentiles", lambda values: waits.append([value - 0.01 for value in values])
    )
    for seed in range(3):
        found = simulate(
            ONE_STEP, machine(), rate_per_s=load / 0.01, num_requests=10_000, draws=draws(seed)
        )
        assert found["busy"] == pytest.approx(load, rel=0.05)
    first_token = [wait for found in waits[::2] for wait in found]
    assert sum(first_token) / len(first_token) == pytest.approx(
        0.01 * load / (2 * (1 - load)), rel=0.1
    )


@pytest.mark.usefixtures("unchecked_types")
def test_the_plan_meets_its_goal_and_not_much_more():
    work = [Work(1, tuple(Step(0, 0, 1) for _ in range(20)))]
    goal = Goal(rate_per_s=1000.0, first_token_s=0.05, token_s=0.02, spare=0.2)
    found = plan(work, machine(4, plain=0.01), goal, Effort(num_requests=120, num_replicas=1))
    best = found["sustained"]
    assert goal.is_met(best)
    assert 0.0 < best["share"] < 1.0
    assert found["replicas"] == math.ceil(1000.0 / best["rate_per_replica"] / 0.8)
    assert found["saturation"]["rate_per_replica"] == pytest.approx(20.0, rel=0.1)
    busy = [point["busy"] for point in found["points"]]
    assert busy == sorted(busy)


def test_goals_and_loads_that_cannot_be():
    for settings in ({"rate_per_s": 0.0}, {"spare": 1.0}, {"first_token_s": -1.0}):
        with pytest.raises(OptionError, match="must be positive and 0 <= spare < 1"):
            Goal(**settings)
    with pytest.raises(OptionError, match="at least one request"):
        simulate([], machine(), rate_per_s=1.0, num_requests=1, draws=draws())


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    from monge.cli.app import app

    path = tmp_path_factory.mktemp("log") / "run.mlog"
    prompts = path.with_name("prompts.txt")
    prompts.write_text("The history of\nOnce upon a time\n")
    command = (
        f"replay record --file {prompts} --max-new-tokens 12 --ignore-eos --no-costs --out {path}"
    )
    result = CliRunner().invoke(app, command.split())
    assert result.exit_code == 0, result.output
    return path


@pytest.mark.slow
@pytest.mark.usefixtures("unchecked_types")
def test_command(lab, log, tmp_path):
    out = tmp_path / "out"
    common = (
        "--tree chain(2) --requests 20 --replicas 2 --seconds 0.2 --max-batch-size 2 --rate 1000 --json "
        "--first-token 1000 --token 1000"
    )
    measured = lab("capacity", log, common, "--out", out)
    assert measured.exit_code == 0, measured.output
    document = json.loads(measured.stdout.splitlines()[-1])
    assert list(document["arms"]) == ["none", "chain(2)"]
    assert all(arm["replicas"] > 0 for arm in document["arms"].values())
    again = lab("capacity", log, common, f"--costs {out}/capacity.json --out {tmp_path}/again")
    assert again.exit_code == 0, again.output
    assert json.loads(again.stdout.splitlines()[-1])["arms"] == document["arms"], (
        "a function of the log, the times and the seed"
    )
