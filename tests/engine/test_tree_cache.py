"""Rows of the cache keep their texts, memory is what open texts need, and a failed forward leaves it usable."""

import copy
import random

import pytest
import torch

from monge.networks.base import NodeBlock
from monge.networks.hf_tree import HfTreeModel
from tests.engine.tiny import FIRST_WORD, VOCAB, network, prompts

TREE = NodeBlock((5, 6, 7, 8), (-1, 0, 0, 1))


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("seed", range(4))
def test_texts_survive_whatever_is_read_beside_them(family: str, seed: int) -> None:
    """Sequences come, grow together with a random part of the others, and go."""
    net, chance = network(family), random.Random(seed)
    model, texts, opened = HfTreeModel(net), {}, 0
    watched = model.watch((1,))
    for _ in range(25):
        for _ in range(chance.choice((0, 1, 3))):
            texts[opened] = ()
            model.open({opened: ()})
            opened += 1
        asked = chance.sample(sorted(texts), chance.randint(0, len(texts)))
        if asked and chance.random() < 0.5:
            words = range(FIRST_WORD, VOCAB)
            pieces = {one: tuple(chance.choices(words, k=chance.randint(1, 40))) for one in asked}
            model.append(pieces)
            texts |= {one: texts[one] + piece for one, piece in pieces.items()}
        elif asked:
            model.extend(dict.fromkeys(asked, TREE))
            model.commit(dict.fromkeys(asked, (0, 1, 3)))
            texts |= {one: (*texts[one], 5, 6, 8) for one in asked}
        for one in [one for one in texts if chance.random() < 0.1]:
            model.close(one)
            del texts[one]
        model.check_integrity()
    assert len(texts) > 2, "the script was to leave some"
    for one, text in texts.items():
        fresh = HfTreeModel(net)
        seen = fresh.watch((1,))
        fresh.open({one: text})
        logits = [reader.extend({one: TREE})[one] for reader in (model, fresh)]
        torch.testing.assert_close(*logits, rtol=1e-3, atol=1e-3)
        model.commit({one: (0, 2)})
        fresh.commit({one: (0, 2)})
        states = watched.take(one), seen.take(one)
        assert None not in states
        torch.testing.assert_close(*states, rtol=1e-3, atol=1e-3)


def test_a_row_that_moves_leaves_nothing_behind() -> None:
    """What is not a number, in one row, never meets the sequence that lies there afterwards.

    Weight zero would not hide it.
    """
    llama = copy.deepcopy(network("llama"))
    model, texts = HfTreeModel(llama), prompts((6, 6, 30, 6))
    model.open(dict(enumerate(texts)))
    sound = llama.model.embed_tokens.weight[9].clone()
    with torch.no_grad():
        llama.model.embed_tokens.weight[9] = float("nan")
        assert model.extend({1: NodeBlock.chain((9,) * 12)})[1].isnan().all()
        llama.model.embed_tokens.weight[9] = sound
    model.commit({1: ()})
    for asked in ((0, 2, 3), (2, 3), (0, 2)):
        logits = model.extend(dict.fromkeys(asked, TREE))
        assert all(rows.isfinite().all() for rows in logits.values())
        model.commit(dict.fromkeys(asked, (0, 1, 3)))


def test_prompts_of_different_length_are_read_apart() -> None:
    llama, shapes = copy.deepcopy(network("llama")), []
    model, texts = HfTreeModel(llama), prompts((3, 200, 2, 190, 4))
    llama.register_forward_pre_hook(
        lambda _, args, inputs: shapes.append(inputs["input_ids"].shape), with_kwargs=True
    )
    model.open(dict(enumerate(texts)))
    assert shapes == [(2, 200), (3, 4)], "the cheapest split of all"


def tree_model():
    return HfTreeModel(network("llama", max_position_embeddings=4096))


def assert_reads_like_a_fresh_one(model, texts):
    """A model reads a tree behind these texts as one that holds nothing else."""
    fresh = tree_model()
    fresh.open(texts)
    blocks = dict.fromkeys(texts, TREE)
    ours, theirs = model.extend(blocks), fresh.extend(blocks)
    for number in texts:
        torch.testing.assert_close(ours[number], theirs[number], rtol=1e-4, atol=1e-4)
    model.check_integrity()


def test_a_long_text_is_not_paid_for_after_it_is_gone():
    model = tree_model()
    (long,), short = prompts((2000,), seed=1), prompts((5, 9, 4, 7), seed=2)
    model.open({0: long})
    alone = model.cache_bytes
    model.open({1: short[0]})
    model.close(0)
    assert model.cache_bytes >= alone
    model.open({2: short[1], 3: short[2], 4: short[3]})
    assert model.cache_bytes < alone / 1.5, "four short texts need less room than a long one"
    assert_reads_like_a_fresh_one(model, dict(enumerate(short, start=1)))


def test_a_model_without_texts_holds_no_cache():
    model, (long, short) = tree_model(), prompts((2000, 9), seed=1)
    model.open({0: long, 1: short})
    model.close(1)
    assert model.cache_bytes > 0
    model.close(0)
    assert model.cache_bytes == 0
    model.open({2: short})
    assert_reads_like_a_fresh_one(model, {2: short})


def test_a_first_forward_that_fails_half_way_leaves_a_usable_cache():
    llama = network("llama", max_position_embeddings=4096)
    model = HfTreeModel(llama)

    hook = llama.model.layers[1].register_forward_hook(run_out)
    try:
        with pytest.raises(RuntimeError, match="out of memory"):
            model.open({0: (5, 6)})
    finally:
        hook.remove()
    model.close(0)
    (long,) = prompts((400,), seed=3)
    model.open({1: long})
    assert_reads_like_a_fresh_one(model, {1: long})


def run_out(*_: object, **__: object) -> None:
    raise RuntimeError("out of memory")


def test_where_memory_runs_out_for_a_longer_text_the_cache_stays_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, texts, (long,) = tree_model(), prompts((5, 9), seed=2), prompts((200,), seed=3)
    model.open(dict(enumerate(texts)))
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "new_zeros", run_out)
        with pytest.raises(RuntimeError, match="out of memory"):
            model.append({0: long})
    model.commit({0: ()})
    model.append({0: long})
    assert_reads_like_a_fresh_one(model, {0: (*texts[0], *long), 1: texts[1]})


@pytest.mark.parametrize("order", [(1, 2, 3), (3, 1, 2), (2, 3, 1)])
def test_sequences_that_were_never_read_leave_no_trace(order: tuple[int, ...]) -> None:
    """A draft model that rests opens texts without reading them: its cache has no rows for them."""
    model, (text,) = tree_model(), prompts((5,), seed=2)
    model.open({0: text})
    model.open({1: (), 2: (), 3: ()})
    for number in order:
        model.close(number)
    model.open({4: ()})
    model.close(0)
    model.append({4: text})
    assert_reads_like_a_fresh_one(model, {4: text})
