"""Follow a known text: the real loop runs, and its draws and verdicts are made to give that text.

Replay follows a logged text, and `monge certify` a recorded one.
"""

from abc import abstractmethod
from collections import deque
from dataclasses import dataclass

from monge.core.draws import Draws
from monge.core.law import LawSequence
from monge.core.proposal import ChildDraws, Proposal
from monge.core.tree import TokenTree
from monge.core.verdict import Verdict
from monge.engine.batch import decode
from monge.engine.components import Components
from monge.engine.session import Session, catch
from monge.verify.base import Verifier


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
