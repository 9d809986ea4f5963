"""Acceptance of one node over logged laws, in closed form or by running the rule with seeds."""

import math
from collections import defaultdict
from dataclasses import asdict
from typing import Any, Final

import numpy as np
import torch

from lab.acceptance.log import LawLog, LoggedNode, seeded
from monge.bench.resamples import Resamples
from monge.laws.draws import Draws
from monge.laws.law import DenseLaw
from monge.laws.proposal import Proposal
from monge.oracle.acceptance import legal_schemes, usual_scheme
from monge.oracle.schemes import closed_form, optimum, recursion_calls, sampling_schemes
from monge.verify.base import NodeRule
from monge.verify.flow import Flow, FlowRule
from monge.verify.problem import NodeProblem
from monge.verify.registry import VERIFIERS

OPTIMUM: Final = "optimum"
WALK: Final = "sample_and_match"
MAX_CALLS: Final = 100
"""Most calls of the recursion over rejected tokens at one node of many: milliseconds."""

Values = dict[tuple[str, str, str], list[float]]
"""By drafting, rule and method: one value a node."""


def node_records(
    log: LawLog, width: int, resamples: Resamples, *, samples: int, seed: int
) -> list[dict[str, Any]]:
    """Mean acceptance over the nodes of a log, by drafting and rule, with the mean distance to the optimum.

    Args:
        log: Logged laws.
        width: Number of candidates K.
        resamples: For the intervals.
        samples: Runs a node of rules without a closed form.
        seed: Of these runs.

    Returns:
        Records with `temperature`, `candidates`, `drafting`, `rule` (`optimum` for the largest
        acceptance), `is_usual` (the drafting that the rule is made for), `how`, and `acceptance`
        and `gap` as mean, low and high.
    """
    values: Values = defaultdict(list)
    usual: dict[str, str | None] = {}
    for number, node in enumerate(log.nodes):
        draws = seeded(seed, "node", log.temperature, width, number)
        for key, value in _at(node, width, usual, samples, draws).items():
            values[key].append(value)
    texts = np.array([node.text for node in log.nodes], dtype=np.int64)
    best = {
        drafting: np.array(found)
        for (drafting, rule, _), found in values.items()
        if rule == OPTIMUM
    }
    records: list[dict[str, Any]] = []
    for (drafting, rule, how), found in values.items():
        # Not known at every node: a mean over the others would compare unequal sets.
        if len(found) < len(log.nodes):
            continue
        array = np.array(found)
        gaps = best.get(drafting)
        is_complete = gaps is not None and gaps.size == array.size
        records.append(
            {
                "temperature": log.temperature,
                "candidates": width,
                "drafting": drafting,
                "rule": rule,
                "is_usual": usual.get(rule) == drafting,
                "how": how,
                "num_nodes": len(found),
                "acceptance": asdict(resamples.estimate(array, texts)),
                "gap": asdict(resamples.estimate(gaps - array, texts))
                if is_complete and gaps is not None
                else None,
            }
        )
    return records


def _at(
    node: LoggedNode, width: int, usual: dict[str, str | None], samples: int, draws: Draws
) -> dict[tuple[str, str, str], float]:
    """Everything about one node."""
    found: dict[tuple[str, str, str], float] = {}
    schemes = sampling_schemes(node.q, width)
    for way, proposal in schemes.items():
        best = optimum(node.p, proposal)
        if best is not None:
            found[way, OPTIMUM, "closed form"] = best
    target = DenseLaw(torch.from_numpy(node.p))
    # Of top tokens alone every rule accepts p of them.
    del schemes["top"]
    for name in VERIFIERS:
        legal = legal_schemes(VERIFIERS.make(name), schemes)
        usual.setdefault(name, usual_scheme(VERIFIERS.make(name), legal))
        for way, proposal in legal.items():
            is_slow = recursion_calls(proposal) > MAX_CALLS
            value = None if is_slow and name != WALK else closed_form(name, node.p, proposal)
            if value is not None:
                found[way, name, "closed form"] = value
            elif way == usual[name]:
                mean = _estimated(name, target, proposal, samples, draws)
                found |= {} if mean is None else {(way, name, "sampled"): mean}
    return found


def _estimated(
    name: str, target: DenseLaw, proposal: Proposal, samples: int, draws: Draws
) -> float | None:
    """Mean over a few drawings of the candidates.

    Given these, a rule with a flow says its acceptance exactly.

    Whole-tree rules are left out: on one node each is a node rule that has its own row.
    """
    rule = VERIFIERS.make(name)
    if not isinstance(rule, NodeRule) or samples == 0:
        return None
    total = 0.0
    for _ in range(samples):
        candidates = proposal.draw(draws)
        if isinstance(rule, FlowRule):
            total += _given(rule, target, proposal, candidates, draws)
        else:
            total += rule.emit(target, proposal, candidates, draws) in candidates
    return total / samples


def _given(
    rule: FlowRule, target: DenseLaw, proposal: Proposal, candidates: tuple[int, ...], draws: Draws
) -> float:
    """P(the emitted token is a candidate | candidates): accepted, or hit by the residual."""
    problem = NodeProblem(
        target_law=target, scale=1.0, proposal=proposal, candidates=candidates, draws=draws
    )
    flow = rule.flow(problem)
    accepted = math.fsum(flow.accept_probs.values())
    if not isinstance(flow, Flow):
        return accepted
    residual = target.probs.clone()
    residual[flow.token_ids] -= flow.masses
    left = float(residual.sum())
    hit = float(residual[sorted(set(candidates))].sum())
    # Nothing left: the flow accepts all of p, and no tuple is ever rejected.
    return accepted + (1.0 - accepted) * hit / left if left > 0.0 else accepted
