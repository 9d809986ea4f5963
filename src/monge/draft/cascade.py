"""Drafters in a fixed order; each round uses the first one with enough candidates."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from monge.core.context import Context, DraftPlan
from monge.core.draws import Draws
from monge.core.errors import OptionError
from monge.core.tree import root_only
from monge.core.verdict import Verdict
from monge.draft.base import AnyDrafter, Capabilities, Draft, Drafter
from monge.draft.pool import PoolDrafter, PoolState


@dataclass(frozen=True, slots=True)
class _Selective(Drafter[Any]):
    """A model-free drafter that drops small trees; its candidates are not random."""

    lookup: AnyDrafter
    min_nodes: int

    @property
    def capabilities(self) -> Capabilities:
        return self.lookup.capabilities

    def open(self, contexts: Sequence[Context]) -> Sequence[Any]:
        return self.lookup.open(contexts)

    def draft(
        self, contexts: Sequence[Context], states: Sequence[Any], plans: Sequence[DraftPlan], draws: Sequence[Draws]
    ) -> Sequence[Draft[Any]]:
        return [
            draft if draft.tree.num_nodes > self.min_nodes else replace(draft, tree=root_only(context.token_ids[-1]))
            for context, draft in zip(contexts, self.lookup.draft(contexts, states, plans, draws), strict=True)
        ]

    def observe(self, contexts: Sequence[Context], drafts: Sequence[Draft[Any]], verdicts: Sequence[Verdict]) -> Sequence[Any]:
        return self.lookup.observe(contexts, drafts, verdicts)

    def close(self, context: Context) -> None:
        self.lookup.close(context)


@dataclass(frozen=True, slots=True, kw_only=True)
class CascadeDrafter(Drafter[PoolState]):
    """Drafters in a fixed order: the first one with enough candidates drafts.

    A model-free drafter needs `min_nodes` candidates, except the last one; any other drafter needs
    one. The choice depends on the committed text and finished rounds, and on nothing that the round
    draws.

    Args:
        drafters: Names and drafters in order; at least two.
        min_nodes: Fewest candidates of a model-free drafter.

    Raises:
        OptionError: If there are fewer than two, one is a pool or a cascade, or `min_nodes` is below 1.

    Reference:
        The hybrid of SuffixDecoding (Oliaro et al., arXiv 2411.04975): a lookup with a long match,
        else a model.
    """

    drafters: Mapping[str, AnyDrafter]
    min_nodes: int = 1
    _pool: PoolDrafter = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not isinstance(self.drafters, Mapping) or len(self.drafters) < 2:
            raise OptionError(
                "cascade: needs at least two drafters, as in cascade('ngram', 'model'); use a single drafter by its own name"
            )
        if self.min_nodes < 1:
            raise OptionError(f"cascade: min_nodes must be at least 1; got {self.min_nodes}")
        nested = [name for name, drafter in self.drafters.items() if isinstance(drafter, CascadeDrafter)]
        if nested:
            raise OptionError(f"cascade: drafter {nested[0]!r} is a cascade itself; list its drafters instead")
        members = dict(self.drafters)
        for name in list(members)[:-1]:
            if not members[name].capabilities.runs_network:
                members[name] = _Selective(members[name], self.min_nodes)
        object.__setattr__(self, "_pool", PoolDrafter(drafters=members))

    @property
    def capabilities(self) -> Capabilities:
        return self._pool.capabilities

    def open(self, contexts: Sequence[Context]) -> Sequence[PoolState]:
        return self._pool.open(contexts)

    def draft(
        self,
        contexts: Sequence[Context],
        states: Sequence[PoolState],
        plans: Sequence[DraftPlan],
        draws: Sequence[Draws],
    ) -> Sequence[Draft[PoolState]]:
        return self._pool.draft(contexts, states, [replace(plan, drafter=None) for plan in plans], draws)

    def observe(
        self, contexts: Sequence[Context], drafts: Sequence[Draft[PoolState]], verdicts: Sequence[Verdict]
    ) -> Sequence[PoolState]:
        return self._pool.observe(contexts, drafts, verdicts)

    def close(self, context: Context) -> None:
        self._pool.close(context)
