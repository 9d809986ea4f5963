"""The drafters of a pool as alternatives, with their costs and shared states."""

from collections.abc import Sequence
from dataclasses import dataclass

from monge.control.base import SharedState, latency_of
from monge.core.errors import OptionError
from monge.core.selection import Member


@dataclass(frozen=True, slots=True)
class Arms:
    """The alternatives of one request.

    Args:
        members: The drafters.
        shared: Shared state of each drafter's window controller, with the latency of this drafter's
            rounds.
    """

    members: tuple[Member, ...]
    shared: tuple[SharedState, ...]

    @classmethod
    def of(cls, shared: SharedState, name: str) -> "Arms":
        """The alternatives of a decoder.

        Raises:
            OptionError: If there is no latency, or the drafter is not a pool.
        """
        latency = latency_of(shared, name)
        if not shared.members:
            raise OptionError(
                f"controller {name!r} chooses between drafters and there is only one; use "
                "drafter=\"pool('ngram', 'model')\", "
                "or a controller that plans windows"
            )
        key = f"{name} arms"
        if key not in shared.notes:
            shared.notes[key] = tuple(
                SharedState(
                    latency.of(member.name, runs_network=member.runs_network),
                    max_depth=member.max_depth,
                )
                for member in shared.members
            )
        return cls(shared.members, shared.notes[key])

    @property
    def names(self) -> Sequence[str]:
        """The drafters' names."""
        return [member.name for member in self.members]

    def seconds(self, arm: int, depth: int, batch_size: int) -> float:
        """Return the predicted seconds of a round that one drafter drafts."""
        return latency_of(self.shared[arm], self.names[arm]).round_s(depth, batch_size)
