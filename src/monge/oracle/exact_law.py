"""The exact law of a program that draws only through `Draws`.

Run it once per branch and add up the weights.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping
from typing import Final, TypeVar

import torch
from jaxtyping import Bool, Float64, Int64
from torch import Tensor

from monge.core.errors import MongeError
from monge.laws.draws import Draws
from monge.laws.law import Law, trusted_law
from monge.verify.functional.where import RowLaws

Outcome = TypeVar("Outcome", bound=Hashable)

_WEIGHT_TOLERANCE: Final = 1e-10
"""Largest distance of the weights' sum from 1: rounding of a million products of a few dozen float64 factors."""


class OracleError(MongeError, AssertionError):
    """The program cannot be enumerated.

    It is not a function of its draws, has too many branches, or draws improperly.
    """


class PositionError(OracleError):
    """The program draws a position in [0, 1], which has no branches."""


class ExactDraws:
    """Replays a list of branch numbers and then takes the first open branch, remembering weight and arity of every choice.

    Args:
        script: Branch numbers; extended in place.
        arity: Number of branches that each replayed choice had before.
    """

    def __init__(self, script: list[int], arity: list[int]) -> None:
        self._script = script
        self._expected = tuple(arity)
        self.weights: list[float] = []
        self.arity: list[int] = []

    def bernoulli(self, prob: float) -> bool:
        if not 0.0 <= prob <= 1.0:
            raise OracleError(
                f"bernoulli: {prob!r} is no probability; clamping it would hide a wrong rule"
            )
        return self._choose([1.0 - prob, prob]) == 1

    def categorical(self, law: Law) -> int:
        sparse = law.sparse()
        token_ids: list[int] = sparse.token_ids.tolist()
        return token_ids[self._choose(sparse.probs.tolist())]

    def uniform(self) -> float:
        raise PositionError(
            "uniform: a position in [0, 1] has no branches; prove such a rule pointwise instead"
        )

    @property
    def num_drawn(self) -> int:
        return len(self.weights)

    def _choose(self, probs: list[float]) -> int:
        # Mass zero: no branch.
        options = [(index, weight) for index, weight in enumerate(probs) if weight > 0]
        step = len(self.weights)
        if step == len(self._script):
            self._script.append(0)
        elif step < len(self._expected) and len(options) != self._expected[step]:
            raise OracleError(
                f"choice {step} had {self._expected[step]} branches and now has {len(options)}: "
                "the program is no function of "
                "its draws"
            )
        index, weight = options[self._script[step]]
        self.weights.append(weight)
        self.arity.append(len(options))
        return index


class ExactRows:
    """`ExactDraws` of a batch of one request, for rules that run on a device: `monge.verify.functional`."""

    def __init__(self, draws: Draws) -> None:
        self._draws, self.used = draws, torch.zeros(1, dtype=torch.int64)

    def needed(self, mask: object) -> bool:
        return True

    def bernoulli(
        self, prob: Float64[Tensor, " batch"], where: Bool[Tensor, " batch"]
    ) -> Bool[Tensor, " batch"]:
        self.used = self.used + where
        is_asked = bool(where)
        return torch.tensor([is_asked and self._draws.bernoulli(min(1.0, float(prob)))])

    def skip(self, count: int, where: Bool[Tensor, " batch"]) -> None:
        for _ in range(count):
            self.bernoulli(torch.zeros(1, dtype=torch.float64), where)

    def categorical(self, law: RowLaws, where: Bool[Tensor, " batch"]) -> Int64[Tensor, " batch"]:
        self.used = self.used + where
        is_asked = bool(where)
        (row,) = law.probs
        return torch.tensor([self._draws.categorical(trusted_law(row)) if is_asked else -1])


def exact_law(
    program: Callable[[Draws], Outcome], *, max_runs: int = 200_000
) -> dict[Outcome, float]:
    """The law of a program's outcome.

    Args:
        program: A function of its draws that builds everything afresh.
        max_runs: Most branches to run.

    Raises:
        OracleError: If there are more branches, or the program is no function of its draws.
    """
    law: defaultdict[Outcome, float] = defaultdict(float)
    script: list[int] = []
    arity: list[int] = []
    for _ in range(max_runs):
        draws = ExactDraws(script, arity)
        law[program(draws)] += math.prod(draws.weights)
        arity = list(draws.arity)
        while script and script[-1] + 1 == arity[len(script) - 1]:
            script.pop()
            arity.pop()
        if not script:
            _check_total(law)
            return dict(law)
        script[-1] += 1
    raise OracleError(
        f"exact_law: more than {max_runs} branches; make vocabulary, tree or horizon smaller"
    )


def law_error(output: Mapping[Outcome, float], truth: Mapping[Outcome, float]) -> float:
    """Largest absolute difference between the two probabilities of an outcome."""
    return max(
        abs(output.get(key, 0.0) - truth.get(key, 0.0)) for key in output.keys() | truth.keys()
    )


def _check_total(law: Mapping[Outcome, float]) -> None:
    total = math.fsum(law.values())
    if abs(total - 1.0) > _WEIGHT_TOLERANCE:
        raise OracleError(f"exact_law: the branches weigh {total!r} together instead of 1")
