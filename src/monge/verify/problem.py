"""The problems that rules solve: a node, or a request's tree; and laws that a device reads together."""

from dataclasses import dataclass
from typing import Protocol, TypeGuard

from jaxtyping import Float
from torch import Tensor

from monge.core.sampling_rules import SamplingRules
from monge.core.verdict import Verdict
from monge.laws.draws import Draws
from monge.laws.law import Law, LawSequence
from monge.laws.proposal import Proposal
from monge.laws.tree import TokenTree
from monge.networks.base import Recorder


class StackedLaws(LawSequence, Protocol):
    """Laws by node of a request's logits, which may also be read together."""

    @property
    def is_stacked(self) -> bool:
        """True if it pays to read the laws together; otherwise they are computed node by node."""
        ...

    @property
    def scores(self) -> Float[Tensor, "nodes vocab"]:
        """Logits of all nodes."""
        ...

    @property
    def rules(self) -> SamplingRules:
        """How they become laws."""
        ...

    @property
    def record(self) -> Recorder | None:
        """Runs functions of these laws, if their device records them."""
        ...


def are_stacked(laws: LawSequence) -> TypeGuard[StackedLaws]:
    """Return whether it pays to read laws together."""
    # Every round asks, and `isinstance` of a protocol takes many times as long.
    return bool(getattr(laws, "is_stacked", False))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class NodeProblem:
    """A node whose candidates are drawn, with the target's law there; rules of whole trees scale the law down.

    Args:
        target_law: p, the law of the next token at this node.
        scale: s in (0, 1]; the mass to be transported is s p, and 1 - s stands for "nothing
            accepted".
        proposal: Proposal of the candidates.
        candidates: The candidates' tokens in drawing order, repeats kept; not empty.
        draws: Source of randomness for rules that realise part of their decision.
    """

    target_law: Law
    scale: float = 1.0
    proposal: Proposal
    candidates: tuple[int, ...]
    draws: Draws

    @property
    def draft_law(self) -> Law:
        """q, the law of the drawn candidates."""
        assert (law := self.proposal.draft_law) is not None, "no single law"
        return law

    @property
    def fixed(self) -> tuple[int, ...]:
        """The deterministic candidates of a node that also has drawn candidates."""
        return self.proposal.fixed_ids

    @property
    def drawn(self) -> tuple[int, ...]:
        """The drawn candidates."""
        return self.candidates[len(self.fixed) :]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ScoredTree:
    """One request's part of a round: see `Verifier.verify` in `verify/base.py`."""

    tree: TokenTree
    target_laws: LawSequence
    draws: Draws

    def problem(self, node: int, scale: float = 1.0) -> NodeProblem:
        """Return the problem of a node; this computes the target's law."""
        return NodeProblem(
            target_law=self.target_laws[node],
            scale=scale,
            proposal=self.tree.proposals[node],
            candidates=tuple(self.tree.token_ids[child] for child in self.tree.candidates[node]),
            draws=self.draws,
        )


def verdict_at(tree: TokenTree, node: int, token: int) -> Verdict:
    """Return the verdict that accepts the path to `node`, followed by `token`."""
    path = tree.path(node)
    stood_on = [above for above in (0, *path) if tree.candidates[above]]
    return Verdict(
        path=path,
        next_token=token,
        next_kind="correction" if tree.candidates[node] else "bonus",
        examined=tuple(len(set(tree.candidates[above])) for above in stood_on),
    )
