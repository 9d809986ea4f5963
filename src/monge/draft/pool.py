"""Several drafters; each round of a request uses a single drafter."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Final

from monge.core.context import Context, DraftPlan
from monge.core.errors import OptionError, unknown_name
from monge.core.selection import CounterfactualDraft, Member
from monge.core.setting_types import check_bounds
from monge.core.verdict import Verdict
from monge.draft.base import (
    AnyDraft,
    AnyDrafter,
    Capabilities,
    ChunkedPrefill,
    Draft,
    DrafterPool,
    chunked_prefill,
)
from monge.draft.registry import DRAFTERS
from monge.laws.draws import Draws, TapeDraws
from monge.laws.proposal import Deterministic
from monge.laws.tree import TokenTree, root_only

# Model-free drafters propose deterministic candidates, which draw nothing.
_NO_DRAWS: Final = TapeDraws(())


@dataclass(frozen=True, slots=True)
class ShadowDraft:
    """A tree of deterministic candidates that is not verified but compared with the text.

    Args:
        drafter: Name of its drafter.
        position: Tokens of the text before its round.
        tree: The tree.
    """

    drafter: str
    position: int
    tree: TokenTree

    def result(self, text: Sequence[int]) -> CounterfactualDraft | None:
        """Return what of the tree the text followed, or `None` if a longer text may follow more."""
        tree, node, factors = self.tree, 0, list[float]()
        for token in text[self.position :]:
            children = {tree.token_ids[child]: child for child in tree.candidates[node]}
            if not children or factors[-1:] == [0.0]:
                break
            factors.append(float(token in children))
            node = children.get(token, node)
        if tree.candidates[node] and factors[-1:] != [0.0]:
            return None
        return CounterfactualDraft(
            drafter=self.drafter,
            position=self.position,
            num_nodes=tree.num_nodes - 1,
            factors=tuple(factors),
        )


@dataclass(frozen=True, slots=True)
class PoolState:
    """State of a request.

    Args:
        states: States of the drafters; `None` for a drafter that has not been opened.
        shadows: Shadow drafts of earlier rounds that the text has not decided yet.
        counterfactuals: Results of shadow drafts that the text of the last round decided.
    """

    states: tuple[Any, ...]
    shadows: tuple[ShadowDraft, ...] = ()
    counterfactuals: tuple[CounterfactualDraft, ...] = ()


@dataclass(frozen=True, init=False)
class Pool(DrafterPool[PoolState], ChunkedPrefill[PoolState]):
    """Several drafters; a round uses the drafter that its plan names, else the first with a proposal.

    The choice depends on the plan and on committed text only, so every verifier stays exact. A
    drafter whose context has ended is passed over, also where the plan names it. All
    open drafters observe every commit. The first drafter with a network reads prompts at once,
    unless the controller postpones it. Other drafters with a network are opened at their first use.

    If a plan names a drafter, each model-free drafter makes a *shadow draft*: a tree that is not
    verified. When the committed text has decided it, the record of the round says how much would
    have been accepted (`StepRecord.counterfactuals`).

    Args:
        *drafters: The drafters, objects or texts; at least two.
        min_nodes: Fewest drafted nodes with which a model-free drafter is used if the plan names no
            drafter; the last drafter is used with any.

    Raises:
        OptionError: If there are fewer than two drafters, two are equal, a drafter is a pool, or
            `min_nodes` is below 1.

    Attributes:
        drafters: The drafters by the names that plans use: that of the drafter, or its whole text
            if another has the same name.

    Reference:
        A lookup that falls back to a model: SuffixDecoding (Oliaro et al., arXiv 2411.04975);
        all drafters are judged on the verified text: HedgeSpec, arXiv 2510.20064.
    """

    drafters: Mapping[str, AnyDrafter] = field(init=False)
    min_nodes: int = 1
    _opened: dict[int, set[int]] = field(init=False, repr=False, compare=False)

    def __init__(self, *drafters: AnyDrafter | str, min_nodes: int = 1) -> None:
        every = [DRAFTERS.of(drafter) for drafter in drafters]
        if any(isinstance(drafter, DrafterPool) for drafter in every):
            raise OptionError("pool: a pool cannot be in a pool; list its drafters instead")
        texts = [repr(drafter) for drafter in every]
        names = [text.partition("(")[0] for text in texts]
        labels = [
            text if names.count(name) > 1 else name for name, text in zip(names, texts, strict=True)
        ]
        if len(every) < 2 or len(set(labels)) < len(every):
            raise OptionError(
                "pool: give at least two different drafters, as in pool(ngram, model) or "
                f"pool(ngram(max_ngram=5), suffix, none); got {', '.join(texts) or 'none'}"
            )
        check_bounds("pool", min_nodes=min_nodes)
        object.__setattr__(self, "drafters", dict(zip(labels, every, strict=True)))
        object.__setattr__(self, "min_nodes", min_nodes)
        object.__setattr__(self, "_opened", {})

    def __repr__(self) -> str:
        settings = [f"min_nodes={self.min_nodes}"] if self.min_nodes != 1 else []
        return f"pool({', '.join([*map(repr, self._all), *settings])})"

    @cached_property
    def _all(self) -> tuple[AnyDrafter, ...]:
        return tuple(self.drafters.values())

    @cached_property
    def _can(self) -> tuple[Capabilities, ...]:
        """Capabilities of the drafters, which need their networks for them."""
        return tuple(member.capabilities for member in self._all)

    @cached_property
    def _readers(self) -> list[int]:
        """Indices of the drafters whose networks read prompts in chunks."""
        return [index for index in self._networks if chunked_prefill(self._all[index]) is not None]

    @property
    def capabilities(self) -> Capabilities:
        every = self._can
        return Capabilities(
            proposes=frozenset().union(*(can.proposes for can in every)),
            max_width=_largest(can.max_width for can in every),
            max_depth=max(can.max_depth for can in every),
            needs_trees=any(can.needs_trees for can in every),
            max_nodes=_largest(can.max_nodes for can in every),
            max_length=_largest(can.max_length for can in every),
            num_parameters=sum(can.num_parameters for can in every),
            num_bytes=sum(can.num_bytes for can in every),
            bytes_per_token=sum(can.bytes_per_token for can in every),
            reads_states=any(can.reads_states for can in every),
            runs_network=any(can.runs_network for can in every),
            reads_others=any(can.reads_others for can in every),
        )

    @property
    def members(self) -> tuple[Member, ...]:
        return tuple(
            Member(
                name=name,
                max_depth=can.max_depth,
                runs_network=can.runs_network,
                max_length=can.max_length,
            )
            for name, can in zip(self.drafters, self._can, strict=True)
        )

    @property
    def prefills_in_chunks(self) -> bool:
        return bool(self._readers) and len(self._readers) == len(self._networks)

    def counterfactuals(self, state: PoolState) -> tuple[CounterfactualDraft, ...]:
        return state.counterfactuals

    def open(self, contexts: Sequence[Context]) -> Sequence[PoolState]:
        for context in contexts:
            self._opened[context.request_id] = set()
        rows = [(context, list[Any]([None] * len(self._all))) for context in contexts]
        # Model-free drafters need whole prompts: chunked prompts open them at the first draft.
        whole = [row for row in rows if len(row[0].token_ids) >= row[0].num_prompt_tokens]
        for index in range(len(self._all)):
            if index not in self._readers[1:]:
                self._open(index, rows if index in self._readers else whole)
        return [PoolState(tuple(states)) for _, states in rows]

    def read(self, contexts: Sequence[Context]) -> None:
        for index in self._readers[:1]:
            reader = chunked_prefill(self._all[index])
            fitting = [context for context in contexts if self._fits(index, context)]
            if reader is not None and fitting:
                reader.read(fitting)

    def draft(
        self,
        contexts: Sequence[Context],
        states: Sequence[PoolState],
        plans: Sequence[DraftPlan],
        draws: Sequence[Draws],
    ) -> Sequence[AnyDraft[PoolState]]:
        rows, known = range(len(contexts)), [list(state.states) for state in states]
        named = [self._named(contexts[row], plans[row]) for row in rows]
        # Before anything is drawn, so that an error of a model-free drafter does not fail the round.
        shadows = [
            self._shadows(contexts[row], known[row]) if plans[row].drafter is not None else ()
            for row in rows
        ]
        chosen: dict[int, AnyDraft[Any]] = {}
        for index, (name, drafter) in enumerate(self.drafters.items()):
            free = [row for row in rows if row not in chosen and named[row] in {None, index}]
            own_plans = {row: self._own_plan(index, contexts[row], plans[row]) for row in free}
            own_plans = {
                row: plan for row, plan in own_plans.items() if plan.nodes(plan.depth(1)) > 0
            }
            if not own_plans:
                continue
            self._open(index, [(contexts[row], known[row]) for row in own_plans])
            proposed = drafter.draft(
                [contexts[row] for row in own_plans],
                [known[row][index] for row in own_plans],
                list(own_plans.values()),
                [draws[row] for row in own_plans],
            )
            for row, draft in zip(own_plans, proposed, strict=True):
                # Model-free candidates are not random, so a small tree drops no draw.
                least = self._least_nodes(index) if named[row] is None else 1
                if draft.tree.num_nodes > least:
                    known[row][index] = draft.state
                    chosen[row] = replace(draft, drafter=name)
        drafts: list[AnyDraft[PoolState]] = []
        for row, context in enumerate(contexts):
            name = None if named[row] is None else plans[row].drafter
            nothing: Draft[Any] = Draft(root_only(context.token_ids[-1]), None, drafter=name)
            waiting = (*states[row].shadows, *shadows[row])
            state = PoolState(tuple(known[row]), waiting)
            drafts.append(replace(chosen.get(row, nothing), state=state))
        return drafts

    def observe(
        self,
        contexts: Sequence[Context],
        drafts: Sequence[Draft[PoolState]],
        verdicts: Sequence[Verdict],
    ) -> Sequence[PoolState]:
        states = [list(draft.state.states) for draft in drafts]
        for index, drafter in enumerate(self._all):
            rows = [
                row
                for row, context in enumerate(contexts)
                if index in self._opened[context.request_id]
            ]
            if rows:
                new = drafter.observe(
                    [contexts[row] for row in rows],
                    [replace(drafts[row], state=states[row][index]) for row in rows],
                    [verdicts[row] for row in rows],
                )
                for row, state in zip(rows, new, strict=True):
                    states[row][index] = state
        return [
            _settled(tuple(row_states), draft.state.shadows, context.token_ids)
            for context, draft, row_states in zip(contexts, drafts, states, strict=True)
        ]

    def close(self, context: Context) -> None:
        for index in self._opened.pop(context.request_id, set()):
            self._all[index].close(context)

    @property
    def _networks(self) -> list[int]:
        return [index for index, can in enumerate(self._can) if can.runs_network]

    def _named(self, context: Context, plan: DraftPlan) -> int | None:
        """Return the drafter that a plan names, unless its context has ended."""
        if plan.drafter is None:
            return None
        if plan.drafter not in self.drafters:
            raise unknown_name("drafter of the pool:", plan.drafter, self.drafters)
        index = list(self.drafters).index(plan.drafter)
        return index if self._fits(index, context) else None

    def _fits(self, index: int, context: Context) -> bool:
        """Return whether a drafter can read the text, and a prompt of which this is a part."""
        length = self._can[index].max_length
        return length is None or max(len(context.token_ids), context.num_prompt_tokens) <= length

    def _least_nodes(self, index: int) -> int:
        can, is_last = self._can[index], index == len(self._all) - 1
        is_bound = can.proposes <= {Deterministic} and not can.runs_network and not is_last
        return self.min_nodes if is_bound else 1

    def _own_plan(self, index: int, context: Context, plan: DraftPlan) -> DraftPlan:
        can = self._can[index]
        member_plan = plan if can.runs_network or plan.drafter is not None else plan.for_model_free
        return member_plan.reaching(len(context.token_ids), can.max_length)

    def _shadows(self, context: Context, states: list[Any]) -> tuple[ShadowDraft, ...]:
        """Return the shadow drafts of all model-free drafters."""
        shadows: list[ShadowDraft] = []
        for index, (name, drafter) in enumerate(self.drafters.items()):
            if not self._can[index].runs_network:
                self._open(index, [(context, states)])
                (draft,) = drafter.draft([context], [states[index]], [DraftPlan()], [_NO_DRAWS])
                shadows.append(ShadowDraft(name, len(context.token_ids), draft.result().tree))
        return tuple(shadows)

    def _open(self, index: int, rows: Sequence[tuple[Context, list[Any]]]) -> None:
        """Open a drafter for requests that are new to it, and note their states."""
        new = [
            (context, states)
            for context, states in rows
            if index not in self._opened[context.request_id] and self._fits(index, context)
        ]
        if not new:
            return
        for context, _ in new:  # noted first, so that it is closed if opening fails
            self._opened[context.request_id].add(index)
        opened = self._all[index].open([context for context, _ in new])
        for (_, states), state in zip(new, opened, strict=True):
            states[index] = state


def _settled(
    states: tuple[Any, ...], shadows: Sequence[ShadowDraft], text: Sequence[int]
) -> PoolState:
    """Return the state after a commit; a round's shadow drafts are reported together."""
    results = [(shadow, shadow.result(text)) for shadow in shadows]
    first_open = min(
        (shadow.position for shadow, outcome in results if outcome is None), default=len(text)
    )
    return PoolState(
        states,
        shadows=tuple(shadow for shadow in shadows if shadow.position >= first_open),
        counterfactuals=tuple(
            outcome
            for shadow, outcome in results
            if outcome is not None and shadow.position < first_open
        ),
    )


def _largest(limits: Iterable[int | None]) -> int | None:
    """Return the largest limit, or `None` if a limit is unbounded."""
    known = tuple(limits)
    return None if None in known else max(limit or 0 for limit in known)
