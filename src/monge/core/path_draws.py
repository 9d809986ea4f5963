"""Draws that continue independent paths."""

from dataclasses import dataclass

from monge.core.proposal import Iid


@dataclass(frozen=True, slots=True)
class PathDraws(Iid):
    """`width` independent draws from `law`, one for each of the independent paths that pass the node; at the root, all of them.

    A subclass, though nothing is overridden: a node's own children are independent draws like
    others, and every rule for these is exact. What it adds is a promise about the whole tree, for
    rules that look at whole paths: every path that passes a node with children goes on below it, so
    that whether a node has children depends on the path to it alone. Other independent draws
    promise less: there it may depend on earlier levels of the tree.
    """
