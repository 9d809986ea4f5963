"""The ways of drawing children that tree builders offer by name."""

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar, Final

from monge.core.errors import OptionError
from monge.core.registry import Registry
from monge.core.setting_types import check_bounds
from monge.laws.law import Law, tempered
from monge.laws.proposal import (
    Deterministic,
    Iid,
    Independent,
    Mixed,
    Proposal,
    SharedClocks,
    WithoutReplacement,
)


class Children:
    """A way of drawing the children of a node; by default, `proposes` of the law and the width.

    Attributes:
        proposes: The kind of proposal it makes.
    """

    proposes: ClassVar[type[Proposal]]

    @property
    def min_width(self) -> int:
        """The least width that the widest node of a tree must have."""
        return 1

    def propose(self, law: Law, width: int) -> Proposal:
        """Return a proposal of at most `width` children, or of all tokens if the law has fewer."""
        kind: Any = self.proposes
        return kind(law, width)


class IidChildren(Children):
    """Independent draws, repeats kept."""

    proposes = Iid


class WithoutReplacementChildren(Children):
    """Draws without replacement."""

    proposes = WithoutReplacement


class TopChildren(Children):
    """The most probable tokens, a function of the path."""

    proposes = Deterministic

    def propose(self, law: Law, width: int) -> Proposal:
        return Deterministic(law.top(width))


class GreedyPlusOne(Children):
    """All but one of the most probable tokens, and one draw from the other tokens."""

    proposes = Mixed

    def propose(self, law: Law, width: int) -> Proposal:
        # A support smaller than the width is offered whole: its last token is the draw.
        return _beside(law.top(width)[:-1], law, 1)


@dataclass(frozen=True, slots=True)
class MixedChildren(Children):
    """The most probable tokens, and independent draws from the other tokens.

    A node with fewer candidates than `num_fixed` + 1 has a draw and top tokens beside it; a law
    with no more tokens than candidates offers them all.

    Args:
        num_fixed: Top tokens among the candidates; the width counts them too.
    """

    num_fixed: int = 1
    proposes = Mixed

    def __post_init__(self) -> None:
        check_bounds("mixed", 0, num_fixed=self.num_fixed)

    @property
    def min_width(self) -> int:
        return self.num_fixed + 1

    def propose(self, law: Law, width: int) -> Proposal:
        top = law.top(width + 1)
        if len(top) <= width:
            return _beside(top[:-1], law, 1)
        num_fixed = min(self.num_fixed, width - 1)
        return _beside(top[:num_fixed], law, width - num_fixed)


@dataclass(frozen=True, slots=True)
class TemperatureChildren(Children):
    """One independent draw at each of several temperatures, applied to the draft law.

    A node with fewer candidates than temperatures uses the first of them.

    Args:
        temperatures: Each above 0; 1 is the draft law itself.
    """

    temperatures: tuple[float | int, ...] = (0.7, 1.2)
    proposes = Independent

    def __post_init__(self) -> None:
        if not self.temperatures or not all(
            math.isfinite(value) and value > 0 for value in self.temperatures
        ):
            raise OptionError(
                f"temperatures: give one or more finite numbers above 0; got {self.temperatures}"
            )

    @property
    def min_width(self) -> int:
        return len(self.temperatures)

    def propose(self, law: Law, width: int) -> Proposal:
        return Independent(tuple(tempered(law, value) for value in self.temperatures[:width]))


class SharedChildren(Children):
    """Races of clocks that the verifier `gumbel` knows; the k-th child wins the k-th race."""

    proposes = SharedClocks


def _beside(fixed: tuple[int, ...], law: Law, width: int) -> Mixed:
    for token in fixed:
        law = law.without(token) or law  # never None: callers leave a token of the support
    return Mixed(fixed, law, width)


CHILDREN: Final[Registry[Children]] = Registry(
    "way of drawing children",
    {
        "iid": IidChildren,
        "without_replacement": WithoutReplacementChildren,
        "top": TopChildren,
        "greedy_plus_one": GreedyPlusOne,
        "mixed": MixedChildren,
        "temperatures": TemperatureChildren,
        "shared": SharedChildren,
    },
)
"""Ways of drawing children by name; a tree's settings write `iid`, or `mixed(2)` with settings."""


@lru_cache(maxsize=256)
def way_of_drawing(text: str) -> Children:
    """Return the way of drawing children that a tree's settings name; each text is read once."""
    return CHILDREN.parse(text)


def check_kind(builder: str, kind: str, max_width: int) -> None:
    """Refuse a kind that is not in `CHILDREN`, or that needs wider nodes than any of the tree."""
    needed = way_of_drawing(kind).min_width
    if needed > max_width:
        raise OptionError(
            f"{builder}: children {kind!r} come in groups of {needed} at least, so some node must "
            f"have {needed} or more; the "
            f"widest has {max_width}; widen the tree, or take 'iid' or 'greedy_plus_one'"
        )
