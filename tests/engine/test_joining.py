"""Requests that join, leave and break while others are decoded.

The law of each stays the target's.
"""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from monge.api import make_components
from monge.control.fixed import Fixed
from monge.core.context import DraftPlan
from monge.core.errors import OptionError
from monge.draft.model import Model
from monge.engine.batch import Batch
from monge.engine.opening import equal_shares
from monge.engine.result import result_of
from monge.oracle.decoding import Case, target_law
from monge.oracle.exact_law import exact_law, law_error
from monge.oracle.tabular import RandomTable, TabularModel
from monge.runtime.clock import measured_by
from tests.engine.laws import session
from tests.engine.tiny import network, perturbed, prompts
from tests.kit.tables import table

VOCAB = 3
CASE = Case(prompt=(0, 1, 2), horizon=2, max_new_tokens=2)


def breaks(token_ids, scores):
    if token_ids.shape[-1] > 3:
        raise KeyError("a neighbour's own fault")
    return scores


def program(tree, trouble):
    def run(draws):
        parts = make_components(table(11, VOCAB), table(23, VOCAB), tree=tree)
        batch = Batch(parts, prefill_chunk=2, isolated=True)
        early, late = session(1, (1, 0)), session(2, (2, 2, 1), processors=trouble)
        watched = session(0, CASE.prompt, draws=draws, max_new_tokens=2)
        batch.join([early])
        batch.step()
        batch.join([watched, late])
        while watched.finish_reason is None:
            batch.step()
            if early.finish_reason is None and watched.num_generated:
                batch.leave(early)
                early.finish_reason = "length"
        batch.close()
        return watched.completion_ids

    return run


@pytest.mark.parametrize("trouble", [(), (breaks,)], ids=["sound", "poisoned"])
@pytest.mark.parametrize("tree", ["chain(2)", "fixed_width((2,))"])
def test_the_law_stays_the_targets(tree, trouble):
    truth = target_law(table(11, VOCAB), CASE)
    assert law_error(exact_law(program(tree, trouble)), truth) < 1e-12


@pytest.mark.parametrize(
    ("family", "tree"),
    [("llama", "fixed_width((3, 2))"), ("mistral_window", "chain(4)"), ("bloom", "chain(4)")],
)
@pytest.mark.parametrize("drafter", ["model", "pool('ngram', 'model')"])
@pytest.mark.parametrize("chunk", [1, 7])
def test_prompts_in_pieces_give_the_text_of_whole_ones(family, tree, chunk, drafter):
    import monge

    target = network(family)
    whole = monge.load(target, perturbed(target), drafter=drafter, tree=tree, controller="fixed")
    texts = prompts((9, 24, 1, 17, 5), seed=2)
    options = {"max_new_tokens": 8, "temperature": 0.8, "seed": 4, "ignore_eos": True}
    expected = whole.generate(texts, **options)
    sessions = [whole.session(request) for request in whole.requests(texts, **options)]
    batch, waiting = Batch(whole.components, prefill_chunk=chunk), list(sessions)
    while waiting or len(batch):
        if waiting:
            batch.join([waiting.pop()])
        batch.step()
    found = [result_of(one, "eager") for one in sessions]
    assert [one.token_ids for one in found] == [result.token_ids for result in expected]
    assert batch.num_prompt_tokens == sum(len(text) - 1 for text in texts)


def test_a_long_prompt_delays_neither_those_who_write_nor_short_prompts():
    batch = Batch(
        make_components(table(1, VOCAB), table(2, VOCAB), tree="chain(2)"), prefill_chunk=8
    )
    writing = session(0, (1,), max_new_tokens=400)
    long, short = session(1, (0, 1) * 200), session(2, (1, 2, 0, 1, 2))
    batch.join([writing])
    batch.step()
    batch.join([long])
    batch.step()
    batch.join([short])
    assert batch.step() == [writing, short], "the short prompt was to be read beside the long one"
    steps = 3
    while long.num_generated == 0:
        before = writing.num_generated
        batch.step()
        assert writing.num_generated > before
        steps += 1
    # The first step read nothing, the others eight tokens each.
    assert steps == 1 + math.ceil((399 + 4) / 8)
    batch.close()


@given(st.lists(st.integers(0, 40), max_size=8), st.integers(1, 60))
def test_shares_are_equal_as_far_as_they_are_needed(sizes, total):
    shares = equal_shares(sizes, total)
    assert all(0 <= share <= size for share, size in zip(shares, sizes, strict=True))
    assert sum(shares) == min(total, sum(sizes))
    hungry = [share for share, size in zip(shares, sizes, strict=True) if share < size]
    if hungry:
        assert max(shares) - min(hungry) <= 1


def test_a_piece_must_hold_something():
    parts = make_components(table(1, VOCAB), drafter="none")
    with pytest.raises(OptionError, match="prefill_chunk must be at least 1, or None to .*; got 0"):
        Batch(parts, prefill_chunk=0)


def test_a_drafter_is_not_asked_for_plain_rounds(monkeypatch):
    parts = make_components(
        TabularModel(RandomTable(VOCAB, 11), VOCAB),
        TabularModel(RandomTable(VOCAB, 23), VOCAB),
        controller=Fixed(max_depth=1),
    )
    asked, draft = [], Model.draft
    monkeypatch.setattr(
        Model,
        "draft",
        lambda self, contexts, *given: asked.append(len(contexts)) or draft(self, contexts, *given),
    )
    batch = Batch(parts)
    plain = {"max_new_tokens": 1}, {"limits": DraftPlan(max_depth=0)}
    batch.join(
        [session(1, (1, 0)), *(session(2 + i, (1, 0), **one) for i, one in enumerate(plain))]
    )
    batch.step()
    assert asked == [1]
    batch.close()


class Timed(TabularModel):
    """A table that takes a hundredth of a second by its own clock for every token of a prompt, and notes its pieces."""

    def __init__(self, **options):
        super().__init__(RandomTable(VOCAB, 11), VOCAB, **options)
        self.pieces, self.seconds = [], 0.0

    def append(self, pieces):
        sizes = [len(tokens) for tokens in pieces.values() if tokens]
        self.pieces += sizes
        self.seconds += 0.01 * sum(sizes)
        super().append(pieces)


def read_beside(neighbours, **options):
    """Sizes of the pieces of a prompt of 400 tokens, read while others are decoded."""
    target = Timed()
    parts = make_components(target, drafter="none")
    batch = Batch(parts, prefill_chunk=128, isolated=True, **options)
    with measured_by(lambda: target.seconds):
        for number in range(neighbours):
            batch.join([session(1 + number, (1, 0), max_new_tokens=1000)])
            batch.step()
        target.pieces.clear()
        batch.join([session(0, (1,) * 400)])
        while batch.num_prefilling:
            batch.step()
    batch.close()
    return target.pieces


def test_a_chunk_of_a_prompt_takes_no_longer_than_its_limit():
    pieces = read_beside(1, chunk_s=0.25)
    assert sum(pieces) == 399
    assert max(pieces) * 0.01 <= 0.25
    assert set(pieces[:-1]) <= {16}, "pieces have few shapes"


def test_a_prompt_that_nobody_waits_for_is_read_in_pieces_that_depend_on_no_clock():
    assert read_beside(0, chunk_s=0.25) == read_beside(0) == read_beside(1) == [128, 128, 128, 15]
