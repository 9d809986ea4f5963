"""Laws whose masses are computed when they are read: the excess of a law over another law, and laws of scores.

With scores s at temperature T, `p(x) = exp((s(x) - max s) / T) / Z`. A verifier reads a few masses,
the sum of what p has above a draft law, and a draw. A backend's machine code computes these, if the
backend has it. A row of masses in float64 is written only when it is read. Its masses agree with
those of a softmax in float64 up to a relative error of 1e-12, so a uniform that close to a
threshold may decide otherwise.

p = target law, q = draft law.
"""

import ctypes
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Float64, Int64
from torch import Tensor

from monge.core.errors import LawError
from monge.laws.law import DenseLaw, Law, SparseLaw, sparse_part, trusted_law

_BLOCK: Final = 1024
"""Tokens of a block whose sum is known, as in `law_masses.cpp`."""
_KINDS: Final = {torch.float32: 0, torch.bfloat16: 1}
_MASSES: Final = {torch.float64: 2, torch.float32: 3}
_LEAST: Final = 1 << 12
"""Vocabulary below which computing a row of masses takes less time than computing a few masses."""
_WIDEST: Final = 10**6
"""Largest temperature that the machine code takes; its inverse is the smallest."""


class _Numbers(ctypes.Structure):
    """`Law` of `law_masses.cpp`: scores, or masses; with token ids, of these tokens."""

    _fields_ = (
        ("numbers", ctypes.c_void_p),
        ("token_ids", ctypes.c_void_p),
        ("count", ctypes.c_int64),
        ("kind", ctypes.c_int64),
        ("largest", ctypes.c_double),
        ("heat", ctypes.c_double),
        ("weight", ctypes.c_double),
    )
    kept: Any
    """The tensors that hold the numbers."""


_LAW: Final = ctypes.POINTER(_Numbers)
_ARRAY, _NUMBER, _COUNT = ctypes.c_void_p, ctypes.c_double, ctypes.c_int64
SIGNATURES: Final[dict[str, tuple[Any, tuple[Any, ...]]]] = {
    "scan": (None, (_LAW, _COUNT, _ARRAY, _ARRAY)),
    "masses": (None, (_LAW, _LAW, _NUMBER, _COUNT, _ARRAY)),
    "at": (None, (_LAW, _LAW, _NUMBER, _ARRAY, _COUNT, _ARRAY)),
    "excess": (_NUMBER, (_LAW, _LAW, _NUMBER, _COUNT, _ARRAY, _ARRAY)),
    "quantile": (_COUNT, (_LAW, _LAW, _NUMBER, _COUNT, _ARRAY, _NUMBER)),
    "select": (_COUNT, (_LAW, _ARRAY, _COUNT, _NUMBER, _NUMBER)),
    "selected": (None, (_ARRAY, _ARRAY)),
    "order": (None, (_ARRAY, _COUNT, _ARRAY)),
}
"""Result and arguments of the functions of `law_masses.cpp`, without `monge_` before their names."""

_KERNELS: Final = dict[str, Callable[..., Any]]()


def install(kernels: dict[str, Callable[..., Any]]) -> None:
    """Compute masses by these functions from now on; see `SIGNATURES`."""
    _KERNELS.update(kernels)


def can_score(scores: Float[Tensor, "... vocab"], temperature: float | int) -> bool:
    """Return whether the machine code takes scores at a temperature."""
    return _are_readable(scores, _KINDS) and 1 / _WIDEST <= temperature <= _WIDEST


def stable_order(numbers: Float64[np.ndarray, " count"]) -> Int64[np.ndarray, " count"]:
    """Return the indices that sort numbers of at least 0; equal numbers keep their order."""
    if _KERNELS and numbers.size >= _LEAST:
        order = np.empty(numbers.size, dtype=np.int64)
        _KERNELS["order"](numbers.ctypes.data, numbers.size, order.ctypes.data)
        return order
    order = np.argsort(numbers)  # several times as fast as a stable sort, which only ties need
    ordered = numbers[order]
    has_ties = bool((ordered[1:] == ordered[:-1]).any())
    return np.argsort(numbers, kind="stable") if has_ties else order


class _Terms(NamedTuple):
    """`(scale p - q)_+`, for the machine code; p itself without q."""

    p: _Numbers
    q: _Numbers | None
    scale: float
    vocab: int


