"""The law that a verifier gives to the tokens after a node, by enumeration.

The children of the node are drawn from the declared proposal, and every branch of the drawing and
of the decision is run. Given a text u that the drafted tree may offer, the next token must have the
target's law at u: the mass of outputs that begin with u and t is p_u(t) times the mass of outputs
that go on after u. The law error is the largest absolute difference between the two.

Two things keep this affordable at large vocabularies. A draw of the verifier from a law with many
tokens runs one branch for each candidate and one for all other tokens: the rules do not tell tokens
apart that are no candidates, so the mass of that branch is spread by the law. A draft law of many
tokens is first conditioned on its most probable ones. The target's law is then tried twice: as it
is, and conditioned on these tokens and its own most probable ones.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import torch
from torch import Tensor

from monge.core.clocks import SharedClocks
from monge.core.draws import Draws
from monge.core.errors import MongeError
from monge.core.law import Law, SparseLaw
from monge.core.proposal import (
    Arbitrary,
    Deterministic,
    HubPairs,
    Iid,
    Independent,
    Mixed,
    PathDraws,
    Proposal,
    WithoutReplacement,
)
from monge.core.systematic import Systematic
from monge.core.tree import GrowingTree, TokenTree
from monge.testing.oracle import OracleError, PositionError, exact_law
from monge.verify.base import Verifier, Walk

Text = tuple[int, ...]
_MAX_WHOLE, _MAX_RUNS = 2000, 300
"""Branches that are run for one node with whole draft laws, and for anything else."""
_TRIES: Final = {1: (64, 16, 8, 4, 3, 2), 2: (64, 3, 2)}
"""By depth of the enumerated tree: tokens that a draft law keeps, most first."""
_MOST: Final = 64
_FEW: Final = 32
"""Tokens of a law that are all run as branches. Draws among candidates have fewer outcomes."""
_CANDIDATES: Final = 8
"""Deterministic candidates of a node that are kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """One visited node.

    Args:
        target_law: The target's law there.
        proposal: How its children are drawn; without candidates at a leaf.
    """

    target_law: Law
    proposal: Proposal


@dataclass(frozen=True, slots=True)
class CouplingError:
    """The law error at a node.

    Args:
        error: See the module; `None` where nothing could be enumerated.
        is_whole: The draft laws kept all of their tokens.
    """

    error: float | None
    is_whole: bool


@dataclass(slots=True)
class Coupling:
    """Enumerate the nodes of a run.

    Args:
        verifier: The verifier.
    """

    verifier: Verifier
    _tries: dict[Any, int] = field(default_factory=dict[Any, int])

    def error_at(self, levels: Sequence[Level]) -> CouplingError:
        """Return the law error at a node.

        Args:
            levels: The node, then visited nodes below it, one a depth. All nodes of a depth are
                given the laws of the one that was visited.
        """
        if any(isinstance(one.proposal, SharedClocks) for one in levels):
            return CouplingError(None, False)
        walks = isinstance(self.verifier, Walk)
        key = tuple((type(one.proposal), _width(one.proposal)) for one in levels[:2])
        tries = [(depth, size) for depth in ((1,) if walks else (2, 1)) for size in _TRIES[depth]]
        first = self._tries.get(key, 0)
        for place, (depth, size) in enumerate(tries[first:], start=first):
            own = _drawn(levels, depth)
            largest = max(map(_support, own[:-1]), default=0)
            try:
                limit = _MAX_WHOLE if largest <= size and depth == 1 else _MAX_RUNS
                error = self._enumerated(own, size, limit)
                if largest > size:
                    error = max(error, self._enumerated(_narrowed(own, size), size, limit))
            except PositionError:
                return CouplingError(None, False)
            except OracleError:
                # The next node of this shape starts here, unless its laws are smaller.
                if size < largest:
                    self._tries[key] = place
                continue
            except MongeError:
                if _is_enumerable(self.verifier):
                    raise
                return CouplingError(None, False)
            return CouplingError(error, largest <= size)
        return CouplingError(None, False)

    def _enumerated(self, levels: Sequence[Level], size: int, limit: int) -> float:
        proposals = [_kept(one.proposal, size) for one in levels[:-1]]
        laws = [one.target_law for one in levels]
        rests: list[tuple[Law, frozenset[int]]] = []

        def program(draws: Draws) -> tuple[Text, int, int]:
            tree = _grown(proposals, draws)
            depths, lumped = tree.depths, LumpedDraws(draws, frozenset(tree.token_ids[1:]))
            verdict = self.verifier.verify(tree, [laws[depth] for depth in depths], lumped)
            path = tuple(tree.token_ids[node] for node in verdict.path)
            if verdict.next_token not in lumped.rests:
                return path, verdict.next_token, -1
            rests.append(lumped.rests[verdict.next_token])
            return path, -1, len(rests) - 1

        return _error(exact_law(program, max_runs=limit), rests, laws)


