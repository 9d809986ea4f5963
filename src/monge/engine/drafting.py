"""Asking the drafter for trees, and going on without it where it fails."""

import warnings
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final

from jaxtyping import Float
from torch import Tensor

from monge.core.context import Context, DraftPlan
from monge.core.errors import ContextLengthError, DrafterError
from monge.core.tree import root_only
from monge.core.verdict import Verdict
from monge.draft.base import Draft
from monge.engine.components import Components
from monge.engine.session import Session, catch

_UNBOUNDED: Final = 1 << 62


def propose(
    sessions: Sequence[Session], plans: Sequence[DraftPlan], components: Components
) -> list[Draft[Any]]:
    """One draft per session.

    A drafter that raises costs its request the speculation, never its text.

    Whose plan is plain decoding is not drafted for; only a pool is asked all the same where the
    plan asks its lookups. All sessions draft in one call. If it raises, each drafts alone, from the
    same draws. A session for which the drafter then raises before its first draw, or gives only a
    part of a tree, goes on without the drafter; a warning says so, once per request. One for which
    it has drawn and gives nothing has failed: what was drawn cannot be offered, and to decode on as
    if nothing had been drawn would bias the text.
    """
    drafts: dict[int, Draft[Any]] = {}
    asked = [row for row, plan in enumerate(plans) if _is_asked(plan)]
    if not asked:
        return list(map(nothing, sessions))
    together = [row for row in asked if sessions[row].drafting == "together"]
    alone = [[row] for row in asked if sessions[row].drafting == "alone"]
    groups = ([together] if together else []) + alone
    for group in groups:
        members = [sessions[row] for row in group]
        made = _attempt(members, [plans[row] for row in group], components)
        if made is not None:
            drafts |= dict(zip(group, made, strict=True))
        elif len(group) > 1:
            groups.extend(
                [row]
                for row in group
                if sessions[row].drafting == "alone" and sessions[row].error is None
            )
    return [drafts.get(row) or nothing(session) for row, session in enumerate(sessions)]


def observe(
    rows: Sequence[tuple[Session, Draft[Any], Verdict, Float[Tensor, "nodes vocab"]]],
    components: Components,
) -> None:
    """Let the drafter observe the verdicts; sessions without it are left out.

    If it raises, see `propose`.

    Args:
        rows: Sessions, committed already, with their drafts, verdicts and the target's logits at
            every node. A drafter gets the ranking that its capabilities ask for.
        components: The components.
    """
    together = [row for row in rows if row[0].drafting == "together"]
    for group in ([together] if together else []) + [
        [row] for row in rows if row[0].drafting == "alone"
    ]:
        _observe(group, components)


def _observe(
    rows: Sequence[tuple[Session, Draft[Any], Verdict, Tensor]], components: Components
) -> None:
    sessions, drafts, verdicts, logits = zip(*rows, strict=True)
    count = components.num_successors
    if count:
        verdicts = [
            replace(verdict, successors=_successors(own, count))
            for verdict, own in zip(verdicts, logits, strict=True)
        ]
    contexts, states = [session.context for session in sessions], list[tuple[Session, Any]]()
    error = catch(
        lambda: states.extend(
            zip(sessions, components.drafter.observe(contexts, drafts, verdicts), strict=True)
        )
    )
    if error is not None:
        for session in sessions:
            _recover(session, components, None if len(sessions) > 1 else error)
        return
    for session, state in states:
        session.drafter_state, session.drafting = state, "together"


def _is_asked(plan: DraftPlan) -> bool:
    """Whether a plan asks the drafter for anything."""
    return plan.max_depth != 0 or bool(plan.model_free_depth) or plan.drafter is not None


def _successors(logits: Float[Tensor, "nodes vocab"], count: int) -> tuple[tuple[int, ...], ...]:
    return tuple(map(tuple, logits.topk(min(count, logits.shape[-1])).indices.tolist()))


def leave_long_prompts(sessions: Sequence[Session], components: Components) -> None:
    """Decode requests plainly whose prompt is longer than the drafter's context."""
    for session in sessions:
        if len(session.request.prompt_ids) > (components.draft_length or _UNBOUNDED):
            session.drafting = "off"


