"""The drafters of a pool as alternatives: what each costs, and the memory that its own window controller gets."""

from collections.abc import Sequence
from dataclasses import dataclass

from monge.control.base import CostModel, Memory, costs_of
from monge.core.errors import OptionError
from monge.core.selection import Member


@dataclass(frozen=True, slots=True)
class Arms:
    """The alternatives of one request.

    Args:
        members: The drafters.
        memories: What the window controller of each knows; costs of its own drafting, none for lookups.
        costs: The decoder's table.
    """

    members: tuple[Member, ...]
    memories: tuple[Memory, ...]
    costs: CostModel

    @classmethod
    def of(cls, memory: Memory, name: str) -> "Arms":
        """The alternatives of a decoder.

        Raises:
            OptionError: If there are no costs, or the drafter is not a pool.
        """
        costs = costs_of(memory, name)
        if not memory.members:
            raise OptionError(
                f"controller {name!r} chooses between drafters and there is only one; use drafter=\"pool('ngram', 'model')\", "
                "or a controller that plans windows"
            )
        key = f"{name} arms"
        if key not in memory.notes:
            memory.notes[key] = tuple(
                Memory(costs.of(member.name) if member.runs_network else costs.without_drafting()) for member in memory.members
            )
        return cls(memory.members, memory.notes[key], costs)

    @property
    def names(self) -> Sequence[str]:
        """The drafters' names."""
        return [member.name for member in self.members]

    def follow(self) -> None:
        """Tell the drafters' own costs which batch and text the table was last asked about."""
        for memory in self.memories:
            if memory.costs is not None and memory.costs is not self.costs:
                memory.costs.batch_size, memory.costs.context_length = self.costs.batch_size, self.costs.context_length
                memory.costs.catch_up_s = self.costs.catch_up_s

    def seconds(self, arm: int, num_nodes: int, depth: int, position: int | None) -> float:
        """Predicted seconds of a round that an alternative drafts."""
        drafts = self.members[arm].runs_network and depth > 0
        drafting = costs_of(self.memories[arm], self.members[arm].name).draft_s(depth, self.costs.batch_size) if drafts else 0.0
        return self.costs.verify_s(num_nodes, self.costs.batch_size, position) + drafting
