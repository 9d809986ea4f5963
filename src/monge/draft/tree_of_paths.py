"""Merges paths with equal beginnings into one tree of deterministic candidates."""

from collections.abc import Iterable, Sequence

from monge.core.draws import Draws
from monge.core.proposal import Deterministic
from monge.core.tree import GrowingTree, TokenTree

Path = tuple[int, ...]


def tree_of_paths(
    root: int, paths: Iterable[Sequence[int]], *, num_nodes: int, depth: int, draws: Draws
) -> TokenTree:
    """Return a tree of the tokens of the paths; equal beginnings share their nodes.

    Args:
        root: The last committed token.
        paths: Tokens from the child of the root downwards, in order of preference.
        num_nodes: Most drafted nodes; the rest is cut off.
        depth: Deepest node.
        draws: Source of randomness; deterministic candidates do not use it.
    """
    children: dict[Path, dict[int, None]] = {}
    room = num_nodes
    for path in paths:
        above: Path = ()
        for token in path[:depth]:
            known = children.setdefault(above, {})
            if token not in known:
                if room == 0:
                    break
                room -= 1
                known[token] = None
            above = (*above, token)
    tree = GrowingTree(root)
    node_of: dict[Path, int] = {(): 0}
    # Parents first: a path's nodes are listed from the root downwards.
    for above, tokens in children.items():
        if tokens:
            grown = tree.grow(node_of[above], Deterministic(tuple(tokens)), draws)
            node_of |= {(*above, token): node for token, node in zip(tokens, grown, strict=True)}
    return tree.finish()
