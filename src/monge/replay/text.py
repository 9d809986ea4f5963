"""Follow a logged text: candidates are drawn given the text, and the text is accepted."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from monge.core.draws import Draws
from monge.core.law import Law
from monge.core.model import NodeBlock
from monge.core.proposal import Arbitrary, Deterministic, Proposal
from monge.core.tree import TokenTree
from monge.core.verdict import Verdict
from monge.engine.follow import KnownText
from monge.replay.conditional import Conditional, draft_prob, next_scale, scaled_tests
from monge.replay.log import LoggedText, UnavailableError
from monge.verify.problem import verdict_at


@dataclass(eq=False)
class TextDraws(KnownText):
    """Draw the candidates of nodes on the text given the text, and all others freely.

    Attributes:
        scale: Factor of the target at the node where the text leads to.
    """

    text: LoggedText
    conditional: Conditional
    draws: Draws
    scale: float = 1.0

    def bernoulli(self, prob: float) -> bool:
        return self.draws.bernoulli(prob)

    def categorical(self, law: Law) -> int:
        return self.draws.categorical(law)

    def uniform(self) -> float:
        return self.draws.uniform()

    @property
    def start(self) -> int:
        """Tokens that are committed before this round."""
        return len(self.session.context.token_ids)

    def draw_children(self, path: tuple[int, ...], proposal: Proposal) -> tuple[int, ...]:
        place, tokens = self.start + len(path), self.text.all_ids
        if not path:
            self.scale = 1.0
        if place >= len(tokens) or path != tokens[self.start : place]:
            return proposal.draw(self.draws)
        logged = self.text.logged_token(place, self.scale)
        if isinstance(proposal, Deterministic | Arbitrary):
            candidates = proposal.draw(self.draws)
        else:
            try:
                candidates = self.conditional(logged, proposal, self.draws)
            except UnavailableError as error:
                self.error = error
                raise
        if self.conditional is scaled_tests and logged.token in candidates:
            self.scale = next_scale(logged, draft_prob(proposal, logged.token))
        return candidates

    def verdict(self, tree: TokenTree) -> Verdict:
        node, tokens = 0, self.text.all_ids[self.start :]
        # The last token of a text is its round's own: nothing is logged of what comes after it.
        for token in tokens[:-1]:
            child_of = {tree.token_ids[child]: child for child in tree.candidates[node]}
            if token not in child_of:
                break
            node = child_of[token]
        return verdict_at(tree, node, tokens[len(tree.path(node))])


@dataclass(frozen=True, slots=True)
class ReplayTarget:
    """Stand for the target, a `SequenceModel`, without reading: its laws are in the log.

    Args:
        vocab_size: Of the target that was logged.
    """

    vocab_size: int
    no_tree_reason: str | None = None
    no_draft_reason: str | None = None
    forward_s: float = 0.0
    max_length: int | None = None

    def open(self, prefixes: Mapping[int, Sequence[int]]) -> None: ...

    def append(self, pieces: Mapping[int, Sequence[int]]) -> None: ...

    def commit(self, paths: Mapping[int, Sequence[int]]) -> None: ...

    def close(self, sequence: int) -> None: ...

    def extend(self, blocks: Mapping[int, NodeBlock]) -> Mapping[int, Float[Tensor, "nodes vocab"]]:
        """Return no logits: one empty row a node."""
        return {
            sequence: torch.zeros(len(block.token_ids), 0) for sequence, block in blocks.items()
        }

    def length(self, sequence: int) -> int:
        return 0
