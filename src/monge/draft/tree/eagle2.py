"""EAGLE-2's dynamic tree."""

from dataclasses import dataclass

from monge.draft.tree.base import check_sizes
from monge.draft.tree.best_first import BestFirst


@dataclass(frozen=True, slots=True)
class Eagle2(BestFirst):
    """EAGLE-2's dynamic tree.

    `best_first` with the authors' sizes, and as many nodes read per level as candidates per node.

    Expansion reads the `width` most probable nodes of a level, re-ranking keeps the `num_nodes`
    best of all levels. A controller that limits the depth gives the depth adaptation that was put
    on top of it: the node count stays.

    Args:
        num_nodes: Drafted nodes (`total_token`).
        depth: Deepest node.
        width: Candidates per node, and nodes read per level (`top_k`).
        beam: Nodes read per level; 0 for `width`.

    Reference:
        EAGLE-2 (Li et al., arXiv 2406.16858), sizes of its public code.
    """

    num_nodes: int = 60
    depth: int = 7
    width: int = 10
    beam: int = 0

    def __post_init__(self) -> None:
        check_sizes(
            "eagle2",
            num_nodes=self.num_nodes,
            depth=self.depth,
            width=self.width,
            beam=self.beam or self.width,
        )
        object.__setattr__(self, "beam", self.beam or self.width)
