"""Wrong verifiers and drafters, each a mistake that was really made somewhere.

Every law test must reject them.

Wrong rules are node rules; wrong drafters are tree builders that draw in one way and declare
another. The engine's own types would not let most of them arise, so they forge finished trees.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final

import torch

from monge.core.context import DraftPlan
from monge.core.verdict import Verdict
from monge.draft.tree.base import TreeBuilder, TreeLimits
from monge.laws.draws import Draws
from monge.laws.law import Law, LawSequence, SparseLaw, residual
from monge.laws.proposal import Deterministic, Iid, Proposal, WithoutReplacement
from monge.laws.tree import GrowingTree, TokenTree
from monge.verify.base import NodeRule, Verifier, Walk
from monge.verify.block import Block
from monge.verify.recursive_rejection import RecursiveRejection
from tests.kit.banks import OfIid


@dataclass(frozen=True, slots=True)
class EpsilonInRatio(OfIid):
    """A small constant added to the ratio's denominator."""

    epsilon: float = 1e-9

    def decide(self, target, draft, candidates, draws):
        p, q = target, draft
        for x in candidates:
            if draws.bernoulli(min(1.0, p.prob(x) / (q.prob(x) + self.epsilon))):
                return x
            p = residual(p, q)
        return draws.categorical(p)


@dataclass(frozen=True, slots=True)
class TargetAfterRejection(OfIid):
    """The correction token drawn from p instead of the residual."""

    def decide(self, target, draft, candidates, draws):
        p, q = target, draft
        for x in candidates:
            if draws.bernoulli(min(1.0, p.prob(x) / q.prob(x))):
                return x
            p = residual(p, q)
        return draws.categorical(target)


@dataclass(frozen=True, slots=True)
class FirstRatioForAll(OfIid):
    """Every sibling tested with the first ratio, one residual at the end (an engine's dynamic-tree kernel of 2026)."""

    def decide(self, target, draft, candidates, draws):
        for x in candidates:
            if draws.bernoulli(min(1.0, target.prob(x) / draft.prob(x))):
                return x
        return draws.categorical(residual(target, draft))


@dataclass(frozen=True, slots=True)
class RejectedZeroedOut(OfIid):
    """The rejected token removed from p instead of q subtracted."""

    def decide(self, target, draft, candidates, draws):
        p = target
        for x in candidates:
            if draws.bernoulli(min(1.0, p.prob(x) / draft.prob(x))):
                return x
            p = p.without(x) or p
        return draws.categorical(p)


@dataclass(frozen=True, slots=True)
class WithoutReplacementAsIid(NodeRule):
    """Drawn without replacement, verified as independent draws."""

    accepts = frozenset[type[Proposal]]({WithoutReplacement})

    def emit(
        self, target_law: Law, proposal: Proposal, candidates: Sequence[int], draws: Draws
    ) -> int:
        assert isinstance(proposal, WithoutReplacement)
        return RecursiveRejection().emit(
            target_law, Iid(proposal.law, len(candidates)), candidates, draws
        )


@dataclass(frozen=True, slots=True)
class RepeatsDropped(NodeRule):
    """Independent draws stripped of their repeats, then verified as if all were there."""

    accepts = frozenset[type[Proposal]]({Iid})

    def emit(
        self, target_law: Law, proposal: Proposal, candidates: Sequence[int], draws: Draws
    ) -> int:
        return RecursiveRejection().emit(
            target_law, proposal, tuple(dict.fromkeys(candidates)), draws
        )


@dataclass(frozen=True, slots=True)
class SharedCoin(OfIid):
    """One random decision shared by tests that must be independent."""

    def decide(self, target, draft, candidates, draws):
        p, q = target, draft
        first = min(1.0, p.prob(candidates[0]) / q.prob(candidates[0]))
        if draws.bernoulli(first):
            return candidates[0]
        p = residual(p, q)
        for x in candidates[1:]:
            # The uniform is known to exceed `first`, and the same one is compared again.
            if min(1.0, p.prob(x) / q.prob(x)) > first:
                return x
            p = residual(p, q)
        return draws.categorical(p)


@dataclass(frozen=True, slots=True)
class BonusFromParent(Verifier):
    """The bonus token drawn from the law one node too early."""

    accepts = frozenset[type[Proposal]]({Iid})

    def verify(self, tree: TokenTree, target_laws: LawSequence, draws: Draws) -> Verdict:
        verdict = Walk(RecursiveRejection()).verify(tree, target_laws, draws)
        if verdict.next_kind == "bonus" and verdict.path:
            parent = tree.parents[verdict.path[-1]]
            return replace(verdict, next_token=draws.categorical(target_laws[parent]))
        return verdict


@dataclass(frozen=True, slots=True)
class TokenLevelResidual(Verifier):
    """Block acceptance with the residual of the token-level rule.

    The first version of an engine's block verification.
    """

    accepts = Block.accepts
    max_width = 1

    def verify(self, tree: TokenTree, target_laws: LawSequence, draws: Draws) -> Verdict:
        verdict = Block().verify(tree, target_laws, draws)
        node = verdict.num_accepted
        proposal = tree.proposals[node]
        if verdict.next_kind == "bonus" or not isinstance(proposal, Iid):
            return verdict
        return replace(
            verdict, next_token=draws.categorical(residual(target_laws[node], proposal.law))
        )


