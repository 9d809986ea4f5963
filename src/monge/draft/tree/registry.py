"""The trees by name."""

from typing import Final

from monge.core.registry import Registry
from monge.draft.tree.base import TreeBuilder
from monge.draft.tree.best_first import BestFirst, Eagle2, OptTree, Threshold
from monge.draft.tree.fixed_width import Chain, FixedWidth
from monge.draft.tree.paths import Paths
from monge.draft.tree.sequoia import Sequoia

TREES: Final[Registry[TreeBuilder]] = Registry(
    "tree",
    {
        "chain": Chain,
        "fixed_width": FixedWidth,
        "paths": Paths,
        "best_first": BestFirst,
        "eagle2": Eagle2,
        "opt_tree": OptTree,
        "sequoia": Sequoia,
        "threshold": Threshold,
    },
    group="monge.trees",
)
