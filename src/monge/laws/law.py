"""Probability laws of the next token.

In maths p is the target law and q the draft law. A law is either *sparse* (the tokens of its
support and their masses) or *dense* (a mass per token of the vocabulary, zeros allowed). Both have
the same interface, so verifiers do not depend on the form.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, Protocol, TypeVar, runtime_checkable

import numpy as np
import torch
from jaxtyping import Bool, Float64, Int64
from torch import Tensor

from monge.core.errors import LawError

Made = TypeVar("Made")

MASS_TOLERANCE: Final = 1e-9
"""Largest distance of the sum of a law's masses from 1.

Rounding of a float64 softmax over 256k tokens stays below 1e-12; anything larger is a law that was
never normalised. The total variation that it can hide is at most half of this number.
"""


class Law(ABC):
    """A probability law over token ids."""

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """Device of the masses."""

    @abstractmethod
    def prob(self, token_id: int) -> float:
        """Mass of a token (0 outside the support)."""

    @abstractmethod
    def at(self, token_ids: Int64[Tensor, " support"]) -> Float64[Tensor, " support"]:
        """Masses of several tokens."""

    @abstractmethod
    def quantile(self, position: float) -> int:
        """Token whose cumulative interval covers `position` in [0, 1); never a token of mass zero."""

    @abstractmethod
    def sparse(self) -> "SparseLaw":
        """The same law on its support."""

    @abstractmethod
    def excess_over(self, other: "Law", scale: float | int = 1.0) -> "Law | None":
        """Normalised `(scale self - other)_+`, or `None` if no mass exceeds `other`."""

    @abstractmethod
    def mass_over(self, other: "Law", scale: float | int = 1.0) -> float:
        """The mass of `(scale self - other)_+`."""

    @abstractmethod
    def without(self, token_id: int) -> "Law | None":
        """This law conditioned on not being `token_id`, or `None` where nothing is left."""

    @abstractmethod
    def top_masses(self, count: int) -> tuple[tuple[int, float], ...]:
        """The `count` most probable tokens of the support with their masses, most probable first."""

    def top(self, count: int) -> tuple[int, ...]:
        """The `count` most probable tokens of the support, most probable first."""
        return tuple(token for token, _ in self.top_masses(count))


@runtime_checkable
class LawSequence(Protocol):
    """Laws by node. A law may be computed when it is read, so reading it may take time."""

    def __len__(self) -> int: ...

    def __getitem__(self, node: int, /) -> Law: ...


@dataclass(frozen=True, slots=True, eq=False)
class SparseLaw(Law):
    """A law given on its support.

    Args:
        token_ids: Increasing token ids, `[support]`.
        probs: Their masses, float64, positive, summing to 1, `[support]`.
        point: The token of a point mass that the host knows, so that greedy nodes do not wait for
            a device.

    Raises:
        LawError: If the shapes differ, ids are not increasing, a mass is not positive, or the sum
            is not 1.
    """

    token_ids: Int64[Tensor, " support"]
    probs: Float64[Tensor, " support"]
    point: int | None = None

    def __post_init__(self) -> None:
        shapes = tuple(self.token_ids.shape), tuple(self.probs.shape)
        if shapes[0] != shapes[1] or self.probs.ndim != 1 or self.probs.numel() == 0:
            raise LawError(
                f"SparseLaw: token_ids {shapes[0]} and probs {shapes[1]} must be two vectors of one "
                "positive length"
            )
        if self.probs.numel() > 1 and not bool((self.token_ids.diff() > 0).all()):
            raise LawError(
                "SparseLaw: token_ids must be strictly increasing; sort them and merge "
                "repeats first"
            )
        _check_mass(self.probs, lowest=math.ulp(0.0))

    @property
    def device(self) -> torch.device:
        return self.probs.device

    def prob(self, token_id: int) -> float:
        if self.point is not None:
            return 1.0 if token_id == self.point else 0.0
        if not self.probs.is_cpu:
            # The host waits once.
            return float(self.at(torch.tensor([token_id]).to(self.device, non_blocking=True)))
        index = int(torch.searchsorted(self.token_ids, token_id))
        if index == self.token_ids.numel() or int(self.token_ids[index]) != token_id:
            return 0.0
        return float(self.probs[index])

    def at(self, token_ids: Int64[Tensor, " support"]) -> Float64[Tensor, " support"]:
        if token_ids is self.token_ids:
            return self.probs
        index = torch.searchsorted(self.token_ids, token_ids).clamp_max(self.token_ids.numel() - 1)
        return torch.where(self.token_ids[index] == token_ids, self.probs[index], 0.0)

    def quantile(self, position: float) -> int:
        if self.probs.numel() == 1:
            return int(self.token_ids[0]) if self.point is None else self.point
        return int(self.token_ids[_quantile_place(self.probs, position)])

    def sparse(self) -> "SparseLaw":
        return self

    def excess_over(self, other: Law, scale: float | int = 1.0) -> "SparseLaw | None":
        return _normalised(self.token_ids, self._rest_over(other, scale))

    def mass_over(self, other: Law, scale: float | int = 1.0) -> float:
        return float(self._rest_over(other, scale).sum())

    def _rest_over(self, other: Law, scale: float | int) -> Float64[Tensor, " support"]:
        return (scaled(self.probs, scale) - other.at(self.token_ids)).clamp_min_(0.0)

    def top_masses(self, count: int) -> tuple[tuple[int, float], ...]:
        masses, order = torch.topk(self.probs, min(count, self.probs.numel()))
        return tuple(zip(self.token_ids[order].tolist(), masses.tolist(), strict=True))

    def without(self, token_id: int) -> "SparseLaw | None":
        keep = self.token_ids != token_id
        return _normalised(self.token_ids[keep], self.probs[keep])


@dataclass(frozen=True, slots=True, eq=False)
class DenseLaw(Law):
    """A law given by a mass per token of the vocabulary.

    Args:
        probs: Masses, float64, non-negative, summing to 1, `[vocab]`.

    Raises:
        LawError: If a mass is negative or NaN, or the sum is not 1.
    """

    probs: Float64[Tensor, " vocab"]

    def __post_init__(self) -> None:
        if self.probs.ndim != 1 or self.probs.numel() == 0:
            raise LawError(
                f"DenseLaw: probs must be one non-empty vector; got shape {tuple(self.probs.shape)}"
            )
        _check_mass(self.probs, lowest=0.0)

    @property
    def device(self) -> torch.device:
        return self.probs.device

    def prob(self, token_id: int) -> float:
        return float(self.probs[token_id]) if 0 <= token_id < self.probs.numel() else 0.0

    def at(self, token_ids: Int64[Tensor, " support"]) -> Float64[Tensor, " support"]:
        if token_ids is every_token(self.probs.numel(), self.probs.device):
            return self.probs
        try:
            return self.probs[token_ids]
        except IndexError as error:
            largest, size = int(token_ids.max()), self.probs.numel()
            raise LawError(
                f"law over {size} tokens, asked about token {largest}: compare laws "
                "over one vocabulary"
            ) from error

    def quantile(self, position: float) -> int:
        return int(_quantile_place(self.probs, position))

    def sparse(self) -> SparseLaw:
        if float(self.probs.min()) > 0.0:  # nothing to leave out, and nothing to copy
            return sparse_part(every_token(self.probs.numel(), self.probs.device), self.probs)
        token_ids = places_of(self.probs > 0.0)
        return sparse_part(token_ids, self.probs[token_ids])

    def excess_over(self, other: Law, scale: float | int = 1.0) -> "DenseLaw | None":
        return _normalised_dense(self._rest_over(other, scale))

    def mass_over(self, other: Law, scale: float | int = 1.0) -> float:
        if isinstance(other, DenseLaw):
            return float(self._rest_over(other, scale).sum())
        part = other.sparse()  # of a few tokens: what they take is missing from the mass
        taken = (scale * self.at(part.token_ids)).minimum(part.probs)
        return max(0.0, scale - float(taken.sum()))

    def _rest_over(self, other: Law, scale: float | int) -> Float64[Tensor, " vocab"]:
        masses = scaled(self.probs, scale)
        if isinstance(other, DenseLaw):
            if other.probs.shape != masses.shape:
                raise LawError(
                    f"laws over {masses.numel()} and {other.probs.numel()} tokens cannot be compared"
                )
            return (masses - other.probs).clamp_min_(0.0)
        part = other.sparse()
        rest = masses.clone() if masses is self.probs else masses
        rest[part.token_ids] = (rest[part.token_ids] - part.probs).clamp_min(0.0)
        return rest

    def without(self, token_id: int) -> "DenseLaw | None":
        rest = self.probs.clone()
        rest[token_id] = 0.0
        return _normalised_dense(rest)

    def top_masses(self, count: int) -> tuple[tuple[int, float], ...]:
        # The order of ties is not that of ids, but a function of the law alone.
        masses, ids = torch.topk(self.probs, min(count, self.probs.numel()))
        return tuple(
            (token, mass)
            for token, mass in zip(ids.tolist(), masses.tolist(), strict=True)
            if mass > 0.0
        )


def sparse_part(
    token_ids: Int64[Tensor, " support"], probs: Float64[Tensor, " support"]
) -> SparseLaw:
    """A normalised part of a checked law, without checks, for which the host would wait on a device."""
    return _unchecked(SparseLaw, token_ids=token_ids, probs=probs, point=None)


def places_of(mask: Bool[Tensor, " size"]) -> Int64[Tensor, " places"]:
    """Return the places where a mask is true; the host waits."""
    # Numpy takes a quarter of the time.
    return torch.from_numpy(np.flatnonzero(mask.numpy())) if mask.is_cpu else mask.nonzero()[:, 0]


@lru_cache(maxsize=8192)
def one_hot(token_id: int, device: torch.device | None = None) -> SparseLaw:
    """The point mass at a token. Cached, because greedy decoding often needs the same few tokens."""
    token_ids = torch.tensor([token_id]).to(device, non_blocking=True)
    probs = torch.ones(1, dtype=torch.float64, device=device)
    return _unchecked(SparseLaw, token_ids=token_ids, probs=probs, point=token_id)


@lru_cache(maxsize=16)
def every_token(vocab_size: int, device: torch.device) -> Int64[Tensor, " vocab"]:
    """The tokens of a law without zeros: a single object per vocabulary, so that laws over it compare quickly."""
    return torch.arange(vocab_size, device=device)


def renamed(law: Law, token_ids: Int64[Tensor, " some"]) -> SparseLaw:
    """A law over places in a list of increasing token ids, 0 .. some - 1, as a law over these tokens."""
    part = law.sparse()
    if part.point is not None:
        return one_hot(int(token_ids[part.point]), law.device)
    is_whole = part.probs.numel() == token_ids.numel()
    return sparse_part(token_ids if is_whole else token_ids[part.token_ids], part.probs)


def tempered(law: Law, temperature: float | int) -> SparseLaw:
    """Return the law proportional to `q^(1 / temperature)`; tokens whose mass underflows leave the support."""
    part = law.sparse()
    # Shifted first: a temperature of 1e-310 must give the point mass, not inf - inf.
    masses = torch.softmax((part.probs.log() - part.probs.max().log()) / temperature, dim=0)
    kept = masses > 0.0
    if bool(kept.all()):  # the tokens themselves, so that laws over them know each other
        return sparse_part(part.token_ids, masses)
    return SparseLaw(part.token_ids[kept], masses[kept])


def residual(p: Law, q: Law) -> Law:
    """Normalised `(p - q)_+`, the law of the correction token (Leviathan et al., arXiv 2211.17192).

    Where p equals q nothing is ever rejected, so the residual is never drawn from; rounding alone
    can bring a caller here, and p itself is then returned.
    """
    excess = p.excess_over(q)
    return p if excess is None else excess


def _check_mass(probs: Tensor, lowest: float) -> None:
    total = float(probs.sum())
    smallest = total if probs.numel() == 1 else float(probs.min())
    if not (smallest >= lowest and abs(total - 1.0) <= MASS_TOLERANCE):  # written so that NaN fails
        bound = "non-negative" if lowest == 0.0 else "positive"
        raise LawError(
            f"law: masses must be {bound} and sum to 1; got smallest {smallest:.6g}, sum "
            f"{total:.12g} over "
            f"{probs.numel()} tokens; normalise where the law is made"
        )


def _quantile_place(probs: Tensor, position: float) -> Tensor | int:
    cumulative = probs.cumsum(0)
    # Scaled by the rounded total, so that the last positive mass covers every position below one.
    if cumulative.is_cpu:  # the same search, and a quarter of the price of the call
        return int(
            cumulative.detach().numpy().searchsorted(position * cumulative[-1].item(), side="right")
        )
    # For which the host need not wait.
    return torch.searchsorted(cumulative, position * cumulative[-1:], right=True)


def scaled(masses: Tensor, scale: float | int) -> Tensor:
    """Return masses times a number: the same tensor where that is 1."""
    return masses if scale == 1.0 else scale * masses


def trusted_law(probs: Tensor) -> DenseLaw:
    """A law of masses that were normalised by its maker."""
    return _unchecked(DenseLaw, probs=probs)


def _unchecked(kind: type[Made], **fields: object) -> Made:
    law = object.__new__(kind)
    for name, value in fields.items():
        object.__setattr__(law, name, value)
    return law


def _normalised(token_ids: Tensor, masses: Tensor) -> SparseLaw | None:
    kept = places_of(masses > 0.0)
    masses = masses[kept]
    return sparse_part(token_ids[kept], masses / masses.sum()) if masses.numel() else None


def _normalised_dense(masses: Tensor) -> DenseLaw | None:
    """Return the law of masses, which it divides in place; `None` if there are none."""
    total = masses.sum()
    return trusted_law(masses.div_(total)) if float(total) > 0.0 else None
