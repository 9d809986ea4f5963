"""Verdicts of verifiers, and records of rounds."""

from dataclasses import dataclass
from typing import Literal

from monge.core.context import DraftPlan
from monge.core.selection import CounterfactualDraft


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The outcome of verifying a tree.

    Args:
        path: Accepted nodes from the root's child downwards (the root is not listed).
        next_token: The token after the path: every round commits `len(path) + 1` tokens.
        next_kind: `correction` after a rejection, `bonus` where nothing was left to reject.
        examined: Number of distinct candidates at each visited node with candidates, in order.
    """

    path: tuple[int, ...]
    next_token: int
    next_kind: Literal["correction", "bonus"]
    examined: tuple[int, ...] = ()

    @property
    def num_accepted(self) -> int:
        """Accepted draft tokens, without `next_token`."""
        return len(self.path)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTimes:
    """Wall-clock seconds of a round by stage, for the whole batch that shared it.

    On a device the stages are those of the host, which goes on while the device works; `total_s` is
    the round's own, because every round waits for its verdicts.

    Args:
        draft_s: Drafting, the draft model's forwards included.
        score_s: The target's forward.
        verify_s: Making laws and deciding.
        commit_s: Keeping the accepted path in the caches, and finding stops.
        total_s: The whole round; what the stages leave is the loop's own.
        forward_s: Inside the networks' forwards only (target and draft model).
        is_warm_up: True if something was compiled or captured meanwhile, so that later rounds are
            shorter; controllers do not learn from these times.
    """

    draft_s: float = 0.0
    score_s: float = 0.0
    verify_s: float = 0.0
    commit_s: float = 0.0
    total_s: float = 0.0
    forward_s: float = 0.0
    is_warm_up: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifiedTree:
    """The tree of a round with the probabilities that decided it, by node.

    Args:
        token_ids: Token of every node; node 0 is the last committed token.
        parents: Parent of every node; -1 for node 0.
        target_probs: Probability of the node's token in the target's law at its parent, the law that
            tokens are drawn from; `None` for node 0, and where that law could not be made.
        draft_probs: Probability of the node's token in the law that its parent's children were
            drawn from; `None` for node 0 and for candidates that were not drawn, such as looked-up
            tokens.
        path: Accepted nodes from the root's child downwards.
        next_prob: Probability of the token after the path in the target's law there.
    """

    token_ids: tuple[int, ...]
    parents: tuple[int, ...]
    target_probs: tuple[float | None, ...]
    draft_probs: tuple[float | None, ...]
    path: tuple[int, ...]
    next_prob: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One round of a request, as controllers, metrics and logs see it.

    Args:
        plan: Plan of the controller.
        num_nodes: Drafted nodes that were verified (the root not counted).
        depth: Deepest drafted node.
        num_accepted: Accepted draft tokens.
        examined: See `Verdict.examined`.
        next_kind: See `Verdict.next_kind`.
        token_ids: Tokens committed: accepted tokens, then the correction or bonus token; fewer
            after a stop.
        batch_size: Requests that shared the round.
        times: Stage times of the round.
        context_length: Tokens of the text before the round.
        drafter: Drafter of a pool that drafted; `None` without a pool, or if none proposed anything;
            `grammar` for tokens that the request's grammar forced.
        counterfactuals: Tokens that other drafters of a pool would have had accepted in earlier
            rounds, as far as the text of this round decides it; all entries of a round together.
        tree: The tree, if the request keeps its trees.
    """

    plan: DraftPlan
    num_nodes: int
    depth: int
    num_accepted: int
    examined: tuple[int, ...]
    next_kind: Literal["correction", "bonus"]
    token_ids: tuple[int, ...]
    batch_size: int = 1
    times: StageTimes = StageTimes()
    context_length: int = 0
    drafter: str | None = None
    counterfactuals: tuple[CounterfactualDraft, ...] = ()
    tree: VerifiedTree | None = None
