"""One request's place in one round, and the isolation of its errors."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from jaxtyping import Float
from torch import Tensor

from monge.core.context import Context, DraftPlan
from monge.core.errors import NonFiniteLogitsError
from monge.core.verdict import Verdict
from monge.draft.base import Draft
from monge.engine.components import Components
from monge.engine.logprobs import TokenLogprob
from monge.engine.sampling import NodeLaws
from monge.engine.session import Session, catch


@dataclass(slots=True)
class RoundSlot:
    """What a round makes for one request; filled in stage by stage."""

    session: Session
    plan: DraftPlan = DraftPlan(max_depth=0)
    draft: Draft[Any] | None = None
    outcome: Verdict | NonFiniteLogitsError | None = None
    laws: NodeLaws | None = None
    logprobs: tuple[TokenLogprob, ...] = ()
    length: int = 0
    token_ids: tuple[int, ...] = ()

    @property
    def context(self) -> Context:
        """The request's text."""
        return self.session.context

    @property
    def drafted(self) -> Draft[Any]:
        """The draft, from the stage on that made it."""
        assert self.draft is not None, "nothing has been drafted yet"
        return self.draft

    @property
    def scored(self) -> Float[Tensor, "nodes vocab"]:
        """The target's logits at every node."""
        return self.target_laws.logits

    @property
    def target_laws(self) -> NodeLaws:
        """The target's laws at every node."""
        assert self.laws is not None, "nothing has been scored yet"
        return self.laws

    @property
    def verdict(self) -> Verdict:
        """The verdict, from the stage on that made it."""
        assert isinstance(self.outcome, Verdict), "nothing has been verified yet"
        return self.outcome


Stage = Callable[[Sequence[RoundSlot]], None]


def run_stage(slots: Sequence[RoundSlot], stage: Stage, components: Components) -> list[RoundSlot]:
    """Run a stage before the commit for all slots at once; if it raises, run it again slot by slot.

    Slots for which it raises then have failed. The second attempt starts from the same draws, so
    the failure of a neighbour costs time and changes no text.

    Returns:
        The slots that have not failed.
    """
    for slot in slots:
        slot.session.mark()
    if catch(lambda: stage(slots)) is None:
        return list(slots)
    for slot in slots:
        slot.session.rewind()
    # Drop what the first attempt read: nothing may be read behind it.
    components.target.commit({slot.context.request_id: () for slot in slots})
    return run_each(slots, lambda slot: stage([slot]), isolated=True)


def run_each(
    slots: Sequence[RoundSlot], work: Callable[[RoundSlot], None], *, isolated: bool
) -> list[RoundSlot]:
    """Do some work slot by slot.

    Args:
        slots: The slots.
        work: The work.
        isolated: Whether a slot for which it raises fails alone and is left out; otherwise the
            error is raised.

    Returns:
        The slots that have not failed.
    """
    passed: list[RoundSlot] = []
    for slot in slots:
        if not isolated:
            work(slot)
        elif (error := catch(lambda slot=slot: work(slot))) is not None:
            slot.session.fail(error)
            continue
        passed.append(slot)
    return passed
