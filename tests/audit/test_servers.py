"""Toy servers with known faults are rejected, exact ones are accepted."""

import math

import pytest

from tests.audit.toy import KNOWN_BAD, LOOP_ENGINES, judge
from tests.kit.wrong_engines import EXACT_ENGINES, WRONG_ENGINES, Engine
from tests.kit.wrong_servers import ToyServer

EXACT: dict[str, Engine] = {**EXACT_ENGINES, **LOOP_ENGINES}
WRONG: dict[str, Engine] = {**WRONG_ENGINES, **KNOWN_BAD}
BUDGET = 20_000
QUICKLY_FOUND = [
    "draft law declared before sampling rules",
    "ratio to the largest mass instead of p / q",
    "most probable draft declared as a draw",
    "sampled requests decoded greedily",
    "wrong text only with several requests at once",
    "target law after a rejection",
    "every draft accepted",
    "top-k ignored",
    "one seed for all requests",
]


@pytest.mark.parametrize("name", QUICKLY_FOUND)
def test_wrong_servers_are_found_quickly(name):
    report = judge(ToyServer(WRONG_ENGINES[name], seed=1), budget=BUDGET)
    assert report.verdict == "not lossless", report.reason
    assert report.num_tokens <= 3000


@pytest.mark.parametrize(
    "name", ["plain", "single draft", "logits rounded as in bfloat16", "recursive rejection"]
)
def test_exact_servers_are_accepted(name):
    report = judge(ToyServer(EXACT[name], seed=2, chunks=3), budget=2500)
    assert report.verdict == "lossless", report.reason
    assert report.num_tokens > 1500


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", WRONG)
def test_every_wrong_server_is_rejected(name):
    report = judge(ToyServer(WRONG[name], seed=1), budget=BUDGET)
    print(f"{name}: rejected after {report.num_tokens} tokens: {report.reason}")  # noqa: T201 (a measurement)  # noqa: T201 (shown by -s)
    assert report.verdict == "not lossless", report.reason


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", EXACT)
def test_every_exact_server_is_accepted(name):
    report = judge(ToyServer(EXACT[name], seed=2, chunks=2), budget=BUDGET)
    print(f"{name}: {report.num_tokens} tokens, log e-value {report.log_e:.2f}")  # noqa: T201 (a measurement)  # noqa: T201 (shown by -s)
    assert report.verdict == "lossless", report.reason


@pytest.mark.parametrize("by_id", [False, True], ids=["names", "ids"])
def test_a_twin_serves_as_reference(by_id):
    right = judge(ToyServer(EXACT["plain"], seed=2, by_id=by_id), budget=1500, is_local=False)
    assert right.verdict == "lossless", right.reason
    wrong = judge(
        ToyServer(WRONG_ENGINES["typical acceptance"], seed=2, by_id=by_id),
        budget=4000,
        is_local=False,
    )
    assert wrong.verdict == "not lossless", wrong.reason


def test_the_fault_is_named():
    report = judge(ToyServer(WRONG_ENGINES["top-k ignored"], seed=1))
    assert "outside of the support" in report.reason
    assert report.log_e == math.inf
    assert report.as_json()["log_e"] == 1000.0