@dataclass(frozen=True, slots=True)
class BonusLeftOut(Verifier):
    """No token after a wholly accepted chain, whose last token stands in for it.

    Exact, and a token shorter.
    """

    accepts = Block.accepts
    max_width = 1

    def verify(self, tree: TokenTree, target_laws: LawSequence, draws: Draws) -> Verdict:
        verdict = Block().verify(tree, target_laws, draws)
        if verdict.next_kind != "bonus" or not verdict.path:
            return verdict
        *path, last = verdict.path
        return replace(verdict, path=tuple(path), next_token=tree.token_ids[last])


@dataclass(frozen=True, slots=True)
class Forged(TreeBuilder):
    """A one-level tree drawn in one way and declared in another.

    Args:
        draw: Draft law to candidates.
        declare: Draft law to the proposal that is claimed for them.
    """

    draw: Callable[[Law, Draws], tuple[int, ...]]
    declare: Callable[[Law, int], Proposal]
    kind: type[Proposal] = Iid

    @property
    def limits(self) -> TreeLimits:
        return TreeLimits(proposes=frozenset({self.kind}), max_width=2, max_depth=1, max_nodes=2)

    def expand(
        self,
        tree: GrowingTree,
        frontier: Sequence[int],
        laws: Sequence[Law],
        plan: DraftPlan,
        draws: Draws,
    ) -> Sequence[int]:
        tree.grow(0, _Claim(self.draw(laws[0], draws), laws[0]), draws)
        return ()

    def finish(self, tree: GrowingTree, plan: DraftPlan) -> TokenTree:
        finished = tree.finish()
        claim = finished.proposals[0]
        if not isinstance(claim, _Claim) or not claim.token_ids:
            return (
                finished
                if not isinstance(claim, _Claim)
                else replace(finished, proposals=(Deterministic(),))
            )
        declared = self.declare(claim.law, len(claim.token_ids))
        return replace(finished, proposals=(declared, *finished.proposals[1:]))


@dataclass(frozen=True, slots=True)
class _Claim(Proposal):
    """Candidates with the law that will be claimed for them."""

    token_ids: tuple[int, ...]
    law: Law

    def draw(self, draws: Draws) -> tuple[int, ...]:
        return self.token_ids


def _two(law: Law, draws: Draws) -> tuple[int, ...]:
    return Iid(law, 2).draw(draws)


def _argmax(law: Law, draws: Draws) -> tuple[int, ...]:
    return law.top(1)


def _top_two(law: Law, draws: Draws) -> tuple[int, ...]:
    return law.top(2)


def _from_top_two(law: Law, draws: Draws) -> tuple[int, ...]:
    masses = law.sparse()
    ids = sorted(law.top(2))
    kept = [law.prob(token) for token in ids]
    truncated = SparseLaw(
        masses.token_ids.new_tensor(ids), masses.probs.new_tensor(kept) / sum(kept)
    )
    return Iid(truncated, 1).draw(draws)


def _drop_unreadable(law: Law, draws: Draws) -> tuple[int, ...]:
    (token,) = Iid(law, 1).draw(draws)
    return (token,) if token != 1 else ()


def _drop_improbable(law: Law, draws: Draws) -> tuple[int, ...]:
    (token,) = Iid(law, 1).draw(draws)
    return (token,) if law.prob(token) >= 0.35 else ()


def _best_of_two(law: Law, draws: Draws) -> tuple[int, ...]:
    return (max(_two(law, draws), key=law.prob),)


def _sorted_without_replacement(law: Law, draws: Draws) -> tuple[int, ...]:
    return tuple(sorted(WithoutReplacement(law, 2).draw(draws), key=law.prob, reverse=True))


@dataclass(frozen=True, slots=True)
class _IfRoom(Proposal):
    """Independent draws, if as many nodes are left once the nodes before this one are drawn.

    Otherwise nothing.
    """

    tree: GrowingTree
    budget: int
    drawn: Iid

    def draw(self, draws: Draws) -> tuple[int, ...]:
        has_room = self.tree.num_nodes - 1 + self.drawn.width <= self.budget
        return self.drawn.draw(draws) if has_room else ()


