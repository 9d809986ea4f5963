"""Find the configuration of largest predicted speed on a log, in two passes over a small grid."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from monge.core.model import SequenceModel
from monge.draft.by_name import drafters_in, options_of
from monge.replay.compare import compare
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
_NEARBY: Final[Mapping[str | None, tuple[str, ...]]] = {
    None: ("fixed(max_depth=6)",),
    "fixed(max_depth=2)": ("fixed(max_depth=1)", "fixed(max_depth=3)"),
    "fixed(max_depth=4)": ("fixed(max_depth=3)", "fixed(max_depth=6)"),
}
"""Fixed depths of the first grid, `None` for the whole tree, and those that are tried after each."""
_ADAPTIVE: Final = ("on_the_fly", "goodput", "fsm")
_BEST: Final = 3


def first_grid(
    *, has_draft: bool, is_greedy: bool, drafters: Sequence[str] = ()
) -> list[Configuration]:
    """Return every drafter and tree with a few fixed depths."""
    grid = [Configuration(drafter="ngram")]
    others = [name for name in drafters if name not in ("none", "ngram", MODEL)]
    for drafter in [*([MODEL] if has_draft else []), *others]:
        if not any("tree" in options_of(name) for name in drafters_in(drafter)):
            grid.append(Configuration(drafter=drafter))
            continue
        grid += [Configuration(drafter=drafter, tree=tree) for tree in _TREES]
        # A greedy target accepts the token that it ranks first: drawing candidates only misses it.
        grid += [
            Configuration(drafter=drafter, tree=tree, verifier=verifier)
            for tree, verifier in (() if is_greedy else _DRAWN)
        ]
    fixed = [
        replace(configuration, controller=depth) for configuration in grid for depth in _NEARBY
    ]
    return [Configuration(drafter="none"), *fixed]


def second_grid(first: Sequence[dict[str, Any]]) -> list[Configuration]:
    """Return nearby depths and adaptive controllers for the fastest drafters and trees."""
    best: dict[Configuration, str | None] = {}
    for row in sorted(first, key=_speed, reverse=True):
        chosen = Configuration(**row["configuration"])
        if row["mean_depth"] > 0.0:
            best.setdefault(replace(chosen, controller=None), chosen.controller)
    return [
        replace(parts, controller=controller)
        for parts, depth in list(best.items())[:_BEST]
        for controller in (*_NEARBY[depth], *_ADAPTIVE)
    ]


def tune(
    log: LawLog,
    draft: SequenceModel | None,
    *,
    repeats: int,
    seed: int = 0,
    target: SequenceModel | None = None,
    drafters: Sequence[str] = (),
    on_text: Callable[[], None] = lambda: None,
    on_grid: Callable[[int], None] = lambda _: None,
) -> dict[str, Any]:
    """Replay the two grids, and return what `compare` does, fastest first.

    Args:
        log: With costs.
        draft: The draft model, if there is one.
        repeats: Passes over the log.
        seed: Of all passes.
        target: The target, for drafters that read it.
        drafters: Tried beside none, n-grams and the draft model.
        on_text: Called after every text of every pass.
        on_grid: Called before each grid, with the number of these calls at most.
    """

    def replayed_grid(grid: Sequence[Configuration]) -> dict[str, Any]:
        on_grid(len(grid) * len(log.texts) * repeats)
        return compare(grid, log, draft, repeats=repeats, seed=seed, target=target, on_text=on_text)

    is_greedy = log.rules.temperature == 0
    grid = first_grid(has_draft=draft is not None, is_greedy=is_greedy, drafters=drafters)
    first = replayed_grid(grid)
    second = replayed_grid(second_grid(first["replayed"]))
    replayed = sorted(first["replayed"] + second["replayed"], key=_speed, reverse=True)
    return {"replayed": replayed, "refused": first["refused"] + second["refused"]}


def _speed(row: dict[str, Any]) -> float:
    return float(row["tokens_per_s"]["mean"])
