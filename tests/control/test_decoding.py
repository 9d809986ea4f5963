"""Controllers in the engine: plans without a forward, failing drafters, times that are learned."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from monge.api import make_components
from monge.control.goodput import Goodput
from monge.control.latency import Latency
from monge.core.context import Context, DraftPlan
from monge.core.draws import Draws
from monge.core.verdict import RoundTiming, StageTimes
from monge.draft.base import Draft
from monge.draft.ngram import NgramDrafter
from monge.engine.batch import decode
from monge.engine.clock import measured_by
from monge.engine.decoder import Decoder
from monge.engine.loop import _learn_latency
from monge.testing.tabular import RandomTable, TabularModel
from tests.control.scripts import chain_round

VOCAB = 5


class Counting(TabularModel):
    """Counts its forwards."""

    forwards = 0

    def extend(self, blocks: Any) -> Any:
        self.forwards += 1
        return super().extend(blocks)


def target() -> TabularModel:
    return TabularModel(RandomTable(VOCAB, 3), VOCAB)


def greedy(parts: Any, prompts: Any = ((1, 2, 1, 2, 1),), count: int = 24) -> list[tuple[int, ...]]:
    results = Decoder(parts, max_batch_size=4).generate(
        list(prompts), max_new_tokens=count, temperature=0.0, seed=0
    )
    assert all(result.error is None for result in results)
    return [result.token_ids for result in results]


@pytest.mark.parametrize("plain", ["fixed(max_depth=0)", "fixed(max_nodes=0)"])
def test_no_speculation_runs_no_draft_forward(plain: str) -> None:
    draft = Counting(RandomTable(VOCAB, 4), VOCAB)
    assert greedy(make_components(target(), draft, controller=plain)) == greedy(
        make_components(target(), drafter="none")
    )
    assert draft.forwards == 0


def test_goodput_pauses_without_forwards_and_catches_up() -> None:
    """A slow, useless drafter: after a few rounds it is not run, and reads the text it missed when it is probed."""
    draft = Counting(RandomTable(VOCAB, 4), VOCAB)
    costs = Latency.linear(plain=1.0, node=0.5, draft=0.9)
    decoder = Decoder(
        make_components(target(), draft, drafter="model", controller=Goodput(), latency=costs),
        max_batch_size=1,
    )
    (result,) = decoder.generate([(1, 2)], max_new_tokens=90, temperature=0.0, seed=0)
    rests = [record.plan.max_depth == 0 for record in result.records]
    assert sum(rests) > 60
    assert not all(rests[20:])
    assert draft.forwards < 40
    assert result.token_ids == greedy(make_components(target(), drafter="none"), [(1, 2)], 90)[0]


@pytest.mark.parametrize("num_prompts", [1, 3])
def test_prompts_of_requests_that_rest_are_not_read_by_the_drafter(num_prompts: int) -> None:
    """A dear, useless drafter rests for longer than these requests.

    One that drafts again reads what it has missed.
    """
    draft = Counting(RandomTable(VOCAB, 4), VOCAB)
    costs = Latency.linear(plain=1.0, node=0.5, draft=0.9)
    parts = make_components(
        target(),
        draft,
        drafter="model",
        controller="goodput(last_cooldown=8192)",
        latency=costs,
    )
    prompts = [(1, 2, row) for row in range(num_prompts)]
    plain = greedy(make_components(target(), drafter="none"), prompts, 20)
    greedy(parts, prompts, 90)
    assert draft.forwards < 40
    read, opened = list[int](), draft.open
    draft.open = lambda prefixes: (read.extend(map(len, prefixes.values())), opened(prefixes))[1]  # type: ignore[method-assign]
    assert greedy(parts, prompts, 20) == plain
    assert set(read) == {0}
    parts.shared.notes.clear()
    assert greedy(parts, prompts, 20) == plain
    assert 2 in read[num_prompts:]


@dataclass(frozen=True, slots=True, kw_only=True)
class Failing(NgramDrafter):
    """Raises for requests whose prompt begins with a token, from some length on."""

    begins: int = 0
    from_length: int = 10

    def draft(
        self,
        contexts: Sequence[Context],
        states: Sequence[bytes],
        plans: Sequence[DraftPlan],
        draws: Sequence[Draws],
    ) -> Sequence[Draft[bytes]]:
        for context in contexts:
            if context.token_ids[0] == self.begins and len(context.token_ids) >= self.from_length:
                raise RuntimeError("the drafter is broken")
        return NgramDrafter.draft(self, contexts, states, plans, draws)


def test_a_failing_drafter_costs_its_request_the_speculation_only() -> None:
    prompts = [(0, 2, 1, 2, 1), (1, 2, 1, 2, 1), (2, 1, 2, 1, 2)]
    parts = make_components(target(), drafter=Failing())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        results = Decoder(parts, max_batch_size=4).generate(
            prompts, max_new_tokens=40, temperature=0.0, seed=0
        )
    assert [result.token_ids for result in results] == greedy(
        make_components(target(), drafter="none"), prompts, 40
    )
    said = [str(warning.message) for warning in caught]
    assert len(said) == 1
    assert (
        "request 0: the drafter failed (RuntimeError: the drafter is broken); the request is "
        "decoded without it" in said[0]
    )
    drafted = [[record.num_nodes > 0 for record in result.records[-6:-1]] for result in results]
    assert not any(drafted[0])
    assert all(any(row) for row in drafted[1:])


@dataclass(frozen=True, slots=True, kw_only=True)
class Forgetful(NgramDrafter):
    """Raises where it is told of a request, or where it is to forget it.

    Notes whose texts it was shown.
    """

    raises_in: str = "observe"
    opened: list[int] = field(default_factory=list)

    def open(self, contexts: Sequence[Context]) -> Sequence[bytes]:
        self.opened.extend(context.request_id for context in contexts)
        return NgramDrafter.open(self, contexts)

    def observe(
        self, contexts: Sequence[Context], drafts: Sequence[Draft[bytes]], verdicts: Any
    ) -> Sequence[bytes]:
        if self.raises_in == "observe" and any(context.token_ids[0] == 0 for context in contexts):
            raise RuntimeError("it does not listen")
        return NgramDrafter.observe(self, contexts, drafts, verdicts)

    def close(self, context: Context) -> None:
        if self.raises_in == "close" and context.token_ids[0] == 0:
            raise RuntimeError("it does not forget")


def test_a_drafter_that_cannot_be_told_of_one_request_goes_on_with_the_others() -> None:
    drafter, prompts = Forgetful(), [(0, 2, 1, 2, 1), (1, 2, 1, 2, 1), (2, 1, 2, 1, 2)]
    parts = make_components(target(), drafter=drafter)
    with pytest.warns(
        UserWarning, match="request 0: the drafter failed .RuntimeError: it does not listen"
    ):
        results = Decoder(parts, max_batch_size=4).generate(
            prompts, max_new_tokens=40, temperature=0.0, seed=0
        )
    assert [result.token_ids for result in results] == greedy(
        make_components(target(), drafter="none"), prompts, 40
    )
    drafted = [[record.num_nodes > 0 for record in result.records[-6:-1]] for result in results]
    assert not any(drafted[0])
    assert all(any(row) for row in drafted[1:])
    assert len(drafter.opened) <= 6, "shown their texts again once, to find out whose fault it was"


def test_a_drafter_that_cannot_forget_a_request_costs_nobody_anything() -> None:
    prompts = [(0, 2, 1, 2, 1), (1, 2, 1, 2, 1)]
    parts = make_components(target(), drafter=Forgetful(raises_in="close"))
    with pytest.warns(
        UserWarning,
        match="request 0: the drafter failed to forget it .RuntimeError: it does not forget",
    ):
        assert greedy(parts, prompts, 40) == greedy(
            make_components(target(), drafter="none"), prompts, 40
        )


def test_nothing_is_measured_before_the_first_round() -> None:
    draft = Counting(RandomTable(VOCAB, 4), VOCAB)
    assert make_components(target(), draft, controller="fsm").shared.latency is None
    latency = make_components(target(), draft, controller="goodput").shared.latency
    assert latency is not None
    assert latency.as_dict() == {}
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
    parts = make_components(
        slow, TabularModel(RandomTable(VOCAB, 3), VOCAB), drafter="model", controller="goodput"
    )
    decoder = Decoder(parts)
    (request,) = decoder.requests([(1, 2)], max_new_tokens=60, temperature=1.0)
    session = decoder.session(request, keeps_records=keeps_records)
    with measured_by(lambda: slow.seconds):
        list(decode([session], parts, max_batch_size=1))
    assert parts.shared.latency is not None
    learnt = parts.shared.latency.as_dict()
    assert learnt["|1|0"] == pytest.approx(1.25)
    assert len(learnt) > 1
    for key, seconds in learnt.items():
        assert seconds == pytest.approx(1.25 + 0.25 * int(key.split("|")[2]))


def test_the_first_round_is_plain() -> None:
    draft = TabularModel(RandomTable(VOCAB, 3), VOCAB)
    (result,) = Decoder(make_components(target(), draft, controller="goodput")).generate(
        [(1, 2)], max_new_tokens=20, temperature=1.0, seed=0
    )
    assert result.records[0].depth == 0
    assert result.records[1].depth > 0


def timed_rounds(
    *drafted: tuple[str | None, int], networks: frozenset[str] = frozenset({"model"})
) -> list[RoundTiming]:
    """What latency is told of a round in which requests were drafted by these, so deep."""
    told: list[RoundTiming] = []
    parts = make_components(
        target(),
        TabularModel(RandomTable(VOCAB, 4), VOCAB),
        drafter="pool('ngram', 'model')",
        controller="goodput",
    )
    object.__setattr__(parts, "_networks", networks)
    latency = Latency()
    latency.observe = told.append  # type: ignore[method-assign]
    parts.shared.latency = latency
    times = StageTimes(total_s=2.0)
    records = [
        replace(chain_round(depth, 0), drafter=name, batch_size=len(drafted), times=times)
        for name, depth in drafted
    ]
    _learn_latency(records, parts)
    return told


@pytest.mark.parametrize(
    ("drafted", "depth", "drafter"),
    [
        ([(None, 0), (None, 0)], 0, None),
        ([("ngram", 5), (None, 0)], 5, "ngram"),
        ([("ngram", 5), ("model", 2)], 2, "model"),
    ],
)
def test_a_round_counts_for_the_network_that_drafted_in_it(
    drafted: list[tuple[str | None, int]], depth: int, drafter: str | None
) -> None:
    assert timed_rounds(*drafted) == [
        RoundTiming(depth=depth, batch_size=2, seconds=2.0, drafter=drafter)
    ]


def test_a_round_of_two_networks_teaches_nothing() -> None:
    both = frozenset({"model", "head"})
    assert not timed_rounds(("model", 2), ("head", 2), networks=both)


def test_goodput_keeps_greedy_texts() -> None:
    prompts = [(1, 2), (2, 1, 2), (4,)]
    draft = TabularModel(RandomTable(VOCAB, 3), VOCAB)
    costs = Latency.linear(plain=1.0, node=0.01, draft=0.05)
    parts = make_components(target(), draft, controller="goodput", latency=costs)
    assert greedy(parts, prompts) == greedy(make_components(target(), drafter="none"), prompts)
