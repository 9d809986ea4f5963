"""Check that the verifier keeps the target's law at every visited node, by enumeration.

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
from itertools import takewhile
from typing import Any, Final

import torch
from torch import Tensor

from monge.audit.certify_report import CertifyReport, MismatchError
from monge.core.clocks import SharedClocks
from monge.core.draws import Draws
from monge.core.errors import MongeError
from monge.core.law import Law, SparseLaw
from monge.core.proposal import Arbitrary, Deterministic, PathDraws, Proposal
from monge.core.tree import GrowingTree, TokenTree
from monge.core.verdict import Verdict
from monge.testing.oracle import OracleError, PositionError, exact_law
from monge.verify.base import Verifier, Walk

LAW_BOUND: Final = 1e-12
"""Largest law error that counts as rounding."""
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
class VisitedNode:
    """The target's law at a node, and how its children are drawn; no candidates at a leaf."""

    target_law: Law
    proposal: Proposal


@dataclass(slots=True)
class CouplingCheck:
    """The nodes of a run, enumerated with its verifier; one of every `every` nodes with candidates."""

    verifier: Verifier
    every: int
    report: CertifyReport
    _tries: dict[Any, int] = field(default_factory=dict[Any, int])

    def check(self, tree: TokenTree, laws: Mapping[int, Law], verdict: Verdict) -> None:
        """Check that the verifier keeps the target's law at the nodes of a tree that it visited."""
        report, visited = self.report, (0, *verdict.path)
        for place, node in enumerate(visited):
            if not tree.candidates[node]:
                continue
            report.num_nodes += 1
            if (report.num_nodes - 1) % self.every:
                continue
            nodes = [
                VisitedNode(target_law=laws[below], proposal=tree.proposals[below])
                for below in visited[place : place + 3]
                if below in laws
            ]
            if not nodes or (outcome := self.error_at(nodes)) is None:
                continue
            error, is_whole = outcome
            report.num_enumerated += 1
            report.num_whole += is_whole
            report.law_error = max(report.law_error, error)
            if not error < LAW_BOUND:
                raise MismatchError(
                    f"coupling of node {node}",
                    f"the verifier {self.verifier.title} gives the next token another law than the "
                    f"target's: law error {error:.2g}",
                )

    def error_at(self, nodes: Sequence[VisitedNode]) -> tuple[float, bool] | None:
        """Return the law error at a node, and if the draft laws kept all of their tokens.

        Args:
            nodes: The node, then visited nodes below it, one a depth. All nodes of a depth are
                given the laws of the one that was visited.

        Returns:
            `None` where nothing could be enumerated.
        """
        if any(isinstance(node.proposal, SharedClocks) for node in nodes):
            return None
        rule = self.verifier.rule if isinstance(self.verifier, Walk) else self.verifier
        depths = (2, 1) if rule is self.verifier else (1,)
        key = tuple((type(node.proposal), _width(node.proposal)) for node in nodes[:2])
        tries = [(depth, size) for depth in depths for size in _TRIES[depth]]
        first = self._tries.get(key, 0)
        for place, (depth, size) in enumerate(tries[first:], start=first):
            drawn = _drawn(nodes, depth)
            largest = max(map(_support, drawn[:-1]), default=0)
            try:
                limit = _MAX_WHOLE if largest <= size and depth == 1 else _MAX_RUNS
                error = self._enumerated(drawn, size, limit)
                if largest > size:
                    error = max(error, self._enumerated(_narrowed(drawn, size), size, limit))
            except PositionError:
                return None
            except OracleError:
                # The next node of this shape starts here, unless its laws are smaller.
                if size < largest:
                    self._tries[key] = place
                continue
            except MongeError:
                if rule.is_enumerable:
                    raise
                return None
            return error, largest <= size
        return None

    def _enumerated(self, nodes: Sequence[VisitedNode], size: int, limit: int) -> float:
        proposals = [_kept(node.proposal, size) for node in nodes[:-1]]
        laws = [node.target_law for node in nodes]
        rests: list[tuple[Law, frozenset[int]]] = []

        def program(draws: Draws) -> tuple[Text, int, int]:
            tree = _grown(proposals, draws)
            depths, lumped = tree.depths, _LumpedDraws(draws, frozenset(tree.token_ids[1:]))
            verdict = self.verifier.verify(tree, [laws[depth] for depth in depths], lumped)
            path = tuple(tree.token_ids[node] for node in verdict.path)
            if verdict.next_token not in lumped.rests:
                return path, verdict.next_token, -1
            rests.append(lumped.rests[verdict.next_token])
            return path, -1, len(rests) - 1

        return _error(exact_law(program, max_runs=limit), rests, laws)


