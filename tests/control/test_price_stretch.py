"""`price`: alike rounds of a request alone, planned once and learnt from together."""

from dataclasses import replace

import pytest

from monge.control.base import Memory
from monge.control.price import Price
from monge.control.price_memory import Calm, pooled_of
from monge.control.price_outlook import Lookups, Outlook
from monge.control.price_request import Request
from monge.control.price_stretch import Stretch
from monge.control.survival import DepthCounts
from monge.core.context import DraftPlan
from tests.control.scripts import chain_round, draws, memory_of


def going_well(controller: Price, memory: Memory, num_rounds: int) -> Request:
    """A request that drafted four tokens so often, all accepted."""
    state = controller.init(memory)
    for _ in range(num_rounds):
        state = controller.update(state, chain_round(4, 4, plan=controller.plan(state, draws())))
    return state


def about(counts: DepthCounts) -> list[float]:
    """Up to the order of sums."""
    return [round(count, 9) for count in (*counts.reached, *counts.accepted)]


@pytest.mark.parametrize(("plain", "looks"), [(1.0, 12), (0.018, 3)])
def test_short_rounds_share_a_look_at_what_they_bring(plain: float, looks: int) -> None:
    """Alike rounds look ahead once in sixty milliseconds, later in more; all between are drafted by the last look."""
    controller, memory = Price(), memory_of(plain=plain, node=0.0, draft=0.0)
    state, seen = controller.init(memory), list[object]()
    for number in range(20):
        plan = controller.plan(state, draws())
        record = chain_round(4, 4, plan=plan, confidences=(0.9,) * 4, levels_read=4)
        state = controller.update(state, record)
        assert state.outlook is not None
        if number >= 8 and not any(state.outlook is one for one in seen):
            seen.append(state.outlook)
            assert controller.plan(state, draws()).stop is not None
    assert len(seen) == looks


def test_rounds_that_wait_are_learnt_from_all_the_same() -> None:
    """Where a look follows, as much is known as where each round was looked at; a plain round is one too, and a shared one."""
    controller = Price()
    memories = [memory_of(plain=plain, node=0.0, draft=0.0) for plain in (1.0, 0.003)]
    states, waited = [controller.init(memory) for memory in memories], 0
    for number in range(60):
        plan = controller.plan(states[1], draws())
        assert plan.max_depth != 0
        window = 0 if number in {30, 31} else 4
        batch_size = 2 if number == 50 else 1
        accepted = (number * 7) % (window + 1)
        record = chain_round(
            window,
            accepted,
            plan=replace(plan, max_depth=window),
            confidences=(0.9, 0.8, 0.9, 0.7)[:window],
            levels_read=window,
            batch_size=batch_size,
        )
        states = [controller.update(state, record) for state in states]
        assert states[0].stretch is None or not states[0].stretch.records
        if states[1].stretch is not None and states[1].stretch.records:
            waited += 1
            assert number not in {30, 31, 50}
            continue
        assert about(states[1].counts) == about(states[0].counts)
        slow, fast = map(pooled_of, memories)
        assert about(fast.counts) == about(slow.counts)
        assert (fast.calibration, fast.tokens) == (slow.calibration, slow.tokens)
        assert fast.spells == slow.spells
        assert fast.crowd.tokens == slow.crowd.tokens
    assert waited > 30


def test_a_stretch_ends_early_where_drafting_falls_behind() -> None:
    controller, memory = Price(), memory_of(plain=0.001, node=0.0, draft=0.0005)
    state = going_well(controller, memory, 20)
    assert state.stretch is not None
    while state.stretch is not None and state.stretch.records:  # to the beginning of one
        state = controller.update(state, chain_round(4, 4, plan=controller.plan(state, draws())))
    begun, count = state.stretch, 0
    while state.stretch is begun:
        state, count = controller.update(state, chain_round(4, 0, plan=controller.plan(state, draws()))), count + 1
    # Each round without a token is two plain forwards behind.
    assert count == 2
    assert state.counts.accepted[0] < state.counts.reached[0] - 1.5


def test_requests_learn_from_the_stretch_in_which_another_ended() -> None:
    controller, memory = Price(), memory_of(plain=0.001, node=0.0, draft=0.0)
    state = going_well(controller, memory, 10)
    assert state.stretch is not None
    waiting, known = len(state.stretch.records), pooled_of(memory).tokens
    assert waiting > 2
    controller.init(memory)
    taught = pooled_of(memory).tokens
    assert taught > known + 3 * waiting
    controller.init(memory)
    assert pooled_of(memory).tokens == taught, "nobody learns twice from one round"
    while state.stretch is not None and state.stretch.records:
        state = controller.update(state, chain_round(4, 4, plan=controller.plan(state, draws())))
    state = controller.update(state, chain_round(4, 4, plan=controller.plan(state, draws())))
    state = controller.update(state, chain_round(0, 0, plan=DraftPlan(max_depth=0)))  # which ends the stretch
    taught = pooled_of(memory).tokens
    controller.init(memory)
    assert pooled_of(memory).tokens == taught


