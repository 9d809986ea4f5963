"""Several drafters, of which each round of a request uses one."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any, Final

from monge.core.context import Context, DraftPlan
from monge.core.draws import Draws, TapeDraws
from monge.core.errors import OptionError, unknown_name
from monge.core.proposal import Deterministic
from monge.core.selection import CounterfactualDraft, Member
from monge.core.tree import root_only
from monge.core.verdict import Verdict
from monge.draft.base import AnyDrafter, Capabilities, Draft, DrafterPool, PieceReader, piece_reader
from monge.draft.shadow import ShadowDraft, ShadowTree

# Model-free drafters propose deterministic candidates, which draw nothing.
_NO_DRAWS: Final = TapeDraws(())
_OWN_LIMITS: Final = DraftPlan()


@dataclass(frozen=True, slots=True)
class PoolState:
    """State of one request.

    Args:
        states: States of the drafters; `None` for one that has not been opened.
        chosen: Index of the drafter of the present round, until it has observed the verdict.
        draft: Its draft.
        shadows: Shadow drafts of earlier rounds that the text has not decided yet.
        counterfactuals: Results of shadow drafts that the text of the last round decided.
    """

    states: tuple[Any, ...]
    chosen: int | None = None
    draft: Draft[Any] | None = None
    shadows: tuple[ShadowDraft, ...] = ()
    counterfactuals: tuple[CounterfactualDraft, ...] = ()

    def own_draft(self, index: int, draft: Draft["PoolState"]) -> Draft[Any]:
        """Return the draft of a drafter, with the tree of the drafter that was used."""
        own = self.draft if self.chosen == index else None
        return Draft(draft.tree, self.states[index]) if own is None else own


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolDrafter(DrafterPool[PoolState], PieceReader[PoolState]):
    """Several drafters; a round uses the one that its plan names, else the first with a proposal.

    The choice depends on the plan and on committed text only, so every verifier stays exact. A
    drafter whose context has ended is passed over, also where the plan names it. All
    open drafters observe every commit. The first drafter with a network reads prompts at once,
    unless the controller postpones it. Other drafters with a network are opened at their first use.

    If a plan names a drafter, each model-free drafter makes a *shadow draft*: a tree that is not
    verified. When the committed text has decided it, the record of the round says how much would
    have been accepted (`StepRecord.counterfactuals`).

    Args:
        drafters: Drafters by the names that plans use; at least two.
        min_nodes: Fewest drafted nodes with which a model-free drafter is used if the plan names no
            drafter; the last drafter is used with any.

    Raises:
        OptionError: If there are fewer than two, one is a pool, or `min_nodes` is below 1.
    """

    drafters: Mapping[str, AnyDrafter]
    min_nodes: int = 1
    _places: tuple[tuple[str, AnyDrafter], ...] = field(init=False, repr=False, compare=False)
    _opened: dict[int, set[int]] = field(init=False, repr=False, compare=False)
    _lengths: tuple[int | None, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        _check(self.drafters)
        if self.min_nodes < 1:
            raise OptionError(f"pool: min_nodes must be at least 1; got {self.min_nodes}")
        object.__setattr__(self, "_places", tuple(self.drafters.items()))
        object.__setattr__(self, "_opened", {})
        lengths = tuple(drafter.capabilities.max_length for drafter in self.drafters.values())
        object.__setattr__(self, "_lengths", lengths)

    @property
    def capabilities(self) -> Capabilities:
        every = [drafter.capabilities for drafter in self.drafters.values()]
        widths, lengths = [can.max_width for can in every], [can.max_length for can in every]
        return Capabilities(
            proposes=frozenset().union(*(can.proposes for can in every)),
            max_width=None if None in widths else max(width or 0 for width in widths),
            max_depth=max(can.max_depth for can in every),
            needs_trees=any(can.needs_trees for can in every),
            max_length=None if None in lengths else max(length or 0 for length in lengths),
            num_parameters=sum(can.num_parameters for can in every),
            num_bytes=sum(can.num_bytes for can in every),
            num_successors=max(can.num_successors for can in every),
            bytes_per_token=sum(can.bytes_per_token for can in every),
            reads_states=any(can.reads_states for can in every),
            runs_network=any(can.runs_network for can in every),
        )

    @property
    def members(self) -> tuple[Member, ...]:
        return tuple(
            Member(
                name=name,
                max_depth=own.capabilities.max_depth,
                runs_network=own.capabilities.runs_network,
                max_length=own.capabilities.max_length,
            )
            for name, own in self._places
        )

    @property
    def reads_pieces(self) -> bool:
        networks = [drafter for _, drafter in self._places if drafter.capabilities.runs_network]
        return bool(networks) and all(piece_reader(drafter) is not None for drafter in networks)

    def counterfactuals(self, state: PoolState) -> tuple[CounterfactualDraft, ...]:
        return state.counterfactuals

    def open(self, contexts: Sequence[Context]) -> Sequence[PoolState]:
        states = {context.request_id: [None] * len(self._places) for context in contexts}
        for context in contexts:
            self._opened[context.request_id] = set()
        whole, reader = (
            [one for one in contexts if len(one.token_ids) >= one.num_prompt_tokens],
            self._reader,
        )
        for index, (_, drafter) in enumerate(self._places):
            if index == reader:
                self._open(index, contexts, states)
            elif not (drafter.capabilities.runs_network and piece_reader(drafter) is not None):
                # Model-free drafters need whole prompts, so chunked prompts open them at the first
                # draft.
                self._open(index, whole, states)
        return [PoolState(tuple(states[context.request_id])) for context in contexts]

    def read(self, contexts: Sequence[Context]) -> None:
        index = self._reader
        if index is None or (reader := piece_reader(self._places[index][1])) is None:
            return
        contexts = [one for one in contexts if self._fits(index, one)]
        if contexts:
            reader.read(contexts)

    def draft(
        self,
        contexts: Sequence[Context],
        states: Sequence[PoolState],
        plans: Sequence[DraftPlan],
        draws: Sequence[Draws],
    ) -> Sequence[Draft[PoolState]]:
        known = {
            context.request_id: list(state.states)
            for context, state in zip(contexts, states, strict=True)
        }
        named = [self._named(context, plan) for context, plan in zip(contexts, plans, strict=True)]
        # Before anything is drawn, so that an error of a model-free drafter costs no drawn tree.
        shadows = [
            self._shadows(context, known, plan)
            for context, plan in zip(contexts, plans, strict=True)
        ]
        chosen: dict[int, tuple[int, Draft[Any]]] = {}
        for index, (_, drafter) in enumerate(self._places):
            own_plans = [
                self._own_plan(index, context, plan)
                for context, plan in zip(contexts, plans, strict=True)
            ]
            rows = [
                row
                for row, plan in enumerate(own_plans)
                if row not in chosen
                and named[row] in (None, index)
                and plan.depth(1) > 0
                and plan.nodes(1) > 0
            ]
            if not rows:
                continue
            self._open(index, [contexts[row] for row in rows], known)
            proposed = drafter.draft(
                [contexts[row] for row in rows],
                [known[contexts[row].request_id][index] for row in rows],
                [own_plans[row] for row in rows],
                [draws[row] for row in rows],
            )
            for row, draft in zip(rows, proposed, strict=True):
                # Model-free candidates are not random, so a small tree drops no draw.
                least = self._least_nodes(index) if named[row] is None else 1
                if draft.tree.num_nodes > least or draft.error is not None:
                    chosen[row] = index, draft
        return [
            self._joined(
                context,
                PoolState(tuple(known[context.request_id]), shadows=(*state.shadows, *own)),
                name,
                made,
            )
            for context, state, own, name, made in zip(
                contexts,
                states,
                shadows,
                named,
                (chosen.get(row) for row in range(len(contexts))),
                strict=True,
            )
        ]

    def observe(
        self,
        contexts: Sequence[Context],
        drafts: Sequence[Draft[PoolState]],
        verdicts: Sequence[Verdict],
    ) -> Sequence[PoolState]:
        states = [list(draft.state.states) for draft in drafts]
        for index, (_, drafter) in enumerate(self._places):
            rows = [
                row
                for row, context in enumerate(contexts)
                if index in self._opened[context.request_id]
            ]
            if rows:
                own = [drafts[row].state.own_draft(index, drafts[row]) for row in rows]
                new = drafter.observe(
                    [contexts[row] for row in rows], own, [verdicts[row] for row in rows]
                )
                for row, state in zip(rows, new, strict=True):
                    states[row][index] = state
        return [
            _followed(context, draft.state.shadows, tuple(own))
            for context, draft, own in zip(contexts, drafts, states, strict=True)
        ]

    def close(self, context: Context) -> None:
        for index in self._opened.pop(context.request_id, set()):
            self._places[index][1].close(context)

    @property
    def _reader(self) -> int | None:
        """Index of the first drafter whose network reads prompts."""
        networks = (
            index for index, (_, own) in enumerate(self._places) if own.capabilities.runs_network
        )
        return next(
            (index for index in networks if piece_reader(self._places[index][1]) is not None), None
        )

    def _index(self, name: str) -> int:
        if name not in self.drafters:
            raise unknown_name("drafter of the pool:", name, self.drafters)
        return list(self.drafters).index(name)

    def _named(self, context: Context, plan: DraftPlan) -> int | None:
        """Return the drafter that a plan names, unless its context has ended."""
        index = None if plan.drafter is None else self._index(plan.drafter)
        return None if index is None or not self._fits(index, context) else index

    def _fits(self, index: int, context: Context) -> bool:
        """Return whether a drafter can read the text, and a prompt of which this is a part."""
        length = self._lengths[index]
        size = max(len(context.token_ids), context.num_prompt_tokens)
        return length is None or size <= length

    def _least_nodes(self, index: int) -> int:
        can, is_last = self._places[index][1].capabilities, index == len(self._places) - 1
        is_bound = can.proposes <= {Deterministic} and not can.runs_network and not is_last
        return self.min_nodes if is_bound else 1

    def _own_plan(self, index: int, context: Context, plan: DraftPlan) -> DraftPlan:
        is_model_free = not self._places[index][1].capabilities.runs_network
        own = plan.for_model_free if is_model_free and plan.drafter is None else plan
        return own.reaching(len(context.token_ids), self._lengths[index])

    def _joined(
        self,
        context: Context,
        state: PoolState,
        named: int | None,
        made: tuple[int, Draft[Any]] | None,
    ) -> Draft[PoolState]:
        """Return the draft of the pool from the draft of one member."""
        if made is None:
            name = None if named is None else self._places[named][0]
            return Draft(root_only(context.token_ids[-1]), state, drafter=name)
        index, draft = made
        state = PoolState(state.states, index, draft, state.shadows)
        return Draft(draft.tree, state, draft.token_probs, self._places[index][0], draft.error)

    def _shadows(
        self, context: Context, states: Mapping[int, list[Any]], plan: DraftPlan
    ) -> tuple[ShadowDraft, ...]:
        """Return the shadow drafts of all model-free drafters if the plan names a drafter."""
        if plan.drafter is None:
            return ()
        trees: list[ShadowTree] = []
        for index, (name, drafter) in enumerate(self._places):
            if not drafter.capabilities.runs_network:
                self._open(index, [context], states)
                own = states[context.request_id]
                (draft,) = drafter.draft([context], [own[index]], [_OWN_LIMITS], [_NO_DRAWS])
                trees.append(ShadowTree(name, draft.tree))
        return (ShadowDraft(len(context.token_ids), tuple(trees)),) if trees else ()

    def _open(
        self, index: int, contexts: Sequence[Context], states: Mapping[int, list[Any]]
    ) -> None:
        """Open a drafter for new requests."""
        new = [
            context
            for context in contexts
            if index not in self._opened[context.request_id] and self._fits(index, context)
        ]
        if not new:
            return
        for context in new:  # noted first, so that it is closed if opening fails
            self._opened[context.request_id].add(index)
        for context, state in zip(new, self._places[index][1].open(new), strict=True):
            states[context.request_id][index] = state


def _check(drafters: Mapping[str, AnyDrafter]) -> None:
    """Refuse drafters that cannot form a pool; see `PoolDrafter`."""
    if not isinstance(drafters, Mapping) or len(drafters) < 2:
        raise OptionError(
            "pool: needs at least two drafters, as in pool('ngram', 'model'); use a single "
            "drafter by its own name"
        )
    nested = [name for name, drafter in drafters.items() if isinstance(drafter, DrafterPool)]
    if nested:
        raise OptionError(
            f"pool: drafter {nested[0]!r} is a pool itself; list its drafters instead"
        )


def _followed(
    context: Context, shadows: tuple[ShadowDraft, ...], states: tuple[Any, ...]
) -> PoolState:
    """Return the state after a commit; decided shadow drafts are reported in order."""
    walked = [one.after(context.token_ids) for one in shadows]
    decided = list(takewhile(lambda one: one.is_decided, walked))
    counterfactuals = tuple(entry for one in decided for entry in one.counterfactuals())
    return PoolState(states, shadows=tuple(walked[len(decided) :]), counterfactuals=counterfactuals)
