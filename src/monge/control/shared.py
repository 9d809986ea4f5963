"""What the requests of one decoder share."""

from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

from monge.control.latency import Latency
from monge.core.selection import Member


@dataclass(slots=True)
class SharedState:
    """State of a decoder that outlives its requests.

    The engine corrects `latency` after every round. `notes` belong to the controllers, one entry each. A controller that reads
    neither plans for a request as if it were alone, so that equal seeds give equal texts whatever the neighbours. One that
    reads them keeps the *distribution* of every request's text, but not the text of a seed.

    Args:
        latency: Measured times; `None` where no controller reads them.
        notes: What controllers keep across requests, by name.
        members: The drafters of the decoder's pool, in its order; empty where there is no pool.
    """

    latency: Latency | None = None
    notes: dict[str, Any] = field(default_factory=dict[str, Any])
    members: tuple[Member, ...] = ()

    def beside(self, name: str) -> "SharedState":
        """Shared state of a further controller of the same decoder: the same latency and drafters, its own notes.

        Args:
            name: Name of the controller; equal names share notes.
        """
        return SharedState(self.latency, self.notes.setdefault(f"controller {name}", {}), self.members)

    @property
    def model_free(self) -> frozenset[str | None]:
        """Names of the pool's drafters that run no network and come before one that does."""
        names = [member.name for member in takewhile(lambda member: not member.runs_network, self.members)]
        return frozenset(names if len(names) < len(self.members) else ())
