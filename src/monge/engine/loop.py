"""The loop: plan, draft, score, verify, commit, update. Nothing else in the library contains it."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jaxtyping import Float
from torch import Tensor

from monge.core.context import DraftPlan
from monge.core.errors import NonFiniteLogitsError
from monge.core.model import NodeBlock
from monge.core.tree import TokenTree
from monge.core.verdict import StageTimes, StepRecord, Verdict
from monge.draft.base import Draft
from monge.engine.parts import Parts
from monge.engine.sampling import NodeLaws
from monge.engine.session import Session
from monge.verify.base import ScoredTree


@dataclass(slots=True)
class _Timer:
    """Seconds since the last question."""

    last: float

    def lap(self) -> float:
        now = time.perf_counter()
        passed, self.last = now - self.last, now
        return passed


def open_sessions(sessions: Sequence[Session], parts: Parts) -> None:
    """Read the prompts of new requests; all but the last token, which is the root of the first tree."""
    timer = _Timer(time.perf_counter())
    parts.target.open({session.context.request_id: session.context.token_ids[:-1] for session in sessions})
    states = parts.drafter.open([session.context for session in sessions])
    for session, state in zip(sessions, states, strict=True):
        session.drafter_state, session.controller_state = state, parts.controller.init()
    passed = timer.lap()
    for session in sessions:
        session.prefill_s = passed


def run_round(sessions: Sequence[Session], parts: Parts) -> None:
    """One round for every session; afterwards each has a new record, and perhaps a reason to be finished."""
    timer, forward_s = _Timer(start := time.perf_counter()), parts.forward_s
    contexts = [session.context for session in sessions]
    plans = [session.limit(parts.controller.plan(session.controller_state, session.draws)) for session in sessions]
    drafts = parts.drafter.draft(
        contexts, [session.drafter_state for session in sessions], plans, [session.draws for session in sessions]
    )
    draft_s = timer.lap()
    logits = parts.target.extend(
        {
            context.request_id: NodeBlock(draft.tree.token_ids, draft.tree.parents)
            for context, draft in zip(contexts, drafts, strict=True)
        }
    )
    score_s = timer.lap()
    rows = _verified(sessions, drafts, plans, logits, parts)
    verify_s = timer.lap()
    parts.target.commit({session.context.request_id: (0, *verdict.path) for session, _, _, verdict in rows})
    records = [_commit(session, draft.tree, plan, verdict, len(sessions)) for session, draft, plan, verdict in rows]
    states = parts.drafter.observe(
        [session.context for session, *_ in rows], [draft for _, draft, *_ in rows], [verdict for *_, verdict in rows]
    )
    commit_s, total_s = timer.lap(), timer.last - start
    times = StageTimes(
        draft_s=draft_s,
        score_s=score_s,
        verify_s=verify_s,
        commit_s=commit_s,
        total_s=total_s,
        forward_s=parts.forward_s - forward_s,
    )
    for (session, *_), record, state in zip(rows, records, states, strict=True):
        session.drafter_state = state
        session.records.append(replace(record, times=times))
        session.controller_state = parts.controller.update(session.controller_state, session.records[-1])


def close_session(session: Session, parts: Parts) -> None:
    """Give back the room that a request had."""
    parts.target.close(session.context.request_id)
    parts.drafter.close(session.context)


def _verified(
    sessions: Sequence[Session],
    drafts: Sequence[Draft[Any]],
    plans: Sequence[DraftPlan],
    logits: Mapping[int, Float[Tensor, "nodes vocab"]],
    parts: Parts,
) -> list[tuple[Session, Draft[Any], DraftPlan, Verdict]]:
    """The sessions with a verdict; one whose logits are not finite has failed."""
    scored = [
        ScoredTree(
            tree=draft.tree,
            target_laws=NodeLaws(logits[session.context.request_id], draft.tree, session.context, session.request.processors),
            draws=session.draws,
        )
        for session, draft in zip(sessions, drafts, strict=True)
    ]
    rows: list[tuple[Session, Draft[Any], DraftPlan, Verdict]] = []
    for session, draft, plan, outcome in zip(sessions, drafts, plans, parts.verifier.verify_many(scored), strict=True):
        if isinstance(outcome, NonFiniteLogitsError):
            session.fail(outcome)
        else:
            rows.append((session, draft, plan, outcome))
    return rows


def _commit(session: Session, tree: TokenTree, plan: DraftPlan, verdict: Verdict, batch_size: int) -> StepRecord:
    tokens = [*(tree.token_ids[node] for node in verdict.path), verdict.next_token]
    return StepRecord(
        plan=plan,
        num_nodes=tree.num_nodes - 1,
        depth=max(tree.depths),
        num_accepted=verdict.num_accepted,
        examined=verdict.examined,
        next_kind=verdict.next_kind,
        token_ids=session.commit(tokens),
        batch_size=batch_size,
    )
