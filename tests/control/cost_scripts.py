"""Rounds and tables of costs that were never measured."""

from monge.control.cost_model import CostModel
from monge.core.verdict import RoundKind, RoundTiming


def timing(nodes: int, rest_s: float, *, depth: int = 0, draft_s: float = 0.0, batch: int = 1, context: int = 0) -> RoundTiming:
    return RoundTiming(num_nodes=nodes, depth=depth, batch_size=batch, context_length=context, draft_s=draft_s, rest_s=rest_s)


def table(**settings: object) -> CostModel:
    given_settings = {"verify_s": {1: {0: 1.0, 4: 1.4, 8: 2.2}}, "draft_s": {1: {0: 0.0, 4: 0.4}}, **settings}
    return CostModel(**given_settings)  # type: ignore[arg-type]


def kind(*drafters: str | None, as_one: bool = False, runs_network: bool = True, num_before: int = 99) -> RoundKind:
    """Of a round of a request that is no longer new."""
    return RoundKind(frozenset(drafters), as_one, runs_network and bool(drafters), num_before)


def meet(costs: CostModel, *rounds: RoundTiming) -> None:
    """Tell a table of finished rounds, each a second after the one before, and let it learn from those that it asks for."""
    for one in rounds:
        met = kind(one.drafter, runs_network=one.depth > 0) if one.num_nodes else kind()
        if costs.is_due(met, 1.0):
            costs.observe(one)