class LumpedDraws:
    """Draws that merge all tokens beside the candidates into one.

    Attributes:
        rests: By the token that stands for the others: the law, and the tokens that it does not
            stand for.
    """

    def __init__(self, draws: Draws, candidates: frozenset[int]) -> None:
        self._draws, self._candidates = draws, candidates
        self.rests: dict[int, tuple[Law, frozenset[int]]] = {}

    def bernoulli(self, prob: float) -> bool:
        return self._draws.bernoulli(prob)

    def uniform(self) -> float:
        return self._draws.uniform()

    def categorical(self, law: Law) -> int:
        part = law.sparse()
        if part.probs.numel() <= _FEW:
            return self._draws.categorical(law)
        own = torch.tensor(sorted(self._candidates))
        is_own = torch.isin(part.token_ids, own)
        standing = int(part.token_ids[~is_own][0])
        ids = torch.cat([part.token_ids[is_own], torch.tensor([standing])])
        masses = torch.cat([part.probs[is_own], part.probs[~is_own].sum()[None]])
        ids, order = ids.sort()
        token = self._draws.categorical(SparseLaw(ids, masses[order]))
        if token == standing:
            self.rests[token] = law, self._candidates
        return token


def _error(
    found: Mapping[tuple[Text, int, int], float],
    rests: Sequence[tuple[Law, frozenset[int]]],
    laws: Sequence[Law],
) -> float:
    """Return the largest difference, over texts that outputs go on from and tokens after them."""
    size = max(_size(law) for law in [*laws, *(law for law, _ in rests)])
    size = max([size, *(token + 1 for path, token, _ in found for token in (*path, token))])
    masses: defaultdict[Text, Tensor] = defaultdict(lambda: torch.zeros(size, dtype=torch.float64))
    for (path, token, rest), weight in found.items():
        for depth, step in enumerate(path):
            masses[path[:depth]][step] += weight
        if rest < 0:
            masses[path][token] += weight
            continue
        law, named = rests[rest]
        part = law.sparse()
        others = ~torch.isin(part.token_ids, torch.tensor(sorted(named)))
        own = part.probs[others]
        masses[path][part.token_ids[others]] += weight * own / own.sum()
    worst = 0.0
    for text, row in masses.items():
        part = laws[len(text)].sparse()
        right = torch.zeros(size, dtype=torch.float64)
        right[part.token_ids] = row.sum() * part.probs
        worst = max(worst, float((row - right).abs().max()))
    return worst


def _grown(proposals: Sequence[Proposal], draws: Draws) -> TokenTree:
    tree, frontier = GrowingTree(0), [0]
    for depth, proposal in enumerate(proposals):
        own = {
            node: _at(proposal, tree.multiplicity(node)) if depth else proposal for node in frontier
        }
        frontier = [child for grown in tree.grow_level(own, draws).values() for child in grown]
    return tree.finish()


