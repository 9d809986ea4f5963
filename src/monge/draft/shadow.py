"""Shadow drafts: trees that are not verified, compared with the text."""

from collections.abc import Sequence
from dataclasses import dataclass

from monge.core.selection import CounterfactualDraft
from monge.core.tree import TokenTree


@dataclass(frozen=True, slots=True)
class ShadowTree:
    """A tree of deterministic candidates and how far the text has gone along it.

    Args:
        drafter: Name of its drafter.
        tree: The tree.
        node: The node that the text has reached.
        factors: See `CounterfactualDraft`.
    """

    drafter: str
    tree: TokenTree
    node: int = 0
    factors: tuple[float, ...] = ()

    @property
    def is_decided(self) -> bool:
        """Whether the result is final: the tree ends here, or the text has left it."""
        return not self.tree.candidates[self.node] or (bool(self.factors) and self.factors[-1] == 0.0)

    def after(self, token_ids: Sequence[int]) -> "ShadowTree":
        """Return the tree after more text."""
        node, factors = self.node, list(self.factors)
        for token in token_ids:
            children = {self.tree.token_ids[child]: child for child in self.tree.candidates[node]}
            if not children or (factors and factors[-1] == 0.0):
                break
            factors.append(1.0 if token in children else 0.0)
            node = children.get(token, node)
        return ShadowTree(self.drafter, self.tree, node, tuple(factors))


@dataclass(frozen=True, slots=True)
class ShadowDraft:
    """All shadow drafts of one round.

    Args:
        position: Tokens of the text before the round.
        trees: One per model-free drafter.
    """

    position: int
    trees: tuple[ShadowTree, ...]

    @property
    def is_decided(self) -> bool:
        """Whether all results are final."""
        return all(tree.is_decided for tree in self.trees)

    def after(self, text: Sequence[int]) -> "ShadowDraft":
        """Return the shadow draft for the whole text so far."""
        # A final tree has one factor for each relevant token, so more text does not change it.
        return ShadowDraft(self.position, tuple(tree.after(text[self.position + len(tree.factors) :]) for tree in self.trees))

    def counterfactuals(self) -> tuple[CounterfactualDraft, ...]:
        """Return the results of the trees."""
        return tuple(
            CounterfactualDraft(
                drafter=one.drafter, position=self.position, num_nodes=one.tree.num_nodes - 1, factors=one.factors
            )
            for one in self.trees
        )
