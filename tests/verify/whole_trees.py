"""Small trees of tabular laws: every tree is drawn, verified and continued by the target, by enumeration."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from hypothesis import strategies as st

from monge.draft.tree.children import way_of_drawing
from monge.laws.draws import Draws
from monge.laws.law import DenseLaw
from monge.laws.proposal import Proposal
from monge.laws.tree import GrowingTree, TokenTree
from monge.oracle.exact_law import exact_law, law_error
from monge.verify.base import Verifier
from tests.kit.strategies import dense_law, weight_lists

Path = tuple[int, ...]
Children = Callable[[Path], Proposal | None]


@dataclass(frozen=True, slots=True)
class Tables:
    """Integer weights of target and draft law after every path."""

    targets: Mapping[Path, Sequence[int]]
    drafts: Mapping[Path, Sequence[int]]

    def target(self, path: Path) -> DenseLaw:
        return dense_law(self.targets[path])

    def draft(self, path: Path) -> DenseLaw:
        return dense_law(self.drafts[path])

    def target_masses(self, path: Path) -> np.ndarray:
        return self.target(path).probs.numpy()

    def draft_masses(self, path: Path) -> np.ndarray:
        return self.draft(path).probs.numpy()

    def laws(self, tree: TokenTree) -> list[DenseLaw]:
        return [self.target(tree.path_tokens(node)) for node in range(tree.num_nodes)]


def random_tables(*, vocab: int, depth: int, seed: int) -> Tables:
    rng = np.random.default_rng(seed)
    level: list[Path] = [()]
    paths: list[Path] = []
    for _ in range(depth + 1):
        paths += level
        level = [(*path, token) for path in level for token in range(vocab)]
    targets, drafts = (
        {path: (1 + rng.integers(0, 9, vocab) ** 2).tolist() for path in paths} for _ in range(2)
    )
    return Tables(targets, drafts)


def grown(children: Children, draws: Draws) -> TokenTree:
    """A tree whose nodes have the candidates that `children` says for their path."""
    tree = GrowingTree(0)
    paths: dict[int, Path] = {0: ()}
    frontier = [0]
    while frontier:
        proposals = {
            node: proposal for node in frontier if (proposal := children(paths[node])) is not None
        }
        level = tree.grow_level(proposals, draws)
        paths |= {
            child: (*paths[node], tree.token_ids[child])
            for node, grown in level.items()
            for child in grown
        }
        frontier = [child for grown in level.values() for child in grown]
    return tree.finish()


def text_error(rule: Verifier, tables: Tables, children: Children, length: int) -> float:
    """Law error of the first `length` tokens: what one round commits, continued by the target."""

    def run(draws: Draws) -> Path:
        tree = grown(children, draws)
        verdict = rule.verify(tree, tables.laws(tree), draws)
        return (*(tree.token_ids[node] for node in verdict.path), verdict.next_token)

    return law_error(
        continued(exact_law(run), tables, length), continued({(): 1.0}, tables, length)
    )


@st.composite
def tables_of_two_levels(draw) -> Tables:  # type: ignore[no-untyped-def]
    """Unrelated laws with zeros and ties, or equal laws at some nodes."""
    paths: list[Path] = [(), (0,), (1,), (2,)]
    paths += [(first, second) for first in range(3) for second in range(3)]
    targets = {path: draw(weight_lists(3)) for path in paths}
    drafts = {
        path: targets[path] if draw(st.booleans()) else draw(weight_lists(3)) for path in paths
    }
    return Tables(targets, drafts)


def fixed_width(tables: Tables, widths: Sequence[int], way: str) -> Children:
    """Children that are drawn in one way, so many of each node of a depth."""

    def children(path: Path) -> Proposal | None:
        is_leaf = len(path) == len(widths)
        return (
            None if is_leaf else way_of_drawing(way).propose(tables.draft(path), widths[len(path)])
        )

    return children


def width_error(rule: Verifier, tables: Tables, widths: Sequence[int], way: str) -> float:
    """`text_error` of the tokens that a tree of such children can decide."""
    return text_error(rule, tables, fixed_width(tables, widths, way), len(widths) + 1)


def expected_accepted(rule: Verifier, tables: Tables, children: Children) -> float:
    """E[tau], by enumeration."""

    def run(draws: Draws) -> int:
        tree = grown(children, draws)
        return rule.verify(tree, tables.laws(tree), draws).num_accepted

    return sum(count * prob for count, prob in exact_law(run).items())


class HasTarget(Protocol):
    """The target's laws by path."""

    def target_masses(self, path: Path) -> np.ndarray: ...


def continued(law: Mapping[Path, float], tables: HasTarget, length: int) -> dict[Path, float]:
    """The law of texts of one length: shorter ones are continued by the target."""
    full: defaultdict[Path, float] = defaultdict(float)
    open_texts = list(law.items())
    while open_texts:
        text, weight = open_texts.pop()
        if len(text) >= length:
            full[text[:length]] += weight
            continue
        open_texts += [
            ((*text, token), weight * mass)
            for token, mass in enumerate(tables.target_masses(text).tolist())
            if mass > 0.0
        ]
    return dict(full)
