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
ACCEPTED_QUICKLY = [
    "plain",
    "single draft",
    "logits rounded as in bfloat16",
    "recursive rejection",
]


def some(names, quick):
    """All names; those that are not quick to judge are slow tests."""
    slow = (pytest.mark.slow, pytest.mark.timeout(600))
    return [pytest.param(name, marks=() if name in quick else slow) for name in names]


@pytest.mark.parametrize("name", some(WRONG, QUICKLY_FOUND))
def test_wrong_servers_are_rejected(name):
    report = judge(ToyServer(WRONG[name], seed=1), budget=BUDGET)
    assert report.verdict == "not lossless", report.reason
    assert name not in QUICKLY_FOUND or report.num_tokens <= 3000


@pytest.mark.parametrize("name", some(EXACT, ACCEPTED_QUICKLY))
def test_exact_servers_are_accepted(name):
    budget = 2500 if name in ACCEPTED_QUICKLY else BUDGET
    report = judge(ToyServer(EXACT[name], seed=2, chunks=3), budget=budget)
    assert report.verdict == "lossless", report.reason
    assert report.num_tokens > 1500


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
