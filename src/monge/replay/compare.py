"""Replays many configurations on one log."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from dataclasses import replace as dataclass_replace
from typing import Any, Final

from monge.core.errors import MongeError
from monge.core.model import SequenceModel
from monge.draft.base import Capabilities
from monge.replay.configuration import Configuration
from monge.replay.costs import costs_for, untimed
from monge.replay.log import LawLog
from monge.replay.play import DEPTH, PLAIN, hindsight, look, nodes_by_depth, play
from monge.replay.rules import stands_in
from monge.replay.summary import summary
from monge.replay.survey import Position
from monge.replay.text import ReplayTarget

REPEATS: Final = 4

Surveys = dict[tuple[Configuration, Capabilities], tuple[tuple[Position, ...], ...]]
"""What was seen of the texts, by configuration without its controller, and by what the drafter may propose: a controller
changes no more than the tree that is taken where none is named."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How configurations are replayed.

    Args:
        repeats: Passes over the log, because drafts are random.
        depth: Deepest fixed window and deepest window of the oracle.
        seed: Of passes and bootstrap.
    """

    repeats: int = REPEATS
    depth: int = DEPTH
    seed: int = 0


def replay(
    configuration: Configuration,
    log: LawLog,
    draft: SequenceModel | None,
    settings: Settings = Settings(),
    *,
    target: SequenceModel | None = None,
    surveys: Surveys | None = None,
    on_text: Callable[[], None] | None = None,
) -> dict[str, Any]:
    """Replay one configuration: see `monge.replay.summary.summary`.

    A drafter of which the log has no times is replayed as on a log without any: rounds are counted,
    speeds are not predicted.

    Args:
        configuration: Drafter, tree, verifier, controller.
        log: The log.
        draft: The draft model, for drafters that run one.
        settings: How often and how deep.
        target: The target, for drafters that read its hidden states, layers or rankings.
        surveys: Those made so far with the same log, settings and draft model; a new one is added.
        on_text: Called after every text of every pass.

    Raises:
        MongeError: If the parts do not fit together, or the log cannot answer.
    """
    parts = configuration.components(
        ReplayTarget(log.model.vocab_size) if target is None else target, draft
    )
    depth = min(settings.depth, parts.drafter.capabilities.max_depth)
    known = {} if surveys is None else surveys
    key = dataclass_replace(configuration, controller=None), parts.drafter.capabilities
    if key not in known:
        known[key] = look(parts, log, depth=depth, seed=settings.seed, on_text=on_text)
    positions = known[key]
    names = configuration.drafter_names(draft)
    reason = untimed(log, names)
    is_timed = bool(log.costs) and reason is None
    costs = costs_for(log, names) if is_timed else PLAIN
    played = play(
        parts,
        log,
        costs,
        nodes=nodes_by_depth(positions),
        repeats=settings.repeats,
        seed=settings.seed,
        on_text=on_text,
    )
    seen = hindsight(positions, costs, depth)
    found = summary(configuration, log, played, seen, is_timed=is_timed, seed=settings.seed)
    compact = stands_in(
        parts.rule, parts.drafter.capabilities.proposes, is_compact=log.top is not None
    )
    return {**found, "stands_in": compact, "untimed": reason}


def compare(
    configurations: Sequence[Configuration],
    log: LawLog,
    draft: SequenceModel | None,
    settings: Settings,
    *,
    target: SequenceModel | None = None,
    surveys: Surveys | None = None,
    on_text: Callable[[], None] | None = None,
) -> dict[str, Any]:
    """Replay configurations, and keep the reason for each one that cannot be replayed.

    Returns:
        `replayed` (summaries), `refused` (label and reason).
    """
    surveys = {} if surveys is None else surveys
    replayed: list[dict[str, Any]] = []
    refused: list[dict[str, str]] = []
    for configuration in configurations:
        try:
            replayed.append(
                replay(
                    configuration,
                    log,
                    draft,
                    settings,
                    target=target,
                    surveys=surveys,
                    on_text=on_text,
                )
            )
        except MongeError as error:
            refused.append({"label": configuration.label, "reason": str(error)})
    return {"replayed": replayed, "refused": refused}
