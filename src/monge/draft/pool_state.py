"""What a pool of drafters keeps for a request."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, Final

from monge.core.context import Context, DraftPlan
from monge.core.draws import TapeDraws
from monge.core.errors import OptionError
from monge.core.selection import Hindsight
from monge.draft.base import AnyDrafter, Capabilities, Draft, DrafterPool
from monge.draft.ensemble import EnsembleDrafter
from monge.draft.hindsight import Followed, Watched
from monge.draft.jacobi import JacobiDrafter
from monge.draft.layer_skip import LayerSkipDrafter
from monge.draft.lookahead import LookaheadDrafter
from monge.draft.model import ModelDrafter
from monge.draft.ngram import NgramDrafter
from monge.draft.none import NoDrafter
from monge.draft.retokenize import RetokenizeDrafter
from monge.draft.suffix import SuffixDrafter
from monge.draft.token_recycling import TokenRecyclingDrafter

LOOKUPS: Final = (NgramDrafter, SuffixDrafter, TokenRecyclingDrafter, LookaheadDrafter, JacobiDrafter, NoDrafter)
"""Drafters that run no network: what they would have proposed can be looked up in every round."""
NETWORKS: Final = (ModelDrafter, EnsembleDrafter, LayerSkipDrafter, RetokenizeDrafter)
"""Drafters with a cache of their own, which stays where it is while they are not used."""

NO_DRAWS: Final = TapeDraws(())
"""Deterministic candidates draw nothing, and a request's own draws stay untouched where none of them is offered."""
_OWN_LIMITS: Final = DraftPlan()


@dataclass(frozen=True, slots=True)
class Place:
    """A drafter of a pool; looked up once, since rounds are short.

    Args:
        name: What a plan calls it.
        drafter: The drafter.
        looks_up: Whether it is one of `LOOKUPS`.
        keeps_cache: Whether it is one of `NETWORKS`.
        is_told: Whether it is told of rounds that others draft.
    """

    name: str
    drafter: AnyDrafter
    looks_up: bool
    keeps_cache: bool
    is_told: bool


def check_drafters(drafters: Mapping[str, AnyDrafter]) -> None:
    """Refuse what is no pool; for the reasons see `PoolDrafter`."""
    if not isinstance(drafters, Mapping) or len(drafters) < 2:
        raise OptionError(
            "pool: needs at least two drafters, as in pool('ngram', 'model'); use a single drafter by its own name"
        )
    nested = [name for name, drafter in drafters.items() if isinstance(drafter, DrafterPool)]
    if nested:
        raise OptionError(f"pool: drafter {nested[0]!r} is a pool itself; list its drafters instead")
    readers = [name for name, drafter in drafters.items() if drafter.capabilities.reads_states]
    if len(readers) > 1:
        raise OptionError(f"pool: {' and '.join(readers)} both take the target's hidden states, which one of them can")


def places_of(drafters: Mapping[str, AnyDrafter]) -> tuple[Place, ...]:
    """The drafters of a pool, in its order."""
    return tuple(_place(name, drafter) for name, drafter in drafters.items())


def _place(name: str, drafter: AnyDrafter) -> Place:
    keeps_cache = isinstance(drafter, NETWORKS)
    is_told = not keeps_cache and not drafter.capabilities.reads_text
    return Place(name, drafter, isinstance(drafter, LOOKUPS), keeps_cache, is_told)


@dataclass(frozen=True, slots=True)
class PoolState:
    """State of one request.

    Args:
        states: States of the drafters; `None` for one that has not been opened.
        chosen: Place of the drafter of the present round, until it was told the verdict.
        draft: Its draft.
        watched: Earlier rounds whose would-be trees the text has not decided yet.
        hindsight: What the last round's text decided.
    """

    states: tuple[Any, ...]
    chosen: int | None = None
    draft: Draft[Any] | None = None
    watched: tuple[Watched, ...] = ()
    hindsight: tuple[Hindsight, ...] = ()


def joint_capabilities(places: Sequence[Place]) -> Capabilities:
    """What the drafters of a pool can do, whichever is used."""
    every = [place.drafter.capabilities for place in places]
    widths = [can.max_width for can in every]
    lengths = [can.max_length for can in every if can.max_length is not None]
    return Capabilities(
        proposes=frozenset().union(*(can.proposes for can in every)),
        max_width=None if None in widths else max(width or 0 for width in widths),
        max_depth=max(can.max_depth for can in every),
        needs_trees=any(can.needs_trees for can in every),
        max_length=min(lengths, default=None),
        num_parameters=sum(can.num_parameters for can in every),
        num_bytes=sum(can.num_bytes for can in every),
        num_successors=max(can.num_successors for can in every),
        bytes_per_token=sum(can.bytes_per_token for can in every),
        reads_states=any(can.reads_states for can in every),
        reads_text=not any(place.is_told for place in places),
    )


def may_draft(plan: DraftPlan) -> bool:
    """Whether a plan allows any draft."""
    return plan.depth(1) > 0 and plan.nodes(1) > 0


def own_plan(place: Place, plan: DraftPlan) -> DraftPlan:
    """What a round's plan says to the drafter at a place."""
    return plan.for_lookups if place.looks_up and plan.drafter is None else plan


def own_draft(place: int, draft: Draft[PoolState]) -> Draft[Any]:
    """A drafter's own draft; where another one was used, its state with the tree of that one."""
    state = draft.state
    return state.draft if state.chosen == place and state.draft is not None else Draft(draft.tree, state.states[place])


def followed(context: Context, state: PoolState, states: tuple[Any, ...]) -> PoolState:
    """The state after the commit: earlier would-be trees have been walked on, decided ones handed over in order."""
    if not state.watched:
        return PoolState(states)
    walked = [one.after(context.token_ids) for one in state.watched]
    decided = list(takewhile(lambda one: one.is_decided, walked))
    hindsight = tuple(entry for one in decided for entry in one.hindsight())
    return PoolState(states, watched=tuple(walked[len(decided) :]), hindsight=hindsight)


def would_be(places: Sequence[Place], context: Context, states: list[Any], plan: DraftPlan) -> tuple[Watched, ...]:
    """What drafters without a network would propose, each within its own limits, where the plan asks; states follow."""
    if plan.drafter is None and (not plan.follows or plan.may_look_up):
        return ()
    trees: list[Followed] = []
    for number, place in enumerate(places):
        if place.looks_up:
            (draft,) = place.drafter.draft([context], [states[number]], [_OWN_LIMITS], [NO_DRAWS])
            states[number] = states[number] if place.is_told else draft.state
            if draft.tree.num_nodes > 1 or plan.drafter is not None:
                trees.append(Followed(place.name, draft.tree))
    return (Watched(len(context.token_ids), tuple(trees)),) if trees else ()
