"""The cache holds what open texts need, and a forward that fails leaves it usable."""

import pytest
import torch

from monge.core.model import NodeBlock
from monge.engine.models.hf_tree import HfTreeModel
from tests.engine.tiny import network, prompts

BLOCK = NodeBlock((5, 6, 7, 8), (-1, 0, 0, 1))


def tree_model():
    return HfTreeModel(network("llama", max_position_embeddings=4096))


def assert_reads_like_a_fresh_one(model, texts, fresh=None):
    """A model reads a tree behind these texts as one that holds nothing else."""
    if fresh is None:
        fresh = tree_model()
        fresh.open(texts)
    blocks = dict.fromkeys(texts, BLOCK)
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
    model, fresh = tree_model(), tree_model()
    (long,), (short,) = prompts((2000,), seed=1), prompts((9,), seed=2)
    model.open({0: long, 1: short})
    model.close(1)
    assert model.cache_bytes > 0
    model.close(0)
    assert model.cache_bytes == 0
    for one in (model, fresh):
        one.open({2: short})
    assert_reads_like_a_fresh_one(model, {2: short}, fresh)
    assert model.cache_bytes == fresh.cache_bytes


def test_a_first_forward_that_fails_half_way_leaves_a_usable_cache():
    llama = network("llama", max_position_embeddings=4096)
    model = HfTreeModel(llama)

    def fail(module, args, output):
        raise RuntimeError("out of memory")

    hook = llama.model.layers[1].register_forward_hook(fail)
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
