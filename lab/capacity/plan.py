"""From a log and a cost table to a number of replicas.

Replay makes requests, simulation finds what a replica sustains.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from lab.capacity.simulation import Machine, Step, Work, simulate
from monge.control.base import Reads
from monge.core.draws import Draws
from monge.core.errors import OptionError
from monge.core.model import SequenceModel
from monge.replay.configuration import Configuration
from monge.replay.log import LawLog
from monge.replay.simulate import seeded
from monge.replay.simulate import simulate as simulated_passes
from monge.replay.text import ReplayTarget

SHARES: Final = (0.2, 0.4, 0.6, 0.8, 0.9, 0.95)
"""Points of the table, as shares of what saturated replicas serve."""
_HALVINGS: Final = 7


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """The load and the latencies that are wanted.

    Args:
        rate_per_s: Requests a second of the whole service.
        first_token_s: Largest p95 of the first token.
        token_s: Largest p95 of the seconds per further token of a request.
        spare: Share of replicas that may be down, or busy elsewhere.

    Raises:
        OptionError: If a number is not positive, or the share not below 1.
    """

    rate_per_s: float = 100.0
    first_token_s: float = 1.0
    token_s: float = 0.1
    spare: float = 0.1

    def __post_init__(self) -> None:
        if not (
            self.rate_per_s > 0.0
            and self.first_token_s > 0.0
            and self.token_s > 0.0
            and 0.0 <= self.spare < 1.0
        ):
            raise OptionError(
                "capacity: rate and latencies must be positive and 0 <= spare < 1; got "
                f"{self.rate_per_s}, {self.first_token_s}, {self.token_s} and {self.spare}"
            )

    def is_met(self, figures: dict[str, Any]) -> bool:
        """Return whether a simulated load was served well enough."""
        return (
            figures["first_token_s"]["p95"] <= self.first_token_s
            and figures["token_s"]["p95"] <= self.token_s
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """The size of a simulation.

    Args:
        num_requests: Requests of every replica.
        num_replicas: Replicas simulated together.
        seed: Of everything.

    Raises:
        OptionError: If a number is not positive.
    """

    num_requests: int = 400
    num_replicas: int = 4
    seed: int = 0

    def __post_init__(self) -> None:
        if self.num_requests < 1 or self.num_replicas < 1:
            raise OptionError(
                f"capacity: sizes must be at least 1; got {self.num_requests} and "
                f"{self.num_replicas}"
            )

    def draws(self, *names: object) -> Draws:
        """Draws for one simulation."""
        return seeded(self.seed, "capacity", *names)


def works(
    configuration: Configuration,
    log: LawLog,
    draft: SequenceModel | None,
    *,
    repeats: int,
    seed: int,
) -> list[Work]:
    """Requests: the log's texts, in the rounds that a configuration would have needed.

    Args:
        configuration: Drafter, tree, verifier, controller. A controller that reads latency is
            refused: it would plan for a batch of one.
        log: What was written.
        draft: The draft model.
        repeats: Passes over the log.
        seed: Of the passes.

    Raises:
        OptionError: If the controller reads latency.
        UnavailableError: If the log cannot say what the verifier would have accepted.
    """
    parts = configuration.components(ReplayTarget(log.model.vocab_size), draft)
    if Reads.LATENCY in parts.controller.reads:
        raise OptionError(
            f"capacity: controller {configuration.controller!r} plans by the batch that it meets, "
            "which replay does not know; "
            "use fixed or fsm, and compare several depths"
        )
    played = simulated_passes(parts, log, repeats=repeats, seed=seed)
    return [
        Work(
            num_prompt_tokens=len(log.texts[one.text].prompt_ids),
            steps=tuple(
                Step(record.num_nodes, record.depth, len(record.token_ids))
                for record in one.records
            ),
        )
        for one in played
    ]


def plan(
    requests: Sequence[Work], machine: Machine, goal: Goal, effort: Effort = Effort()
) -> dict[str, Any]:
    """Return the load that a replica sustains, and the number of replicas.

    Returns:
        `saturation` (figures with all requests at once), `points` (figures at shares of it),
        `sustained` (figures at the largest rate that meets the goal; `None` where none does),
        `replicas` (for the goal's rate, spare ones included).
    """
    full = {
        "num_requests": effort.num_requests * effort.num_replicas,
        "num_replicas": effort.num_replicas,
    }
    saturation = simulate(requests, machine, rate_per_s=math.inf, draws=effort.draws("all"), **full)
    most = saturation["requests_per_s"]

    def at(share: float) -> dict[str, Any]:
        # The same draws at every rate: arrivals are those of one process on another clock.
        figures = simulate(
            requests, machine, rate_per_s=share * most, draws=effort.draws("load"), **full
        )
        return {"share": share, "rate_per_replica": share * most / effort.num_replicas, **figures}

    points = [at(share) for share in SHARES]
    low, high, sustained = 0.0, 1.0, None
    for point in points:
        if goal.is_met(point):
            low, sustained = point["share"], point
        else:
            high = point["share"]
            break
    for _ in range(_HALVINGS):
        middle = at((low + high) / 2)
        if goal.is_met(middle):
            low, sustained = middle["share"], middle
        else:
            high = middle["share"]
    return {
        "saturation": {**saturation, "rate_per_replica": most / effort.num_replicas},
        "points": points,
        "sustained": sustained,
        "replicas": None
        if sustained is None
        else replicas_for(goal, sustained["rate_per_replica"]),
    }


def replicas_for(goal: Goal, rate_per_replica: float) -> int:
    """Replicas of which the goal's share may be missing."""
    return math.ceil(goal.rate_per_s / rate_per_replica / (1.0 - goal.spare))