def test_who_is_behind_for_long_looks_again_only_after_further_losses() -> None:
    """Where drafting is expected to pay all the same, a look after every round would take more than it tells."""
    controller, memory = Price(), memory_of(plain=0.001, draft=0.00005, node=0.00001)
    state = replace(controller.init(memory), trial_left=0, rounds_on=1, debt_s=1.0)
    looks = 0
    for number in range(12):
        plan = controller.plan(state, draws())
        window = min(3, plan.max_depth or 0)
        following = controller.update(state, chain_round(window, 1, plan=plan, context_length=10 + 2 * number))
        looks += following is not state
        state = following
    assert looks <= 7


def test_the_first_rounds_of_a_trial_never_wait() -> None:
    controller, memory = Price(trial=3), memory_of(plain=0.001, node=0.0, draft=0.0003)
    pooled_of(memory).off_tokens = 64
    state = controller.init(memory)
    state = replace(state, off_left=0, off_tokens=64, trial_left=3)
    for _ in range(3):
        state = controller.update(state, chain_round(4, 0, plan=controller.plan(state, draws())))
        assert state.stretch is None
    assert state.off_left > 0, "a trial that fails ends at once"


def test_looks_that_say_the_same_are_further_apart_until_one_says_something_else() -> None:
    controller, memory = Price(), memory_of(plain=0.01, node=0.0, draft=0.0)
    state, lengths, last = going_well(controller, memory, 30), list[int](), None
    for _ in range(90):
        state = controller.update(state, chain_round(4, 4, plan=controller.plan(state, draws())))
        assert state.stretch is not None
        if state.stretch is not last:
            last = state.stretch
            lengths.append(last.num_rounds)
    assert lengths[-3:] == [12, 12, 12], "an eighth of a second"
    pooled_of(memory).calm = pooled_of(memory).calm.after(None, 1, 2.0)
    while state.stretch is last:
        state = controller.update(state, chain_round(4, 4, plan=controller.plan(state, draws())))
    assert state.stretch is not None
    assert state.stretch.num_rounds == 6
    # A rest begins anew, and so does what others begin with.
    pooled_of(memory).calm = pooled_of(memory).calm.after(None, state.stretch.outlook.window, 2.0)
    pooled_of(memory).switch_off(40)
    assert pooled_of(memory).calm == Calm()


@pytest.mark.parametrize(("gain", "is_calm"), [(1.2, False), (1.4, True)])
def test_looks_are_further_apart_only_where_drafting_clearly_pays(gain: float, is_calm: bool) -> None:
    once = Calm().after(3, 2, gain)
    assert once == Calm((3, 2))
    assert once.after(3, 2, gain) == Calm((3, 2), is_calm)
    assert once.after(None, 2, gain) == Calm((None, 2))


def test_requests_that_begin_as_others_did_have_not_looked() -> None:
    controller, memory = Price(), memory_of(plain=0.01, node=0.0, draft=0.0)
    going_well(controller, memory, 40)
    first = controller.init(memory)
    assert first.stretch is not None
    pooled_of(memory).calm = calm = Calm((None, 1))
    again = controller.init(memory)
    assert again.stretch is not None
    assert again.stretch == first.stretch
    assert again.stretch is not first.stretch
    assert pooled_of(memory).calm == calm


def test_what_one_request_notes_of_its_rounds_is_not_in_the_beginning_of_the_next() -> None:
    controller, memory = Price(), memory_of(plain=0.01, node=0.0, draft=0.001)
    going_well(controller, memory, 40)
    first = controller.init(memory)
    assert first.stretch is not None
    plan, patience_s = first.stretch.plan, first.stretch.patience_s
    first.stretch.plan = replace(plan, lookup_depth=7)
    state = controller.update(first, chain_round(8, 0, plan=plan))
    assert state is first
    assert first.stretch.records
    again = controller.init(memory)
    assert again.stretch is not None
    assert again.stretch.plan == plan
    assert not again.stretch.records
    assert again.stretch.debt_s == first.stretch.debt_s == again.debt_s > 0.0, "what one may lose is not lost by each"
    assert again.stretch.patience_s == patience_s


def test_what_was_looked_up_is_looked_at_the_more_rarely_the_more_looks_changed_nothing() -> None:
    lookups, looks = Lookups((1.0, 1.9, 2.7), (1.0, 1.0, 1.0), (0.9, 0.9)), list[int]()
    outlook = Outlook.of((0.1,), (1.0, 1.1), seconds=(1.0, 3.0), verifying=(1.0, 1.0), price=1.0, lookups=lookups)
    plan = DraftPlan(max_depth=1, lookup_depth=2)
    stretch = Stretch(plan, outlook, 99, 99.0, 0.0, frozenset({"ngram"}), DepthCounts())
    for number in range(40):
        record, before = chain_round(2, 0, plan=plan, drafter="ngram"), stretch.outlook
        is_news = stretch.is_news(record)
        assert stretch.takes(record)
        assert stretch.plan is plan
        assert is_news == (stretch.outlook is not before)
        looks += [number] * is_news
    assert looks == [0, 2, 6, 14, 22, 30, 38]
    assert stretch.outlook.lookups is not None
    # Each look sees all that was refused: 39 rounds, of which the last ten count, beside two of 0.9.
    assert stretch.outlook.lookups.tokens[1] == pytest.approx(1.0 + 1.8 / (2.0 + (1.0 - 0.9**39) / 0.1))