class _LumpedDraws:
    """Draws that merge all tokens beside the candidates into one, which stands for them.

    `rests` has, by that token, the law and the tokens for which it does not stand.
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
        is_candidate = torch.isin(part.token_ids, torch.tensor(sorted(self._candidates)))
        standing = int(part.token_ids[~is_candidate][0])
        ids = torch.cat([part.token_ids[is_candidate], torch.tensor([standing])])
        masses = torch.cat([part.probs[is_candidate], part.probs[~is_candidate].sum()[None]])
        ids, order = ids.sort()
        token = self._draws.categorical(SparseLaw(ids, masses[order]))
        if token == standing:
            self.rests[token] = law, self._candidates
        return token


def _error(
    outputs: Mapping[tuple[Text, int, int], float],
    rests: Sequence[tuple[Law, frozenset[int]]],
    laws: Sequence[Law],
) -> float:
    """Return the largest difference, over texts that outputs go on from and tokens after them."""
    size = max(_size(law) for law in [*laws, *(law for law, _ in rests)])
    size = max([size, *(token + 1 for path, token, _ in outputs for token in (*path, token))])
    masses: defaultdict[Text, Tensor] = defaultdict(lambda: torch.zeros(size, dtype=torch.float64))
    for (path, token, rest), weight in outputs.items():
        for depth, step in enumerate(path):
            masses[path[:depth]][step] += weight
        if rest < 0:
            masses[path][token] += weight
            continue
        law, named = rests[rest]
        part = law.sparse()
        others = ~torch.isin(part.token_ids, torch.tensor(sorted(named)))
        probs = part.probs[others]
        masses[path][part.token_ids[others]] += weight * probs / probs.sum()
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
        level = dict.fromkeys(frontier, proposal)
        if depth and isinstance(proposal, PathDraws):  # as many as paths that pass the node
            level = {node: PathDraws(proposal.law, tree.multiplicity(node)) for node in frontier}
        frontier = [child for grown in tree.grow_level(level, draws).values() for child in grown]
    return tree.finish()


def _drawn(nodes: Sequence[VisitedNode], depth: int) -> list[VisitedNode]:
    """Return at most `depth` nodes with candidates, and the one below them; the last one stands in for it."""
    with_candidates = list(takewhile(lambda node: node.proposal != Deterministic(), nodes[:depth]))
    below = nodes[min(len(with_candidates), len(nodes) - 1)]
    return [*with_candidates, replace(below, proposal=Deterministic())]


def _narrowed(nodes: Sequence[VisitedNode], size: int) -> list[VisitedNode]:
    """Keep the tokens of the draft laws, and the most probable ones, in the target laws."""
    tokens = {
        token for node in nodes for law in draft_laws(node.proposal) for token in law.top(size)
    }
    tokens |= {token for node in nodes for token in _fixed(node.proposal)}
    return [
        replace(node, target_law=_among(node.target_law, tokens | set(node.target_law.top(size))))
        for node in nodes
    ]


def _fixed(proposal: Proposal) -> Text:
    return getattr(proposal, "fixed", getattr(proposal, "token_ids", ()))


def _among(law: Law, tokens: set[int]) -> Law:
    part = law.sparse()
    is_among = torch.isin(part.token_ids, torch.tensor(sorted(tokens)))
    probs = part.probs[is_among]
    return SparseLaw(part.token_ids[is_among], probs / probs.sum())


def draft_laws(proposal: Proposal) -> tuple[Law, ...]:
    """Return the draft laws of a proposal; none for candidates that are not drawn."""
    law = getattr(proposal, "law", None)
    return getattr(proposal, "laws", () if law is None else (law,))


def _width(proposal: Proposal) -> int:
    drawn = getattr(proposal, "width", len(draft_laws(proposal)))
    return drawn + min(len(_fixed(proposal)), _CANDIDATES)


def _support(node: VisitedNode) -> int:
    if isinstance(node.proposal, Deterministic | Arbitrary):
        is_cut = len(node.proposal.token_ids) > _CANDIDATES
        return _MOST + 1 if is_cut else 0
    return max((law.sparse().probs.numel() for law in draft_laws(node.proposal)), default=0)


def _kept(proposal: Any, size: int) -> Proposal:  # noqa: ANN401 (any kind)
    """Return the proposal with draft laws of at most `size` tokens."""
    if isinstance(proposal, Deterministic | Arbitrary):
        return type(proposal)(proposal.token_ids[:_CANDIDATES])
    laws = tuple(
        law if law.sparse().probs.numel() <= size else _among(law, set(law.top(size)))
        for law in draft_laws(proposal)
    )
    return replace(proposal, **({"laws": laws} if hasattr(proposal, "laws") else {"law": laws[0]}))


def _size(law: Law) -> int:
    return int(law.sparse().token_ids[-1]) + 1
