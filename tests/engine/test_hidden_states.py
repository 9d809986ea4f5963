"""Hidden states of committed tokens, on tables whose hidden states are their logits."""

import gc

import pytest
import torch

from monge.networks.base import NodeBlock
from monge.networks.forward import NetworkForward
from monge.networks.hf_tree import HfTreeModel
from monge.networks.hidden_states import HiddenStates
from monge.networks.network_facts import own_cache
from monge.oracle.tabular import RandomTable, TabularModel
from tests.engine.tiny import FAMILIES, network


def test_where_the_last_state_is_enough_it_is_there_as_often_as_asked() -> None:
    every, last = (TabularModel(RandomTable(3, 1), 3) for _ in range(2))
    all_states, last_state = every.watch((1,)), last.watch((1,), only_last=True)
    for model in (every, last):
        model.open({0: (0, 1), 1: (2,)})
    expected = torch.empty(0)
    for path in ((0, 2), (0,), (), (0, 1)):
        for model in (every, last):
            model.extend({0: NodeBlock((2, 1, 0), (-1, 0, 0))})
            model.commit({0: path})
        seen = all_states.take(0)
        if seen is not None:
            expected = seen[-1:]
        for _ in range(2):
            assert torch.equal(last_state.take(0), expected)
    last.close(0)
    assert last_state.take(0) is None


def test_a_text_that_nobody_drafts_for_keeps_no_states_of_others() -> None:
    """Its states are views of what the batch has read, until they are copied."""
    states, num_rounds = HiddenStates(1), 200
    log = states.watch((1,))
    for place in range(num_rounds):
        states.read({row: (row, 1) for row in range(8)}, [torch.full((8, 1, 7919), float(place))])
        states.commit(dict.fromkeys(range(8), (0,)))
    for row in range(1, 8):
        states.close(row)
    ours = [one for one in gc.get_objects() if type(one) is torch.Tensor and 7919 in one.shape]
    held = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in ours}
    text = log.take(0)
    assert text is not None
    assert text[:, 0].tolist() == list(range(num_rounds))
    assert sum(held.values()) < 2 * text.untyped_storage().nbytes()


@pytest.mark.parametrize("name", FAMILIES)
def test_the_last_state_alone_is_that_of_all(name: str) -> None:
    """Seen by a hook on the network's body, which is left without one."""
    held, token_ids = network(name), torch.tensor([[5, 6, 7]])
    last = held.config.get_text_config().num_hidden_layers
    with torch.inference_mode():
        one, two = (
            NetworkForward(held, layers)(token_ids, None, {}, own_cache(held))
            for layers in ((last,), (0, last))
        )
    assert torch.equal(one.logits, two.logits)
    assert len(one.states) == 1
    assert torch.equal(one.states[0], two.states[1])
    assert not held.get_decoder()._forward_hooks


def test_a_decoder_that_is_never_called_shows_nothing_so_all_states_are_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    held = network("llama")

    def states() -> torch.Tensor:
        model = HfTreeModel(held)
        log = model.watch((2,))
        model.open({0: (5, 6)})
        model.extend({0: NodeBlock.chain((7, 8))})
        model.commit({0: (0, 1)})
        taken = log.take(0)
        assert taken is not None
        return taken

    expected = states()
    monkeypatch.setattr(held, "get_decoder", torch.nn.Identity)
    assert torch.equal(states(), expected)


def test_two_heads_of_one_target_get_their_own_states() -> None:
    held = network("llama")
    model = HfTreeModel(held)
    middle, last = model.watch((1,)), model.watch((2, 0), only_last=True)
    model.open({0: (5, 6, 7)})
    model.extend({0: NodeBlock((8, 9), (-1, -1))})
    model.commit({0: (1,)})
    with torch.inference_mode():
        states = held(torch.tensor([(5, 6, 7, 9)]), output_hidden_states=True).hidden_states
    torch.testing.assert_close(middle.take(0), states[1][0], atol=5e-5, rtol=0)
    assert middle.take(0) is None
    expected = torch.cat([states[2][0, -1:], states[0][0, -1:]], dim=-1)
    for _ in range(2):
        torch.testing.assert_close(last.take(0), expected, atol=5e-5, rtol=0)
    model.close(0)
    del middle, last
    gc.collect()
    only = model.watch((2,))
    model.open({1: (5, 6)})
    assert only.take(1).shape == (2, model.hidden_size), "states that nobody takes are not kept"
