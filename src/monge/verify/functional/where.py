"""Values in which the single source of a rule is written: of a request on the host, or of a batch on a device.

A rule reads like its paper. On the host a value is a number, a mask is true or false, a law is a
`Law`, and the rule leaves as soon as nothing is open. In a batch each of them is a tensor with a
row per request, every request takes every step, and masks say which of them the step concerns.

p = target law, q = draft law.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar, overload, runtime_checkable

import numpy as np
import torch
from jaxtyping import Bool, Float64, Int64
from torch import Tensor

from monge.core.errors import OptionError
from monge.laws.draws import Draws
from monge.laws.law import Law, one_hot
from monge.laws.lazy_laws import Excess
from monge.laws.quantiles import independent

Value = Any
"""A number, or `[batch]`."""
Mask = Any
"""`numpy.bool_`, or `[batch]`."""
Token = Any
"""A token, or `[batch]`; -1 for none."""

AnyLaw = Any
"""A `Law`, or `RowLaws`."""

Picked = TypeVar("Picked")


class RowLaws(NamedTuple):
    """A law a request, or what a law has above another law.

    Attributes:
        probs: Masses, float64, `[batch, support]`.
        token_ids: Tokens of the masses, each once, with mass zero where padded; `None` if the
            support is the vocabulary, `[batch, support]`.
        total: Sum of masses that are not normalised; `None` of laws, `[batch]`.
        mass: The same, as `Excess` adds: what a sparse q takes is missing from p, `[batch]`.
    """

    probs: Float64[Tensor, "batch support"]
    token_ids: Int64[Tensor, "batch support"] | None = None
    total: Float64[Tensor, " batch"] | None = None
    mass: Float64[Tensor, " batch"] | None = None

    def prob(self, token: Int64[Tensor, " batch"]) -> Float64[Tensor, " batch"]:
        """Mass of a token of each request; of token 0 where there is none."""
        x = token.clamp_min(0)[:, None]
        if self.token_ids is None:
            return self.probs.gather(1, x).squeeze(1)
        return torch.where(self.token_ids == x, self.probs, 0.0).sum(1)

    def without(self, token: Int64[Tensor, " batch"]) -> "RowLaws":
        """Each law conditioned on not being a token."""
        x, ids = token.clamp_min(0)[:, None], self.token_ids
        rest = self.probs.scatter(1, x, 0.0) if ids is None else self.probs * (ids != x)
        return RowLaws(rest / rest.sum(1, keepdim=True), ids)

    def points(self, token: Int64[Tensor, " batch"]) -> "RowLaws":
        """The point masses at a token of each request."""
        return RowLaws(torch.ones_like(self.probs[:, :1]), token[:, None])

    def or_point(
        self, is_point: Bool[Tensor, " batch"], token: Int64[Tensor, " batch"]
    ) -> "RowLaws":
        """The point mass at a token, where `is_point`."""
        mask, x = is_point[:, None], token.clamp_min(0)[:, None]
        if self.token_ids is None:
            point = torch.zeros_like(self.probs).scatter(1, x, 1.0)
            return RowLaws(torch.where(mask, point, self.probs))
        # A column beside the draft law, which gives the token no mass.
        probs = torch.cat([torch.where(mask, 0.0, self.probs), mask.double()], 1)
        return RowLaws(probs, torch.cat([self.token_ids, x], 1))


@runtime_checkable
class RuleDraws(Protocol):
    """The only source of randomness of a rule."""

    def needed(self, mask: Mask) -> bool:
        """Return whether any request takes the next step; true in a batch, which never waits for its device."""
        ...

    def bernoulli(self, prob: Value, where: Mask) -> Mask:
        """True with probability `min(1, prob)` where `where` is true, false elsewhere."""
        ...

    def skip(self, count: int, where: Mask) -> None:
        """Skip draws that would be false, where `where` is true."""
        ...

    def categorical(self, law: AnyLaw, where: Mask) -> Token:
        """A token drawn from a law where `where` is true; another number elsewhere."""
        ...


@runtime_checkable
class BatchDraws(RuleDraws, Protocol):
    """The draws of a batch, which counts them."""

    @property
    def used(self) -> Int64[Tensor, " batch"]:
        """Draws of each request so far."""
        ...


Uniforms = Float64[Tensor, "batch uniforms"] | BatchDraws
"""Uniforms of each request, or a source of draws such as `ExactRows`, which enumerates them."""


@dataclass(frozen=True, slots=True)
class HostDraws:
    """The draws of a request."""

    draws: Draws

    def needed(self, mask: Mask) -> bool:
        return bool(mask)

    def bernoulli(self, prob: float, where: Mask) -> Mask:
        return np.bool_(where and self.draws.bernoulli(min(1.0, prob)))

    def skip(self, count: int, where: Mask) -> None:
        for _ in range(count):
            self.bernoulli(0.0, where)

    def categorical(self, law: Law, where: Mask) -> int:
        return self.draws.categorical(law) if where else -1


class UniformRows:
    """The draws of a batch: each request uses its own uniforms, in the order in which it draws.

    Args:
        uniforms: Uniforms in [0, 1).
        least: Most uniforms that a request may need.

    Raises:
        OptionError: If there are fewer.
    """

    # Logits that are not finite make a probability NaN; such a request draws no token any more.

    def __init__(self, uniforms: Float64[Tensor, "batch uniforms"], least: int) -> None:
        if uniforms.shape[1] < least:
            raise OptionError(
                f"uniforms: got {uniforms.shape[1]} a request; these trees need {least}"
            )
        self._uniforms = uniforms
        self._used = torch.zeros_like(uniforms[:, 0], dtype=torch.int64)
        self._asked = torch.zeros_like(uniforms[:, 0])

    @property
    def used(self) -> Int64[Tensor, " batch"]:
        return self._used

    def needed(self, mask: Mask) -> bool:
        del mask
        return True

    def _next(self, where: Bool[Tensor, " batch"]) -> Float64[Tensor, " batch"]:
        """The next uniform of each request; requests where `where` is true consume it."""
        # Requests that have used all of theirs do not read it.
        place = self._used.clamp_max(self._uniforms.shape[1] - 1)[:, None]
        self._used = self._used + where
        return self._uniforms.gather(1, place).squeeze(1)

    def bernoulli(
        self, prob: Float64[Tensor, " batch"], where: Bool[Tensor, " batch"]
    ) -> Bool[Tensor, " batch"]:
        self._asked = self._asked + torch.where(where, prob, 0.0)
        return where & (self._next(where) < prob)

    def skip(self, count: int, where: Bool[Tensor, " batch"]) -> None:
        self._used = self._used + count * where

    def categorical(self, law: RowLaws, where: Bool[Tensor, " batch"]) -> Int64[Tensor, " batch"]:
        token = independent(law.probs, self._next(where)[:, None]).squeeze(1)
        return torch.where(self._asked.isnan(), -1, token)


def batch_draws(uniforms: Uniforms, least: int) -> BatchDraws:
    """Return the draws of a batch; `least` is the most uniforms that a request may need."""
    return UniformRows(uniforms, least) if isinstance(uniforms, Tensor) else uniforms


@overload
def pick(mask: Mask, yes: Excess, no: Law) -> Law: ...
@overload
def pick(mask: Mask, yes: Picked, no: Picked) -> Picked: ...
def pick(mask: Mask, yes: Any, no: Any) -> Any:
    """`yes` where the mask is true, else `no`; the law of an excess, or p where nothing is left of p."""
    if not isinstance(mask, Tensor):
        chosen = yes if mask else no
        return chosen.law if isinstance(chosen, Excess) else chosen
    if isinstance(yes, RowLaws):
        if yes.total is not None:
            mask, yes = mask & ~(yes.total == 0.0), RowLaws(yes.probs / yes.total[:, None])
        return yes._replace(probs=torch.where(mask[:, None], yes.probs, no.probs))
    return torch.where(mask, yes, no)


def at_most(most: float, value: Value) -> Value:
    """The smaller of a number and a value; NaN stays."""
    return value.clamp_max(most) if isinstance(value, Tensor) else min(most, value)


def without(law: AnyLaw, token: Token) -> AnyLaw:
    """Return a law conditioned on not being a token. Some other token must have mass."""
    rest = law.without(token)
    assert rest is not None, "more candidates than the draft law has tokens"
    return rest


def point(like: AnyLaw, token: Token) -> AnyLaw:
    """The point mass at a token, the law of a deterministic candidate."""
    return like.points(token) if isinstance(like, RowLaws) else one_hot(token, like.device)


def or_point(law: AnyLaw, is_point: Mask, token: Token) -> AnyLaw:
    """The point mass at a token where `is_point`, else a law."""
    if isinstance(is_point, Tensor):
        return law.or_point(is_point, token)
    return point(law, token) if is_point else law


def offers(
    p: AnyLaw, q: AnyLaw, tokens: Sequence[Token], num_fixed: int
) -> Iterator[tuple[Token, AnyLaw]]:
    """Yield every distinct candidate in drawing order, with its law given the candidates before it.

    A deterministic candidate has a point mass. Independent draws, repeats dropped, are draws
    without replacement whose number does not depend on which tokens are still to come.
    """
    for place, x in enumerate(tokens):
        if place < num_fixed:
            yield x, point(p, x)
            continue
        yield x, q
        if place + 1 < len(tokens):
            q = without(q, x)


def excess(scale: Value, p: AnyLaw, q: AnyLaw) -> Any:  # noqa: ANN401 (`Excess` or `RowLaws`)
    """`(scale p - q)_+`."""
    if not isinstance(p, RowLaws):
        return Excess(scale, p, q)
    left, ids = p.probs if isinstance(scale, float) else scale[:, None] * p.probs, q.token_ids
    rest = (left - q.probs if ids is None else left.scatter_add(1, ids, -q.probs)).clamp_min(0.0)
    total = mass = rest.sum(1)
    if ids is not None:
        mass = (scale - left.gather(1, ids).minimum(q.probs).sum(1)).clamp_min(0.0)
    return RowLaws(rest, None, total, mass)


def share(mass: Value, scale: Value) -> Value:
    """`S / (S + 1 - a)`: the node's own share of the mass that its candidates leave undecided.

    Both vanish only if a = 1 and p = q; a deeper token is then certain to be accepted, and the
    result is never used.
    """
    undecided = mass + (1.0 - scale)
    if isinstance(undecided, Tensor):
        return torch.where(undecided == 0.0, 0.0, mass / undecided)
    return mass / undecided if undecided > 0.0 else 0.0
