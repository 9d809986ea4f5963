"""Tree shapes by node budget, and what is drawn in them."""

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from monge.core.errors import OptionError
from monge.draft.tree.base import TreeBuilder
from monge.draft.tree.children import CHILDREN, way_of_drawing
from monge.draft.tree.registry import TREES

LONGEST_CHAIN: Final = 8
FEW_PATHS: Final = 4
PATH_DEPTHS: Final = (4, 8)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A tree builder and where it belongs in tables and plots.

    Args:
        family: `chain`, `binary` (two candidates a node), `comb` (several at the root, then
            chains), `paths`, or the name of a builder that is given its number of nodes.
        children: How children are drawn, where that is a setting; the builder's own way otherwise.
        budget: Most drafted nodes that were asked for; `None` outside the comparison by budget.
        builder: The tree.
    """

    family: str
    children: str
    budget: int | None
    builder: TreeBuilder

    @property
    def name(self) -> str:
        """The builder as users write it."""
        settings = (
            f"{field.name}={getattr(self.builder, field.name)!r}"
            for field in dataclasses.fields(self.builder)  # pyright: ignore[reportArgumentType]
        )
        name = repr(self.builder).partition("(")[0]
        return f"{name}({', '.join(settings)})"


def shapes(budgets: Sequence[int]) -> list[Shape]:
    """Every family and way of drawing children within every budget.

    Raises:
        OptionError: If a budget is below two nodes.
    """
    found: list[Shape] = []
    for budget in budgets:
        if budget < 2:
            raise OptionError(f"a node budget must be at least 2; got {budget}")
        if budget <= LONGEST_CHAIN:
            found.append(
                Shape(
                    family="chain",
                    children="iid",
                    budget=budget,
                    builder=TREES.make("chain", depth=budget),
                )
            )
        for family, widths in (("binary", _binary(budget)), ("comb", _comb(budget))):
            for way in CHILDREN:
                if way_of_drawing(way).min_width <= max(widths):
                    builder = TREES.make("fixed_width", widths=widths, children=way)
                    found.append(Shape(family=family, children=way, budget=budget, builder=builder))
        if budget >= FEW_PATHS:
            found += _paths(FEW_PATHS, budget // FEW_PATHS, budget)
        for name in TREES:
            if "num_nodes" in TREES.options(name):
                builder = TREES.make(name, num_nodes=budget)
                found.append(
                    Shape(family=name, children=_ways(builder), budget=budget, builder=builder)
                )
    return found


def path_table(counts: Sequence[int], depths: Sequence[int] = PATH_DEPTHS) -> list[Shape]:
    """SpecTr's table: one to eight independent paths of four and eight tokens (arXiv 2310.15141, section 7)."""
    return [shape for depth in depths for count in counts for shape in _paths(count, depth, None)]


def _paths(count: int, depth: int, budget: int | None) -> Iterator[Shape]:
    if "paths" in set(TREES):
        builder = TREES.make("paths", num_paths=count, depth=depth)
        yield Shape(family="paths", children="iid", budget=budget, builder=builder)


def _binary(budget: int) -> tuple[int, ...]:
    """The deepest tree with two candidates a node."""
    depth = 1
    while 2 ** (depth + 2) - 2 <= budget:
        depth += 1
    return (2,) * depth


def _comb(budget: int) -> tuple[int, ...]:
    """Four candidates at the root (or as many as fit), each followed by a chain."""
    width = min(FEW_PATHS, budget)
    return (width, *(1,) * (budget // width - 1))


def _ways(builder: TreeBuilder) -> str:
    kinds = builder.limits.proposes
    return next((way for way in CHILDREN if {way_of_drawing(way).proposes} == kinds), "several")
