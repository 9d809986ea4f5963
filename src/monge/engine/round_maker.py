"""Whether the rounds of some parts can run as one, and who runs them then."""

import math
from dataclasses import replace
from typing import Final

from monge.control.base import CostModel
from monge.engine.apart import apart
from monge.engine.backends import BACKENDS, Backend
from monge.engine.costs import measure_whole
from monge.engine.hf import HfTreeModel
from monge.engine.parts import Parts
from monge.engine.whole_round import DEEPEST, WholeRound

_USUAL: Final = 3


def with_whole_rounds(parts: Parts, backend: str | Backend, draft_backend: str | Backend | None = None) -> Parts:
    """The parts, which run rounds of requests alone as one where drafts are chains and the backend has programs for that.

    Args:
        parts: The parts.
        backend: What runs the target.
        draft_backend: What runs the draft model, if it is not the same.
    """
    whole = _whole_round(parts, backend, draft_backend)
    made = parts if whole is None else replace(parts, whole_round=whole)
    if (costs := parts.memory.costs) is not None:
        _count(made, costs)
    return made


def _whole_round(parts: Parts, backend: str | Backend, draft_backend: str | Backend | None) -> WholeRound | None:
    chain, target, decision = parts.own_chain, parts.target, parts.on_chains
    if chain is None or decision is None or parts.num_successors or draft_backend not in (None, backend):
        return None
    # Controllers that plan windows of many depths come by the usual one often.
    depth = min(chain.depth, _USUAL) if parts.reads else chain.depth
    if depth > DEEPEST or not isinstance(target, HfTreeModel) or not isinstance(chain.model, HfTreeModel):
        return None
    chosen = BACKENDS.parse(backend) if isinstance(backend, str) else backend
    programs = chosen.round_programs(target, chain.model, depth, decision)
    return None if programs is None else WholeRound(target, chain.model, chain, decision, programs, depth=depth)


def _count(parts: Parts, costs: CostModel) -> None:
    """Let the table of costs know what such rounds take, and that there are none where it was kept by parts that had them."""
    whole = parts.whole_round
    if whole is None:
        costs.whole = None
    elif costs.learns and (costs.whole is None or costs.whole.depth != whole.depth):
        plain_rounds = apart(lambda: measure_whole(parts, whole.depth))
        if plain_rounds < math.inf:
            costs.note_whole(whole.depth, plain_rounds)
    if whole is not None and costs.whole is not None:
        costs.whole.longest_text = whole.longest_text
