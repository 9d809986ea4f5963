"""Trees that were not drafted, followed along the text that was written instead."""

from collections.abc import Sequence
from dataclasses import dataclass

from monge.core.selection import CounterfactualDraft
from monge.core.tree import TokenTree


@dataclass(frozen=True, slots=True)
class ShadowTree:
    """A tree of deterministic candidates and how far the text has gone along it.

    Args:
        drafter: Whose tree it is.
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
        """Whether further text changes nothing: the tree ends here, or the text has left it."""
        return not self.tree.candidates[self.node] or (bool(self.factors) and self.factors[-1] == 0.0)

    def after(self, token_ids: Sequence[int]) -> "ShadowTree":
        """The same after more text."""
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
    """All trees that would have been drafted in one round.

    Args:
        position: Tokens of the text before the round.
        trees: One per drafter that was asked.
    """

    position: int
    trees: tuple[ShadowTree, ...]

    @property
    def is_decided(self) -> bool:
        """Whether further text changes nothing."""
        return all(tree.is_decided for tree in self.trees)

    def after(self, text: Sequence[int]) -> "ShadowDraft":
        """The same once the text is `text`, from its first token on."""
        # A tree that is decided has as many factors as tokens mattered; more text changes nothing.
        return ShadowDraft(self.position, tuple(tree.after(text[self.position + len(tree.factors) :]) for tree in self.trees))

    def counterfactuals(self) -> tuple[CounterfactualDraft, ...]:
        """What became of the trees."""
        return tuple(
            CounterfactualDraft(
                drafter=one.drafter, position=self.position, num_nodes=one.tree.num_nodes - 1, factors=one.factors
            )
            for one in self.trees
        )
