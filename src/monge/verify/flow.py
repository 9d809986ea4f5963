"""Flows: the mass of a scaled target that a node rule passes to its candidates.

p = target law, q = draft law, s = scale in (0, 1].
"""

from abc import abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import reduce
from operator import add
from typing import ClassVar

import torch
from jaxtyping import Float64, Int64
from torch import Tensor

from monge.laws.law import Law
from monge.laws.lazy_laws import Excess, below
from monge.verify.base import NodeRule
from monge.verify.problem import NodeProblem


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Flow:
    """A coupling of the candidates with s p, given a tuple of candidates.

    Args:
        accept_probs: pi(x | candidates) of every distinct candidate; they sum to at most 1.
        token_ids: Increasing ids of the tokens with accepted mass, `[support]`.
        masses: y(x) = E[pi(x | candidates)] over the draws of the candidates (and of the rule),
            `[support]`; y <= s p.
    """

    accept_probs: Mapping[int, float]
    token_ids: Int64[Tensor, " support"]
    masses: Float64[Tensor, " support"]

    @property
    def total(self) -> float:
        """|y|."""
        return total_of(self.masses)

    def left(self, target_law: Law, scale: float) -> Law:
        """Return s p - y, normalised."""
        return below(target_law, self.token_ids, self.masses, scale)


class LazyFlow(Flow):
    """The flow to a single draw, y = min(s p, q); its masses are computed when they are read.

    Args:
        accept_prob: pi of the draw.
        x: The draw.
        excess: `(s p - q)_+`.
    """

    __slots__ = ("_excess",)

    def __init__(self, accept_prob: float, x: int, excess: Excess) -> None:
        object.__setattr__(self, "accept_probs", {x: accept_prob})
        object.__setattr__(self, "_excess", excess)

    @property
    def token_ids(self) -> Int64[Tensor, " support"]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self._excess.q.sparse().token_ids

    @property
    def masses(self) -> Float64[Tensor, " support"]:  # pyright: ignore[reportIncompatibleVariableOverride]
        part = self._excess.q.sparse()
        return (self._excess.scale * self._excess.p.at(part.token_ids)).minimum(part.probs)

    @property
    def total(self) -> float:
        return self._excess.scale - self._excess.mass

    def left(self, target_law: Law, scale: float) -> Law:
        return self._excess.law


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Emission:
    """The emitted law given a tuple of candidates, if the averages y have no closed form.

    With e(x | candidates) the law of the emitted token (1 - s is missing from it on average), E[e(x
    | candidates)] = s p(x).

    Args:
        accept_probs: e(x | candidates) of every distinct candidate.
        leftover: Mass of e on all other tokens.
        leftover_law: e on all other tokens, normalised; any law where `leftover` is zero.
    """

    accept_probs: Mapping[int, float]
    leftover: float
    leftover_law: Law


class FlowRule(NodeRule):
    """A node rule that can be lifted to whole trees: it has flows of scaled targets.

    A scaled target is the rule run on the law (s p, 1 - s) with an additional symbol that is never
    drafted; that symbol and every token that is not a candidate read "nothing accepted".

    Attributes:
        counts_hits: True if `accept_probs` of its flows include candidates that the rule emits as
            its correction token.
    """

    counts_hits: ClassVar[bool] = False

    @abstractmethod
    def flow(self, problem: NodeProblem) -> Flow | Emission:
        """The flow at a node."""


def total_of(masses: Iterable[float] | Float64[Tensor, " masses"]) -> float:
    """Return the sum, in order, as programs for many requests add: zeros between masses do not change it."""
    if isinstance(masses, Tensor):
        return float(masses.cumsum(0)[-1:].sum())
    return reduce(add, masses, 0.0)  # `sum` of newer Pythons compensates


def walked(problem: NodeProblem) -> Flow:
    """Return the flow of deterministic candidates, which have nothing to be coupled with: pi(t) = y(t) = s p(t)."""
    p, scale = problem.target_law, problem.scale
    token_ids = p.sparse().token_ids.new_tensor(sorted(problem.candidates))
    masses = scale * p.at(token_ids)
    return Flow(
        accept_probs=dict(zip(token_ids.tolist(), masses.tolist(), strict=True)),
        token_ids=token_ids,
        masses=masses,
    )


def with_fixed(
    problem: NodeProblem,
    token_ids: Int64[Tensor, " support"],
    masses: Float64[Tensor, " support"],
) -> tuple[Int64[Tensor, " tokens"], Float64[Tensor, " tokens"]]:
    """Return accepted masses, by increasing id, with those of deterministic candidates, whole from the residual."""
    if not problem.fixed:
        return token_ids, masses
    ids = token_ids.new_tensor(sorted(problem.fixed))
    count = token_ids.numel() + ids.numel()
    at = torch.searchsorted(token_ids, ids) + torch.arange(ids.numel(), device=ids.device)
    is_drawn = torch.ones(count, dtype=torch.bool, device=ids.device)
    is_drawn[at] = False
    tokens, accepted = token_ids.new_empty(count), masses.new_empty(count)
    tokens[at], accepted[at] = ids, problem.scale * problem.target_law.at(ids)
    tokens[is_drawn], accepted[is_drawn] = token_ids, masses
    return tokens, accepted
