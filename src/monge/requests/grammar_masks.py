"""The tokens that a grammar allows at the nodes of a tree."""

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from monge.core.errors import GrammarError, NonFiniteLogitsError
from monge.laws.tree import TokenTree
from monge.requests.grammar import GrammarState


class TreeMask:
    """The tokens that a grammar allows after every node of a tree, each by its own path.

    Args:
        state: The grammar after the committed text, the root included.
        tree: The tree.
    """

    def __init__(self, state: GrammarState, tree: TokenTree) -> None:
        words, states = state.new_words(tree.num_nodes), list[GrammarState | None]()
        self._errors = dict[int, str]()
        for node, parent in enumerate(tree.parents):
            above = None if node == 0 else states[parent]
            try:
                here = state if node == 0 else above and above.after(tree.token_ids[node])
            except GrammarError as error:
                here, self._errors[node] = None, str(error)
            states.append(here)
            # Where the path is no text of the grammar, no law is asked for.
            if here is not None and (reason := here.write(words[node])) is not None:
                self._errors[node] = f"grammar: no token can come next: {reason}"
        bits = np.unpackbits(
            words.view(np.uint8), axis=1, count=state.vocab_size, bitorder="little"
        )
        self._banned: Bool[Tensor, "nodes vocab"] = torch.from_numpy(bits ^ 1).view(torch.bool)

    def apply(self, scores: Float[Tensor, " vocab"], node: int) -> Float[Tensor, " vocab"]:
        """Return the scores after a node, -inf for tokens that are not allowed.

        Raises:
            GrammarError: If the library gave up there, or no token of the vocabulary can follow.
        """
        if node in self._errors:
            raise GrammarError(self._errors[node])
        return scores.masked_fill(self._banned[node].to(scores.device), -torch.inf)

    def apply_all(self, logits: Float[Tensor, "nodes vocab"]) -> Float[Tensor, "nodes vocab"]:
        """Return the logits after all nodes; NaN where `apply` raises."""
        logits = logits.masked_fill(self._banned.to(logits.device, non_blocking=True), -torch.inf)
        for node in self._errors:
            logits[node] = torch.nan
        return logits

    def explain(self, error: Exception) -> Exception:
        """Return the error of the grammar if it made a distribution not finite, else `error`."""
        is_masked = isinstance(error, NonFiniteLogitsError) and self._errors
        return GrammarError(next(iter(self._errors.values()))) if is_masked else error
