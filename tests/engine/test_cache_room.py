"""The cache holds what is needed now, not the most that ever was.

And a forward that fails leaves it usable.
"""

import pytest
import torch

from monge.core.model import NodeBlock
from monge.engine.models.hf_tree import HfTreeModel
from tests.engine.tiny import network, prompts

BLOCK = NodeBlock((5, 6, 7, 8), (-1, 0, 0, 1))


def test_a_long_text_is_not_paid_for_after_it_is_gone():
    model = HfTreeModel(network("llama", max_position_embeddings=4096))
    (long,), short = prompts((2000,), seed=1), prompts((5, 9, 4, 7), seed=2)
    model.open({0: long})
    alone = model.cache_bytes
    model.open({1: short[0]})
    model.close(0)
    assert model.cache_bytes >= alone
    model.open({2: short[1], 3: short[2], 4: short[3]})
    assert model.cache_bytes < alone / 1.5, (
        "four short texts were to take less room than a long one"
    )
    fresh = HfTreeModel(network("llama", max_position_embeddings=4096))
    fresh.open({1: short[0], 2: short[1], 3: short[2], 4: short[3]})
    blocks = dict.fromkeys((1, 2, 3, 4), BLOCK)
    ours, theirs = model.extend(blocks), fresh.extend(blocks)
    for number in blocks:
        torch.testing.assert_close(ours[number], theirs[number], rtol=1e-4, atol=1e-4)
    model.check_integrity()


def test_a_model_without_texts_holds_no_cache():
    model, fresh = (HfTreeModel(network("llama", max_position_embeddings=4096)) for _ in range(2))
    (long,), (short,) = prompts((2000,), seed=1), prompts((9,), seed=2)
    model.open({0: long, 1: short})
    model.close(1)
    assert model.cache_bytes > 0
    model.close(0)
    assert model.cache_bytes == 0
    for one in (model, fresh):
        one.open({2: short})
    torch.testing.assert_close(model.extend({2: BLOCK})[2], fresh.extend({2: BLOCK})[2])
    assert model.cache_bytes == fresh.cache_bytes
    model.check_integrity()


def test_rows_that_are_gone_are_not_paid_for_when_a_text_grows():
    model = HfTreeModel(network("llama", max_position_embeddings=4096))
    texts = prompts((150,) * 8)
    model.open(dict(enumerate(texts)))
    for number in range(7):
        model.close(number)
    crowd = model.cache_bytes
    (long,) = prompts((900,), seed=3)
    model.append({7: long})
    assert model.cache_bytes <= crowd, "one long row was to take the place of eight short ones"
    fresh = HfTreeModel(network("llama", max_position_embeddings=4096))
    fresh.open({7: (*texts[7], *long)})
    torch.testing.assert_close(
        model.extend({7: BLOCK})[7], fresh.extend({7: BLOCK})[7], rtol=1e-4, atol=1e-4
    )


def test_a_first_forward_that_fails_half_way_leaves_a_usable_cache():
    llama = network("llama", max_position_embeddings=4096)
    model, fresh = HfTreeModel(llama), HfTreeModel(llama)

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
    for one in (model, fresh):
        one.open({1: long})
    torch.testing.assert_close(model.extend({1: BLOCK})[1], fresh.extend({1: BLOCK})[1])


def run_out(*_: object, **__: object) -> None:
    raise RuntimeError("out of memory")


def test_where_memory_runs_out_for_a_longer_text_the_cache_stays_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, fresh = HfTreeModel(network("llama")), HfTreeModel(network("llama"))
    texts, (long,) = prompts((5, 9), seed=2), prompts((200,), seed=3)
    for one in (model, fresh):
        one.open(dict(enumerate(texts)))
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "new_zeros", run_out)
        with pytest.raises(RuntimeError, match="out of memory"):
            model.append({0: long})
    model.commit({0: ()})
    for one in (model, fresh):
        one.append({0: long})
    for number in (0, 1):
        torch.testing.assert_close(
            model.extend({number: BLOCK})[number], fresh.extend({number: BLOCK})[number]
        )


def test_a_short_text_after_a_long_one_has_a_short_cache():
    model = HfTreeModel(network("llama", max_position_embeddings=4096))
    long, short = prompts((900, 5), seed=3)
    model.open({0: long})
    before = model.cache_bytes
    model.close(0)
    model.open({0: short})
    assert 4 * model.cache_bytes < before
    fresh = HfTreeModel(network("llama", max_position_embeddings=4096))
    fresh.open({0: short})
    torch.testing.assert_close(
        model.extend({0: BLOCK})[0], fresh.extend({0: BLOCK})[0], rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("order", [(1, 2, 3), (3, 1, 2), (2, 3, 1)])
def test_sequences_that_were_never_read_leave_no_trace(order: tuple[int, ...]) -> None:
    """A draft model that rests opens texts without reading them.

    Its cache has no rows for them yet.
    """
    model, (text,) = HfTreeModel(network("llama")), prompts((5,), seed=2)
    model.open({0: text})
    model.open({1: (), 2: (), 3: ()})
    for number in order:
        model.close(number)
    model.open({4: ()})
    model.close(0)
    model.append({4: text})
    fresh = HfTreeModel(network("llama"))
    fresh.open({4: text})
    ours, theirs = model.extend({4: BLOCK}), fresh.extend({4: BLOCK})
    torch.testing.assert_close(ours[4], theirs[4], rtol=1e-4, atol=1e-4)
    model.check_integrity()
