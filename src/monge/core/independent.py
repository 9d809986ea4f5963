"""Independent draws, each from a law of its own."""

from dataclasses import dataclass

import torch

from monge.core.draws import Draws
from monge.core.errors import OptionError
from monge.core.law import Law, SparseLaw, sparse_part
from monge.core.proposal import Proposal


@dataclass(frozen=True, slots=True)
class Independent(Proposal):
    """One draw from each of `laws`, in their order, independent of each other; repeats are kept.

    The laws may come from different draft models, or from one model at different temperatures.
    Unlike i.i.d. draws they are not exchangeable: which candidate came from which law is part of
    the joint law.

    Args:
        laws: Draft laws, at least one; candidate k is drawn from `laws[k]`.
    """

    laws: tuple[Law, ...]

    def __post_init__(self) -> None:
        if not self.laws:
            raise OptionError(
                "Independent: give at least one draft law (no candidates at all is "
                "Deterministic(()))"
            )

    def draw(self, draws: Draws) -> tuple[int, ...]:
        return tuple(draws.categorical(law) for law in self.laws)


def tempered(law: Law, temperature: float | int) -> SparseLaw:
    """The law proportional to `q^(1 / temperature)`.

    Tokens whose mass underflows leave the support.

    Args:
        law: q.
        temperature: Above 0.
    """
    part = law.sparse()
    # Shifted first: a temperature of 1e-310 must give the point mass, not inf - inf.
    masses = torch.softmax((part.probs.log() - part.probs.max().log()) / temperature, dim=0)
    kept = masses > 0.0
    if bool(kept.all()):  # the tokens themselves, so that laws over them know each other
        return sparse_part(part.token_ids, masses)
    return SparseLaw(part.token_ids[kept], masses[kept])
