"""The trees by name."""

from typing import Final

from monge.core.parts import PARTS
from monge.core.registry import Registry
from monge.draft.tree.base import TreeBuilder

TREES: Final[Registry[TreeBuilder]] = Registry(
    "tree", PARTS["tree"], base=TreeBuilder, group="monge.trees"
)
