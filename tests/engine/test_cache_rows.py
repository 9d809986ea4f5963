"""A forward reads the rows that it is asked for and no others; rows that move keep their texts."""

import copy
import random
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from monge.core.model import NodeBlock
from monge.engine.models.hf_tree import HfTreeModel
from tests.engine.tiny import FIRST_WORD, VOCAB, network, prompts

TREE = NodeBlock((5, 6, 7, 8), (-1, 0, 0, 1))


@contextmanager
def shapes_read(model: torch.nn.Module) -> Iterator[list[tuple[int, int]]]:
    """Rows and widths of the network's forwards."""
    shapes: list[tuple[int, int]] = []
    hook = model.register_forward_pre_hook(
        lambda _, args, inputs: shapes.append(inputs["input_ids"].shape), with_kwargs=True
    )
    try:
        yield shapes
    finally:
        hook.remove()


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
            pieces = {
                one: tuple(
                    chance.randrange(FIRST_WORD, VOCAB) for _ in range(chance.randint(1, 40))
                )
                for one in asked
            }
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
        torch.testing.assert_close(
            model.extend({one: TREE})[one], fresh.extend({one: TREE})[one], rtol=1e-3, atol=1e-3
        )
        model.commit({one: (0, 2)})
        fresh.commit({one: (0, 2)})
        ours, theirs = watched.take(one), seen.take(one)
        assert ours is not None
        assert theirs is not None
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)


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
        assert all(
            logits.isfinite().all() for logits in model.extend(dict.fromkeys(asked, TREE)).values()
        )
        model.commit(dict.fromkeys(asked, (0, 1, 3)))


def test_prompts_of_different_length_are_read_apart() -> None:
    llama = network("llama")
    model = HfTreeModel(llama)
    texts = prompts((3, 200, 2, 190, 4))
    with shapes_read(llama) as shapes:
        model.open(dict(enumerate(texts)))
    assert shapes == [(2, 200), (3, 4)], "the cheapest split of all"
