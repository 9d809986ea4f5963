"""Proposals: a draft law together with the way in which the children of a node are drawn from it.

A rejection or transport rule is exact only for children that really follow the declared proposal,
so the same class declares and draws: `Proposal.draw` draws the children of a node,
`Proposal.draw_rows` those of many nodes on a device, and no other code draws a child.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Final, TypeVar

from jaxtyping import Float64, Int64
from torch import Tensor

from monge.core.errors import LawError, OptionError
from monge.laws.clocks import clock_draws, first_token, num_clocks
from monge.laws.draws import Draws
from monge.laws.law import Law
from monge.laws.quantiles import independent, without_replacement

Entry = TypeVar("Entry")
DrawRows = Callable[
    [Float64[Tensor, "nodes vocab"], Float64[Tensor, "nodes width"]], Int64[Tensor, "nodes width"]
]
"""Draws tokens from laws at positions in [0, 1)."""


class Proposal:
    """A draft law and the way in which children are drawn from it.

    Attributes:
        draw_rows: Draws what `draw` draws, up to rounding of running sums, at many nodes. It takes
            their laws, `[nodes, vocab]`, and uniforms, `[nodes, width]`, in the order in which `draw`
            takes them. It returns tokens, `[nodes, width]`; -1 where a law is not finite, or has no
            token left. `None` for a kind that is not made of a law and a width.
        may_repeat: True if a token can be drawn twice.
    """

    draw_rows: ClassVar[DrawRows | None] = None
    may_repeat: ClassVar[bool] = True

    @property
    def draft_law(self) -> Law | None:
        """q, the law that all drawn candidates follow; `None` if none is drawn, or if they have no law in common."""
        return None

    @property
    def draft_laws(self) -> tuple[Law, ...]:
        """The law of each drawn candidate, if the candidates before it are not looked at."""
        return ()

    @property
    def fixed_ids(self) -> tuple[int, ...]:
        """The deterministic candidates, which come before all drawn candidates."""
        return ()

    def draw(self, draws: Draws) -> tuple[int, ...]:
        """Return all children of the node, in drawing order; a token drawn twice is listed twice.

        By default the fixed candidates, and an independent draw from each draft law.
        """
        return self.fixed_ids + tuple(draws.categorical(law) for law in self.draft_laws)

    def at_depth(self, depth: int) -> "Proposal":
        """Return the proposal at a node of that depth: the same, unless its noise is addressed by place."""
        return self


@dataclass(frozen=True, slots=True)
class Deterministic(Proposal):
    """Candidates that are a function of the path alone: top tokens, a looked-up continuation, or none."""

    token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if len(set(self.token_ids)) != len(self.token_ids):
            raise OptionError(
                f"Deterministic: a candidate set has no repeats; got {self.token_ids}"
            )

    @property
    def fixed_ids(self) -> tuple[int, ...]:
        return self.token_ids


class OneLaw(Proposal):
    """`width` candidates are drawn from `law`; the subclass says how."""

    law: Law
    width: int

    def __post_init__(self) -> None:
        if self.width < 1:
            raise OptionError(
                f"{type(self).__name__}: width must be at least 1 (no candidates at all is "
                f"Deterministic(())); got {self.width}"
            )

    @property
    def draft_law(self) -> Law:
        return self.law

    @property
    def draft_laws(self) -> tuple[Law, ...]:
        return (self.law,) * self.width


@dataclass(frozen=True, slots=True)
class Iid(OneLaw):
    """`width` independent draws from `law`; repeats are kept."""

    law: Law
    width: int = 1

    draw_rows = staticmethod(independent)


@dataclass(frozen=True, slots=True)
class PathDraws(Iid):
    """`width` independent draws from `law`: a draw for each independent path that passes the node; at the root, for all paths.

    The subclass adds a promise about the whole tree, for rules that look at whole paths: every path
    that passes a node with children goes on below it, so whether a node has children depends on the
    path to it alone. For other independent draws it may depend on earlier levels of the tree.
    """


@dataclass(frozen=True, slots=True)
class Independent(Proposal):
    """A draw from each of `laws`, in their order, independent of each other; repeats are kept.

    The laws may come from different draft models, or from one model at different temperatures.
    Unlike i.i.d. draws they are not exchangeable: which candidate came from which law is part of
    the joint law.

    Args:
        laws: Draft laws, at least one; candidate k is drawn from `laws[k]`.
    """

    laws: tuple[Law, ...]

    def __post_init__(self) -> None:
        if not self.laws:
            raise OptionError(
                "Independent: give at least one draft law (no candidates at all is "
                "Deterministic(()))"
            )

    @property
    def draft_laws(self) -> tuple[Law, ...]:
        return self.laws


@dataclass(frozen=True, slots=True)
class WithoutReplacement(OneLaw):
    """`width` draws from `law`, each conditioned on being new, in order; fewer if the support is smaller."""

    law: Law
    width: int

    may_repeat = False
    draw_rows = staticmethod(without_replacement)

    def draw(self, draws: Draws) -> tuple[int, ...]:
        tokens: list[int] = []
        rest: Law | None = self.law
        while rest is not None and len(tokens) < self.width:
            tokens.append(draws.categorical(rest))
            if len(tokens) < self.width:
                rest = rest.without(tokens[-1])
        return tuple(tokens)


@dataclass(frozen=True, slots=True)
class Mixed(OneLaw):
    """Deterministic candidates `fixed`, then `width` independent draws from a law that gives them no mass."""

    fixed: tuple[int, ...]
    law: Law
    width: int

    def __post_init__(self) -> None:
        OneLaw.__post_init__(self)
        if len(set(self.fixed)) != len(self.fixed):
            raise OptionError(f"Mixed: fixed candidates have no repeats; got {self.fixed}")
        heavy = [token for token in self.fixed if self.law.prob(token) > 0]
        if heavy:
            raise LawError(
                f"Mixed: the sampled law gives mass to fixed candidates {heavy}; "
                "remove them and renormalise"
            )

    @property
    def fixed_ids(self) -> tuple[int, ...]:
        return self.fixed


@dataclass(frozen=True, slots=True)
class SharedClocks(OneLaw):
    """`width` draws from `law`, draft k by the race of the clocks `(depth, k, .)`, which the verifier knows.

    The draws are independent of each other, given the tokens above them. They depend on the
    verifier's noise, so two kinds of rules are exact: those made for it, and those that never look
    at the candidates.
    """

    law: Law
    width: int = 1
    depth: int = 0

    def at_depth(self, depth: int) -> "SharedClocks":
        return replace(self, depth=depth)

    def draw(self, draws: Draws) -> tuple[int, ...]:
        source, size = clock_draws(draws), num_clocks(self.law)
        return tuple(
            first_token(source.clocks(self.depth, draft, size), self.law)
            for draft in range(self.width)
        )


@dataclass(frozen=True, slots=True)
class Arbitrary(Proposal):
    """Candidates of unknown or anticipating origin; only sample and match is exact for them."""

    token_ids: tuple[int, ...]

    def draw(self, draws: Draws) -> tuple[int, ...]:
        return self.token_ids


PROPOSALS: Final[tuple[type[Proposal], ...]] = (
    *(Deterministic, Iid, Independent, WithoutReplacement, Mixed, SharedClocks, Arbitrary),
)
"""The ways in which candidates can be drawn."""


def entry_for(kind: type[Proposal], table: Mapping[type[Proposal], Entry]) -> Entry:
    """Return the entry of a kind of proposal, or of the nearest kind that it is a subclass of.

    Rules accept subclasses of the kinds that they name, so tables by kind are read in the same way.

    Raises:
        KeyError: If the table has neither the kind nor a superclass of it.
    """
    for parent in kind.__mro__:
        if parent in table:
            return table[parent]
    raise KeyError(
        f"{kind.__name__} is not in the table of "
        f"{', '.join(sorted(known.__name__ for known in table))}"
    )
