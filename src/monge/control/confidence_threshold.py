"""Stops drafting after a token that is improbable under the draft network."""

from collections.abc import Sequence
from dataclasses import dataclass

from monge.control.base import Reads, RoundInfo, SharedState, SoloController
from monge.core.context import DraftPlan
from monge.core.draws import Draws
from monge.core.setting_types import check_bounds
from monge.core.verdict import StepRecord


@dataclass(frozen=True, slots=True)
class ThresholdState:
    """State of one request: the threshold; draft probability and acceptance of verified tokens."""

    threshold: float | int
    samples: tuple[tuple[float, bool], ...] = ()


@dataclass(frozen=True, slots=True)
class ConfidenceThreshold(SoloController[ThresholdState]):
    """Stop after a token whose draft probability is below a threshold that is fitted to acceptance.

    The improbable token itself stays in the tree: to drop a drawn token would bias the output. The
    threshold minimises (share of rejected tokens above it) + 3 (share of accepted tokens below it),
    once more than five tokens, accepted and rejected ones, are known.

    Args:
        threshold: Threshold of the first rounds; 0 never stops, and is not refitted.
        max_window: Largest window.
        max_samples: Latest tokens that the fit uses.

    Reference:
        `transformers`, `assistant_confidence_threshold` (there without a bound on the samples);
        DISCO, Mamou et al., arXiv 2405.04304.
    """

    threshold: float | int = 0.4
    max_window: int = 8
    max_samples: int = 256

    reads = frozenset({Reads.ACCEPTED, Reads.CONFIDENCE})

    def __post_init__(self) -> None:
        check_bounds("confidence_threshold", max_window=self.max_window)
        check_bounds("confidence_threshold", 0, 1, threshold=self.threshold)

    def init(self, shared: SharedState) -> ThresholdState:
        return ThresholdState(self.threshold)

    def plan_one(
        self, state: ThresholdState, info: RoundInfo, context_length: int, draws: Draws
    ) -> DraftPlan:
        return DraftPlan(max_depth=self.max_window, min_token_prob=state.threshold)

    def update(self, state: ThresholdState, record: StepRecord) -> ThresholdState:
        # Tokens after the first rejection were not tested.
        decided = record.token_probs[: record.num_accepted + 1]
        new = tuple((prob, depth < record.num_accepted) for depth, prob in enumerate(decided))
        samples = (*state.samples, *new)[-self.max_samples :]
        is_enough = len(samples) > 5 and len({matched for _, matched in samples}) == 2
        if self.threshold == 0.0 or not is_enough:
            return ThresholdState(state.threshold, samples)
        return ThresholdState(best_threshold(samples), samples)


def best_threshold(samples: Sequence[tuple[float, bool]]) -> float:
    """Return the threshold t of least cost; false negatives count three times.

    It is the largest such t among the samples. If no threshold is better than never continuing, it
    is 1, and every draft stops after one token.
    """
    accepted = sum(matched for _, matched in samples)
    rejected = len(samples) - accepted
    best, best_cost, true_positives, false_positives = 1.0, 3.0, 0, 0
    ordered = sorted(samples, reverse=True)
    for index, (prob, matched) in enumerate(ordered):
        true_positives += matched
        false_positives += not matched
        if index + 1 < len(ordered) and ordered[index + 1][0] == prob:
            continue
        cost = false_positives / rejected + 3.0 * (1.0 - true_positives / accepted)
        if cost < best_cost:
            best, best_cost = prob, cost
    return best
