"""The tree builder interface, and the ways of drawing children that builders offer by name."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from monge.core.context import DraftPlan
from monge.core.draws import Draws
from monge.core.errors import OptionError, unknown_name
from monge.core.law import Law
from monge.core.proposal import Deterministic, Iid, Mixed, Proposal, WithoutReplacement
from monge.core.tree import GrowingTree, TokenTree


def _top(law: Law, width: int) -> Proposal:
    return Deterministic(law.top(width))


def _greedy_plus_one(law: Law, width: int) -> Proposal:
    # Where the support is smaller than the width, its last token is the draw: then all of it is offered, as it should be.
    fixed = law.top(width)[:-1]
    for token in fixed:
        law = law.without(token) or law  # never None: one token of the support stays
    return Mixed(fixed, law, 1)


CHILDREN: Final[Mapping[str, tuple[type[Proposal], Callable[[Law, int], Proposal]]]] = MappingProxyType(
    {
        "iid": (Iid, Iid),
        "without_replacement": (WithoutReplacement, WithoutReplacement),
        "top": (Deterministic, _top),
        "greedy_plus_one": (Mixed, _greedy_plus_one),
    }
)
"""Ways of drawing `width` children from a draft law: independent draws; draws without replacement; the most probable tokens;
all but one of these, and one draw from the other tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeLimits:
    """What a tree builder may produce.

    Args:
        proposes: Kinds of proposals it uses.
        max_width: Most candidates of one node.
        max_depth: Deepest node.
        max_nodes: Most drafted nodes, the root not counted.
    """

    proposes: frozenset[type[Proposal]]
    max_width: int
    max_depth: int
    max_nodes: int


class TreeBuilder(ABC):
    """Grows a tree level by level. Usable by every drafter that has a law for each node."""

    @property
    @abstractmethod
    def limits(self) -> TreeLimits:
        """What it may produce."""

    @abstractmethod
    def expand(
        self, tree: GrowingTree, frontier: Sequence[int], laws: Sequence[Law], plan: DraftPlan, draws: Draws
    ) -> Sequence[int]:
        """Draw the children of the frontier's nodes, given their draft laws.

        Returns:
            The nodes to be read next: those that will get children in the coming level.
        """

    @abstractmethod
    def finish(self, tree: GrowingTree, plan: DraftPlan) -> TokenTree:
        """The finished tree."""


def children_of(kind: str, law: Law, width: int) -> Proposal:
    """A proposal of a named kind."""
    return CHILDREN[kind][1](law, width)


def check_kind(kind: str) -> None:
    """Refuse a kind that is not in `CHILDREN`."""
    if kind not in CHILDREN:
        raise unknown_name("way of drawing children", kind, CHILDREN)


def check_sizes(builder: str, **sizes: int) -> None:
    """Refuse sizes below one."""
    for name, size in sizes.items():
        if size < 1:
            raise OptionError(f"{builder}: {name} must be at least 1; got {size}")
