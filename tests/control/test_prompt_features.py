"""What the linear model of `linear_selection` is made of.

Ridge regression and features of prompts.
"""

import math
from typing import Any

import pytest
import torch

from monge.control.prompt_features import FEATURES
from monge.control.ridge import Ridge
from monge.core.prompt import PromptProfile


def test_recursive_ridge_equals_the_solution_of_the_normal_equations() -> None:
    examples = [((1.0, 0.5 * k, float(k % 3)), 0.3 * k - 1.0, 1.0 + k % 2) for k in range(12)]
    ridge = Ridge.empty(3, 2.0)
    for features, value, weight in examples:
        ridge = ridge.update(features, value, weight)
    x = torch.tensor([one[0] for one in examples], dtype=torch.float64)
    y, w = (torch.tensor([one[place] for one in examples], dtype=torch.float64) for place in (1, 2))
    matrix = 2.0 * torch.eye(3, dtype=torch.float64) + x.T @ (w[:, None] * x)
    assert ridge.coefficients == pytest.approx(torch.linalg.solve(matrix, x.T @ (w * y)).tolist())
    at = torch.tensor((1.0, 2.0, 0.0), dtype=torch.float64)
    assert ridge.width((1.0, 2.0, 0.0)) == pytest.approx(float((at @ matrix.inverse() @ at).sqrt()))


def test_features_of_prompts() -> None:
    def features(**known: Any) -> dict[str, float]:
        return {name: feature(PromptProfile(**known)) for name, feature in FEATURES.items()}

    nothing = dict.fromkeys(FEATURES, 0.0)
    assert features(token_ids=(7,)) == nothing | {"length": math.log(2) / 8}
    repeated = features(token_ids=(1, 2, 1, 2, 1, 2))
    assert repeated["repeated_pairs"] == pytest.approx(3 / 5)
    assert repeated["repeated_quadruples"] == pytest.approx(1 / 3)
    told = features(token_ids=(7,), text="x = f(10) # é", surprisal=4.0, entropy=math.inf)
    assert (told["surprisal"], told["entropy"]) == (0.5, 2.0)
    assert (told["digits"], told["code"], told["foreign"]) == pytest.approx(
        (2 / 13, 4 / 13, 1 / 13)
    )