@dataclass(frozen=True, slots=True)
class DrawnBudget(TreeBuilder):
    """A budget that counts drawn nodes, so that a repeated token makes room for the children of its level's next node.

    Args:
        widths: Independent draws of a node, from the root downwards.
        num_nodes: Most drafted nodes.
    """

    widths: tuple[int, ...] = (2, 2)
    num_nodes: int = 5

    @property
    def limits(self) -> TreeLimits:
        return TreeLimits(
            proposes=frozenset[type[Proposal]]({Iid}),
            max_width=max(self.widths),
            max_depth=len(self.widths),
            max_nodes=self.num_nodes,
        )

    def expand(
        self,
        tree: GrowingTree,
        frontier: Sequence[int],
        laws: Sequence[Law],
        plan: DraftPlan,
        draws: Draws,
    ) -> Sequence[int]:
        depth = tree.depths[frontier[0]]
        proposals = {
            node: _IfRoom(tree, self.num_nodes, Iid(law, self.widths[depth]))
            for node, law in zip(frontier, laws, strict=True)
        }
        grown = [
            child for children in tree.grow_level(proposals, draws).values() for child in children
        ]
        return grown if depth + 1 < len(self.widths) else ()

    def finish(self, tree: GrowingTree, plan: DraftPlan) -> TokenTree:
        finished = tree.finish()
        declared = [
            (one.drawn if candidates else Deterministic()) if isinstance(one, _IfRoom) else one
            for one, candidates in zip(finished.proposals, finished.candidates, strict=True)
        ]
        return replace(finished, proposals=tuple(declared))


KNOWN_BAD_RULES: Final[Mapping[str, NodeRule | Verifier]] = MappingProxyType(
    {
        "epsilon 1e-9 in the ratio": EpsilonInRatio(1e-9),
        "epsilon 1e-4 in the ratio": EpsilonInRatio(1e-4),
        "target law after a rejection": TargetAfterRejection(),
        "first ratio for every sibling": FirstRatioForAll(),
        "rejected token zeroed out": RejectedZeroedOut(),
        "without replacement verified as i.i.d.": WithoutReplacementAsIid(),
        "repeats dropped, verified as i.i.d.": RepeatsDropped(),
        "one coin shared by two tests": SharedCoin(),
        "bonus token from the parent": BonusFromParent(),
    }
)
"""Wrong rules, to be shown the proposals that they claim to accept."""

KNOWN_BAD_TREES: Final[Mapping[str, Forged]] = MappingProxyType(
    {
        "argmax declared as a draw": Forged(_argmax, Iid),
        "top two declared as i.i.d. draws": Forged(_top_two, Iid),
        "drawn from the top two, declared with the full law": Forged(_from_top_two, Iid),
        "improbable draw dropped": Forged(_drop_improbable, Iid),
        "draw discarded where the draft model fails to read it": Forged(_drop_unreadable, Iid),
        "best of two draws kept": Forged(_best_of_two, Iid),
        "sorted after drawing without replacement": Forged(
            _sorted_without_replacement, WithoutReplacement, WithoutReplacement
        ),
        "top two declared as drawn without replacement": Forged(
            _top_two, WithoutReplacement, WithoutReplacement
        ),
    }
)
"""Wrong drafters, to be shown to `recursive_rejection` (i.i.d. claims) and `recursive_rejection_without_replacement`."""

KNOWN_BAD_LEVELS: Final[Mapping[str, TreeBuilder]] = MappingProxyType(
    {"budget by drawn nodes": DrawnBudget()}
)
"""Wrong drafters whose mistake only rules for whole trees show: to be shown to `layer`."""


@dataclass(frozen=True, slots=True)
class TrustsDrafts(NodeRule):
    """A copied token is taken without a test, as where the rollouts of an older policy are reused."""

    accepts = frozenset[type[Proposal]]({Deterministic})

    def emit(
        self, target_law: Law, proposal: Proposal, candidates: Sequence[int], draws: Draws
    ) -> int:
        return candidates[0] if candidates else draws.categorical(target_law)


class NotedDraws:
    """Draws that note, for every token drawn, the positions in [0, 1) that give it."""

    def __init__(self, draws: Draws) -> None:
        self._draws = draws
        self.positions: list[tuple[float, float]] = []

    def bernoulli(self, prob: float) -> bool:
        return self._draws.bernoulli(prob)

    def uniform(self) -> float:
        return self._draws.uniform()

    def categorical(self, law: Law) -> int:
        token = self._draws.categorical(law)
        self.positions.append(_cells(law)[token])
        return token


class SameUniforms(NotedDraws):
    """Draws that use the uniforms of another request again, from the first on."""

    def __init__(self, draws: Draws, first: NotedDraws) -> None:
        super().__init__(draws)
        self._first, self._used = first, 0

    def categorical(self, law: Law) -> int:
        # Given the first one's token, its uniform lies in this interval, and anywhere in it.
        low, high = self._first.positions[self._used]
        self._used += 1
        shares = {
            token: min(high, stop) - max(low, start)
            for token, (start, stop) in _cells(law).items()
            if min(high, stop) > max(low, start)
        }
        probs = torch.tensor(list(shares.values()), dtype=torch.float64)
        tokens = torch.tensor(list(shares))
        return self._draws.categorical(SparseLaw(tokens, probs / probs.sum()))


def _cells(law: Law) -> dict[int, tuple[float, float]]:
    part = law.sparse()
    stops = part.probs.cumsum(0).tolist()
    return dict(zip(part.token_ids.tolist(), zip([0.0, *stops], stops, strict=False), strict=True))
