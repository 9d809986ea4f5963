"""Token trees, proposed by a drafter and scored in one forward of the target.

Node 0 is the last committed token; parents come before their children. A tree is a few dozen small
integers that are walked node by node, so it holds tuples; tensors are made once, by the model that
reads it.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from jaxtyping import Int64
from torch import Tensor

from monge.core.errors import MongeError
from monge.laws.draws import Draws
from monge.laws.proposal import Arbitrary, Deterministic, Proposal


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenTree:
    """A finished tree.

    Args:
        token_ids: Token of every node; node 0 is the last committed token.
        parents: Parent of every node; `parents[0] == -1` and `parents[n] < n`.
        proposals: Proposal of the children of every node.
        candidates: Child nodes of every node in drawing order; a token drawn twice is a single node
            offered twice.
    """

    token_ids: tuple[int, ...]
    parents: tuple[int, ...]
    proposals: tuple[Proposal, ...]
    candidates: tuple[tuple[int, ...], ...]

    @property
    def num_nodes(self) -> int:
        """Nodes, the root included."""
        return len(self.token_ids)

    @property
    def depths(self) -> tuple[int, ...]:
        """Distance of every node from the root."""
        return depths_of(self.parents)

    @property
    def is_chain(self) -> bool:
        """True if every node has at most one child."""
        return all(parent == node - 1 for node, parent in enumerate(self.parents))

    def path(self, node: int) -> tuple[int, ...]:
        """Nodes from the first drafted node down to `node` (the root excluded)."""
        return path_to(node, self.parents)

    def path_tokens(self, node: int) -> tuple[int, ...]:
        """Drafted tokens from the root's child down to `node`."""
        return tuple(self.token_ids[step] for step in self.path(node))

    def prune(self, keep: Iterable[int]) -> "TokenTree":
        """Return the tree of the kept nodes.

        The choice among finished nodes may depend on draws anywhere in the tree, so *every* sampled
        proposal becomes `Arbitrary`; deterministic candidates stay as they are.

        Raises:
            MongeError: If a node is kept without its parent.
        """
        kept = sorted({0, *keep})
        index = {node: position for position, node in enumerate(kept)}
        orphans = [node for node in kept[1:] if self.parents[node] not in index]
        if orphans:
            raise MongeError(f"prune: nodes {orphans} are kept without their parents")
        children = [[child for child in self.candidates[node] if child in index] for node in kept]
        kinds = [
            Deterministic if isinstance(self.proposals[node], Deterministic) else Arbitrary
            for node in kept
        ]
        return TokenTree(
            token_ids=tuple(self.token_ids[node] for node in kept),
            parents=tuple(-1 if node == 0 else index[self.parents[node]] for node in kept),
            proposals=tuple(
                kind(tuple(self.token_ids[child] for child in siblings))
                for kind, siblings in zip(kinds, children, strict=True)
            ),
            candidates=tuple(tuple(index[child] for child in siblings) for siblings in children),
        )


@dataclass(frozen=True, slots=True, eq=False)
class FutureTree:
    """A tree that a device still draws: its shape is known to the host, and its tokens are not.

    Args:
        root: The last committed token.
        drawn_ids: Tokens below the root on the device, `[nodes]`; negative where a law was not
            finite, and below such a node.
        parents: Parent of the root, and of these nodes.
        result: Waits for the device, and returns the tree without negative tokens.
    """

    root: int
    drawn_ids: Int64[Tensor, " nodes"]
    parents: tuple[int, ...]
    result: Callable[[], TokenTree]

    @property
    def num_nodes(self) -> int:
        """Nodes that are read, the root included."""
        return len(self.parents)


@lru_cache(maxsize=8192)
def _only(token_id: int) -> Proposal:
    return Deterministic((token_id,))


@lru_cache(maxsize=8192)
def root_only(token_id: int) -> TokenTree:
    """Return the tree of a round without candidates; cached, because trees are never edited."""
    return TokenTree(
        token_ids=(token_id,), parents=(-1,), proposals=(Deterministic(),), candidates=((),)
    )


def chain_of(root: int, token_ids: tuple[int, ...], proposals: tuple[Proposal, ...]) -> TokenTree:
    """Return the tree of a path of drafted tokens, each with its proposal, below the last committed token."""
    count = len(token_ids)
    return TokenTree(
        token_ids=(root, *token_ids),
        parents=tuple(range(-1, count)),
        proposals=(*proposals, Deterministic()),
        candidates=(*((node,) for node in range(1, count + 1)), ()),
    )


def fixed_chain(root: int, token_ids: tuple[int, ...]) -> TokenTree:
    """Return the tree of a path of deterministic candidates."""
    if not token_ids:
        return root_only(root)
    return chain_of(root, token_ids, tuple(map(_only, token_ids)))


DrawnTokens = Mapping[int, tuple[int, ...]]
"""Children of some nodes in drawing order, which are drawn already."""


