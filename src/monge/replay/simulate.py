"""Simulate the rounds of a configuration on all texts of a log."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from monge.control.base import SharedState
from monge.core.draws import SeededDraws
from monge.core.verdict import StepRecord
from monge.engine.components import Components
from monge.replay.costs import RoundCosts, fixed_latency, predicted
from monge.replay.log import LawLog, LoggedText
from monge.replay.run import replay_text

PLAIN: Final = RoundCosts.linear(plain=1.0, node=0.0, draft=0.0)
"""Costs if none are known: every round costs the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedText:
    """One pass over one text.

    Args:
        text: Its number in the log.
        repeat: Number of the pass.
        records: The rounds, with predicted times.
    """

    text: int
    repeat: int
    records: tuple[StepRecord, ...]


def seeded(*names: object) -> SeededDraws:
    """Return draws that are a function of names."""
    digest = hashlib.blake2b(repr(names).encode(), digest_size=8).digest()
    return SeededDraws(int.from_bytes(digest, "big"))


def simulate(
    components: Components,
    log: LawLog,
    costs: RoundCosts = PLAIN,
    *,
    nodes: Sequence[int] | None = None,
    repeats: int = 1,
    seed: int = 0,
    on_text: Callable[[], None] = lambda: None,
) -> tuple[SimulatedText, ...]:
    """Run the rounds of a configuration along every text of a log.

    Args:
        components: Drafter, verifier and controller; the target is not used.
        log: The texts.
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
    passes: list[SimulatedText] = []
    for repeat in range(repeats):
        # A controller may learn across requests, as a decoder's own does; every pass starts afresh.
        fresh = replace(components, shared=SharedState(latency))
        for number, text in enumerate(log.texts):
            records = replay_text(fresh, log, text, seeded(seed, "replay", repeat, number))
            timed = tuple(
                predicted(record, costs, runs_network=fresh.runs_network(record.drafter))
                for record in records
            )
            passes.append(SimulatedText(text=number, repeat=repeat, records=timed))
            on_text()
    return tuple(passes)


def plain_seconds(text: LoggedText, costs: RoundCosts) -> float:
    """Return the predicted seconds of plain decoding of a text."""
    return len(text.token_ids) * costs.verify_s(0)
