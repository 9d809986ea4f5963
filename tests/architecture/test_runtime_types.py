"""Shapes and dtypes are checked while tests run: a switch that is off by mistake would prove nothing."""

import pytest
import torch
from jaxtyping import TypeCheckError

from monge.core.law import DenseLaw, SparseLaw, one_hot


def test_wrong_dtype_is_refused():
    with pytest.raises(TypeCheckError, match="probs"):
        DenseLaw(torch.ones(1, dtype=torch.float32))


def test_wrong_rank_is_refused():
    with pytest.raises(TypeCheckError, match="probs"):
        DenseLaw(torch.ones(1, 1, dtype=torch.float64))


def test_fields_that_disagree_are_refused():
    with pytest.raises(TypeCheckError, match="support"):
        SparseLaw(torch.tensor([0, 1]), torch.ones(1, dtype=torch.float64))


def test_wrong_argument_is_refused():
    with pytest.raises(TypeCheckError, match="token_id"):
        one_hot("0")
