"""What each setting of the adaptive controllers is worth, by replay of a log: one changed at a time, compared in pairs."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

import numpy as np

from monge.control.latency import Latency
from monge.control.prompt_features import FEATURES
from monge.core.errors import OptionError
from monge.core.model import SequenceModel
from monge.replay.compare import Settings
from monge.replay.configuration import Configuration
from monge.replay.costs import costs_for
from monge.replay.log import LawLog
from monge.replay.play import PLAIN, look, nodes_by_depth, play
from monge.replay.summary import Estimate, Totals, resampled
from monge.replay.text import ReplayTarget

_CHAIN: Final = "chain(8)"
_POOL: Final = "pool('ngram', 'model')"


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """One question.

    Args:
        name: What is varied.
        base: Drafter and tree of all arms, and the controller that the others are compared with.
        variants: Controllers, by what was changed.
    """

    name: str
    base: Configuration
    variants: dict[str, str]


def studies() -> list[Study]:
    """Length of the history, rate of the probes, every feature of the linear model, exploration."""
    window = Configuration(drafter="model", tree=_CHAIN, controller="on_the_fly")
    every = tuple(FEATURES)
    selection = Configuration(drafter=_POOL, tree=_CHAIN, controller=_selecting(every))
    pool = Configuration(drafter=_POOL, tree=_CHAIN, controller="hedge")
    return [
        Study(
            name="on_the_fly: rounds of history (32)",
            base=window,
            variants={str(count): f"on_the_fly(history={count})" for count in (1, 2, 4, 8, 16, 64, 128)}
            | {"32, no prior": "on_the_fly(prior=(0, 0))"},
        ),
        Study(
            name="on_the_fly: plain tokens before a probe (64)",
            base=window,
            variants={str(count): f"on_the_fly(probe_tokens={count})" for count in (4, 16, 256)}
            | {"never": "on_the_fly(probe_tokens=1000000000)"},
        ),
        Study(
            name="linear_selection: features of the prompt (all)",
            base=selection,
            variants={f"without {name}": _selecting([other for other in every if other != name]) for name in every}
            | {"default ones": "linear_selection", "none": _selecting(())},
        ),
        Study(
            name="hedge: share of exploration (0.05)",
            base=pool,
            variants={str(share): f"hedge(explore={share})" for share in (0.01, 0.02, 0.1, 0.2)},
        ),
    ]


def ablate(
    log: LawLog,
    draft: SequenceModel,
    settings: Settings = Settings(),  # noqa: B008 (frozen)
    *,
    on_text: Callable[[], None] | None = None,
) -> list[dict[str, Any]]:
    """Replay every arm of every study.

    Args:
        log: With costs.
        draft: The draft model, which really runs.
        settings: Passes and seed; all arms get the same.
        on_text: Called after every text of every pass.

    Returns:
        Rows with `study`, `arm`, `speed` (of the arm over that of the base: mean, low, high, texts resampled in pairs),
        `block_efficiency`, `plain_share` (rounds without a draft).

    Raises:
        OptionError: If the log has no costs.
    """
    if not log.costs:
        raise OptionError("ablations compare speeds, and the log has no times; log again without --no-costs")
    rows: list[dict[str, Any]] = []
    for study in studies():
        costs = _costs(study.base, log, draft, settings)
        base: Totals | None = None
        arms = {"base": study.base.controller, **study.variants}
        for arm, controller in arms.items():
            parts = replace(study.base, controller=controller).components(ReplayTarget(log.model.vocab_size), draft, costs)
            played = play(parts, log, costs, repeats=settings.repeats, seed=settings.seed, on_text=on_text)
            totals = Totals.of(played, len(log.texts))
            base = totals if base is None else base
            records = [record for one in played for record in one.records]
            rows.append(
                {
                    "study": study.name,
                    "arm": arm,
                    "speed": asdict(_against(totals, base, settings.seed)),
                    "block_efficiency": float(totals.tokens.sum() / totals.rounds.sum()),
                    "plain_share": sum(record.depth == 0 for record in records) / len(records),
                }
            )
    return rows


def num_replays(log: LawLog, settings: Settings) -> int:
    """How often `on_text` is called."""
    return sum(1 + len(study.variants) for study in studies()) * len(log.texts) * settings.repeats


def _costs(base: Configuration, log: LawLog, draft: SequenceModel, settings: Settings) -> Latency:
    """The base's table, for the trees that are drafted on this log."""
    parts = replace(base, controller=None).components(ReplayTarget(log.model.vocab_size), draft, PLAIN)
    positions = look(parts, log, depth=settings.depth, seed=settings.seed)
    return costs_for(log, base.drafter_names(draft), nodes_by_depth(positions))


def _against(totals: Totals, base: Totals, seed: int) -> Estimate:
    """Speed over the base's, with the middle 95% on resampled texts."""
    choices = resampled(len(base.tokens), seed)

    speeds = [one.tokens[choices].sum(axis=1) / one.seconds[choices].sum(axis=1) for one in (totals, base)]
    low, high = np.percentile(speeds[0] / speeds[1], [2.5, 97.5])
    mean = totals.tokens.sum() / totals.seconds.sum() * base.seconds.sum() / base.tokens.sum()
    return Estimate(mean=float(mean), low=float(low), high=float(high))


def _selecting(features: Sequence[str]) -> str:
    return f"linear_selection(features={tuple(features)!r})"
