"""The loop: plan, draft, score, verify, commit, update. Nothing else in the library contains it."""

from collections.abc import Sequence
from functools import partial
from typing import Any

from monge.core.errors import NonFiniteLogitsError
from monge.core.model import NodeBlock
from monge.core.splits import splits_along
from monge.core.verdict import StageTimes, StepRecord, Verdict
from monge.engine.catch import catch
from monge.engine.clock import StageTimer
from monge.engine.drafting import close_drafter, observe, propose
from monge.engine.latency_learning import learn_latency
from monge.engine.logprobs import along
from monge.engine.parts import Parts
from monge.engine.planning import make_plans
from monge.engine.row import Row, every, together
from monge.engine.sampling import NodeLaws
from monge.engine.session import Session
from monge.verify.problem import ScoredTree


def run_round(sessions: Sequence[Session], parts: Parts, *, num_waiting: int = 0, isolated: bool = False) -> None:
    """One round for every session; afterwards each has a new record, and perhaps a reason to be finished.

    Args:
        sessions: Requests that are open and not finished.
        parts: What they share.
        num_waiting: Requests that wait for a place in the batch.
        isolated: Whether a request for which a stage raises ends alone, with the error; else the error is raised.
    """
    timer, forward_s = StageTimer(), parts.forward_s
    rows = [Row(session) for session in sessions]
    for session in sessions:
        session.begin_round()
    rows = _stage(rows, partial(make_plans, parts=parts, batch_size=len(rows), num_waiting=num_waiting), parts, isolated)
    drafts = propose([row.session for row in rows], [row.plan for row in rows], parts)
    for row, draft in zip(rows, drafts, strict=True):
        row.draft = draft
    timer.lap("draft_s")
    rows = [row for row in rows if row.session.error is None]
    rows = _stage(rows, partial(_score_and_verify, parts=parts, timer=timer), parts, isolated)
    if not rows:
        return
    parts.target.commit({row.context.request_id: (0, *row.verdict.path) for row in rows})
    rows = every(rows, _commit, isolated=isolated)
    observe([(row.session, row.drafted, row.verdict, row.scored) for row in rows], parts)
    timer.lap("commit_s")
    times = StageTimes(total_s=timer.total_s, forward_s=parts.forward_s - forward_s, **timer.stages)
    rows = every(rows, partial(_record, times=times, parts=parts, batch_size=len(sessions)), isolated=isolated)
    learn_latency([row.session.records[-1] for row in rows], parts)
    every(rows, partial(_update, parts=parts), isolated=isolated)


def close_session(session: Session, parts: Parts) -> None:
    """Give back what a request holds in the caches."""
    if not session.stays_open:
        parts.target.close(session.context.request_id)
    if session.drafting != "off":
        close_drafter(session, parts)


def abandon_session(session: Session, parts: Parts) -> None:
    """Give back what a request holds that failed while it was opened: some of the parts may not know it."""
    catch(lambda: parts.target.close(session.context.request_id))
    catch(lambda: parts.drafter.close(session.context))


def _stage(rows: list[Row], stage: Any, parts: Parts, isolated: bool) -> list[Row]:
    """Run a stage; the rows that got through. Networks read no empty batch, so without rows nothing runs."""
    if not rows:
        return rows
    if not isolated:
        stage(rows)
    return [row for row in (together(rows, stage, parts) if isolated else rows) if row.session.error is None]


def _score_and_verify(rows: Sequence[Row], parts: Parts, timer: StageTimer) -> None:
    """Score the trees in one forward and verify them: every row gets a verdict, or its session has failed."""
    trees = [row.drafted.tree for row in rows]
    logits = parts.target.extend(
        {row.context.request_id: NodeBlock(tree.token_ids, tree.parents) for row, tree in zip(rows, trees, strict=True)}
    )
    timer.lap("score_s")
    scored = [
        ScoredTree(
            tree=tree,
            target_laws=NodeLaws(logits[row.context.request_id], tree, row.context, row.session.request.processors),
            draws=row.session.draws,
        )
        for row, tree in zip(rows, trees, strict=True)
    ]
    outcomes: dict[int, Verdict | NonFiniteLogitsError] = {}
    is_greedy = [row.context.rules.temperature == 0 for row in rows]
    for greedy, verifier in ((True, parts.greedy_verifier), (False, parts.verifier)):
        places = [place for place, own in enumerate(is_greedy) if own == greedy]
        if places:
            outcomes |= zip(places, verifier.verify_many([scored[place] for place in places]), strict=True)
    for place, (row, one) in enumerate(zip(rows, scored, strict=True)):
        outcome = outcomes[place]
        row.outcome, row.logits = outcome, logits[row.context.request_id]
        wanted = row.session.request.logprobs
        if isinstance(outcome, NonFiniteLogitsError):
            row.session.fail(outcome)
        elif wanted is not None:
            tokens = [one.tree.token_ids[node] for node in outcome.path] + [outcome.next_token]
            row.logprobs = along(wanted, one.target_laws, row.scored, (0, *outcome.path), tokens)
    timer.lap("verify_s")


def _commit(row: Row) -> None:
    tree, verdict, session = row.drafted.tree, row.verdict, row.session
    row.length = len(session.context.token_ids)
    row.token_ids = session.commit([*(tree.token_ids[node] for node in verdict.path), verdict.next_token])
    session.logprobs = row.logprobs[: len(row.token_ids)]


def _record(row: Row, times: StageTimes, parts: Parts, batch_size: int) -> None:
    tree, verdict = row.drafted.tree, row.verdict
    record = StepRecord(
        plan=row.plan,
        num_nodes=tree.num_nodes - 1,
        depth=max(tree.depths),
        num_accepted=verdict.num_accepted,
        examined=verdict.examined,
        next_kind=verdict.next_kind,
        token_ids=row.token_ids,
        times=times,
        batch_size=batch_size,
        context_length=row.length,
        drafter=row.drafted.drafter,
        splits=splits_along(tree, verdict.path) if row.plan.num_fixed else (),
        counterfactuals=parts.counterfactuals(row.session.drafter_state),
        **_evidence(row),
    )
    row.session.note(record)


def _evidence(row: Row) -> dict[str, Any]:
    """What the drafter noted along the accepted path and on through first candidates."""
    noted, tree, path = row.drafted.evidence, row.drafted.tree, list(row.verdict.path)
    if noted is None:
        return {}
    while candidates := tree.candidates[path[-1] if path else 0]:
        path.append(candidates[0])
    tokens = [tree.token_ids[node] for node in path]
    return {
        "levels_read": noted.levels_read,
        "confidences": noted.confidences_along(tokens),
        "token_probs": noted.token_probs_along(tokens),
    }


def _update(row: Row, parts: Parts) -> None:
    session = row.session
    if session.request.adaptive and session.drafting != "off":
        controller = parts.planner(session.request.controller).controller
        session.controller_state = controller.update(session.controller_state, session.records[-1])
