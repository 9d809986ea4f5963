"""Asking the drafter for trees, and going on without it where it fails."""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from jaxtyping import Float
from torch import Tensor

from monge.core.context import Context, DraftPlan
from monge.core.errors import MongeError
from monge.core.tree import GrowingTree
from monge.core.verdict import Verdict
from monge.draft.base import Draft
from monge.engine.parts import Parts
from monge.engine.session import Session

FAILURES: Final = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    MongeError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""What a drafter may raise, its network's errors included; anything else ends the decoding."""


def propose(sessions: Sequence[Session], plans: Sequence[DraftPlan], parts: Parts) -> list[Draft[Any]]:
    """One draft per session. A drafter that raises costs its request the speculation, never its text.

    All sessions draft in one call. If it raises, nobody drafts in this round, and in the next one each of them drafts alone, so
    that only those for which it raises again are decoded plainly to their end; a warning says so, once per request. Such a
    round is exact unless the failure depends on the tokens that the round drew.
    """
    drafts: dict[int, Draft[Any]] = {}
    together = [row for row, session in enumerate(sessions) if session.drafting == "together"]
    alone = [[row] for row, session in enumerate(sessions) if session.drafting == "alone"]
    for group in ([together] if together else []) + alone:
        members = [sessions[row] for row in group]
        made = _attempt(members, [plans[row] for row in group], parts)
        if made is not None:
            drafts |= dict(zip(group, made, strict=True))
    return [drafts.get(row) or nothing(session) for row, session in enumerate(sessions)]


def observe(
    rows: Sequence[tuple[Session, Draft[Any], Verdict]], logits: Mapping[int, Float[Tensor, "nodes vocab"]], parts: Parts
) -> None:
    """Tell the drafter what became of its drafts; sessions without it are left out. If it raises, see `propose`.

    Args:
        rows: Sessions, committed already, with their drafts and verdicts.
        logits: The target's logits at every node of the finished round, by request; of these a drafter learns the ranking that
            its capabilities ask for.
        parts: The parts.
    """
    told = [row for row in rows if row[0].drafting != "off"]
    if told:
        sessions, drafts, verdicts = zip(*told, strict=True)
        count = parts.drafter.capabilities.num_successors
        if count:
            verdicts = [
                replace(verdict, successors=_successors(logits[session.context.request_id], count))
                for session, verdict in zip(sessions, verdicts, strict=True)
            ]
        try:
            states = parts.drafter.observe([session.context for session in sessions], drafts, verdicts)
        except FAILURES as error:
            for session in sessions:
                _recover(session, parts, None if len(sessions) > 1 else error)
            return
        for session, state in zip(sessions, states, strict=True):
            session.drafter_state = state


def _successors(logits: Float[Tensor, "nodes vocab"], count: int) -> tuple[tuple[int, ...], ...]:
    return tuple(map(tuple, logits.topk(min(count, logits.shape[-1])).indices.tolist()))


def start(session: Session, parts: Parts, first: Context | None = None) -> None:
    """Show the drafter a new request, or the first part of its prompt; if it raises, the request is decoded without it."""
    try:
        (session.drafter_state,) = parts.drafter.open([first or session.context])
    except FAILURES as error:
        give_up(session, parts, error)


def give_up(session: Session, parts: Parts, error: Exception) -> None:
    """Go on without the drafter, whose error costs the request its speculation; a warning says so."""
    _recover(session, parts, error)


def nothing(session: Session) -> Draft[Any]:
    """A draft without candidates, whose state is the one before it."""
    return Draft(GrowingTree(session.context.token_ids[-1]).finish(), session.drafter_state)


def _attempt(sessions: Sequence[Session], plans: Sequence[DraftPlan], parts: Parts) -> Sequence[Draft[Any]] | None:
    try:
        made = parts.drafter.draft(
            [session.context for session in sessions],
            [session.drafter_state for session in sessions],
            plans,
            [session.draws for session in sessions],
        )
    except FAILURES as error:
        for session in sessions:
            _recover(session, parts, None if len(sessions) > 1 else error)
        return None
    for session in sessions:
        session.drafting = "together"
    return made


def _recover(session: Session, parts: Parts, error: Exception | None) -> None:
    """Drop what the failed call left behind; with an error, or if that fails too, without the drafter from now on."""
    try:
        parts.drafter.close(session.context)
        if error is None:
            (session.drafter_state,) = parts.drafter.open([session.context])
            session.drafting = "alone"
            return
    except FAILURES as again:
        error = error or again
    session.drafting, session.drafter_state = "off", None
    warnings.warn(
        f"request {session.context.request_id}: the drafter failed ({type(error).__name__}: {error}); the request is decoded "
        "without it from here on",
        stacklevel=2,
    )
