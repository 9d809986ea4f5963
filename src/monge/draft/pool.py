"""Several drafters, of which every round of every request uses one."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from monge.core.context import Context, DraftPlan
from monge.core.draws import Draws
from monge.core.errors import unknown_name
from monge.core.proposal import Proposal
from monge.core.selection import Hindsight, Member
from monge.core.tree import lone_root
from monge.core.verdict import Verdict
from monge.draft.base import AnyDrafter, Capabilities, Draft, DrafterPool, OwnChain, PieceReader
from monge.draft.pool_state import (
    NO_DRAWS,
    Place,
    PoolState,
    check_drafters,
    followed,
    joint_capabilities,
    may_draft,
    own_draft,
    own_plan,
    places_of,
    would_be,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolDrafter(DrafterPool[PoolState], PieceReader[PoolState]):
    """Several drafters; each round uses the one that its plan names, else the first that proposes anything.

    Which drafter a round uses depends on its plan, or on what is found in the committed text: on nothing that the round draws.
    The others follow the text: those without a network are told every commit, a draft model that is not used reads what it has
    missed when it is used again. The first that runs a network reads prompts at once, unless the controller lets it wait.

    Where a plan names a drafter, or keeps those from drafting that run no network and asks what they would have proposed, all
    of these say so. As soon as the text has decided about all of their trees, at most their depth in tokens later, the round's
    record carries the outcome (`hindsight`).

    Args:
        drafters: Names, which plans use, and drafters; at least two.

    Raises:
        OptionError: If there are fewer than two, two have one name, one is a pool itself, or two take hidden states.
    """

    drafters: Mapping[str, AnyDrafter]
    _opened: dict[int, set[int]] = field(init=False, repr=False, compare=False)
    _places: tuple[Place, ...] = field(init=False, repr=False, compare=False)
    _found: dict[int, tuple[int, int, DraftPlan, Draft[Any]]] = field(init=False, repr=False, compare=False)
    _looked: dict[int, tuple[int, tuple[Any, ...]]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_drafters(self.drafters)
        for name in ("_opened", "_found", "_looked"):
            object.__setattr__(self, name, {})
        object.__setattr__(self, "_places", places_of(self.drafters))

    @property
    def capabilities(self) -> Capabilities:
        return joint_capabilities(self._places)

    @property
    def own_chain(self) -> OwnChain[PoolState] | None:
        networks = [number for number, place in enumerate(self._places) if not place.looks_up]
        own = self._places[networks[0]].drafter.own_chain if len(networks) == 1 else None
        return None if own is None else PoolChain(model=own.model, depth=own.depth, pool=self, place=networks[0], own=own)

    @property
    def reads_pieces(self) -> bool:
        networks = [place.drafter for place in self._places if not place.looks_up]
        return bool(networks) and all(isinstance(drafter, PieceReader) and drafter.reads_pieces for drafter in networks)

    @property
    def members(self) -> tuple[Member, ...]:
        return tuple(
            Member(name=place.name, max_depth=place.drafter.capabilities.max_depth, runs_network=not place.looks_up)
            for place in self._places
        )

    def hindsight(self, state: PoolState) -> tuple[Hindsight, ...]:
        return state.hindsight

    def is_idle(self, state: PoolState) -> bool:
        return not state.watched and not state.hindsight

    def open(self, contexts: Sequence[Context]) -> Sequence[PoolState]:
        states = {context.request_id: [None] * len(self.drafters) for context in contexts}
        for context in contexts:
            self._opened[context.request_id] = set()
        reader = self._reader
        for number, place in enumerate(self._places):
            if number == reader or not (place.looks_up or place.keeps_cache):
                self._open(number, contexts, states)
        # Lookups need whole prompts: where those come in pieces, they are opened when they are asked first.
        self._open_lookups([one for one in contexts if len(one.token_ids) >= one.num_prompt_tokens], states)
        return [PoolState(tuple(states[context.request_id])) for context in contexts]

    def read(self, contexts: Sequence[Context]) -> None:
        reader = self._reader
        drafter = None if reader is None else self._places[reader].drafter
        if isinstance(drafter, PieceReader):
            drafter.read(contexts)

    def draft(
        self,
        contexts: Sequence[Context],
        states: Sequence[PoolState],
        plans: Sequence[DraftPlan],
        draws: Sequence[Draws],
    ) -> Sequence[Draft[PoolState]]:
        known = {context.request_id: list(state.states) for context, state in zip(contexts, states, strict=True)}
        named = [None if plan.drafter is None else self._place(plan.drafter) for plan in plans]
        made: dict[int, tuple[int, Draft[Any]]] = {}
        self._open_lookups([one for one, plan in zip(contexts, plans, strict=True) if plan.asks_lookups], known)
        # First: what a lookup raises must not cost a tree that is drawn already.
        watched = [
            (*state.watched, *would_be(self._places, context, known[context.request_id], plan))
            for context, state, plan in zip(contexts, states, plans, strict=True)
        ]
        for number, place in enumerate(self._places):
            own_plans = [own_plan(place, plan) for plan in plans]
            rows = [
                row
                for row, plan in enumerate(own_plans)
                if row not in made and may_draft(plan) and named[row] in (None, number)
            ]
            if not rows:
                continue
            group = [contexts[row] for row in rows]
            self._open(number, [one for one in group if not self.is_open(number, one)], known)
            own = [known[one.request_id][number] for one in group]
            proposed = self._found_before(number, group, own_plans) or place.drafter.draft(
                group, own, [own_plans[row] for row in rows], [draws[row] for row in rows]
            )
            for row, draft in zip(rows, proposed, strict=True):
                if draft.tree.num_nodes > 1 or draft.error is not None or named[row] is not None:
                    made[row] = (number, draft)
                elif place.looks_up and not place.is_told:
                    known[contexts[row].request_id][number] = draft.state
        drafts: list[Draft[PoolState]] = []
        for row, context in enumerate(contexts):
            own = tuple(known[context.request_id])
            chosen, draft = made.get(row, (named[row], None))
            drafts.append(
                Draft(
                    tree=lone_root(context.token_ids[-1]) if draft is None else draft.tree,
                    state=PoolState(own, None if draft is None else chosen, draft, watched[row]),
                    evidence=None if draft is None else draft.evidence,
                    drafter=None if chosen is None else self._places[chosen].name,
                    error=None if draft is None else draft.error,
                )
            )
        return drafts

    def observe(
        self, contexts: Sequence[Context], drafts: Sequence[Draft[PoolState]], verdicts: Sequence[Verdict]
    ) -> Sequence[PoolState]:
        if len(contexts) == 1:
            return [self._observed(contexts, drafts, verdicts)]
        states = [list(draft.state.states) for draft in drafts]
        for number, place in enumerate(self._places):
            told = [row for row, draft in enumerate(drafts) if self._is_told(number, place, contexts[row], draft)]
            if told:
                new = place.drafter.observe(
                    [contexts[row] for row in told],
                    [own_draft(number, drafts[row]) for row in told],
                    [verdicts[row] for row in told],
                )
                for row, state in zip(told, new, strict=True):
                    states[row][number] = state
        return [
            followed(context, draft.state, tuple(own)) for context, draft, own in zip(contexts, drafts, states, strict=True)
        ]

    def _observed(
        self, contexts: Sequence[Context], drafts: Sequence[Draft[PoolState]], verdicts: Sequence[Verdict]
    ) -> PoolState:
        """The same for one request, whose rounds are the shortest."""
        states = list(drafts[0].state.states)
        for number, place in enumerate(self._places):
            if self._is_told(number, place, contexts[0], drafts[0]):
                (states[number],) = place.drafter.observe(contexts, [own_draft(number, drafts[0])], verdicts)
        return followed(contexts[0], drafts[0].state, tuple(states))

    def _is_told(self, number: int, place: Place, context: Context, draft: Draft[PoolState]) -> bool:
        return draft.state.chosen == number or (place.is_told and self.is_open(number, context))

    def close(self, context: Context) -> None:
        self._found.pop(context.request_id, None)
        self._looked.pop(context.request_id, None)
        opened = self._opened.pop(context.request_id, set())
        for number, place in enumerate(self._places):
            if number in opened:
                place.drafter.close(context)

    def looked_up(self, context: Context, state: PoolState, plan: DraftPlan) -> PoolState | None:
        if plan.max_depth != 0 or plan.stop is not None or plan.drafter is not None or state.hindsight:
            return None
        if plan.may_look_up:
            finds = state.watched or self.proposes(context, state, plan, len(self._places))
            return None if finds else PoolState(self._having_looked(context, state))
        if not plan.follows or not all(self.is_open(n, context) for n, place in enumerate(self._places) if place.looks_up):
            return None
        own = list(state.states)
        watched = (*state.watched, *would_be(self._places, context, own, plan))
        return PoolState(tuple(own), watched=watched)

    def proposes(self, context: Context, state: PoolState, plan: DraftPlan, before: int) -> bool:
        """Whether one of the drafters in front of a place that run no network proposes something, or was never asked to."""
        if not plan.may_look_up:
            return False
        asked, states = plan.for_lookups, list(state.states)
        for number, place in enumerate(self._places[:before]):
            if not place.looks_up:
                continue
            if not self.is_open(number, context):
                return True
            (draft,) = place.drafter.draft([context], [state.states[number]], [asked], [NO_DRAWS])
            if draft.tree.num_nodes > 1:
                self._found[context.request_id] = number, len(context.token_ids), asked, draft
                return True
            if not place.is_told:
                states[number] = draft.state
        self._looked[context.request_id] = len(context.token_ids), tuple(states)
        return False

    def _having_looked(self, context: Context, state: PoolState) -> tuple[Any, ...]:
        """States of the drafters after `proposes` found nothing, if it was asked in this round."""
        length, states = self._looked.pop(context.request_id, (0, ()))
        return states if length == len(context.token_ids) else state.states

    def _found_before(self, number: int, contexts: Sequence[Context], plans: Sequence[DraftPlan]) -> list[Draft[Any]]:
        """What the drafter at a place said in `proposes` in the same round of a request alone; empty where it was not asked."""
        found = self._found.get(contexts[0].request_id) if len(plans) == 1 else None
        if found is None or found[:3] != (number, len(contexts[0].token_ids), plans[0]):
            return []
        del self._found[contexts[0].request_id]
        return [found[3]]

    def is_open(self, number: int, context: Context) -> bool:
        """Whether the drafter at a place knows a request."""
        return number in self._opened[context.request_id]

    def chained(self, context: Context, state: PoolState, plan: DraftPlan, number: int, draft: Draft[Any]) -> Draft[PoolState]:
        """A draft that the network of the drafter at a place made elsewhere, for the only request of a round."""
        own, watched = self._having_looked(context, state), state.watched
        if plan.asks_lookups:
            self._open_lookups([context], {context.request_id: (told := list(own))})
            watched = (*watched, *would_be(self._places, context, told, plan))
            own = tuple(told)
        return Draft(draft.tree, PoolState(own, number, draft, watched), draft.evidence, self._places[number].name)

    @property
    def _reader(self) -> int | None:
        """Place of the drafter that reads prompts first."""
        return next((number for number, place in enumerate(self._places) if place.keeps_cache), None)

    def _place(self, name: str) -> int:
        if name not in self.drafters:
            raise unknown_name("drafter of the pool:", name, self.drafters)
        return list(self.drafters).index(name)

    def _open_lookups(self, contexts: Sequence[Context], states: Mapping[int, list[Any]]) -> None:
        for number, place in enumerate(self._places):
            if place.looks_up and (new := [one for one in contexts if not self.is_open(number, one)]):
                self._open(number, new, states)

    def _open(self, number: int, contexts: Sequence[Context], states: Mapping[int, list[Any]]) -> None:
        if contexts:
            for context in contexts:  # noted first: what fails half-way is closed all the same
                self._opened[context.request_id].add(number)
            opened = self._places[number].drafter.open(contexts)
            for context, state in zip(contexts, opened, strict=True):
                states[context.request_id][number] = state


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolChain(OwnChain[PoolState]):
    """The chains of the one drafter of a pool that runs a network.

    Args:
        pool: The pool.
        place: The drafter's place in it.
        own: The drafter's own chains.
    """

    pool: PoolDrafter
    place: int
    own: OwnChain[Any]

    def is_next(self, context: Context, state: PoolState, plan: DraftPlan) -> bool:
        if not self.pool.is_open(self.place, context):
            return False
        if plan.drafter is not None:
            return plan.drafter == list(self.pool.drafters)[self.place]
        return not self.pool.proposes(context, state, plan, self.place)

    def draft(
        self, context: Context, state: PoolState, plan: DraftPlan, drawn: Sequence[tuple[int, Proposal]]
    ) -> Draft[PoolState]:
        own = self.own.draft(context, state.states[self.place], plan, drawn)
        return self.pool.chained(context, state, plan, self.place, own)
