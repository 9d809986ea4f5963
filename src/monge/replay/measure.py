"""Measures rounds for a log: the target's rounds by drafted nodes, and the cost of each drafter."""

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any, Final

from monge.control.fixed import Fixed
from monge.core.model import SequenceModel
from monge.engine.components import Components
from monge.engine.latency_measurement import FillerDrafter, measure_latency
from monge.replay.configuration import MODEL, Configuration
from monge.verify.target_walk import TargetWalk

_DEEPEST: Final = 8
_WIDE: Final = 4
TIMED: Final = {
    "none": Configuration(drafter="none"),
    "ngram": Configuration(drafter="ngram"),
    MODEL: Configuration(tree=f"chain({_DEEPEST})"),
}
"""Configurations that are always timed; `model` if there is a draft model."""


def measured_costs(
    target: SequenceModel,
    draft: SequenceModel | None,
    more: Sequence[tuple[Configuration, SequenceModel]] = (),
) -> dict[str, Any]:
    """Return cost tables by drafter, as plain values.

    Args:
        target: The target.
        draft: The draft model, if there is one.
        more: Further configurations, each of one drafter, with the target that it runs on.

    Each measurement takes about a second, within which plain rounds take turns with others. So all
    are scaled to one common time of a plain round: a machine that is slower during one of them does
    not make a drafter look slow.
    """
    widths = [1] if target.no_tree_reason is not None or target.vocab_size < _WIDE else [1, _WIDE]
    drafts = target.no_draft_reason is None
    rounds = [_timed(_filled(target, width)) for width in widths] if drafts else []
    drafters = {
        name: _timed(configuration.components(target, draft))
        for name, configuration in TIMED.items()
        if name == "none" or (drafts and (name != MODEL or draft is not None))
    }
    for configuration, own in more:
        (name,) = configuration.drafter_names(draft)
        drafters[name] = _timed(configuration.components(own, draft))
    tables = [*rounds, *drafters.values()]
    plain = median(_plain(table) for table in tables)
    verify: dict[str, float] = {"0": plain}
    for table in rounds:
        for nodes, seconds in table["verify_s"]["1"].items():
            verify.setdefault(nodes, seconds * plain / _plain(table))
    base = tables[0]
    return {
        name: {
            **base,
            "verify_s": {"1": verify},
            "draft_s": {
                "1": {
                    depth: seconds * plain / _plain(table)
                    for depth, seconds in table["draft_s"]["1"].items()
                }
            },
            "context_s": median(one["context_s"] for one in tables),
            "nodes": [],
        }
        for name, table in drafters.items()
    }


def _filled(target: SequenceModel, width: int) -> Components:
    return Components(
        target=target, drafter=FillerDrafter(_DEEPEST, width), rule=TargetWalk(), controller=Fixed()
    )


def _timed(components: Components) -> Mapping[str, Any]:
    return measure_latency(components).as_dict()


def _plain(table: Mapping[str, Any]) -> float:
    return float(table["verify_s"]["1"]["0"])
