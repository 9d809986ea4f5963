"""How many nodes drafts have: trees differ from request to request, and from text to text."""

from collections.abc import Sequence
from itertools import accumulate

from monge.control.cost_table import OWN_RATE


class Nodes:
    """Drafted nodes by depth of the plan, which follow those that were seen; deeper drafts never have fewer.

    Args:
        counts: From depth 0 on; where they end, a chain goes on.
    """

    def __init__(self, counts: Sequence[int]) -> None:
        self.counts, self._means = tuple(counts), dict[int, float]()

    def at(self, depth: int) -> int:
        """Those of a plan of some depth."""
        if depth < len(self.counts):
            return self.counts[depth]
        return (self.counts[-1] - len(self.counts) + 1 if self.counts else 0) + depth

    def note(self, depth: int, num_nodes: int) -> bool:
        """A draft of this depth had so many; whether that changes the counts."""
        if depth >= len(self.counts):
            return False
        mean = self._means.get(depth, float(self.counts[depth]))
        self._means[depth] = mean = mean + OWN_RATE * (num_nodes - mean)
        if round(mean) == self.counts[depth]:
            return False
        before = self.counts
        changed = (round(mean) if level == depth else count for level, count in enumerate(before))
        self.counts = tuple(accumulate(changed, max))
        return self.counts != before