def start_all(
    sessions: Sequence[Session], contexts: Sequence[Context], components: Components
) -> None:
    """Show the drafter new requests together.

    A request for which the drafter's context turns out to be too short, as with a tokenizer of
    longer texts, is decoded without it.
    """
    try:
        states = components.drafter.open(contexts)
    except ContextLengthError:
        for session, context in zip(sessions, contexts, strict=True):
            catch(partial(components.drafter.close, context))
            start(session, components, context)
        return
    for session, state in zip(sessions, states, strict=True):
        session.drafter_state = state


def start(session: Session, components: Components, first: Context | None = None) -> None:
    """Show the drafter a new request, or the first part of its prompt.

    If it raises, the request is decoded without it.
    """
    error = catch(lambda: _open(session, components, first or session.context))
    if error is not None:
        give_up(session, components, error)


def give_up(session: Session, components: Components, error: Exception) -> None:
    """Go on without the drafter, whose error costs the request its speculation.

    A warning says so.
    """
    _recover(session, components, error)


def close_drafter(session: Session, components: Components) -> None:
    """Tell the drafter that a request has ended.

    Its text is written, so what the drafter raises is a warning.
    """
    error = catch(lambda: components.drafter.close(session.context))
    if error is not None:
        warnings.warn(
            f"request {session.context.request_id}: the drafter failed to forget it "
            f"({type(error).__name__}: {error})",
            stacklevel=2,
        )


def nothing(session: Session) -> Draft[Any]:
    """A draft without candidates, whose state is the one before it."""
    return Draft(root_only(session.context.token_ids[-1]), session.drafter_state)


def _attempt(
    sessions: Sequence[Session], plans: Sequence[DraftPlan], components: Components
) -> Sequence[Draft[Any]] | None:
    """The drafts of one call, or `None` where it raised.

    Each session then drafts alone, goes without, or has failed.
    """
    for session in sessions:
        if session.can_rewind:
            session.mark()
    contexts, draws = (
        [session.context for session in sessions],
        [session.draws for session in sessions],
    )
    states, made = (
        [session.drafter_state for session in sessions],
        list[tuple[Session, Draft[Any]]](),
    )
    error = catch(
        lambda: made.extend(
            zip(sessions, components.drafter.draft(contexts, states, plans, draws), strict=True)
        )
    )
    if error is None:
        for session, draft in made:
            if draft.error is not None:
                give_up(session, components, draft.error)
        return [draft for _, draft in made]
    for session in sessions:
        if len(sessions) > 1 and session.can_rewind:
            session.rewind()
        if session.has_drawn:
            session.fail(_drawn_in_vain(session, error))
        else:
            _recover(session, components, None if len(sessions) > 1 else error)
    return None


def _drawn_in_vain(session: Session, error: Exception) -> DrafterError:
    made = DrafterError(
        f"request {session.context.request_id}: the drafter failed ({type(error).__name__}: "
        f"{error}) after it had drawn "
        "tokens, and did not return them; continuing without them would bias the text, so the "
        "request ends here. A drafter may "
        "raise before its first draw, or return the tree so far with `Draft.error`"
    )
    made.__cause__ = error
    return made


def _recover(session: Session, components: Components, error: Exception | None) -> None:
    """Drop what the failed call left behind.

    With an error, or if that fails too, without the drafter from now on.
    """
    again = catch(lambda: components.drafter.close(session.context))
    if error is None and len(session.context.token_ids) > (components.draft_length or _UNBOUNDED):
        session.drafting, session.drafter_state = "off", None
        return
    if error is None and again is None:
        again = catch(lambda: _open(session, components, session.context))
    error = error or again
    if error is None:
        session.drafting = "alone"
        return
    session.drafting, session.drafter_state = "off", None
    warnings.warn(
        f"request {session.context.request_id}: the drafter failed ({type(error).__name__}: "
        f"{error}); the request is decoded "
        "without it from here on",
        stacklevel=2,
    )


def _open(session: Session, components: Components, context: Context) -> None:
    (session.drafter_state,) = components.drafter.open([context])
