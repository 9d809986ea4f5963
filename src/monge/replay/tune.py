"""The configuration of largest predicted speed, found on a log in two passes over a small grid."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from monge.control.registry import CONTROLLERS
from monge.core.model import SequenceModel
from monge.draft.by_name import drafters_in, options_of
from monge.replay.compare import Settings, compare
from monge.replay.configuration import MODEL, Configuration
from monge.replay.log import LawLog

_TREES: Final = (
    "chain(8, 'top')",
    "best_first(num_nodes=16, depth=6)",
    "best_first(num_nodes=32, depth=8)",
)
_DRAWN: Final = (
    ("chain(8)", "single_draft"),
    ("chain(8)", "block"),
    ("fixed_width((3, 2, 1, 1))", "rrs_without_replacement"),
)
_ADAPTIVE: Final = ("on_the_fly", "goodput", "fsm")
"""Controllers that are tried, as far as they are registered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TuningResult:
    """What was found.

    Args:
        best: The fastest configuration.
        predicted: Its figures.
        document: All that was tried, fastest first.
    """

    best: Configuration
    predicted: dict[str, Any]
    document: dict[str, Any]


def first_grid(
    *, has_draft: bool, is_greedy: bool, drafters: Sequence[str] = ()
) -> list[Configuration]:
    """One configuration of every drafter and tree, as deep as a chain is ever worth.

    Args:
        has_draft: Whether there is a draft model.
        is_greedy: Whether the log's texts are.
        drafters: Further ones, with their settings.
    """
    found = [Configuration(drafter="none"), Configuration(drafter="ngram")]
    for drafter in [
        *([MODEL] if has_draft else []),
        *(one for one in drafters if one not in ("none", "ngram", MODEL)),
    ]:
        if not any("tree" in options_of(one) for one in drafters_in(drafter)):
            found.append(Configuration(drafter=drafter))
            continue
        found += [Configuration(drafter=drafter, tree=tree) for tree in _TREES]
        # A greedy target accepts the token that it ranks first: drawing candidates only misses it.
        if not is_greedy:
            found += [
                Configuration(drafter=drafter, tree=tree, verifier=verifier)
                for tree, verifier in _DRAWN
            ]
    return found


def second_grid(first: Sequence[dict[str, Any]], count: int = 3) -> list[Configuration]:
    """For the fastest drafters and trees in hindsight.

    Their best fixed window, and the controllers that adapt it.
    """
    found: list[Configuration] = []
    controllers = [name for name in _ADAPTIVE if name in CONTROLLERS]
    drafting = [one for one in first if one["mean_window"] > 0.0]
    for one in sorted(drafting, key=_hindsight_speed, reverse=True)[:count]:
        window = one["hindsight"]["best_window"]
        for controller in [*([f"fixed(max_depth={window})"] if window > 0 else []), *controllers]:
            found.append(Configuration(**{**one["configuration"], "controller": controller}))
    return found


def tune(
    log: LawLog,
    draft: SequenceModel | None,
    settings: Settings,
    *,
    target: SequenceModel | None = None,
    drafters: Sequence[str] = (),
    on_text: Callable[[], None] | None = None,
    on_grid: Callable[[int], None] = lambda _: None,
) -> TuningResult:
    """Replay the two grids.

    Args:
        log: With costs.
        draft: The draft model, if there is one.
        settings: How configurations are replayed.
        target: The target, for drafters that live on what it says.
        drafters: Tried beside none, n-grams and the draft model.
        on_text: Called after every text of every pass.
        on_grid: Called before each grid, with the number of these calls at most.
    """
    passes = len(log.texts) * (1 + settings.repeats)
    common: dict[str, Any] = {"target": target, "surveys": {}, "on_text": on_text}
    grid = first_grid(
        has_draft=draft is not None, is_greedy=log.rules.temperature == 0, drafters=drafters
    )
    on_grid(len(grid) * passes)
    first = compare(grid, log, draft, settings, **common)
    adaptive = second_grid(first["replayed"])
    on_grid(len(adaptive) * passes)
    second = compare(adaptive, log, draft, settings, **common)
    replayed = sorted(
        first["replayed"] + second["replayed"], key=lambda one: -one["tokens_per_s"]["mean"]
    )
    document = {"replayed": replayed, "refused": first["refused"] + second["refused"]}
    return TuningResult(
        best=Configuration(**replayed[0]["configuration"]), predicted=replayed[0], document=document
    )


def _hindsight_speed(one: dict[str, Any]) -> float:
    hindsight = one["hindsight"]
    return float(hindsight["windows"][hindsight["best_window"]]["tokens_per_s"])
