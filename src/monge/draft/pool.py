"""Several drafters, of which every round of every request uses one."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any, Final

from monge.core.context import Context, DraftPlan
from monge.core.draws import Draws, TapeDraws
from monge.core.errors import OptionError, unknown_name
from monge.core.selection import Hindsight, Member
from monge.core.tree import lone_root
from monge.core.verdict import Verdict
from monge.draft.base import AnyDrafter, Capabilities, Draft, DrafterPool
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
"""Drafters that run no network: what they would have proposed is looked up in every round that names a drafter."""
_NETWORKS: Final = (ModelDrafter, LayerSkipDrafter, RetokenizeDrafter)
"""Drafters with a cache of their own, which stays where it is while they are not used."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolDrafter(DrafterPool[PoolState]):
    """Several drafters; each round uses the one that its plan names, else the first that proposes anything.

    Which drafter a round uses depends on its plan, or on which drafters find something in the committed text: on nothing that
    the round draws. The others follow the text: those without a network are told every commit, a draft model that is not used
    runs no forward, not even for the prompt, and reads what it has missed when it is used again.

    Where a plan names a drafter, all that run no network also say what they would have proposed; as soon as the text has
    decided about all of these trees, at most their depth in tokens later, the round's record carries the outcome (`hindsight`).

    Args:
        drafters: Names, which plans use, and drafters; at least two.

    Raises:
        OptionError: If there are fewer than two, two have one name, one is a pool itself, or two take hidden states.
    """

    drafters: Mapping[str, AnyDrafter]
    _opened: dict[int, set[int]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not isinstance(self.drafters, Mapping) or len(self.drafters) < 2:
            raise OptionError(
                "pool: needs at least two drafters, as in pool('ngram', 'model'); use a single drafter by its own name"
            )
        nested = [name for name, drafter in self.drafters.items() if isinstance(drafter, DrafterPool)]
        if nested:
            raise OptionError(f"pool: drafter {nested[0]!r} is a pool itself; list its drafters instead")
        readers = [name for name, drafter in self.drafters.items() if drafter.capabilities.reads_states]
        if len(readers) > 1:
            raise OptionError(f"pool: {' and '.join(readers)} both take the target's hidden states, which one of them can")
        object.__setattr__(self, "_opened", {})

    @property
    def capabilities(self) -> Capabilities:
        every = [drafter.capabilities for drafter in self.drafters.values()]
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
        )

    @property
    def members(self) -> tuple[Member, ...]:
        return tuple(
            Member(name=name, max_depth=drafter.capabilities.max_depth, runs_network=not isinstance(drafter, LOOKUPS))
            for name, drafter in self.drafters.items()
        )

    def hindsight(self, state: PoolState) -> tuple[Hindsight, ...]:
        return state.hindsight

    def open(self, contexts: Sequence[Context]) -> Sequence[PoolState]:
        states = {context.request_id: [None] * len(self.drafters) for context in contexts}
        for context in contexts:
            self._opened[context.request_id] = set()
        for place, drafter in enumerate(self.drafters.values()):
            if not isinstance(drafter, _NETWORKS):
                self._open(place, contexts, states)
        return [PoolState(tuple(states[context.request_id])) for context in contexts]

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
        for place, drafter in enumerate(self.drafters.values()):
            rows = [
                row for row, plan in enumerate(plans) if row not in made and _may_draft(plan) and named[row] in (None, place)
            ]
            if not rows:
                continue
            group = [contexts[row] for row in rows]
            self._open(place, [one for one in group if place not in self._opened[one.request_id]], known)
            own = [known[one.request_id][place] for one in group]
            proposed = drafter.draft(group, own, [plans[row] for row in rows], [draws[row] for row in rows])
            for row, draft in zip(rows, proposed, strict=True):
                if draft.tree.num_nodes > 1 or named[row] is not None:
                    made[row] = (place, draft)
        drafts: list[Draft[PoolState]] = []
        for row, (context, state) in enumerate(zip(contexts, states, strict=True)):
            own = tuple(known[context.request_id])
            watched = state.watched if named[row] is None else (*state.watched, *self._would_be(context, own))
            place, draft = made.get(row, (named[row], None))
            drafts.append(
                Draft(
                    tree=lone_root(context.token_ids[-1]) if draft is None else draft.tree,
                    state=PoolState(own, None if draft is None else place, draft, watched),
                    evidence=None if draft is None else draft.evidence,
                    drafter=None if place is None else list(self.drafters)[place],
                )
            )
        return drafts

    def observe(
        self, contexts: Sequence[Context], drafts: Sequence[Draft[PoolState]], verdicts: Sequence[Verdict]
    ) -> Sequence[PoolState]:
        states = [list(draft.state.states) for draft in drafts]
        for place, drafter in enumerate(self.drafters.values()):
            told = [
                row
                for row, (context, draft) in enumerate(zip(contexts, drafts, strict=True))
                if draft.state.chosen == place
                or (place in self._opened[context.request_id] and not isinstance(drafter, _NETWORKS))
            ]
            if told:
                new = drafter.observe(
                    [contexts[row] for row in told],
                    [_own(place, drafts[row]) for row in told],
                    [verdicts[row] for row in told],
                )
                for row, state in zip(told, new, strict=True):
                    states[row][place] = state
        return [
            _followed(context, draft.state, tuple(own)) for context, draft, own in zip(contexts, drafts, states, strict=True)
        ]

    def close(self, context: Context) -> None:
        opened = self._opened.pop(context.request_id, set())
        for place, drafter in enumerate(self.drafters.values()):
            if place in opened:
                drafter.close(context)

    def _place(self, name: str) -> int:
        if name not in self.drafters:
            raise unknown_name("drafter of the pool:", name, self.drafters)
        return list(self.drafters).index(name)

    def _open(self, place: int, contexts: Sequence[Context], states: Mapping[int, list[Any]]) -> None:
        if contexts:
            for context in contexts:  # noted first: what fails half-way is closed all the same
                self._opened[context.request_id].add(place)
            opened = list(self.drafters.values())[place].open(contexts)
            for context, state in zip(contexts, opened, strict=True):
                states[context.request_id][place] = state

    def _would_be(self, context: Context, states: tuple[Any, ...]) -> tuple[Watched, ...]:
        """What the drafters without a network would propose, each within its own limits."""
        trees: list[Followed] = []
        for (name, drafter), state in zip(self.drafters.items(), states, strict=True):
            if isinstance(drafter, LOOKUPS):
                # An empty tape: deterministic candidates draw nothing, and the request's own draws stay untouched.
                (draft,) = drafter.draft([context], [state], [DraftPlan()], [TapeDraws(())])
                trees.append(Followed(name, draft.tree))
        return (Watched(len(context.token_ids), tuple(trees)),) if trees else ()


def _may_draft(plan: DraftPlan) -> bool:
    return plan.depth(1) > 0 and plan.nodes(1) > 0


def _own(place: int, draft: Draft[PoolState]) -> Draft[Any]:
    """A drafter's own draft; where another one was used, its state with the tree of that one."""
    state = draft.state
    return state.draft if state.chosen == place and state.draft is not None else Draft(draft.tree, state.states[place])


def _followed(context: Context, state: PoolState, states: tuple[Any, ...]) -> PoolState:
    """The state after the commit: earlier would-be trees have been walked on, decided ones handed over in order."""
    walked = [one.after(context.token_ids) for one in state.watched]
    decided = list(takewhile(lambda one: one.is_decided, walked))
    hindsight = tuple(entry for one in decided for entry in one.hindsight())
    return PoolState(states, watched=tuple(walked[len(decided) :]), hindsight=hindsight)
