"""One logged position of a text: the committed token, and the target's law."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool
from torch import Tensor

from monge.core.draws import Draws
from monge.core.law import Law, SparseLaw
from monge.replay.errors import UnavailableError


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedToken:
    """The token that was committed after some prefix, and the target's law there.

    Args:
        token: The committed token.
        law: The target's law. In a compact log, all other tokens are one token, `other`.
        other: That token, outside of the vocabulary; `None` if the law is complete.
        scale: Factor of the target, for rules that look at whole chains.
    """

    token: int
    law: SparseLaw
    other: int | None = None
    scale: float = 1.0

    def covers(self, q: Law) -> bool:
        """Return whether the target's mass of every token of a draft law is known."""
        if self.other is None:
            return True
        return bool(self._is_logged(q.sparse()).all())

    def require(self, q: Law) -> None:
        """Refuse a question about tokens that were not logged.

        Raises:
            UnavailableError: If the draft law reaches beyond them.
        """
        if not self.covers(q):
            part = q.sparse()
            missing = int((~self._is_logged(part)).sum())
            raise UnavailableError(
                f"replay: this rule needs the target's mass of every token that can be drafted; the log keeps "
                f"{self.law.token_ids.numel() - 1} tokens of a law, and {missing} of {part.token_ids.numel()} draftable ones "
                "are not among them; log complete laws (no --top), or compare rules that test one draw a node"
            )

    def rejected(self, q: Law, left: Law, draws: Draws) -> int:
        """Draw from q, given a rejection for the target `left`: from `(q - left)_+`, normalised.

        If a compact log does not cover q, another token of q is drawn; see `stands_in`.
        """
        if not self.covers(q):
            return draws.categorical(q.sparse().without(self.token) or q)
        # The excess is empty only by rounding: a law below the target is never rejected.
        return draws.categorical(q.sparse().excess_over(left) or q)

    def _is_logged(self, part: SparseLaw) -> Bool[Tensor, " support"]:
        return torch.isin(part.token_ids, self.law.token_ids)
