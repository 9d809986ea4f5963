"""Random token trees, enumerated: what a drafter may propose over several steps."""

import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

import numpy as np
from jaxtyping import Float64

from monge.core.errors import LawError, OptionError
from monge.laws.law import MASS_TOLERANCE
from monge.transport.candidates import CandidateLaw
from monge.transport.laws import Tabular, check_law

MAX_TREES: Final = 1 << 14
"""Most distinct trees that are listed: the linear program has a variable per node of every tree."""

Path = tuple[int, ...]
Nodes = frozenset[Path]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RandomTree:
    """P(tree) for every tree that can be drawn.

    A tree is the set of its nodes, each named by the tokens on the way to it; the root, which is
    the empty path, is not listed. Trees that differ only in drawing order or repeats are merged:
    averaging a verifier over them changes no constraint.

    Args:
        trees: Distinct sets of nodes, each closed under taking parents.
        probs: Their masses, positive, summing to 1, `[trees]`.

    Raises:
        LawError: If the masses are no law, or a node lacks its parent.
    """

    trees: tuple[Nodes, ...]
    probs: Float64[np.ndarray, " trees"]

    def __post_init__(self) -> None:
        if (
            self.probs.shape != (len(self.trees),)
            or not self.trees
            or len(set(self.trees)) != len(self.trees)
        ):
            raise LawError(
                f"trees: {len(self.trees)} trees, which must be distinct, and masses "
                f"of shape {self.probs.shape}"
            )
        # Written so that NaN fails.
        if not (self.probs.min() > 0.0 and abs(self.probs.sum() - 1.0) <= MASS_TOLERANCE):
            raise LawError(
                f"trees: masses must be positive and sum to 1; got sum {self.probs.sum():.12g}"
            )
        orphans = [
            node
            for nodes in self.trees
            for node in nodes
            if len(node) > 1 and node[:-1] not in nodes
        ]
        if orphans or any(() in nodes for nodes in self.trees):
            raise LawError(f"trees: nodes {orphans[:3]} lack their parent, or the root is listed")

    @classmethod
    def from_children(cls, children: Callable[[Path], CandidateLaw], depth: int) -> "RandomTree":
        """Every node above `depth` draws its children, independently of the rest of the tree."""
        return cls._from_law(
            _grow((), depth, lambda path, _: ((o, p) for o, p in children(path)), 1)
        )

    @classmethod
    def from_paths(cls, draft: Tabular, *, depth: int, width: int) -> "RandomTree":
        """`width` independent paths of length `depth` (SpecTr, arXiv 2310.15141, section 6)."""

        def draws(path: Path, copies: int) -> Iterable[tuple[Path, float]]:
            return CandidateLaw.iid(draft(path), copies)

        return cls._from_law(_grow((), depth, draws, width, keep_copies=True))

    @classmethod
    def _from_law(cls, law: dict[Nodes, float]) -> "RandomTree":
        # Products of tiny masses vanish.
        held = {nodes: prob for nodes, prob in law.items() if prob > 0.0}
        return cls(trees=tuple(held), probs=np.array(list(held.values())))


def _grow(
    path: Path,
    depth: int,
    draws: Callable[[Path, int], Iterable[tuple[Path, float]]],
    copies: int,
    *,
    keep_copies: bool = False,
) -> dict[Nodes, float]:
    """Law of the nodes below `path`, through which `copies` paths go."""
    if depth == 0:
        return {frozenset(): 1.0}
    law: defaultdict[Nodes, float] = defaultdict(float)
    below: dict[tuple[int, int], dict[Nodes, float]] = {}
    for candidate_ids, prob in draws(path, copies):
        parts: list[list[tuple[Nodes, float]]] = []
        for token, count in Counter(candidate_ids).items():
            key = (token, count if keep_copies else 1)
            if key not in below:
                below[key] = _grow(
                    (*path, token), depth - 1, draws, key[1], keep_copies=keep_copies
                )
            child = (*path, token)
            parts.append([(nodes | {child}, mass) for nodes, mass in below[key].items()])
        for choice in itertools.product(*parts):
            law[frozenset().union(*(nodes for nodes, _ in choice))] += prob * float(
                np.prod([mass for _, mass in choice])
            )
        if len(law) > MAX_TREES:
            raise OptionError(
                f"trees: more than {MAX_TREES} to list; take a smaller vocabulary, depth or width"
            )
    return dict(law)


def string_laws(model: Tabular, depth: int) -> list[dict[Path, float]]:
    """Law of the string of the first d tokens, for d = 0..depth.

    Strings of mass zero are left out.
    """
    laws: list[dict[Path, float]] = [{(): 1.0}]
    for _ in range(depth):
        longer: dict[Path, float] = {}
        for path, mass in laws[-1].items():
            for token, prob in enumerate(check_law(f"law after {path}", model(path)).tolist()):
                if prob > 0.0:
                    longer[*path, token] = mass * prob
        laws.append(longer)
    return laws
