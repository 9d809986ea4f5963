"""Follow a logged text: candidates are drawn given the text, and the verifier accepts it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from monge.core.draws import Draws
from monge.core.law import Law, LawSequence
from monge.core.model import NodeBlock
from monge.core.proposal import Arbitrary, ChildDraws, Deterministic, Proposal
from monge.core.tree import TokenTree
from monge.core.verdict import Verdict
from monge.replay.conditional import Conditional, draft_prob, next_scale, scaled_tests
from monge.replay.log import LoggedText, UnavailableError
from monge.verify.base import Verifier


@dataclass(slots=True)
class TextDraws(ChildDraws):
    """Draw the candidates of nodes on the text given the text, and all others freely.

    Attributes:
        start: Tokens committed when the round started; set before every round.
        scale: Factor of the target at the node where the text leads to.
        error: Why candidates could not be drawn.
    """

    text: LoggedText
    conditional: Conditional
    draws: Draws
    start: int = 0
    scale: float = 1.0
    error: UnavailableError | None = None

    def begin(self, start: int) -> None:
        """Begin a round after `start` committed tokens."""
        self.start, self.scale = start, 1.0

    def bernoulli(self, prob: float) -> bool:
        return self.draws.bernoulli(prob)

    def categorical(self, law: Law) -> int:
        return self.draws.categorical(law)

    def uniform(self) -> float:
        return self.draws.uniform()

    def draw_children(self, path: tuple[int, ...], proposal: Proposal) -> tuple[int, ...]:
        place, tokens = self.start + len(path), self.text.all_ids
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


@dataclass(frozen=True, slots=True)
class TextVerifier(Verifier):
    """Accept the tokens of the text.

    With candidates drawn given the text, this is every lossless rule at once.
    """

    accepts = frozenset[type[Proposal]]({Proposal})

    def verify(self, tree: TokenTree, target_laws: LawSequence, draws: Draws) -> Verdict:
        assert isinstance(draws, TextDraws), "replay draws candidates given a text"
        tokens, place = draws.text.all_ids, draws.start
        node, path, examined = 0, list[int](), list[int]()
        while tree.candidates[node]:
            child_of = {tree.token_ids[child]: child for child in tree.candidates[node]}
            examined.append(len(child_of))
            # The last token of a text is its round's own: nothing is logged of what comes after it.
            if place + 1 >= len(tokens) or tokens[place] not in child_of:
                break
            node = child_of[tokens[place]]
            path.append(node)
            place += 1
        kind = "correction" if tree.candidates[node] else "bonus"
        return Verdict(
            path=tuple(path), next_token=tokens[place], next_kind=kind, examined=tuple(examined)
        )


class ReplayTarget:
    """Stand for the target, a `SequenceModel`, without reading: its laws are in the log.

    Args:
        vocab_size: Of the target that was logged.
    """

    no_tree_reason: str | None = None
    no_draft_reason: str | None = None
    forward_s = 0.0
    max_length: int | None = None

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self._lengths: dict[int, int] = {}

    def open(self, prefixes: Mapping[int, Sequence[int]]) -> None:
        self._lengths.update({sequence: len(tokens) for sequence, tokens in prefixes.items()})

    def append(self, pieces: Mapping[int, Sequence[int]]) -> None:
        for sequence, tokens in pieces.items():
            self._lengths[sequence] += len(tokens)

    def extend(self, blocks: Mapping[int, NodeBlock]) -> Mapping[int, Float[Tensor, "nodes vocab"]]:
        """Return no logits: one empty row a node."""
        return {
            sequence: torch.zeros(len(block.token_ids), 0) for sequence, block in blocks.items()
        }

    def commit(self, paths: Mapping[int, Sequence[int]]) -> None:
        for sequence, path in paths.items():
            self._lengths[sequence] += len(path)

    def length(self, sequence: int) -> int:
        return self._lengths[sequence]

    def close(self, sequence: int) -> None:
        del self._lengths[sequence]
