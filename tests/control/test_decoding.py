"""Controllers in the engine: plans without a forward, failing drafters, measured costs."""

import itertools
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from monge.api import make_components
from monge.control.goodput import Goodput
from monge.control.latency import Latency
from monge.core.context import Context, DraftPlan
from monge.core.draws import Draws
from monge.core.errors import OptionError
from monge.core.tree import root_only
from monge.draft.base import Draft
from monge.draft.ngram import NgramDrafter
from monge.engine import latency_measurement
from monge.engine.batch import decode
from monge.engine.clock import measured_by
from monge.engine.decoder import Decoder
from monge.engine.latency_files import load_latency, save_latency
from monge.engine.latency_measurement import FillerDrafter, latency_key, measure_latency
from monge.testing.tabular import RandomTable, TabularModel

VOCAB = 5
DEPTHS = (0, 1, 2, 4, 8)


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
        make_components(target(), draft, controller=Goodput(), costs=costs), max_batch_size=1
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
        target(), draft, controller="goodput(last_cooldown=8192)", costs=costs, max_batch_size=3
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
    assert read[num_prompts:] == [2] * num_prompts


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


def test_costs_are_measured_kept_and_read_again(tmp_path: Path) -> None:
    draft = Counting(RandomTable(VOCAB, 4), VOCAB)
    parts = make_components(target(), draft, controller="goodput", costs=tmp_path, max_batch_size=2)
    assert parts.shared.latency is not None
    assert draft.forwards > 0
    draft.forwards = 0
    again = make_components(
        parts.target, draft, controller="goodput", costs=tmp_path, max_batch_size=2
    )
    assert draft.forwards == 0
    assert again.shared.latency is not None
    (file,) = tmp_path.iterdir()
    assert load_latency(tmp_path, "other") is None
    with pytest.raises(OptionError, match="cannot write costs"):
        save_latency(again.shared.latency, file, latency_key(parts))