def _at(proposal: Proposal, multiplicity: int) -> Proposal:
    """Return the proposal of a node; draws along paths are as many as paths that pass the node."""
    return PathDraws(proposal.law, multiplicity) if isinstance(proposal, PathDraws) else proposal


def _drawn(levels: Sequence[Level], depth: int) -> list[Level]:
    """Return at most `depth` nodes with candidates, and the one below them; the last one stands in for it."""
    kept: list[Level] = []
    for one in levels[:depth]:
        if one.proposal == Deterministic():
            break
        kept.append(one)
    below = levels[min(len(kept), len(levels) - 1)]
    return [*kept, replace(below, proposal=Deterministic())]


def _narrowed(levels: Sequence[Level], size: int) -> list[Level]:
    """Keep the tokens of the draft laws, and the most probable ones, in the target laws."""
    kept = {token for one in levels for law in draft_laws(one.proposal) for token in law.top(size)}
    kept |= {token for one in levels for token in _fixed(one.proposal)}
    return [
        replace(one, target_law=_among(one.target_law, kept | set(one.target_law.top(size))))
        for one in levels
    ]


def _fixed(proposal: Proposal) -> Text:
    if isinstance(proposal, Mixed):
        return proposal.fixed
    return proposal.token_ids if isinstance(proposal, Deterministic | Arbitrary) else ()


def _among(law: Law, tokens: set[int]) -> Law:
    part = law.sparse()
    kept = torch.isin(part.token_ids, torch.tensor(sorted(tokens)))
    probs = part.probs[kept]
    return SparseLaw(part.token_ids[kept], probs / probs.sum())


def _is_enumerable(verifier: Verifier) -> bool:
    rule = verifier.rule if isinstance(verifier, Walk) else verifier
    return rule.is_enumerable


def draft_laws(proposal: Proposal) -> tuple[Law, ...]:
    """Return the draft laws of a proposal; none for candidates that are not drawn."""
    if isinstance(proposal, Independent):
        return proposal.laws
    has_law = isinstance(
        proposal, Iid | WithoutReplacement | Mixed | HubPairs | Systematic | SharedClocks
    )
    return (proposal.law,) if has_law else ()


def _width(proposal: Proposal) -> int:
    if isinstance(proposal, Deterministic | Arbitrary):
        return min(len(proposal.token_ids), _CANDIDATES)
    if isinstance(proposal, Mixed):
        return len(proposal.fixed) + proposal.width
    if isinstance(proposal, HubPairs):
        return 2
    is_wide = isinstance(proposal, Iid | WithoutReplacement | Systematic)
    return proposal.width if is_wide else len(draft_laws(proposal))


def _support(level: Level) -> int:
    if isinstance(level.proposal, Deterministic | Arbitrary):
        is_cut = len(level.proposal.token_ids) > _CANDIDATES
        return _MOST + 1 if is_cut else 0
    return max((law.sparse().probs.numel() for law in draft_laws(level.proposal)), default=0)


def _kept(proposal: Proposal, size: int) -> Proposal:
    """Return the proposal with draft laws of at most `size` tokens."""
    if isinstance(proposal, Deterministic | Arbitrary):
        return type(proposal)(proposal.token_ids[:_CANDIDATES])
    if isinstance(proposal, Independent):
        return Independent(tuple(_conditioned(law, size) for law in proposal.laws))
    if isinstance(proposal, Iid | WithoutReplacement | Mixed | HubPairs | Systematic):
        return replace(proposal, law=_conditioned(proposal.law, size))
    return proposal


def _conditioned(law: Law, size: int) -> Law:
    part = law.sparse()
    if part.probs.numel() <= size:
        return law
    probs, order = torch.topk(part.probs, size)
    ids, places = part.token_ids[order].sort()
    probs = probs[places]
    return SparseLaw(ids, probs / probs.sum())


def _size(law: Law) -> int:
    return int(law.sparse().token_ids[-1]) + 1
