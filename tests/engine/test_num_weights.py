"""How many weights a network has, whatever they are stored in."""

import copy

import pytest
import torch

from monge.engine.backends.packed_linear import PackedLinear
from monge.engine.models.network_facts import num_weights
from tests.engine.compiling import require
from tests.engine.tiny import network


@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize("kind", ["int8", "int4", "bfloat16"])
def test_packed_weights_count(kind, is_tied):
    require("compiled")
    from monge.engine.backends.rounded_weights import round_weights

    given = copy.deepcopy(network("llama", "sdpa"))
    given.config.tie_word_embeddings = is_tied
    output = given.get_output_embeddings()
    output.weight = (
        given.get_input_embeddings().weight
        if is_tied
        else torch.nn.Parameter(output.weight.detach().clone())
    )
    size = sum(weight.numel() for weight in given.parameters())
    rounded = round_weights(given, kind)
    assert isinstance(rounded.get_output_embeddings(), PackedLinear)
    assert num_weights(given) == num_weights(rounded) == size
