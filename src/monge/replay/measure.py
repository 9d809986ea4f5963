"""Measures rounds: of a log's target by drafted nodes, and of each drafter by depth."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, Final

from monge.control.base import SharedState
from monge.control.fixed import Fixed
from monge.core.context import Context, DraftPlan
from monge.core.draws import Draws
from monge.core.model import SequenceModel
from monge.core.proposal import Deterministic
from monge.core.sampling_rules import SamplingRules
from monge.core.tree import GrowingTree, TokenTree
from monge.core.verdict import StepRecord
from monge.draft.base import Capabilities, ModelFreeDrafter, model_free
from monge.engine.clock import now
from monge.engine.components import Components
from monge.engine.loop import close_session, run_round
from monge.engine.opening import open_sessions
from monge.engine.session import Request, Session
from monge.replay.configuration import MODEL, Configuration
from monge.replay.costs import RoundCosts
from monge.verify.target_walk import TargetWalk

BUDGET_S: Final = 1.0
_DEPTHS: Final = (0, 1, 2, 4, 8)
_DEEPEST: Final = _DEPTHS[-1]
_WIDE: Final = 4
_PROMPT: Final = 32  # tokens of the text on which rounds are measured
_CYCLES: Final = 6  # most rounds of each depth
_UNBOUNDED: Final = 1 << 30  # tokens of a context
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
    """Return the costs of each drafter, as plain values.

    Each measurement takes about a second, within which plain rounds take turns with others. So all
    are scaled to one common time of a plain round: a machine that is slower during one of them does
    not make a drafter look slow.

    Args:
        target: The target.
        draft: The draft model, if there is one.
        more: Further configurations, each of one drafter, with the target that it runs on.
    """
    is_narrow = target.no_tree_reason is not None or target.vocab_size < _WIDE
    drafts = target.no_draft_reason is None
    parts: dict[str, Any] = {"target": target, "rule": TargetWalk(), "controller": Fixed()}
    filled = [
        measured_rounds(Components(drafter=FillerDrafter(_DEEPEST, width), **parts))
        for width in (() if not drafts else (1,) if is_narrow else (1, _WIDE))
    ]
    drafters = {
        name: measured_rounds(configuration.components(target, draft))
        for name, configuration in TIMED.items()
        if name == "none" or (drafts and (name != MODEL or draft is not None))
    }
    for configuration, its_target in more:
        (name,) = configuration.drafter_names(draft)
        drafters[name] = measured_rounds(configuration.components(its_target, draft))
    plain = median(costs.verify_s(0) for costs in (*filled, *drafters.values()))
    verify = {0: plain}
    for costs in filled:
        for nodes, seconds in costs.scaled(1, plain / costs.verify_s(0)).verify[1].items():
            verify.setdefault(nodes, seconds)
    return {
        name: RoundCosts({1: verify}, costs.scaled(1, plain / costs.verify_s(0)).draft).as_dict()
        for name, costs in drafters.items()
    }


def measured_rounds(
    components: Components, *, batch_sizes: Sequence[int] = (1,), budget_s: float = BUDGET_S
) -> RoundCosts:
    """Run real rounds of several depths on random text, and tabulate their shortest times.

    What else runs on the machine makes a round longer, never shorter.

    Args:
        components: The components that will decode.
        batch_sizes: Requests decoded together.
        budget_s: Seconds after which no further round is begun, once each depth had two.
    """
    verify: dict[int, dict[int, float]] = {}
    draft: dict[int, dict[int, float]] = {}
    can, budget_s = components.drafter.capabilities, budget_s / len(batch_sizes)
    deepest = min(can.max_depth, _DEEPEST)
    for size in sorted(set(batch_sizes)):
        records = _rounds(components, size, budget_s)
        draft[size] = _shortest((record.depth, record.times.draft_s) for record in records)
        # A lookup drafts where the text repeats itself, which the measured text hardly does.
        if Deterministic in can.proposes and max(record.num_nodes for record in records) < deepest:
            filler = replace(components, drafter=FillerDrafter(deepest))
            records = _rounds(filler, size, budget_s)
        verify[size] = _shortest(
            (record.num_nodes, record.times.total_s - record.times.draft_s) for record in records
        )
    return RoundCosts(verify, draft)


@dataclass(frozen=True, slots=True)
class FillerDrafter(ModelFreeDrafter[None]):
    """Propose `width` meaningless candidates a level, so that a round of any size can be timed."""

    max_depth: int
    width: int = 1

    @property
    def capabilities(self) -> Capabilities:
        return model_free(max_depth=self.max_depth, max_width=self.width)

    def start(self, context: Context) -> None:
        return None

    def tree(self, context: Context, state: None, plan: DraftPlan, draws: Draws) -> TokenTree:
        tree, node = GrowingTree(context.token_ids[-1]), 0
        for _ in range(plan.depth(self.max_depth)):
            node, *_ = tree.grow(node, Deterministic(tuple(range(self.width))), draws)
        return tree.finish()


def _shortest(times: Iterable[tuple[int, float]]) -> dict[int, float]:
    """Return the shortest time of each size; no size takes longer than a larger one."""
    shortest: dict[int, float] = {}
    for size, seconds in sorted(times, reverse=True):
        shortest[size] = min(seconds, *shortest.values()) if shortest else seconds
    return dict(sorted(shortest.items()))


def _rounds(components: Components, batch_size: int, budget_s: float) -> Sequence[StepRecord]:
    """Return one record of each round, with the depth and nodes of its largest tree.

    A network that runs for the first time can take many times its later time, so each depth has at
    least two rounds.
    """
    can = components.drafter.capabilities
    depths = sorted({min(depth, can.max_depth) for depth in _DEPTHS})
    trials = [
        replace(components, controller=Fixed(max_depth=depth), shared=SharedState())
        for depth in depths
    ]
    bounds = components.target.max_length, can.max_length
    longest = min((bound for bound in bounds if bound is not None), default=_UNBOUNDED)
    most = min(_CYCLES * (sum(depths) + len(depths)) + 1, longest - 1)
    prompt = max(1, min(_PROMPT, longest - most))
    requests = [
        Request(
            prompt_ids=_text(prompt, components.target.vocab_size, row),
            max_new_tokens=most,
            rules=SamplingRules(),
            seed=row,
        )
        for row in range(batch_size)
    ]
    sessions = [Session(request, request_id=request.seed) for request in requests]
    open_sessions(sessions, trials[0])
    start, records = now(), list[StepRecord]()
    try:
        for number in range(_CYCLES * len(depths)):
            is_late = number >= 2 * len(depths) and now() - start > budget_s
            if is_late or any(session.finish_reason is not None for session in sessions):
                break
            run_round(sessions, trials[number % len(depths)])
            rows = [session.records[-1] for session in sessions]
            num_nodes, depth = (max(row.num_nodes for row in rows), max(row.depth for row in rows))
            records.append(replace(rows[0], num_nodes=num_nodes, depth=depth))
    finally:
        for session in sessions:
            close_session(session, components)
    return records


def _text(length: int, vocab_size: int, seed: int) -> tuple[int, ...]:
    """Return tokens that repeat nothing soon, so that no drafter finds them easy."""
    return tuple(
        (7 + 31 * seed + 7919 * position * (position + 1)) % vocab_size
        for position in range(length)
    )
