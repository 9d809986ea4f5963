"""Hidden states of committed tokens, on tables whose hidden states are their logits."""

import pytest
import torch

from monge.core.errors import OptionError
from monge.core.model import FeatureModel, NodeBlock
from monge.testing.tabular import RandomTable, TabularModel


def test_tables_show_their_logits() -> None:
    model = TabularModel(RandomTable(3, 1), 3)
    assert isinstance(model, FeatureModel)
    model.watch((1,))
    model.open({0: (0, 1)})
    logits = model.extend({0: NodeBlock((2, 1, 0), (-1, 0, 0))})[0]
    model.commit({0: (0, 2)})
    features = model.features(0)
    assert features is not None
    assert features.shape == (4, 3)
    assert torch.equal(features[2:], logits[[0, 2]])
    assert torch.equal(model.unembed(features), features)
    assert model.features(0) is None


def test_layers_that_do_not_exist_are_refused() -> None:
    with pytest.raises(OptionError, match=r"layers \[3\] were asked for; this network has 0 \(embedding\) to 1"):
        TabularModel(RandomTable(3, 1), 3).watch((3,))
