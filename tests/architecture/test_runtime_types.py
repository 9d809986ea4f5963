"""Shapes and dtypes are checked while tests run.

A switch that is off by mistake would prove nothing.
"""

import jaxtyping
import pytest
import torch
from jaxtyping import TypeCheckError

from monge.core.law import DenseLaw, SparseLaw, one_hot
from tests import type_checks


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


def test_only_the_first_calls_of_a_test_are_checked():
    right = torch.tensor([0.5, 0.5], dtype=torch.float64)
    assert not jaxtyping.config.jaxtyping_disable
    for _ in range(type_checks.CHECKED_CALLS):
        DenseLaw(right)
    assert jaxtyping.config.jaxtyping_disable


def test_the_next_test_is_checked_again():
    test_wrong_rank_is_refused()
