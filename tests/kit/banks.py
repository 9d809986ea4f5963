"""Pairs of a target and a draft law, on which wrong rules are told from right ones."""

from abc import abstractmethod
from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Float64

from monge.laws.draws import Draws
from monge.laws.law import DenseLaw, Law
from monge.laws.proposal import Iid, Proposal
from monge.oracle.tabular import RandomTable
from monge.verify.base import NodeRule


class OfIid(NodeRule):
    """A rule for independent draws."""

    accepts = frozenset[type[Proposal]]({Iid})

    @abstractmethod
    def decide(self, target: Law, draft: Law, candidates: Sequence[int], draws: Draws) -> int:
        """Emit the next token."""

    def emit(self, target_law, proposal, candidates, draws):
        assert isinstance(proposal, Iid)
        return self.decide(target_law, proposal.law, candidates, draws)


def bank(size: int = 40, vocab: int = 4) -> list[tuple[DenseLaw, DenseLaw]]:
    """Pairs of a target and a draft law: a wrong rule may be right on some of them."""
    return [(_random(vocab, seed), _random(vocab, 1000 + seed)) for seed in range(size)]


def certain_bank(size: int = 40, vocab: int = 4) -> list[tuple[DenseLaw, DenseLaw]]:
    """Pairs in which the target gives 0.9995 to the draft law's most probable token."""
    pairs: list[tuple[DenseLaw, DenseLaw]] = []
    for p, q in bank(size, vocab):
        hub = int(q.probs.argmax())
        masses = p.probs.numpy().copy()
        masses[hub] = 0.0
        masses *= 5e-4 / masses.sum()
        masses[hub] = 0.9995
        pairs.append((law_of(masses), q))
    return pairs


def near_bank(size: int = 40, vocab: int = 4) -> list[tuple[DenseLaw, DenseLaw]]:
    """Pairs whose draft law has a little too much at the target's most probable token."""
    pairs: list[tuple[DenseLaw, DenseLaw]] = []
    for p, _ in bank(size, vocab):
        masses = 0.999 * masses_of(p)
        masses[int(p.probs.argmax())] += 0.001
        pairs.append((p, law_of(masses)))
    return pairs


def _random(vocab: int, seed: int) -> DenseLaw:
    return law_of(np.array(RandomTable(vocab, seed)(())))


def masses_of(law: Law) -> Float64[np.ndarray, " vocab"]:
    """The masses of a dense law."""
    assert isinstance(law, DenseLaw)
    return law.probs.numpy()


def law_of(weights: np.ndarray) -> DenseLaw:
    """The law of these weights, `[vocab]`."""
    return DenseLaw(torch.from_numpy(weights / weights.sum()))
