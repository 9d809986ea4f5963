"""The drafters of a pool as alternatives, with their costs and shared states."""

from collections.abc import Sequence
from dataclasses import dataclass

from monge.control.base import latency_of
from monge.control.latency import Latency
from monge.control.shared import SharedState
from monge.core.errors import OptionError
from monge.core.selection import Member


@dataclass(frozen=True, slots=True)
class Arms:
    """The alternatives of one request.

    Args:
        members: The drafters.
        shared: Shared state of each drafter's window controller; its latency counts this drafter's drafting only.
        latency: The decoder's latency.
    """

    members: tuple[Member, ...]
    shared: tuple[SharedState, ...]
    latency: Latency

    @classmethod
    def of(cls, shared: SharedState, name: str) -> "Arms":
        """The alternatives of a decoder.

        Raises:
            OptionError: If there is no latency, or the drafter is not a pool.
        """
        latency = latency_of(shared, name)
        if not shared.members:
            raise OptionError(
                f"controller {name!r} chooses between drafters and there is only one; use drafter=\"pool('ngram', 'model')\", "
                "or a controller that plans windows"
            )
        key = f"{name} arms"
        if key not in shared.notes:
            shared.notes[key] = tuple(
                SharedState(latency.of(member.name) if member.runs_network else latency.without_drafting())
                for member in shared.members
            )
        return cls(shared.members, shared.notes[key], latency)

    @property
    def names(self) -> Sequence[str]:
        """The drafters' names."""
        return [member.name for member in self.members]

    def seconds(self, arm: int, num_nodes: int, depth: int, *, batch_size: int, context_length: int | None) -> float:
        """Predicted seconds of a round that one drafter drafts."""
        member = self.members[arm]
        drafting = latency_of(self.shared[arm], member.name).draft_s(depth, batch_size) if member.runs_network else 0.0
        return self.latency.verify_s(num_nodes, batch_size, context_length) + drafting
