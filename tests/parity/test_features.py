"""Hidden states that come with a tree's forward are those of a plain forward over the committed text."""

import pytest
import torch

from monge.core.errors import MongeError, OptionError
from monge.networks.base import FeatureModel, NodeBlock
from monge.networks.hf_tree import HfTreeModel
from monge.oracle.tabular import RandomTable, TabularModel
from tests.engine.tiny import TREE_FAMILIES, network, prompts

LARGEST_DIFFERENCE = 5e-5
"""As for logits: two float32 forwards in another order of summation."""


@pytest.mark.parametrize("name", TREE_FAMILIES)
def test_features_of_the_committed_text(name: str) -> None:
    network_ = network(name)
    model = HfTreeModel(network_)
    assert isinstance(model, FeatureModel)
    layers = (0, 1, model.num_layers)
    watched = model.watch(layers)
    texts = {seq: list(text) for seq, text in enumerate(prompts((6, 3), seed=4))}
    model.open({seq: text[:-1] for seq, text in texts.items()})
    taken = {seq: [watched.take(seq)] for seq in texts}
    for step in range(3):
        # A root, two children, and a grandchild below the second one; the grandchild is read in a
        # forward of its own.
        tokens = {seq: (text[-1], 5 + step, 7 + seq) for seq, text in texts.items()}
        model.extend({seq: NodeBlock(own, (-1, 0, 0)) for seq, own in tokens.items()})
        logits = model.extend({seq: NodeBlock((11,), (2,)) for seq in texts})
        model.commit(dict.fromkeys(texts, (0, 2, 3)))
        for seq, text in texts.items():
            text += [7 + seq, 11, 13 + step]
            taken[seq].append(watched.take(seq))
            last = taken[seq][-1][-1:, -model.hidden_size :]
            found = model.unembed(last)
            torch.testing.assert_close(found, logits[seq], atol=LARGEST_DIFFERENCE, rtol=0)
    assert watched.take(0) is None
    for seq, text in texts.items():
        with torch.inference_mode():
            states = network_(torch.tensor([text[:-1]]), output_hidden_states=True).hidden_states
        expected = torch.cat([states[layer][0] for layer in layers], dim=-1)
        torch.testing.assert_close(torch.cat(taken[seq]), expected, atol=LARGEST_DIFFERENCE, rtol=0)
        embedded = network_.get_input_embeddings()(torch.tensor(text[:-1]))
        torch.testing.assert_close(model.embed(text[:-1]), embedded)
        model.close(seq)


def test_tables_show_their_logits() -> None:
    model = TabularModel(RandomTable(3, 1), 3)
    watched = model.watch((1,))
    model.open({0: (0, 1)})
    logits = model.extend({0: NodeBlock((2, 1, 0), (-1, 0, 0))})[0]
    model.commit({0: (0, 2)})
    features = watched.take(0)
    assert features is not None
    assert features.shape == (4, 3)
    assert torch.equal(features[2:], logits[[0, 2]])
    assert torch.equal(model.unembed(features), features)


def test_layers_that_do_not_exist_are_refused() -> None:
    model = HfTreeModel(network("llama"))
    reason = r"layers \[3\] were asked for; this network has 0 \(embedding\) to 2"
    with pytest.raises(OptionError, match=reason):
        model.watch((3,))
    model.open({0: (4, 5)})
    with pytest.raises(MongeError, match="watched before sequences are open; 1 are"):
        model.watch((1,))
