"""One request's part of one round, and what happens if it raises."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from jaxtyping import Float
from torch import Tensor

from monge.core.context import Context, DraftPlan
from monge.core.errors import NonFiniteLogitsError
from monge.core.verdict import Verdict
from monge.draft.base import Draft
from monge.engine.catch import catch
from monge.engine.logprobs import TokenLogprob
from monge.engine.parts import Parts
from monge.engine.session import Session


@dataclass(slots=True)
class Row:
    """Filled in stage by stage."""

    session: Session
    plan: DraftPlan = DraftPlan(max_depth=0)
    draft: Draft[Any] | None = None
    outcome: Verdict | NonFiniteLogitsError | None = None
    logits: Float[Tensor, "nodes vocab"] | None = None
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
        assert self.logits is not None, "nothing has been scored yet"
        return self.logits

    @property
    def verdict(self) -> Verdict:
        """The verdict of a row that has one."""
        assert isinstance(self.outcome, Verdict), "the row has no verdict"
        return self.outcome


Stage = Callable[[Sequence[Row]], None]


def together(rows: Sequence[Row], stage: Stage, parts: Parts) -> list[Row]:
    """Run a stage before the commit for all rows at once; if it raises, again row by row.

    Rows for which it raises then have failed. The second attempt starts from the same draws, so what a neighbour's failure
    changes is time, never text.

    Returns:
        The rows that got through.
    """
    for row in rows:
        row.session.mark()
    if catch(lambda: stage(rows)) is None:
        return list(rows)
    for row in rows:
        row.session.rewind()
    # What the first attempt read is dropped, so that nobody reads behind it.
    parts.target.commit({row.context.request_id: () for row in rows})
    return each(rows, lambda row: stage([row]))


def every(rows: list[Row], work: Callable[[Row], None], *, isolated: bool) -> list[Row]:
    """Do something for row by row; if it raises, the error is raised, or isolated: the row has failed, and is left out."""
    if isolated:
        return each(rows, work)
    for row in rows:
        work(row)
    return rows


def each(rows: Sequence[Row], work: Callable[[Row], None]) -> list[Row]:
    """Do something for row by row; the rows for which it raised have failed, and are left out."""
    passed: list[Row] = []
    for row in rows:
        error = catch(lambda row=row: work(row))
        if error is None:
            passed.append(row)
        else:
            row.session.fail(error)
    return passed
