"""The list of the ways in which candidates can be drawn."""

from typing import Final

from monge.core.clocks import SharedClocks
from monge.core.proposal import (
    Arbitrary,
    Deterministic,
    Iid,
    Independent,
    Mixed,
    Proposal,
    WithoutReplacement,
)

PROPOSALS: Final[tuple[type[Proposal], ...]] = (
    *(Deterministic, Iid, Independent, WithoutReplacement, Mixed, SharedClocks, Arbitrary),
)
