"""Replays a configuration on a whole log: its rounds, its speed, and the speed of an oracle."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from monge.control.base import SharedState
from monge.core.draws import SeededDraws
from monge.core.verdict import StepRecord
from monge.engine.components import Components
from monge.replay.costs import RoundCosts, fixed_latency, predicted
from monge.replay.log import LawLog
from monge.replay.run import replay_text
from monge.replay.survey import Expectation, Position, fixed_window, oracle, survey

DEPTH: Final = 8
PLAIN: Final = RoundCosts.linear(plain=1.0, node=0.0, draft=0.0)
"""Costs if none are known: every round costs the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayedText:
    """One replayed pass over one text.

    Args:
        text: Its number in the log.
        repeat: Number of the pass.
        records: The rounds, with predicted times.
    """

    text: int
    repeat: int
    records: tuple[StepRecord, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class OracleBounds:
    """The best possible results, by text.

    Args:
        windows: Expectations of every fixed window from 0 on, `[window][text]`.
        oracle: Of the best window at every position.
        positions: Surveyed positions, `[text]`.
    """

    windows: tuple[tuple[Expectation, ...], ...]
    oracle: tuple[Expectation, ...]
    positions: tuple[tuple[Position, ...], ...]

    @property
    def best_window(self) -> int:
        """Return the fixed window with the fewest seconds on the whole log."""
        seconds = [sum(text.seconds for text in texts) for texts in self.windows]
        return seconds.index(min(seconds))


def seeded(*names: object) -> SeededDraws:
    """Return draws that are a function of names."""
    digest = hashlib.blake2b(repr(names).encode(), digest_size=8).digest()
    return SeededDraws(int.from_bytes(digest, "big"))


def look(
    components: Components,
    log: LawLog,
    *,
    depth: int,
    seed: int = 0,
    on_text: Callable[[], None] | None = None,
) -> tuple[tuple[Position, ...], ...]:
    """Survey all texts: see `monge.replay.survey.survey`.

    Raises:
        UnavailableError: If the log cannot say what the verifier would have accepted.
    """
    found: list[tuple[Position, ...]] = []
    for number, text in enumerate(log.texts):
        found.append(survey(components, log, text, seeded(seed, "survey", number), depth=depth))
        if on_text is not None:
            on_text()
    return tuple(found)


def hindsight(
    positions: tuple[tuple[Position, ...], ...], costs: RoundCosts, depth: int
) -> OracleBounds:
    """Evaluate every fixed window and the oracle on surveyed texts."""
    return OracleBounds(
        windows=tuple(
            tuple(fixed_window(text, costs, window) for text in positions)
            for window in range(depth + 1)
        ),
        oracle=tuple(oracle(text, costs, depth) for text in positions),
        positions=positions,
    )


def nodes_by_depth(positions: Sequence[Sequence[Position]]) -> tuple[int, ...]:
    """Drafted nodes of plans of depth 0, 1, ..., rounded means over all positions with room for them."""
    deepest = max((len(place.nodes) for text in positions for place in text), default=1)
    means: list[int] = []
    for level in range(deepest):
        seen = [
            place.nodes[level] for text in positions for place in text if len(place.nodes) > level
        ]
        means.append(round(sum(seen) / len(seen)))
    return tuple(means)


def play(
    components: Components,
    log: LawLog,
    costs: RoundCosts = PLAIN,
    *,
    nodes: Sequence[int] | None = None,
    repeats: int = 1,
    seed: int = 0,
    on_text: Callable[[], None] | None = None,
) -> tuple[ReplayedText, ...]:
    """Replay a configuration.

    Args:
        components: Drafter, verifier and controller; the target is not used.
        log: What happened.
        costs: Predicted times, for the controller and for the records.
        nodes: Drafted nodes of depth 0, 1, ...; `None` for a chain.
        repeats: Passes over the log: what is drafted on the way to a text is random.
        seed: Of all passes.
        on_text: Called after every text.

    Raises:
        UnavailableError: If the log cannot say what the verifier would have accepted.
    """
    if nodes is None:
        nodes = range(components.drafter.capabilities.max_depth + 1)
    latency = fixed_latency(costs, components, nodes)
    passes: list[ReplayedText] = []
    for repeat in range(repeats):
        # A controller may learn across requests, as a decoder's own does; every pass starts afresh.
        fresh = replace(components, shared=SharedState(latency))
        for number, text in enumerate(log.texts):
            records = replay_text(fresh, log, text, seeded(seed, "replay", repeat, number))
            timed = tuple(
                predicted(record, costs, runs_network=fresh.runs_network(record.drafter))
                for record in records
            )
            passes.append(ReplayedText(text=number, repeat=repeat, records=timed))
            if on_text is not None:
                on_text()
    return tuple(passes)