class LazyLaw(DenseLaw):
    """A law of scores or of masses, or what such a law has above another law; written when `probs` is read.

    Args:
        terms: What the machine code reads; the numbers must not change.
        sums: Sums of its masses over blocks of tokens.
        tops: Largest scores of blocks, of a law of scores.
        origin: The law p, if it is not this law.
        total: Its mass, before it is normalised.
    """

    __slots__ = ("_kernels", "_origin", "_probs", "_tops", "sums", "terms", "total")

    # Nobody else writes; what a frozen dataclass with slots defines fails in subclasses.
    __setattr__ = object.__setattr__

    def __init__(
        self,
        terms: _Terms,
        sums: Float64[Tensor, " blocks"],
        *,
        tops: Float64[Tensor, " blocks"] | None = None,
        origin: Law | None = None,
        total: float = 1.0,
    ) -> None:
        self.terms, self.sums, self._tops, self._origin = terms, sums, tops, origin
        self.total, self._kernels = total, _KERNELS
        self._probs: Tensor | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return trusted_law, (self.probs,)

    @property
    def device(self) -> torch.device:
        return self.sums.device

    @property
    def probs(  # pyright: ignore[reportIncompatibleVariableOverride]
        self,
    ) -> Float64[Tensor, " vocab"]:
        """Masses, written at the first reading."""
        if self._probs is None:
            probs = torch.empty(self.terms.vocab, dtype=torch.float64)
            self._kernels["masses"](*self.terms, probs.data_ptr())
            self._probs = probs if self.total == 1.0 else probs.div_(self.total)
        return self._probs

    def prob(self, token_id: int) -> float:
        if not 0 <= token_id < self.terms.vocab:
            return 0.0
        token, mass = ctypes.c_int64(token_id), _NUMBER()
        self._kernels["at"](*self.terms[:3], ctypes.byref(token), 1, ctypes.byref(mass))
        return mass.value / self.total

    def at(self, token_ids: Int64[Tensor, " support"]) -> Float64[Tensor, " support"]:
        vocab = self.terms.vocab
        is_few = 4 * token_ids.numel() <= vocab
        # Tokens beyond the vocabulary are refused there.
        if self._probs is not None or not is_few or bool((token_ids >= vocab).any()):
            return super().at(token_ids)
        ids = token_ids.contiguous()
        masses = torch.empty(ids.numel(), dtype=torch.float64)
        self._kernels["at"](*self.terms[:3], ids.data_ptr(), ids.numel(), masses.data_ptr())
        return masses if self.total == 1.0 else masses.div_(self.total)

    def quantile(self, position: float) -> int:
        token: int = self._kernels["quantile"](*self.terms, self.sums.data_ptr(), position)
        if token < 0 and self._origin is not None:  # rounding alone left something of p
            return self._origin.quantile(position)
        return token

    def excess_over(self, other: Law, scale: float | int = 1.0) -> "LazyLaw | None":
        excess = excess_of(scale, self, other)
        return excess if excess.total > 0.0 else None

    def mass_over(self, other: Law, scale: float | int = 1.0) -> float:
        return excess_of(scale, self, other).total

    def truncated(
        self, top_k: int | None, top_p: float | int, min_p: float | int
    ) -> SparseLaw | None:
        """Return the law of the tokens of a law of scores that sampling rules keep.

        Returns:
            The law; `None` where rounding could decide which tokens these are.
        """
        assert self._tops is not None, "a law of scores"
        count = self._kernels["select"](
            self.terms.p, self._tops.data_ptr(), top_k or 0, top_p, min_p
        )
        if count < 0:
            return None
        token_ids = torch.empty(count, dtype=torch.int64)
        probs = torch.empty(count, dtype=torch.float64)
        self._kernels["selected"](token_ids.data_ptr(), probs.data_ptr())
        return sparse_part(token_ids, probs)


def scored_laws(
    scores: Float[Tensor, "nodes vocab"], temperature: float | int
) -> list[LazyLaw | None]:
    """Return the law of every row of scores for which `can_score` holds; `None` where they make none."""
    num_laws, vocab = scores.shape
    numbers = (_Numbers * num_laws)()
    begin, step = scores.data_ptr(), scores.stride(0) * scores.element_size()
    for row, law in enumerate(numbers):
        law.numbers, law.count, law.kind = begin + row * step, vocab, _KINDS[scores.dtype]
        law.heat = 1.0 / temperature
    sums = torch.empty(2, num_laws, _num_blocks(vocab), dtype=torch.float64)
    _KERNELS["scan"](numbers, num_laws, sums[0].data_ptr(), sums[1].data_ptr())
    return [
        _law_of(law, row, of_blocks, tops)
        for law, row, of_blocks, tops in zip(numbers, scores, *sums, strict=True)
    ]


def _law_of(
    numbers: _Numbers,
    kept: Float[Tensor, " vocab"],
    sums: Float64[Tensor, " blocks"],
    tops: Float64[Tensor, " blocks"] | None = None,
) -> LazyLaw | None:
    """Return the law of numbers that were scanned, or `None` if they make none."""
    numbers.kept = kept
    is_law = 0.0 < numbers.weight < math.inf
    return LazyLaw(_Terms(numbers, None, 1.0, kept.numel()), sums, tops=tops) if is_law else None


