"""Shapes and dtypes are checked while tests run: a switch that is off would prove nothing."""

import jaxtyping
import pytest
import torch
from jaxtyping import TypeCheckError

from monge.core.law import DenseLaw, SparseLaw, one_hot
from tests import type_checks


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: DenseLaw(torch.ones(1, dtype=torch.float32)), "probs"),
        (lambda: DenseLaw(torch.ones(1, 1, dtype=torch.float64)), "probs"),
        (
            lambda: SparseLaw(torch.tensor([0, 1]), torch.ones(1, dtype=torch.float64)),
            "support",
        ),
        (lambda: one_hot("0"), "token_id"),
    ],
    ids=["dtype", "rank", "fields that disagree", "argument"],
)
def test_wrong_types_are_refused(make, message):
    with pytest.raises(TypeCheckError, match=message):
        make()


def test_only_the_first_calls_of_a_test_are_checked():
    right = torch.tensor([0.5, 0.5], dtype=torch.float64)
    assert not jaxtyping.config.jaxtyping_disable, "the last test may not switch this off"
    for _ in range(type_checks.CHECKED_CALLS):
        DenseLaw(right)
    assert jaxtyping.config.jaxtyping_disable
