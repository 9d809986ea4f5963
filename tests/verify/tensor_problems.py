"""Scored trees for the rules as objects and for their tensor programs, and every branch of a verdict."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from monge.core.verdict import Verdict
from monge.laws.law import DenseLaw, Law, trusted_law
from monge.laws.proposal import Deterministic, Iid, Mixed, Proposal, WithoutReplacement
from monge.laws.tree import TokenTree
from monge.oracle.exact_law import ExactDraws
from monge.verify.base import Rule, as_verifier
from monge.verify.block import Block
from monge.verify.functional import (
    DraftLaws,
    Verified,
    block,
    children_of,
    layer,
    num_uniforms,
    optimal,
    recursive_rejection,
    sample_and_match,
    speculative_sampling,
    traversal,
)
from monge.verify.layer import Layer
from monge.verify.optimal import Optimal
from monge.verify.recursive_rejection import RecursiveRejection
from monge.verify.recursive_rejection_without_replacement import (
    RecursiveRejectionWithoutReplacement,
)
from monge.verify.sample_and_match import SampleAndMatch
from monge.verify.speculative_sampling import SpeculativeSampling
from monge.verify.traversal import Traversal

VOCAB = 5
BELOW_ONE = math.nextafter(1, 0)
CHAIN = (-1, 0, 1, 2)
BUSH = (-1, 0, 0, 1, 1, 2)
STAR = (-1, 0, 0, 0)
REGIMES = ("rough", "ties", "zeros", "one-hot", "equal", "tiny masses")


def without(probs, token_ids, children, draft, uniforms, **_):
    return recursive_rejection(probs, token_ids, children, draft, uniforms, replacement=False)


def on_chain(rule: Callable[..., Verified]) -> Callable[..., Verified]:
    return lambda probs, token_ids, children, draft, uniforms, **_: rule(
        probs, token_ids, draft, uniforms
    )


PROGRAMS: dict[str, tuple[Callable[..., Verified], Rule, type, tuple[tuple[int, ...], ...]]] = {
    "speculative_sampling": (
        on_chain(speculative_sampling),
        SpeculativeSampling(),
        Iid,
        (CHAIN, (-1,)),
    ),
    "block": (on_chain(block), Block(), Iid, (CHAIN, (-1,), (-1, 0))),
    "recursive_rejection": (recursive_rejection, RecursiveRejection(), Iid, (CHAIN, BUSH, STAR)),
    "without replacement": (
        without,
        RecursiveRejectionWithoutReplacement(),
        WithoutReplacement,
        (BUSH, STAR),
    ),
    "traversal": (traversal, Traversal(), WithoutReplacement, (BUSH, STAR, CHAIN)),
    "sample_and_match": (
        lambda probs, token_ids, children, draft, uniforms, **_: sample_and_match(
            probs, token_ids, children, uniforms
        ),
        SampleAndMatch(),
        Deterministic,
        (BUSH, CHAIN, (-1,)),
    ),
    "mixed recursive_rejection": (recursive_rejection, RecursiveRejection(), Mixed, (BUSH, STAR)),
    "mixed traversal": (traversal, Traversal(), Mixed, (BUSH, STAR)),
    "optimal": (optimal, Optimal(), Iid, (BUSH, STAR, CHAIN)),
    "mixed optimal": (optimal, Optimal(), Mixed, (BUSH, STAR)),
    "layer": (layer, Layer(), Iid, (BUSH, STAR, CHAIN)),
    "mixed layer": (layer, Layer(), Mixed, (BUSH, STAR)),
}


@dataclass(frozen=True)
class Problem:
    """One scored tree, for the object and for the program.

    Args:
        num_fixed: Deterministic candidates of each node; empty for none.
        times: How often each other candidate was drawn.
    """

    parents: tuple[int, ...]
    token_ids: tuple[int, ...]
    p: Tensor
    q: Tensor
    kind: type
    num_fixed: tuple[int, ...] = ()
    times: int = 1

    @property
    def children(self) -> tuple[tuple[int, ...], ...]:
        fixed = self.num_fixed or (0,) * len(self.parents)
        pairs = zip(children_of(self.parents), fixed, strict=True)
        return tuple((*own[:count], *own[count:] * self.times) for own, count in pairs)

    @property
    def tree(self) -> TokenTree:
        return TokenTree(
            token_ids=self.token_ids,
            parents=self.parents,
            candidates=self.children,
            proposals=tuple(map(self._proposal, range(len(self.parents)))),
        )

    def _proposal(self, node: int) -> Proposal:
        tokens = tuple(self.token_ids[child] for child in self.children[node])
        fixed = len(tokens) if self.kind is Deterministic else (self.num_fixed or {node: 0})[node]
        if fixed == len(tokens):
            return Deterministic(tokens)
        law, count = trusted_law(self.q[node]), len(tokens) - fixed
        if self.kind is Mixed:
            return Mixed(tokens[:fixed], law, count)
        return self.kind(law, count)

    @property
    def laws(self) -> list[Law]:
        return [trusted_law(row) for row in self.p]

    def run(
        self, program: Callable[..., Verified], uniforms: Sequence[Sequence[float]]
    ) -> Verified:
        return self.call(program, uniforms, "cpu")()

    def call(
        self, program: Callable[..., Verified], uniforms: Sequence[Sequence[float]], device: str
    ) -> Callable[[], Verified]:
        """The program with these uniforms, on tensors that lie on a device already."""
        children = self.children
        size, width = len(uniforms), num_uniforms(children)
        table = torch.tensor(
            [[*row[:width], *[0.5] * (width - len(row))] for row in uniforms], dtype=torch.float64
        )
        return partial(
            program,
            self.p.to(device).expand(size, -1, -1),
            torch.tensor(self.token_ids, device=device).expand(size, -1),
            children,
            DraftLaws(self.q.to(device).expand(size, -1, -1)),
            table.to(device),
            **({"num_fixed": self.num_fixed} if self.num_fixed else {}),
        )


def masses(regime: str, rng: np.random.Generator) -> np.ndarray:
    if regime == "ties":
        weights = rng.integers(0, 3, VOCAB) + (np.arange(VOCAB) == rng.integers(VOCAB))
    elif regime == "zeros":
        weights = rng.dirichlet(np.ones(VOCAB)) * (rng.random(VOCAB) < 0.6)
        weights[rng.integers(VOCAB)] += 0.5
    elif regime == "one-hot":
        weights = np.eye(VOCAB)[rng.integers(VOCAB)]
    elif regime == "tiny masses":
        weights = rng.dirichlet(np.ones(VOCAB)) * 10.0 ** -rng.integers(0, 300, VOCAB)
        weights[rng.integers(VOCAB)] += 0.5
    else:
        weights = rng.dirichlet(np.ones(VOCAB))
    return weights / weights.sum()


def problem(
    regimes: tuple[str, str],
    parents: tuple[int, ...],
    kind: type,
    seed: int,
    *,
    can_fix_all: bool = True,
) -> Problem:
    """Laws that depend on the path, and candidates that their draft law can have drawn."""
    rng = np.random.default_rng(seed)
    p = np.stack([masses(regimes[0], rng) for _ in parents])
    q = np.stack([masses(regimes[1], rng) for _ in parents])
    if regimes[1] == "equal":
        q = p.copy()
    tokens, num_fixed = [0] * len(parents), [0] * len(parents)
    for node in range(len(parents)):
        own = [child for child, parent in enumerate(parents) if parent == node]
        fixed = list[int]()
        if kind is Mixed and own:
            takes_all = can_fix_all and node and rng.random() < 0.3
            num_fixed[node] = len(own) if takes_all else len(own) // 2
            fixed = rng.choice(VOCAB, num_fixed[node], replace=False).tolist()
            q[node, fixed] = 0.0
        num_drawn = len(own) - len(fixed)
        if (q[node] > 0).sum() < num_drawn:
            q[node] = np.isin(np.arange(VOCAB), fixed, invert=True) / (VOCAB - len(fixed))
        if fixed and num_drawn:
            q[node] /= q[node].sum()
        # Distinct, as trees of objects hold a token once.
        drawn = rng.choice(VOCAB, num_drawn, replace=False, p=q[node]).tolist() if num_drawn else []
        for child, token in zip(own, fixed + drawn, strict=True):
            tokens[child] = token
    is_sparing = kind is Iid and rng.random() < 0.3
    return Problem(
        parents,
        tuple(tokens),
        torch.from_numpy(p),
        torch.from_numpy(q),
        kind,
        tuple(num_fixed) if any(num_fixed) else (),
        2 if is_sparing and len(set(parents)) < len(parents) else 1,
    )


class Cells(ExactDraws):
    """Enumerates branches, and notes a uniform inside each branch and those at its borders."""

    def __init__(self, script: list[int], arity: list[int]) -> None:
        super().__init__(script, arity)
        self.inside: list[float] = []
        self.borders: list[tuple[float, ...]] = []

    def uniform(self) -> float:
        """A position has no branches: it depends on its place."""
        position = (0.5 + 0.6180339887 * len(self.inside)) % 1.0
        self.inside.append(position)
        self.borders.append(())
        return position

    def bernoulli(self, prob: float) -> bool:
        found = super().bernoulli(prob)
        self.inside.append(prob / 2 if found else min((1 + prob) / 2, BELOW_ONE))
        self.borders.append(beside([prob]))
        return found

    def categorical(self, law: Law) -> int:
        token = super().categorical(law)
        part = law.sparse()
        sums = [0.0, *part.probs.cumsum(0).tolist()]
        place = part.token_ids.tolist().index(token)
        middle = (sums[place] + sums[place + 1]) / 2 / sums[-1]
        self.inside.append(min(middle, BELOW_ONE))
        self.borders.append(beside([edge / sums[-1] for edge in sums]))
        return token


def beside(edges: Sequence[float]) -> tuple[float, ...]:
    """Uniforms on every threshold, and one unit in the last place to both sides."""
    near = [
        value
        for edge in edges
        for value in (edge, math.nextafter(edge, 0), math.nextafter(edge, 1))
    ]
    return tuple(value for value in near if 0.0 <= value < 1.0)


@dataclass(frozen=True)
class Drawn:
    """A drawn tree, with the laws of the target."""

    tree: TokenTree
    laws: Sequence[DenseLaw]


def branches(one: Problem | Drawn, rule: Rule) -> list[tuple[Cells, Verdict]]:
    found, script, arity = list[tuple[Cells, Verdict]](), list[int](), list[int]()
    verifier = as_verifier(rule)
    while True:
        draws = Cells(script, arity)
        found.append((draws, verifier.verify(one.tree, one.laws, draws)))
        arity = list(draws.arity)
        while script and script[-1] + 1 == arity[len(script) - 1]:
            script.pop()
            arity.pop()
        if not script:
            return found
        script[-1] += 1


def told(verified: Verified) -> list[tuple[tuple[int, ...], int, int]]:
    rows = zip(
        verified.path.tolist(),
        verified.num_accepted.tolist(),
        verified.next_token.tolist(),
        verified.num_uniforms.tolist(),
        strict=True,
    )
    found = []
    for path, count, token, used in rows:
        assert all(node == -1 for node in path[count:])
        found.append((tuple(path[:count]), token, used))
    return found