@pytest.mark.parametrize(
    ("where", "what", "value"),
    [
        ("monge.engine.latency_measurement.processor_name", "processor", lambda: "another CPU"),
        ("torch.get_num_threads", "threads", lambda: 96),
        ("torch.__version__", "torch", "0.0.1"),
    ],
    ids=["processor", "threads", "torch"],
)
def test_costs_of_another_machine_are_not_used(
    where: str, what: str, value: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draft = Counting(RandomTable(VOCAB, 4), VOCAB)
    parts = make_components(target(), draft, controller="goodput", costs=tmp_path)
    monkeypatch.setattr(where, value)
    draft.forwards = 0
    make_components(parts.target, draft, controller="goodput", costs=tmp_path)
    assert draft.forwards > 0, f"measured again, with another {what}"
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("left", ["", "{}", "[]", '{"key": "', "cut off"], ids=repr)
def test_costs_are_measured_again_where_the_file_was_cut_off(tmp_path: Path, left: str) -> None:
    draft = Counting(RandomTable(VOCAB, 4), VOCAB)
    parts = make_components(target(), draft, controller="goodput", costs=tmp_path, max_batch_size=2)
    (file,) = tmp_path.iterdir()
    file.write_text(file.read_text()[:100] if left == "cut off" else left)
    with pytest.warns(RuntimeWarning, match="holds no costs .* measured again"):
        make_components(parts.target, draft, controller="goodput", costs=tmp_path, max_batch_size=2)
    assert load_latency(tmp_path, latency_key(parts)) is not None
    assert list(tmp_path.iterdir()) == [file]


def test_a_cost_file_is_whole_or_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = make_components(
        target(), Counting(RandomTable(VOCAB, 4), VOCAB), controller="goodput", costs=tmp_path
    )
    assert parts.shared.latency is not None
    (file,) = tmp_path.iterdir()
    before = file.read_text()

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("os.fsync", interrupted)  # the disk has as much of it as it has
    with pytest.raises(KeyboardInterrupt):
        save_latency(parts.shared.latency, tmp_path, latency_key(parts))
    assert file.read_text() == before


def test_nothing_is_measured_for_controllers_that_do_not_ask(tmp_path: Path) -> None:
    draft = Counting(RandomTable(VOCAB, 4), VOCAB)
    assert make_components(target(), draft, controller="fsm").shared.latency is None
    assert draft.forwards == 0
    with pytest.raises(
        OptionError,
        match=r"costs \(--costs\) .*: fsm reads no measured times; "
        r"leave it out",
    ):
        make_components(target(), draft, controller="fsm", costs=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_measured_tables_cover_depths_and_batches() -> None:
    parts = make_components(
        target(), TabularModel(RandomTable(VOCAB, 4), VOCAB), tree="fixed_width((2, 1))"
    )
    costs = measure_latency(parts, batch_sizes=(1, 2), budget_s=0.1)
    assert set(costs.as_dict()["verify_s"]) == {"1", "2"}
    assert costs.nodes[0] == 0
    assert 0 < costs.nodes[1] <= 2 <= costs.nodes[2] <= 4
    assert costs.deepest == 2
    assert costs.round_s(2) > 0


def test_a_slow_moment_of_the_machine_is_not_taken_for_a_cost() -> None:
    """All plain rounds but one take many times their usual time."""
    slow = Clocked(1e-3, 1e-3)
    forward = slow.extend
    plain: list[None] = []

    def extend(blocks: Any) -> Any:
        if len(blocks) == 2 and all(len(block.token_ids) == 1 for block in blocks.values()):
            slow.seconds += 20e-3 * (len(plain) != 1)
            plain.append(None)
        return forward(blocks)

    slow.extend = extend  # type: ignore[method-assign]
    parts = make_components(slow, TabularModel(RandomTable(VOCAB, 4), VOCAB), tree="chain(8)")
    with measured_by(lambda: slow.seconds):
        found = measure_latency(parts, batch_sizes=(1, 2))
    assert len(plain) > 2
    assert found.verify_s(0, 2) == pytest.approx(3e-3)


def test_nodes_are_measured_though_a_lookup_finds_nothing() -> None:
    slow = Clocked(1e-3, 1e-3)
    parts = make_components(slow, drafter="ngram(min_ngram=100, max_ngram=100)")
    with measured_by(lambda: slow.seconds):
        found = measure_latency(parts, batch_sizes=(1, 2))
    for batch_size in (1, 2):
        assert found.verify_s(8, batch_size) == pytest.approx(1e-3 + 9e-3 * batch_size)
        assert found.verify_s(0, batch_size) == pytest.approx(1e-3 + 1e-3 * batch_size)


class NotTheFirst(FillerDrafter):
    """Drafts for all requests of a batch but the first."""

    def draft(self, contexts: Any, states: Any, plans: Any, draws: Any) -> Any:
        _, *others = super().draft(contexts, states, plans, draws)
        return [Draft(root_only(contexts[0].token_ids[-1]), None), *others]


def test_a_measured_round_has_the_nodes_of_its_largest_tree() -> None:
    parts = replace(make_components(target(), drafter="ngram"), drafter=NotTheFirst(8))
    records = latency_measurement._rounds(parts, latency_measurement._Cycle(DEPTHS), 2, 8, 100.0)
    assert [record.num_nodes for record in records[:5]] == list(DEPTHS)
    assert [record.depth for record in records[:5]] == list(DEPTHS)


@pytest.mark.parametrize(
    ("budget_s", "num_rounds"), [(100.0, 30), (28.0, 28), (8.0, 10), (3.0, 10), (1.0, 5)]
)
def test_a_slow_pair_runs_two_cycles_unless_these_take_several_budgets(
    budget_s: float, num_rounds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A clock that ticks once a round."""
    seconds = itertools.count(0.0)
    monkeypatch.setattr(latency_measurement, "now", lambda: next(seconds))
    parts = make_components(target(), TabularModel(RandomTable(5, 2), 5), tree="chain(8)")
    records = latency_measurement._rounds(parts, latency_measurement._Cycle(DEPTHS), 1, 8, budget_s)
    assert len(records) == num_rounds
    assert {record.depth for record in records} == set(DEPTHS)


class Clocked(TabularModel):
    """Takes a time for every forward and for every token that it reads, by a clock of its own."""

    def __init__(self, forward_s: float, token_s: float) -> None:
        super().__init__(RandomTable(VOCAB, 3), VOCAB)
        self.forward, self.token, self.seconds, self.longest = forward_s, token_s, 0.0, 0

    def append(self, pieces: Any) -> None:
        self.longest = max(self.longest, *map(len, pieces.values()), 0)
        self.seconds += self.token * sum(map(len, pieces.values()))
        super().append(pieces)

    def extend(self, blocks: Any) -> Any:
        longest = max(len(block.token_ids) for block in blocks.values())
        self.seconds += self.forward + self.token * longest * len(blocks)  # rows are padded
        return super().extend(blocks)


@pytest.mark.parametrize(
    ("forward_s", "token_s", "batch_sizes", "longest"),
    [(0.001, 0.0001, {1, 8}, 511), (0.03, 0.01, {1, 8}, 132), (1.0, 0.3, {1}, 31)],
)
def test_slow_rounds_are_measured_less(
    forward_s: float, token_s: float, batch_sizes: set[int], longest: int
) -> None:
    """So that a start takes seconds where rounds do, not minutes.

    The smallest batch is always measured.
    """
    slow = Clocked(forward_s, token_s)
    parts = make_components(slow, TabularModel(RandomTable(VOCAB, 4), VOCAB), tree="chain(8)")
    with measured_by(lambda: slow.seconds):
        found = measure_latency(parts, batch_sizes=(1, 8))
    assert set(map(int, found.as_dict()["verify_s"])) == batch_sizes
    assert slow.longest == longest
    assert slow.seconds < max(8.0, 40 * (forward_s + token_s))
    assert found.verify_s(0) == pytest.approx(forward_s + token_s, rel=0.2)


def test_rounds_correct_the_costs_and_records_say_what_was_seen() -> None:
    costs = Latency(verify_s={1: {0: 1.0, 8: 2.0}}, draft_s={1: {0: 0.0, 8: 1.0}})
    draft = TabularModel(RandomTable(VOCAB, 4), VOCAB)
    parts = make_components(target(), draft, drafter="model", controller="goodput", costs=costs)
    (result,) = Decoder(parts).generate([(1, 2)], max_new_tokens=20, temperature=1.0, seed=0)
    assert costs.verify_s(0) < 1.0  # a table of whole seconds, and rounds of milliseconds
    for record in result.records:
        if record.depth:
            assert len(record.confidences) == record.depth
            assert record.levels_read >= record.depth
            assert all(0 < confidence <= 1 for confidence in record.confidences)
    assert result.records[0].context_length == 2


@pytest.mark.parametrize(("drafter", "catches_up"), [("ngram", False), ("model", True)])
def test_only_networks_read_missed_text_first(
    drafter: str, catches_up: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[bool] = []
    monkeypatch.setattr(Latency, "observe", lambda _, timing: told.append(timing.catches_up))
    draft = TabularModel(RandomTable(VOCAB, 4), VOCAB) if catches_up else None
    costs = Latency.linear(plain=1.0, node=0.1, draft=0.1)
    greedy(make_components(target(), draft, drafter=drafter, costs=costs))
    assert set(told) == {catches_up}


def test_costs_are_learnt_where_only_the_last_record_is_kept() -> None:
    """As servers keep it: the first rounds of a request say nothing, and none of the others is one of them."""
    costs = Latency(verify_s={1: {0: 1.0, 8: 2.0}}, draft_s={1: {0: 0.0, 8: 1.0}})
    draft = TabularModel(RandomTable(VOCAB, 4), VOCAB)
    decoder = Decoder(
        make_components(target(), draft, drafter="model", controller="goodput", costs=costs)
    )
    (request,) = decoder.requests([(1, 2)], max_new_tokens=40, temperature=1.0)
    session = decoder.session(request, keeps_records=False)
    list(decode([session], decoder.components, max_batch_size=1))
    assert len(session.records) == 1
    assert costs.verify_s(8) < 1.9


def test_goodput_keeps_greedy_texts() -> None:
    prompts = [(1, 2), (2, 1, 2), (4,)]
    draft = TabularModel(RandomTable(VOCAB, 3), VOCAB)
    costs = Latency.linear(plain=1.0, node=0.01, draft=0.05)
    parts = make_components(target(), draft, controller="goodput", costs=costs)
    assert greedy(parts, prompts) == greedy(make_components(target(), drafter="none"), prompts)
