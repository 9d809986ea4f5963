"""Controllers in the engine: plans without a forward, failing drafters, times that are learned."""

import warnings
from dataclasses import dataclass, replace
from typing import Any

import pytest

from monge.api import make_components
from monge.control.goodput import Goodput
from monge.control.latency import Latency
from monge.core.selection import Member
from monge.core.verdict import StageTimes
from monge.draft.ngram import Ngram
from monge.engine.batch import decode
from monge.engine.decoder import Decoder
from monge.engine.planning import _learn_latency
from monge.oracle.tabular import RandomTable, TabularModel
from monge.runtime.clock import measured_by
from tests.control.scripts import chain_round

VOCAB = 5
SLOW = Latency.linear(plain=1.0, node=0.5, draft=0.9)


class Counting(TabularModel):
    """Counts its forwards."""

    forwards = 0

    def extend(self, blocks: Any) -> Any:
        self.forwards += 1
        return super().extend(blocks)


def target() -> TabularModel:
    return TabularModel(RandomTable(VOCAB, 3), VOCAB)


def draft_model() -> Counting:
    return Counting(RandomTable(VOCAB, 4), VOCAB)


def results_of(parts: Any, prompts: Any, count: int) -> Any:
    options = {"max_new_tokens": count, "temperature": 0.0, "seed": 0}
    results = Decoder(parts, max_batch_size=4).generate(list(prompts), **options)
    assert all(result.error is None for result in results)
    return results


def greedy(parts: Any, prompts: Any = ((1, 2, 1, 2, 1),), count: int = 24) -> list[tuple[int, ...]]:
    return [result.token_ids for result in results_of(parts, prompts, count)]


def plain(prompts: Any = ((1, 2, 1, 2, 1),), count: int = 24) -> list[tuple[int, ...]]:
    return greedy(make_components(target(), drafter="none"), prompts, count)


@pytest.mark.parametrize("controller", ["fixed(max_depth=0)", "fixed(max_nodes=0)"])
def test_no_speculation_runs_no_draft_forward(controller: str) -> None:
    draft = draft_model()
    assert greedy(make_components(target(), draft, controller=controller)) == plain()
    assert draft.forwards == 0


def test_goodput_pauses_without_forwards_and_catches_up() -> None:
    """A slow, useless drafter: after a few rounds it is not run, and reads the text it missed when it is probed."""
    draft = draft_model()
    parts = make_components(target(), draft, drafter="model", controller=Goodput(), latency=SLOW)
    (result,) = results_of(parts, [(1, 2)], 90)
    rests = [record.plan.max_depth == 0 for record in result.records]
    assert sum(rests) > 60
    assert not all(rests[20:])
    assert draft.forwards < 40
    assert [result.token_ids] == plain([(1, 2)], 90)


@pytest.mark.parametrize("num_prompts", [1, 3])
def test_prompts_of_requests_that_rest_are_not_read_by_the_drafter(num_prompts: int) -> None:
    """A dear, useless drafter rests for longer than these requests; one that drafts again reads what it has missed."""
    draft = draft_model()
    controller = "goodput(last_cooldown=8192)"
    parts = make_components(target(), draft, drafter="model", controller=controller, latency=SLOW)
    prompts = [(1, 2, row) for row in range(num_prompts)]
    greedy(parts, prompts, 90)
    assert draft.forwards < 40
    read, opened = list[int](), draft.open
    draft.open = lambda prefixes: (read.extend(map(len, prefixes.values())), opened(prefixes))[1]  # type: ignore[method-assign]
    assert greedy(parts, prompts, 20) == plain(prompts, 20)
    assert set(read) == {0}
    parts.shared.memory = None
    assert greedy(parts, prompts, 20) == plain(prompts, 20)
    assert 2 in read[num_prompts:]


@dataclass(frozen=True, slots=True, kw_only=True)
class Broken(Ngram):
    """Raises for requests whose prompt begins with 0, in one of its methods."""

    raises_in: str

    def _check(self, method: str, contexts: Any) -> None:
        for context in contexts:
            is_due = method != "draft" or len(context.token_ids) >= 10
            if method == self.raises_in and context.token_ids[0] == 0 and is_due:
                raise RuntimeError("out of order")

    def draft(self, contexts: Any, *rest: Any) -> Any:
        self._check("draft", contexts)
        return Ngram.draft(self, contexts, *rest)

    def observe(self, contexts: Any, *rest: Any) -> Any:
        self._check("observe", contexts)
        return Ngram.observe(self, contexts, *rest)

    def close(self, context: Any) -> None:
        self._check("close", [context])


