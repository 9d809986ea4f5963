"""Drafts from the group and from earlier calls: the same texts in fewer forwards, and nothing that should not stay."""

import copy
from contextlib import contextmanager

import pytest
import torch

import monge
from tests.engine.tiny import VOCAB, network, padded, prompts

REMEMBERS = {"drafter": "suffix(max_history=400)", "controller": "fixed"}
GREEDY = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": None}
SAMPLED = GREEDY | {"do_sample": True, "temperature": 0.7, "top_p": 0.9, "seed": 3}
ROWS = padded(prompts((6, 4), seed=8))
GROUP = {name: rows[:1].repeat(3, 1) for name, rows in ROWS.items()}


@contextmanager
def forwards(model):
    """Counts the forwards of a network."""
    count = []
    hook = model.lm_head.register_forward_hook(lambda *_: count.append(1))
    yield count
    hook.remove()


def written(model, rows=ROWS, **settings):
    with forwards(model) as count:
        text = model.generate(**rows, **settings)
    return text.tolist(), len(count)


def fresh(**options):
    return monge.accelerate(copy.deepcopy(network("llama")), **REMEMBERS | options)


def plain(model, rows=ROWS, **settings):
    return monge.restore(copy.deepcopy(model)).generate(**rows, **settings).tolist()


@pytest.mark.parametrize("settings", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_the_second_call_drafts_from_the_first_and_writes_the_same(settings):
    model = fresh()
    (first, many), (second, few) = written(model, **settings), written(model, **settings)
    assert second == first
    assert few < many / 2
    forgetful = fresh(drafter="suffix")
    assert written(forgetful, **settings) == written(forgetful, **settings)
    assert written(forgetful, **settings)[0] == first


def test_the_rows_of_a_group_write_what_they_write_alone():
    """Their seeds differ; who drafts from whom does not matter."""
    texts, _ = written(fresh(drafter="none"), GROUP, **SAMPLED)
    assert len({tuple(text) for text in texts}) == 3
    model = fresh()
    for _ in range(2):
        assert written(model, GROUP, **SAMPLED)[0] == texts
    later = [written(model, GROUP, **SAMPLED | {"seed": seed})[0] for seed in (4, 5)]
    other = fresh(drafter="none")
    assert later == [written(other, GROUP, **SAMPLED | {"seed": seed})[0] for seed in (4, 5)]


def test_old_texts_stay_exact_when_the_weights_have_moved():
    model = fresh()
    before, _ = written(model, **GREEDY)
    with torch.no_grad():
        model.lm_head.weight.copy_(model.lm_head.weight.roll(7, 0))
    after, _ = written(model, **GREEDY)
    assert after != before
    assert after == plain(model, **GREEDY)


def test_a_copy_another_vocabulary_and_a_restored_model_start_without_texts():
    model = fresh()
    _, many = written(model, **GREEDY)
    assert written(copy.deepcopy(model), **GREEDY)[1] == many
    monge.accelerate(monge.restore(model), **REMEMBERS)
    assert written(model, **GREEDY)[1] == many
    # Ids of dropped tokens would be outside the smaller network's embeddings.
    model.resize_token_embeddings(VOCAB // 2)
    small = ROWS | {"input_ids": ROWS["input_ids"] % (VOCAB // 2)}
    assert written(model, small, **GREEDY)[0] == plain(model, small, **GREEDY)


def test_options_of_a_call_have_texts_of_their_own_and_old_texts_leave():
    model = fresh(drafter="suffix(max_history=60)")
    _, many = written(model, **GREEDY)
    assert written(model, drafter="suffix(max_history=61)", **GREEDY)[1] == many
    _, few = written(model, **GREEDY)
    assert few < many / 2
    for number in range(4):
        model.generate(torch.tensor([[number + 5, 9]]), **GREEDY)
    assert written(model, **GREEDY)[1] > many / 2


def test_a_pool_keeps_them_too():
    model = fresh(drafter="pool('suffix(max_history=400)', 'ngram')")
    (first, many), (second, few) = written(model, **GREEDY), written(model, **GREEDY)
    assert second == first
    assert few < many
