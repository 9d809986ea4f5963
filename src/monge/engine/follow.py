"""Follow a known text: read its logits, or run the real loop with draws and verdicts that give it.

Replay follows a logged text, and `monge certify` a recorded one.
"""

from abc import abstractmethod
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from jaxtyping import Float
from torch import Tensor

from monge.core.draws import Draws
from monge.core.law import LawSequence
from monge.core.model import NodeBlock, SequenceModel
from monge.core.proposal import ChildDraws, Proposal
from monge.core.tree import TokenTree
from monge.core.verdict import Verdict
from monge.engine.batch import decode
from monge.engine.components import Components
from monge.engine.session import Session, catch
from monge.verify.base import Verifier

_SEQUENCE: Final = -1  # no number of a request


def logits_along(
    model: SequenceModel, token_ids: Sequence[int], first: int, *, piece: int = 256
) -> Iterator[Float[Tensor, "nodes vocab"]]:
    """Yield the next-token logits after `token_ids[: first + 1]`, ..., after the whole text.

    Args:
        model: The model; nothing else may use it meanwhile.
        token_ids: The text.
        first: Tokens before the first one whose logits are wanted.
        piece: Tokens of a forward: it bounds the logits that are held, not the text.
    """
    model.open({_SEQUENCE: token_ids[:first]})
    try:
        for start in range(first, len(token_ids), piece):
            part = tuple(token_ids[start : start + piece])
            yield model.extend({_SEQUENCE: NodeBlock.chain(part)})[_SEQUENCE]
            model.commit({_SEQUENCE: range(len(part))})
    finally:
        model.close(_SEQUENCE)


class KnownText(ChildDraws):
    """The draws of a request whose text is known; they decide its verdicts as well.

    Attributes:
        session: The request while it is followed.
        error: Why the text cannot be followed any further.
    """

    session: Session
    error: Exception | None = None

    @abstractmethod
    def verdict(self, tree: TokenTree) -> Verdict:
        """Return the verdict on a drafted tree that the text implies."""


@dataclass(frozen=True, slots=True)
class KnownVerdicts(Verifier):
    """Decide as the known text implies.

    With candidates drawn given the text, this is every lossless rule at once.
    """

    accepts = frozenset[type[Proposal]]({Proposal})

    def verify(self, tree: TokenTree, target_laws: LawSequence, draws: Draws) -> Verdict:
        assert isinstance(draws, KnownText), "a known text decides its verdicts"
        return draws.verdict(tree)


def follow(session: Session, components: Components) -> None:
    """Run all rounds of a session whose draws are a `KnownText`, with `KnownVerdicts` as the rule.

    Raises:
        Exception: The `error` of the text, or else whatever a component raises.
    """
    text = session.draws
    assert isinstance(text, KnownText), "only a known text can be followed"
    text.session = session
    raised = catch(lambda: deque(decode([session], components, max_batch_size=1), maxlen=0))
    error = text.error or raised or session.error
    if error is not None:
        raise error