@pytest.mark.parametrize("method", ["draft", "observe", "close"])
def test_a_failing_drafter_costs_its_batch_the_speculation_only(method: str) -> None:
    prompts = [(0, 2, 1, 2, 1), (1, 2, 1, 2, 1), (2, 1, 2, 1, 2)]
    parts = make_components(target(), drafter=Broken(raises_in=method))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        results = results_of(parts, prompts, 40)
    assert [result.token_ids for result in results] == plain(prompts, 40)
    said = [str(warning.message) for warning in caught]
    drafted = [any(record.num_nodes for record in result.records[-6:-1]) for result in results]
    assert len(said) == 1
    if method == "close":
        assert "request 0: the drafter failed to forget it (RuntimeError: out of order)" in said[0]
        assert all(drafted)
    else:
        assert "requests 0, 1, 2: the drafter failed (RuntimeError: out of order)" in said[0]
        assert not any(drafted)


def test_nothing_is_measured_before_the_first_round() -> None:
    draft = draft_model()
    assert make_components(target(), draft, controller="fsm").shared.latency is None
    latency = make_components(target(), draft, controller="goodput").shared.latency
    assert latency is not None
    assert not latency.times
    assert draft.forwards == 0


class Clocked(TabularModel):
    """Takes a time for every forward and for every token that it reads, by a clock of its own."""

    def __init__(self, forward_s: float, token_s: float) -> None:
        super().__init__(RandomTable(VOCAB, 3), VOCAB)
        self.forward, self.token, self.seconds = forward_s, token_s, 0.0

    def extend(self, blocks: Any) -> Any:
        longest = max(len(block.token_ids) for block in blocks.values())
        self.seconds += self.forward + self.token * longest * len(blocks)  # rows are padded
        return super().extend(blocks)


@pytest.mark.parametrize("keeps_records", [True, False])
def test_rounds_teach_their_seconds(keeps_records: bool) -> None:
    """Also where only the last record is kept, as servers keep it."""
    slow = Clocked(1.0, 0.25)
    parts = make_components(slow, target(), drafter="model", controller="goodput")
    decoder = Decoder(parts)
    (request,) = decoder.requests([(1, 2)], max_new_tokens=60, temperature=1.0)
    session = decoder.session(request, keeps_records=keeps_records)
    with measured_by(lambda: slow.seconds):
        list(decode([session], parts, max_batch_size=1))
    assert parts.shared.latency is not None
    learnt = parts.shared.latency.times
    assert len(learnt) > 1
    for (_, batch_size, depth), seconds in learnt.items():
        assert batch_size == 1
        assert min(seconds) == pytest.approx(1.25 + 0.25 * depth)


@pytest.mark.parametrize(
    ("drafted", "networks", "taught"),
    [
        ([(None, 0), (None, 0)], {"model"}, (0, None)),
        ([("ngram", 5), (None, 0)], {"model"}, (5, "ngram")),
        ([("ngram", 5), ("model", 2)], {"model"}, (2, "model")),
        ([("model", 2), ("head", 2)], {"model", "head"}, None),
    ],
)
def test_a_round_counts_for_the_one_network_that_drafted_in_it(
    drafted: list[tuple[str | None, int]], networks: set[str], taught: tuple[int, str] | None
) -> None:
    learnt: list[tuple[float, dict[str, Any]]] = []
    pool = "pool('ngram', 'model')"
    parts = make_components(target(), draft_model(), drafter=pool, controller="goodput")
    parts.shared.members = tuple(
        Member(name=name, max_depth=8, runs_network=name in networks)
        for name in ("ngram", "model", "head")
    )
    latency = Latency()
    latency.observe = lambda seconds, **facts: learnt.append((seconds, facts))  # type: ignore[method-assign]
    parts.shared.latency = latency
    times = StageTimes(total_s=2.0)
    facts = {"batch_size": 2, "times": times}
    records = [replace(chain_round(depth, 0), drafter=name, **facts) for name, depth in drafted]
    _learn_latency(records, parts)
    facts = taught and {"depth": taught[0], "batch_size": 2, "drafter": taught[1]}
    assert learnt == ([(2.0, facts)] if facts else [])