class GrowingTree:
    """A tree under construction: the children of a node are drawn all at once and attached all at once, level by level.

    Rules for whole trees are exact only if the draws of a level decide nothing about that level:
    which of its nodes have children, how many, and from which laws. `grow_level` therefore takes
    the proposals of all nodes of a level before it draws from any of them, and a level from which
    children were sampled is closed.

    Args:
        root_token: The last committed token.

    Attributes:
        path_probs: A builder's estimates for the path to every node (a child starts with its
            parent's); not part of the tree.
    """

    def __init__(self, root_token: int) -> None:
        self.token_ids: list[int] = [root_token]
        self.parents: list[int] = [-1]
        self.depths: list[int] = [0]
        self.path_probs: list[float] = [1.0]
        self._proposals: list[Proposal | None] = [None]
        self._candidates: list[tuple[int, ...]] = [()]
        self._deepest_sampled = -1  # deepest level from whose nodes children were sampled

    @property
    def num_nodes(self) -> int:
        """Nodes so far, the root included."""
        return len(self.token_ids)

    def multiplicity(self, node: int) -> int:
        """Return the number of draws that gave a node: its repeats among its parent's candidates, 1 for the root."""
        return 1 if node == 0 else self._candidates[self.parents[node]].count(node)

    def candidates(self, node: int) -> tuple[int, ...]:
        """Child nodes of a node in drawing order, as in the finished tree."""
        return self._candidates[node]

    def grow_level(
        self, proposals: Mapping[int, Proposal], draws: Draws | DrawnTokens
    ) -> dict[int, tuple[int, ...]]:
        """Draw the children of nodes of a level and attach all of them.

        Args:
            proposals: Proposals of the nodes that get children, in drawing order.
            draws: Source of randomness; or the children, by node, as `Proposal.draw_rows` of these
                proposals drew them.

        Returns:
            The new nodes of every node, a node per distinct token, in order of first appearance.

        Raises:
            MongeError: If a node has its children already (drawing again would bias the output), if
                the nodes have different depths, or if children were sampled from nodes as deep or
                deeper before: the choice of these nodes may depend on those draws.
        """
        for node in proposals:
            if self._proposals[node] is not None:
                raise MongeError(
                    f"grow: node {node} has its children already; children are drawn once"
                )
        depths = {self.depths[node] for node in proposals}
        if len(depths) > 1:
            raise MongeError(
                f"grow_level: all nodes have one depth; got nodes of depths {sorted(depths)}"
            )
        if not depths:
            return {}
        (depth,) = depths
        if depth <= self._deepest_sampled:
            raise MongeError(
                f"grow: children of depth {self._deepest_sampled + 1} were sampled already, so "
                f"nodes {list(proposals)} of depth {depth} get none; give all nodes of a level to "
                "one call of grow_level, before any child is drawn"
            )
        grown = {
            node: self._attach(node, proposal.at_depth(depth), draws)
            for node, proposal in proposals.items()
        }
        if any(not isinstance(proposal, Deterministic) for proposal in proposals.values()):
            self._deepest_sampled = depth
        return grown

    def grow(self, node: int, proposal: Proposal, draws: Draws) -> tuple[int, ...]:
        """`grow_level` for a level on which a single node has children.

        Deterministic children may come node by node.
        """
        return self.grow_level({node: proposal}, draws)[node]

    def _attach(self, node: int, proposal: Proposal, draws: Draws | DrawnTokens) -> tuple[int, ...]:
        tokens = draws[node] if isinstance(draws, Mapping) else proposal.draw(draws)
        node_of: dict[int, int] = {}
        for token in tokens:
            if token not in node_of:
                node_of[token] = len(self.token_ids)
                self.token_ids.append(token)
                self.parents.append(node)
                self.depths.append(self.depths[node] + 1)
                self.path_probs.append(self.path_probs[node])
                self._proposals.append(None)
                self._candidates.append(())
        self._proposals[node] = proposal
        self._candidates[node] = tuple(node_of[token] for token in tokens)
        return tuple(node_of.values())

    def path(self, node: int) -> tuple[int, ...]:
        """Nodes from the first drafted node down to `node`, as in the finished tree."""
        return path_to(node, self.parents)

    def finish(self) -> TokenTree:
        """Return the finished tree; nodes that were never grown have no candidates."""
        return TokenTree(
            token_ids=tuple(self.token_ids),
            parents=tuple(self.parents),
            proposals=tuple(
                Deterministic() if proposal is None else proposal for proposal in self._proposals
            ),
            candidates=tuple(self._candidates),
        )


def path_to(node: int, parents: Sequence[int]) -> tuple[int, ...]:
    """Nodes from the first drafted node down to `node` (the root excluded)."""
    nodes: list[int] = []
    while node > 0:
        nodes.append(node)
        node = parents[node]
    return tuple(reversed(nodes))


def depths_of(parents: tuple[int, ...]) -> tuple[int, ...]:
    """Depth of every node; a parent of -1 has depth -1, so roots have depth 0."""
    depths: list[int] = []
    for parent in parents:
        depths.append(0 if parent < 0 else depths[parent] + 1)
    return tuple(depths)
