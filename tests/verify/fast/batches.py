"""Batches of nodes of all widths and supports, for the batched twins."""

import numpy as np
import torch

from monge.core.draws import TapeDraws
from monge.core.law import DenseLaw, Law
from monge.core.proposal import Deterministic, Iid, Mixed, Proposal, WithoutReplacement
from monge.verify.base import NodeProblem
from monge.verify.fast.trials import Trials
from monge.verify.layer import FLOW_RULES
from monge.verify.trial_rule import TrialRule
from tests.verify.fast.test_twins import laws

VOCAB = 40
REGIMES = ("rough", "ties", "nearly equal", "equal", "peaked", "disjoint", "single token")


def law_of(masses: np.ndarray, is_dense: bool) -> Law:
    probs = torch.zeros(VOCAB, dtype=torch.float64)
    probs[: masses.size] = torch.from_numpy(masses / masses.sum())
    return DenseLaw(probs / probs.sum()) if is_dense else DenseLaw(probs).sparse()


def proposal_of(way: str, q: Law, width: int) -> Proposal:
    if way == "mixed":
        heavy = q.top(min(2, width))
        rest = q
        for token in heavy:
            left = rest.without(token)
            if left is None:
                return Deterministic(heavy)
            rest = left
        return Mixed(heavy, rest, width)
    return (
        WithoutReplacement(q, width)
        if way == "without_replacement"
        else Iid(q, 1 if way == "one" else width)
    )


def problems(regime: str, way: str) -> list[tuple[NodeProblem, TapeDraws]]:
    """Nodes of all widths and supports, dense and sparse.

    Each with its tape and another copy of it.
    """
    found = []
    for seed in range(24):
        p, q = laws(regime, seed)
        rng = np.random.default_rng(seed)
        proposal = proposal_of(way, law_of(q, seed % 2 == 0), 1 + seed % 5)
        candidates = proposal.draw(TapeDraws(rng.random(12).tolist()))
        tape = rng.random(30).tolist()
        draws = TapeDraws(tape)
        problem = NodeProblem(
            target_law=law_of(p, seed % 3 > 0),
            proposal=proposal,
            candidates=candidates,
            draws=draws,
        )
        found.append((problem, TapeDraws(tape)))
    return found


def random_trials(regime: str, way: str, device: str) -> Trials:
    """The tests of a recursive rejection at such nodes."""
    rule = FLOW_RULES.parse("rrs_without_replacement" if way == "without_replacement" else "rrs")
    assert isinstance(rule, TrialRule)
    trials = [
        trial for node, _ in problems(regime, way)[::3] if (trial := rule.trial(node)) is not None
    ]
    uniforms = [
        trial.draws.peek(len(trial.candidates))
        for trial in trials
        if isinstance(trial.draws, TapeDraws)
    ]
    on_cpu = Trials.of(trials, uniforms)
    return Trials(**{name: getattr(on_cpu, name).to(device) for name in Trials.__slots__})
