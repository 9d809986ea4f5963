"""Shapes and dtypes are checked while tests run: a switch that is off would prove nothing."""

import pytest
import torch
from jaxtyping import TypeCheckError

from monge.laws.law import DenseLaw, SparseLaw, one_hot


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