def excess_of(scale: float | int, p: LazyLaw, q: Law) -> LazyLaw:
    """Return `(scale p - q)_+`, which is no law where its `total` is 0.

    Raises:
        LawError: If the laws have different vocabularies.
    """
    vocab, others = p.terms.vocab, _numbers_of(q)
    size = others.count if isinstance(q, DenseLaw) else int(q.sparse().token_ids[-1]) + 1
    if size > vocab or (isinstance(q, DenseLaw) and size < vocab):
        raise LawError(f"laws over {vocab} and {size} tokens cannot be compared")
    terms, sums = (
        _Terms(_numbers_of(p), others, scale, vocab),
        torch.empty(_num_blocks(vocab), dtype=torch.float64),
    )
    known = p.sums.data_ptr() if p.terms.q is None else None
    total = _KERNELS["excess"](*terms, known, sums.data_ptr())
    return LazyLaw(terms, sums, origin=p, total=total)


def can_read(masses: Float[Tensor, "batch rows vocab"]) -> bool:
    """Return whether the machine code takes rows of masses."""
    return _are_readable(masses, _MASSES)


def laws_of_masses(
    masses: Float[Tensor, "batch rows vocab"], counts: Sequence[int]
) -> "list[list[LazyLaw]] | None":
    """Return the laws of rows of masses for which `can_read` holds, each divided by its sum.

    Args:
        masses: Masses, which must stay as they are.
        counts: Number of the first rows of each request that are read.

    Returns:
        The laws of each request; `None` where a row makes no law.
    """
    vocab, size = masses.shape[2], masses.element_size()
    numbers, sums = (
        (_Numbers * sum(counts))(),
        torch.empty(sum(counts), _num_blocks(vocab), dtype=torch.float64),
    )
    begin, kind = masses.data_ptr(), _MASSES[masses.dtype]
    to_request, to_row, _ = (step * size for step in masses.stride())
    places = [(request, row) for request, count in enumerate(counts) for row in range(count)]
    for (request, row), law in zip(places, numbers, strict=True):
        law.numbers, law.count, law.kind = begin + request * to_request + row * to_row, vocab, kind
    if places:
        _KERNELS["scan"](numbers, len(numbers), sums.data_ptr(), None)
    laws = [
        _law_of(law, masses[at], of_blocks)
        for at, law, of_blocks in zip(places, numbers, sums, strict=True)
    ]
    known = [law for law in laws if law is not None]
    rest = iter(known)
    return [list(islice(rest, count)) for count in counts] if len(known) == len(laws) else None


def _are_readable(rows: Float[Tensor, "... vocab"], kinds: Mapping[torch.dtype, int]) -> bool:
    return (
        bool(_KERNELS)
        # Those of a compiler have no numbers.
        and type(rows) is Tensor
        and not torch.compiler.is_compiling()
        and rows.is_cpu
        and rows.dtype in kinds
        and rows.shape[-1] >= _LEAST
        and rows.stride(-1) == 1
    )


def _num_blocks(vocab: int) -> int:
    return -(-vocab // _BLOCK)


def _numbers_of(law: Law) -> _Numbers:
    if isinstance(law, LazyLaw) and law.terms.q is None:
        return law.terms.p
    if isinstance(law, DenseLaw):
        probs, ids = law.probs.contiguous(), None
    else:
        part = law.sparse()
        probs, ids = part.probs.contiguous(), part.token_ids.contiguous()
    numbers = _Numbers(
        numbers=probs.data_ptr(),
        token_ids=None if ids is None else ids.data_ptr(),
        count=probs.numel(),
        kind=_MASSES[torch.float64],
        weight=1.0,
    )
    numbers.kept = probs, ids
    return numbers


@dataclass(frozen=True)
class Excess:
    """`(scale p - q)_+`. Its mass and its law are computed on demand.

    Args:
        scale: In (0, 1].
        p: Target law.
        q: Draft law.
    """

    scale: float
    p: Law
    q: Law

    @cached_property
    def mass(self) -> float:
        """Its mass."""
        return self._lazy.total if self._lazy is not None else self.p.mass_over(self.q, self.scale)

    @property
    def law(self) -> Law:
        """Its normalised law; p if there is no mass."""
        if self._lazy is not None:
            return self._lazy if self._lazy.total > 0.0 else self.p
        return self.p.excess_over(self.q, self.scale) or self.p

    @cached_property
    def _lazy(self) -> LazyLaw | None:
        # Its mass and its law are known together.
        return excess_of(self.scale, self.p, self.q) if isinstance(self.p, LazyLaw) else None


def below(
    p: Law,
    token_ids: Int64[Tensor, " support"],
    masses: Float64[Tensor, " support"],
    scale: float = 1.0,
) -> Law:
    """Normalised `s p - y`, the law of the token after a rejection; p itself if all of s p is accepted.

    A rule that accepts token i with mass y_i <= p_i in all, and otherwise emits from p - y, has the
    output law p, whatever y is: the two masses that are missing are the same, 1 - sum(y).

    Args:
        p: Target law.
        token_ids: Increasing token ids, `[support]`.
        masses: y of these tokens, at most s p; y is zero elsewhere, `[support]`.
        scale: s.
    """
    # Where nothing is left, nothing is ever rejected: rounding alone brings a caller here.
    return p.excess_over(sparse_part(token_ids, masses), scale) or p
