"""The only source of randomness of drafters, verifiers and controllers."""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import islice
from operator import index
from typing import Final, Protocol, TypeGuard, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float64
from torch import Tensor

from monge.core.errors import MongeError, OptionError
from monge.core.setting_types import is_of
from monge.laws.law import Law

_WORD: Final = 1 << 64
_FIRST_SEED: Final = -(1 << 63)
_BLOCK: Final = 256  # uniforms drawn at once: one call costs more than a hundred of its numbers
_CLOCKS, _PLANS = 1, 2  # `use` of the generator; 0 is the stream of uniforms


@runtime_checkable
class Draws(Protocol):
    """The only source of randomness a drafter, verifier or controller may use."""

    def bernoulli(self, prob: float) -> bool:
        """True with probability `prob`; never true at 0, always true at 1."""
        ...

    def categorical(self, law: Law) -> int:
        """A token drawn from `law`."""
        ...

    def uniform(self) -> float:
        """A number in [0, 1). It is not enumerable: only rules that need a position may use it."""
        ...


def num_drawn(draws: Draws) -> int | None:
    """Return how many draws were made; `None` where they are not counted."""
    return getattr(draws, "num_drawn", None)


class PeekableDraws(Draws, Protocol):
    """Draws of a uniform each that can be peeked, as batched versions need."""

    def peek(self, count: int) -> list[float]:
        """Return the next `count` uniforms without consuming them."""
        ...

    def skip(self, count: int) -> None:
        """Consume `count` uniforms, from which draws were made elsewhere."""
        ...


def can_peek(draws: Draws) -> TypeGuard[PeekableDraws]:
    """Return whether draws can be peeked."""
    return hasattr(draws, "peek")


class _UniformDraws:
    """Turns a stream of uniforms into draws, one uniform per draw, in call order; they can be peeked."""

    def __init__(self, uniforms: Iterator[float]) -> None:
        self._uniforms = uniforms
        self._peeked = deque[float]()
        self.num_drawn = 0

    def uniform(self) -> float:
        number = self._peeked.popleft() if self._peeked else next(self._uniforms)
        self.num_drawn += 1
        return number

    def bernoulli(self, prob: float) -> bool:
        return self.uniform() < prob

    def categorical(self, law: Law) -> int:
        return law.quantile(self.uniform())

    def peek(self, count: int) -> list[float]:
        while len(self._peeked) < count:
            self._peeked.append(next(self._uniforms))
        return list(islice(self._peeked, count))

    def skip(self, count: int) -> None:
        for _ in self.peek(count):
            self._peeked.popleft()
        self.num_drawn += count


class SeededDraws(_UniformDraws):
    """Draws of a request in production: stream `row` of a seed, which no other request uses.

    Args:
        seed: Equal seeds and rows give equal draws, whatever other requests do.
        row: Number of the stream. The streams of two different pairs (seed, row) never overlap.

    Raises:
        OptionError: As `check_seed`.
    """

    def __init__(self, seed: int, row: int = 0) -> None:
        check_seed(seed, row)
        super().__init__(_generated(seed, row))


class TapeDraws(_UniformDraws):
    """Replays pre-drawn uniforms in call order, to compare a fast version with the plain version.

    Raises:
        MongeError: When the tape is exhausted.
    """

    def __init__(self, uniforms: Iterable[float]) -> None:
        super().__init__(_taped(tuple(uniforms)))


def check_seed(seed: int, row: int = 0) -> None:
    """Raise `OptionError` unless the seed is a whole number in -2^63 .. 2^64 - 1, and the row in 0 .. 2^64 - 1."""
    if not is_of(seed, int) or not _FIRST_SEED <= seed < _WORD:
        raise OptionError(
            f"seed must be a whole number of at least -2^63 and less than 2^64; got {seed!r}"
        )
    if not is_of(row, int) or not 0 <= row < _WORD:
        raise OptionError(
            f"row must be a whole number of at least 0 and less than 2^64; got {row!r}"
        )


def stream_key(seed: int, row: int) -> tuple[int, int]:
    """Return the key of a stream's generator: 64 bits of seed (in two's complement, if negative), 64 bits of row."""
    return index(seed) % _WORD, index(row)


def random_numbers(
    seed: int, row: int, *, place: int = 0, draft: int = 0, use: int = 0
) -> np.random.Generator:
    """Return a counter-based generator (Philox 4x64) whose numbers depend on the arguments alone.

    The seed and the row are the key. The other arguments are the upper 192 bits of the counter, and
    the numbers count in the lower 64, so different arguments never give overlapping numbers.

    Reference:
        Salmon et al., Parallel random numbers: as easy as 1, 2, 3, SC 2011.
    """
    # numpy: torch seeds its CPU generator with 32 bits only, and has no counter-based one there.
    key, counter = (
        np.array(words, dtype=np.uint64)
        for words in (stream_key(seed, row), (0, place, draft, use))
    )
    return np.random.Generator(np.random.Philox(key=key, counter=counter))


def _generated(seed: int, row: int, *, place: int = 0, use: int = 0) -> Iterator[float]:
    # Few controllers draw, so the generator waits for the first draw.
    numbers = random_numbers(seed, row, place=place, use=use)
    while True:
        yield from numbers.random(_BLOCK).tolist()


def _taped(uniforms: tuple[float, ...]) -> Iterator[float]:
    yield from uniforms
    raise MongeError(f"TapeDraws: all {len(uniforms)} uniforms are used; record a longer tape")


class ClockDraws(ABC):
    """A random source with clocks, and with separate numbers for controllers.

    Clock `(depth, draft, token)` is an exponential variable of mean 1, independent of all other
    clocks and of every draw. Depth counts from the last committed token, so the clocks at a
    position of the text do not depend on how rounds were cut.
    """

    @abstractmethod
    def clocks(self, depth: int, draft: int, num_tokens: int) -> Float64[Tensor, " vocab"]:
        """Return the clocks of tokens 0 .. num_tokens - 1, for the token after a node at `depth` (0 for the root)."""

    @abstractmethod
    def move_to(self, place: int) -> None:
        """Set the number of committed tokens."""

    @abstractmethod
    def for_plans(self) -> Draws:
        """Return draws of the controller at this place of the text: the same for every call.

        They are no part of the stream, so drafts and verdicts never depend on a controller's draws.
        """


class RequestDraws(SeededDraws, ClockDraws):
    """`SeededDraws` of a request, with clocks and numbers for plans under the same seed and row."""

    def __init__(self, seed: int, row: int = 0) -> None:
        super().__init__(seed, row)
        self._seed, self._row, self._place = seed, row, 0

    def move_to(self, place: int) -> None:
        self._place = place

    def clocks(self, depth: int, draft: int, num_tokens: int) -> Float64[Tensor, " vocab"]:
        return keyed_clocks(self._seed, self._row, self._place + depth, draft, num_tokens)

    def for_plans(self) -> Draws:
        return _UniformDraws(_generated(self._seed, self._row, place=self._place, use=_PLANS))


def keyed_clocks(
    seed: int, row: int, place: int, draft: int, num_tokens: int
) -> Float64[Tensor, " vocab"]:
    """Clocks of a place of the text: numbers of their own for every place and draft."""
    uniforms = random_numbers(seed, row, place=place, draft=draft, use=_CLOCKS).random(num_tokens)
    return torch.from_numpy(-np.log1p(-uniforms))
