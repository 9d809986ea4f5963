"""The real loop on a logged text: candidates drawn given the text, and a verifier that follows it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import torch
from jaxtyping import Float
from torch import Tensor

from monge.core.child_draws import ChildDraws
from monge.core.draws import Draws
from monge.core.law import Law, LawSequence
from monge.core.model import NodeBlock
from monge.core.proposal import Arbitrary, Deterministic, Iid, Proposal
from monge.core.tree import TokenTree
from monge.core.verdict import Verdict
from monge.replay.conditional import ConditionalCandidates, draft_prob
from monge.replay.errors import UnavailableError
from monge.replay.log import LoggedText
from monge.replay.logged_token import LoggedToken
from monge.verify.base import Verifier

_TRIES: Final = 16
"""How often the candidates of a wide node are drawn anew until the committed token is among them, before it is put there."""


@dataclass(slots=True)
class TextDraws(ChildDraws):
    """Draws the candidates of the nodes that the text passes given the text, and all others freely.

    Args:
        text: The text that is followed.
        conditional: The law of the candidates, given the emitted token.
        draws: Source of randomness.
        start: Tokens committed when the round started; set before every round.
        chances: Of the round's nodes on the text, from the root down: P(accepted | text, the node
            was reached). Kept where the text is forced.
        tree: The finished tree of the round.
        scale: Factor of the target at the node where the text leads to.
        error: Why candidates could not be drawn.
        is_forced: Whether the committed token is always put among the candidates, so that a round
            sees the text to its end.
    """

    text: LoggedText
    conditional: ConditionalCandidates
    draws: Draws
    start: int = 0
    is_forced: bool = False
    chances: list[float] = field(default_factory=list[float])
    tree: TokenTree | None = None
    scale: float = 1.0
    error: UnavailableError | None = None

    def begin(self, start: int) -> None:
        """A new round, after `start` committed tokens."""
        self.start, self.chances, self.tree, self.scale = start, [], None, 1.0

    def bernoulli(self, prob: float) -> bool:
        return self.draws.bernoulli(prob)

    def categorical(self, law: Law) -> int:
        return self.draws.categorical(law)

    def uniform(self) -> float:
        return self.draws.uniform()

    def draw_children(self, path: tuple[int, ...], proposal: Proposal) -> tuple[int, ...]:
        place, tokens = self.start + len(path), self.text.all_ids
        if place >= len(tokens) or path != tokens[self.start : place]:
            candidates = proposal.draw(self.draws)
        else:
            logged = self.text.logged_token(place, self.scale)
            try:
                candidates = self._on_text(logged, proposal)
            except UnavailableError as error:
                self.error = error
                raise
            if logged.token in candidates:
                self.scale = self.conditional.next_scale(logged, draft_prob(proposal, logged.token))
        return candidates

    def _on_text(self, logged: LoggedToken, proposal: Proposal) -> tuple[int, ...]:
        if isinstance(proposal, Deterministic | Arbitrary):
            if self.is_forced:
                self.chances.append(float(logged.token in proposal.token_ids))
            return proposal.draw(self.draws)
        if not self.is_forced:
            return self.conditional.draw(logged, proposal, self.draws)
        self.chances.append(self.conditional.chance(logged, proposal, self.draws))
        for _ in range(_TRIES if isinstance(proposal, Iid) and proposal.width > 1 else 0):
            candidates = self.conditional.draw(logged, proposal, self.draws)
            if logged.token in candidates:
                return candidates
        drawn = proposal.draw(self.draws)
        others = [token for token in drawn if token != logged.token]
        return (logged.token, *others[: len(drawn) - 1])


@dataclass(frozen=True, slots=True)
class TextVerifier(Verifier):
    """Accept what the text goes on with.

    With candidates drawn given the text, this is every lossless rule at once.

    Args:
        only_looks: Accept nothing, so that every round commits one token.
    """

    only_looks: bool = False
    accepts = frozenset[type[Proposal]]({Proposal})

    def verify(self, tree: TokenTree, target_laws: LawSequence, draws: Draws) -> Verdict:
        assert isinstance(draws, TextDraws), "replay draws candidates given a text"
        draws.tree = tree
        tokens, place = draws.text.all_ids, draws.start
        node, path, examined = 0, list[int](), list[int]()
        while tree.candidates[node]:
            child_of = {tree.token_ids[child]: child for child in tree.candidates[node]}
            examined.append(len(child_of))
            # The last token of a text is its round's own: nothing is logged of what comes after it.
            if self.only_looks or place + 1 >= len(tokens) or tokens[place] not in child_of:
                break
            node = child_of[tokens[place]]
            path.append(node)
            place += 1
        kind = "correction" if tree.candidates[node] else "bonus"
        return Verdict(
            path=tuple(path), next_token=tokens[place], next_kind=kind, examined=tuple(examined)
        )


class ReplayTarget:
    """A target that reads nothing: its laws are in the log. A `SequenceModel`.

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
        """No logits: one empty row a node."""
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
