"""The only door through which randomness enters drafters, verifiers and controllers."""

from collections.abc import Iterable, Iterator
from typing import Final, Protocol, runtime_checkable

import torch

from monge.core.errors import MongeError
from monge.core.law import Law

_BLOCK: Final = 256  # uniforms drawn at once: one call of the generator costs more than a hundred of its numbers


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
        """A number in [0, 1). Not enumerable: only rules that need a position may ask for one."""
        ...


class _UniformDraws:
    """Turns a stream of uniforms into draws, one uniform per draw, in call order."""

    def __init__(self, uniforms: Iterator[float]) -> None:
        self._uniforms = uniforms

    def uniform(self) -> float:
        return next(self._uniforms)

    def bernoulli(self, prob: float) -> bool:
        return self.uniform() < prob

    def categorical(self, law: Law) -> int:
        return law.quantile(self.uniform())


class TorchDraws(_UniformDraws):
    """Production draws from one generator that belongs to one request and is shared with nobody.

    Args:
        generator: A CPU generator; its state is consumed in blocks of fixed size, so equal seeds give equal draws whatever the
            neighbours in the batch do.
    """

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__(_generated(generator))


class TapeDraws(_UniformDraws):
    """Replays pre-drawn uniforms in call order: how a fast path proves that it decides as its plain twin does.

    Raises:
        MongeError: When the tape is exhausted.
    """

    def __init__(self, uniforms: Iterable[float]) -> None:
        super().__init__(_taped(tuple(uniforms)))


def _generated(generator: torch.Generator) -> Iterator[float]:
    while True:
        yield from torch.rand(_BLOCK, generator=generator, dtype=torch.float64).tolist()


def _taped(uniforms: tuple[float, ...]) -> Iterator[float]:
    yield from uniforms
    raise MongeError(f"TapeDraws: all {len(uniforms)} uniforms are used; record a longer tape")
