"""The loop: plan, draft, score, verify, commit, update. Nothing else in the library contains it."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jaxtyping import Float
from torch import Tensor

from monge.control.base import PromptReader
from monge.core.context import DraftPlan
from monge.core.errors import NonFiniteLogitsError
from monge.core.model import NodeBlock
from monge.core.prompt import PromptProfile
from monge.core.verdict import RoundTiming, StageTimes, StepRecord, Verdict
from monge.draft.base import Draft
from monge.engine.drafting import observe, propose
from monge.engine.parts import Parts
from monge.engine.prompts import open_profiled
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
    prompts, controller = _open_target(sessions, parts), parts.controller
    states = parts.drafter.open([session.context for session in sessions])
    for session, state in zip(sessions, states, strict=True):
        session.drafter_state, session.controller_state = state, controller.init(parts.memory)
    if isinstance(controller, PromptReader):
        for session, prompt in zip(sessions, prompts, strict=True):
            session.controller_state = controller.read(session.controller_state, prompt)
    passed = timer.lap()
    for session in sessions:
        session.prefill_s = passed


def run_round(sessions: Sequence[Session], parts: Parts) -> None:
    """One round for every session; afterwards each has a new record, and perhaps a reason to be finished."""
    timer, forward_s = _Timer(start := time.perf_counter()), parts.forward_s
    contexts = [session.context for session in sessions]
    for session in sessions:
        session.begin_round()
    planned = parts.controller.plan_many(
        [session.controller_state for session in sessions], [session.draws for session in sessions]
    )
    plans = [session.limit(plan) for session, plan in zip(sessions, planned, strict=True)]
    drafts = propose(sessions, plans, parts)
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
    records = [_commit(session, draft, plan, verdict, len(sessions)) for session, draft, plan, verdict in rows]
    observe([(session, draft, verdict) for session, draft, _, verdict in rows], logits, parts)
    commit_s, total_s = timer.lap(), timer.last - start
    times = StageTimes(
        draft_s=draft_s,
        score_s=score_s,
        verify_s=verify_s,
        commit_s=commit_s,
        total_s=total_s,
        forward_s=parts.forward_s - forward_s,
    )
    _learn_costs(records, times, parts)
    for (session, *_), record in zip(rows, records, strict=True):
        session.records.append(replace(record, times=times, hindsight=parts.hindsight(session.drafter_state)))
        session.controller_state = parts.controller.update(session.controller_state, session.records[-1])


def close_session(session: Session, parts: Parts) -> None:
    """Give back the room that a request had."""
    parts.target.close(session.context.request_id)
    if session.drafting != "off":
        parts.drafter.close(session.context)


def _open_target(sessions: Sequence[Session], parts: Parts) -> list[PromptProfile]:
    """Read all but the last token of every prompt; their profiles, for a controller that asks."""
    ids, controller = [session.context.request_id for session in sessions], parts.controller
    is_reader = isinstance(controller, PromptReader)
    prompts = [session.prompt for session in sessions] if is_reader else []
    if is_reader and controller.reads_prompt_laws:
        profiles = open_profiled(parts.target, dict(zip(ids, prompts, strict=True)))
        return [profiles[number] for number in ids]
    parts.target.open({number: session.context.token_ids[:-1] for number, session in zip(ids, sessions, strict=True)})
    return prompts


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


def _learn_costs(records: Sequence[StepRecord], times: StageTimes, parts: Parts) -> None:
    """Correct the decoder's costs by what this round took."""
    costs = parts.memory.costs
    if costs is not None and records:
        timing = RoundTiming(
            num_nodes=max(record.num_nodes for record in records),
            depth=max(record.depth if parts.runs_network(record.drafter) else 0 for record in records),
            batch_size=records[0].batch_size,
            context_length=max(record.context_length for record in records),
            draft_s=times.draft_s,
            rest_s=times.total_s - times.draft_s,
        )
        costs.observe(timing)


def _commit(session: Session, draft: Draft[Any], plan: DraftPlan, verdict: Verdict, batch_size: int) -> StepRecord:
    tree, length = draft.tree, len(session.context.token_ids)
    accepted = [tree.token_ids[node] for node in verdict.path]
    return StepRecord(
        plan=plan,
        num_nodes=tree.num_nodes - 1,
        depth=max(tree.depths),
        num_accepted=verdict.num_accepted,
        examined=verdict.examined,
        next_kind=verdict.next_kind,
        token_ids=session.commit([*accepted, verdict.next_token]),
        batch_size=batch_size,
        context_length=length,
        drafter=draft.drafter,
        **_evidence(draft, verdict),
    )


def _evidence(draft: Draft[Any], verdict: Verdict) -> dict[str, Any]:
    """What the drafter noted along the accepted path and on through first candidates."""
    if draft.evidence is None:
        return {}
    tree, path = draft.tree, list(verdict.path)
    while offers := tree.offers[path[-1] if path else 0]:
        path.append(offers[0])
    tokens = [tree.token_ids[node] for node in path]
    return {
        "levels_read": draft.evidence.levels_read,
        "confidences": draft.evidence.confidences_along(tokens),
        "token_probs": draft.evidence.token_probs_along(tokens),
    }
