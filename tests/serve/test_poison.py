"""Code of a request fails that request; what its batch shares fails the batch; the server goes on."""

import pytest

from monge.draft.model import Model
from monge.options import ServeOptions
from monge.serve.scheduling.scheduler import Scheduler
from tests.serve import toy
from tests.serve.toy import VOCAB, Letters, Oops, alone, decoder, generation, submit

POISON = VOCAB - 1
"""First token of the prompt that makes trouble."""
INNOCENT = [
    generation(row % 3, 1 + row, seed=row, tokens=8 + row, temperature=float(row != 1))
    for row in range(5)
]


def with_processor(whole):
    return {"processors": (toy.Mine(5),)}


def with_network(whole):
    whole.components.target.failing.add(POISON)
    return {}


def with_prompt(whole):
    whole.components.target.failing_prompts.add(POISON)
    return {}


def with_nan(whole):
    whole.components.target.nan.add(POISON)
    return {}


def with_tokenizer(whole):
    whole.tokenizer = toy.Stumbling()
    return {"stop": ("xyz",)}


CASES = {
    with_processor: "Oops: stepped on",
    with_nan: "NonFiniteLogitsError",
    with_tokenizer: "Oops: an unspeakable text",
}


def told(end):
    """The error of a generation, in words."""
    assert end.finish_reason == "error"
    return f"{type(end.summary.cause).__name__}: {end.summary.cause}"


def crowd(make_trouble, *, chunk=2):
    """What innocent generations write beside a poisoned one, and how that one ends."""
    whole = decoder(tokenizer=Letters())
    options = make_trouble(whole)
    scheduler = Scheduler(whole, ServeOptions(prefill_chunk=chunk))
    before = [submit(scheduler, one) for one in INNOCENT[:3]]
    poisoned = submit(scheduler, generation(POISON, 0, 1, tokens=30, **options))
    after = [submit(scheduler, one) for one in INNOCENT[3:]]
    with scheduler:
        texts = [handle.completion(60) for handle in (*before, *after)]
        end = poisoned.completion(60)
        state = scheduler.snapshot()
        went_on = submit(scheduler, generation(3)).completion(60)
        assert went_on.finish_reason == "length", "the scheduler was to go on"
        assert went_on.summary.speculation.num_drafts > 0
    for model in (whole.components.target, whole.components.drafter.model):
        assert model.open_sequences == 0
    assert (state.kv_used_tokens, state.num_running, state.num_waiting) == (0, 0, 0)
    return texts, end


def written(texts):
    return [text.token_ids for text in texts]


EXPECTED = [alone(one) for one in INNOCENT]


@pytest.mark.usefixtures("unchecked_types")
@pytest.mark.parametrize("chunk", [1, 64])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_neighbours_write_what_they_write_alone(case, chunk):
    texts, end = crowd(case, chunk=chunk)
    assert written(texts) == EXPECTED
    assert all(text.finish_reason == "length" for text in texts)
    assert CASES[case] in told(end)


@pytest.mark.usefixtures("unchecked_types")
@pytest.mark.parametrize("case", [with_network, with_prompt], ids=lambda case: case.__name__)
def test_a_forward_that_raises_ends_those_who_share_it_and_nobody_else(case):
    texts, end = crowd(case)
    assert "that breaks the network" in told(end)
    for text, own in zip(texts, EXPECTED, strict=True):
        if text.finish_reason == "error":
            assert told(text) == told(end)
        else:
            assert text.token_ids == own


@pytest.mark.parametrize("chunk", [2, 64])
@pytest.mark.parametrize("what", ["failing", "failing_prompts"])
def test_a_drafter_that_raises_costs_those_who_share_its_call_the_speculation(what, chunk):
    def with_drafter(whole):
        getattr(whole.components.drafter.model, what).add(POISON)
        return {}

    said = r"requests? .*\b3\b.*: the drafter failed .(ZeroDivisionError|Oops)"
    with pytest.warns(UserWarning, match=said) as caught:
        texts, end = crowd(with_drafter, chunk=chunk)
    assert len(caught) == 1
    assert all(text.finish_reason == "length" for text in (*texts, end))
    assert texts[1].token_ids == EXPECTED[1], "greedy text is the same with or without drafts"
    assert end.summary.speculation.num_drafts == 0


def test_a_drafter_that_raises_after_drawing_ends_those_it_drafted_for(monkeypatch):
    draft = Model.draft

    def dislikes(self, contexts, states, plans, draws):
        drafts = draft(self, contexts, states, plans, draws)
        for one, tree in zip(contexts, drafts, strict=True):
            if one.token_ids[0] == POISON and tree.tree.num_nodes > 1:
                raise Oops("it dislikes what it drew")
        return drafts

    monkeypatch.setattr(Model, "draft", dislikes)
    texts, end = crowd(lambda _: {})
    for text, own in zip(texts, EXPECTED, strict=True):
        assert text.finish_reason == "error" or text.token_ids == own
    assert "the drafter failed (Oops: it dislikes what it drew) after it had drawn" in told(end)


def test_a_round_that_fails_as_a_whole_ends_its_requests_and_no_others():
    whole = decoder(max_batch_size=2)
    with Scheduler(whole) as scheduler:
        whole.components.target.commits_fail = True
        for handle in [submit(scheduler, one) for one in INNOCENT[:2]]:
            assert "MemoryError: the caches are gone" in told(handle.completion(60))
        whole.components.target.commits_fail = False
        assert submit(scheduler, INNOCENT[1]).completion(60).token_ids == EXPECTED[1]
        assert scheduler.snapshot().finished == {"error": 2, "length": 1}
        assert scheduler.snapshot().failure is None
