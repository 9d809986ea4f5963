"""The window of largest predicted speed, for an acceptance rate that is estimated on the fly."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from monge.control.acceptance import argmax, speeds
from monge.control.base import Reads, RoundInfo, SharedState, SoloController, latency_of
from monge.control.latency import Latency
from monge.core.context import PLAIN, DraftPlan
from monge.core.setting_types import check_bounds
from monge.core.verdict import StepRecord
from monge.laws.draws import Draws


@dataclass(frozen=True, slots=True)
class History:
    """State of a request.

    Args:
        latency: Measured times.
        deepest: Largest window.
        rounds: Window and accepted tokens of the last rounds that drafted.
        idle_tokens: Tokens committed since the last of them.
    """

    latency: Latency
    deepest: int
    rounds: tuple[tuple[int, int], ...] = ()
    idle_tokens: int = 0


@dataclass(frozen=True, slots=True)
class OnTheFly(SoloController[History]):
    """The window that maximises expected tokens per second, from the last rounds' acceptance and measured latency.

    Acceptance is a single number `Acc` for all depths, the maximum-likelihood estimate of a
    geometric law that is censored at the window: accepted tokens / (accepted tokens + rounds with a
    rejection), with `prior` as earlier evidence. The window maximises `(1 - Acc^(w+1)) / ((1 - Acc)
    * seconds(w))` over 0 .. `max_window`. Window 0 is plain decoding, during which nothing is
    learnt: every `probe_tokens` tokens, and before that with probability `probe_prob` a round, a
    round drafts all the same.

    Args:
        history: Rounds that the estimate looks at.
        max_acceptance: Largest estimate.
        prior: Accepted and rejected tokens taken as seen before; (0, 0) is the bare estimate of the
            paper.
        max_window: Largest window; at most the tree builder's own depth has an effect.
        probe_tokens: Tokens of plain decoding after which a round drafts again.
        probe_prob: Chance of drafting in a round that should not.

    Reference:
        Liu, Park and Shen, ACL 2025, paper 482, equations 1 and 2.
    """

    history: int = 32
    max_acceptance: float | int = 0.98
    prior: tuple[float | int, float | int] = (1.5, 0.5)
    max_window: int = 8
    probe_tokens: int = 64
    probe_prob: float | int = 0.0

    reads = frozenset({Reads.ACCEPTED, Reads.LATENCY})

    def __post_init__(self) -> None:
        sizes = {"max_window": self.max_window, "history": self.history}
        check_bounds("on_the_fly", **sizes, probe_tokens=self.probe_tokens)
        shares = {"max_acceptance": self.max_acceptance, "probe_prob": self.probe_prob}
        check_bounds("on_the_fly", 0, 1, **shares)
        check_bounds("on_the_fly", 0, prior=min(self.prior))

    def init(self, shared: SharedState) -> History:
        deepest = min(self.max_window, shared.max_depth or self.max_window)
        return History(latency_of(shared, "on_the_fly"), deepest)

    def plan_one(
        self, state: History, info: RoundInfo, context_length: int, draws: Draws
    ) -> DraftPlan:
        acceptance = censored_acceptance(state.rounds, self.prior, self.max_acceptance)
        seconds = state.latency.rounds_s(state.deepest, info.batch_size)
        window = argmax(speeds(acceptance, seconds))
        if window > 0:
            return DraftPlan(max_depth=window)
        is_probe = state.idle_tokens >= self.probe_tokens or (
            self.probe_prob > 0.0 and draws.bernoulli(self.probe_prob)
        )
        return DraftPlan(max_depth=1) if is_probe else PLAIN

    def update(self, state: History, record: StepRecord) -> History:
        if record.depth == 0:
            return replace(state, idle_tokens=state.idle_tokens + len(record.token_ids))
        # A path that was accepted to its end rejects nothing, also above the tree's deepest node.
        window = record.num_accepted if record.next_kind == "bonus" else record.depth
        rounds = (*state.rounds, (window, record.num_accepted))[-self.history :]
        return replace(state, rounds=rounds, idle_tokens=0)


def censored_acceptance(
    rounds: Sequence[tuple[int, int]],
    prior: tuple[float | int, float | int] = (0, 0),
    largest: float = 1.0,
) -> float:
    """Return the maximum-likelihood acceptance of rounds that end at a rejection or at their window (equation 2).

    Args:
        rounds: Windows and accepted tokens.
        prior: Accepted and rejected tokens taken as seen before.
        largest: Largest value returned, and the value without data.
    """
    accepted = prior[0] + sum(count for _, count in rounds)
    rejected = prior[1] + sum(count < window for window, count in rounds)
    return min(largest, accepted / (accepted + rejected)) if accepted + rejected > 0 else largest
