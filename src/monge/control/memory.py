"""What the requests of one decoder share."""

from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

from monge.control.cost_model import CostModel
from monge.core.selection import Member


@dataclass(slots=True)
class Memory:
    """What outlives a request: the cost of rounds, and what a controller noted.

    One object per decoder, handed to `Controller.init` for every request. The engine corrects `costs` after every round,
    `notes` belong to the controller, under its own names. A controller that reads neither decides for a request as if it were
    alone, so equal seeds give equal texts whatever the neighbours; one that does keeps every request's *law*, but not its
    draws.

    Args:
        costs: Measured times; `None` where no controller asked for them.
        notes: What a controller keeps across requests.
        members: The drafters of the decoder's pool, in its order; empty where there is no pool.
    """

    costs: CostModel | None = None
    notes: dict[str, Any] = field(default_factory=dict[str, Any])
    members: tuple[Member, ...] = ()

    def beside(self, name: str) -> "Memory":
        """What a further controller of the same decoder knows: these costs and drafters, and notes of its own.

        Args:
            name: Of the controller; equal names share notes.
        """
        return Memory(self.costs, self.notes.setdefault(f"controller {name}", {}), self.members)

    @property
    def lookups(self) -> frozenset[str | None]:
        """Names of the pool's drafters that run no network and come before one that does, so that they may draft first."""
        names = [member.name for member in takewhile(lambda member: not member.runs_network, self.members)]
        return frozenset(names if len(names) < len(self.members) else ())
