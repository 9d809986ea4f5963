"""The loop: plan, draft, score, verify, commit, learn. Nothing else in the library contains it."""

from collections.abc import Sequence
from typing import Any

from monge.core.verdict import StageTimes, StepRecord, Verdict
from monge.draft.base import Draft
from monge.engine.components import Components
from monge.engine.drafting import Row, close_drafter, draft_trees, observe, row_of
from monge.engine.planning import learn, plan_round
from monge.engine.session import Session, catch
from monge.requests.sampling import NodeLaws
from monge.runtime.clock import StageTimer
from monge.verify.problem import ScoredTree


def run_round(sessions: Sequence[Session], components: Components, *, num_waiting: int = 0) -> None:
    """Run one round of every session: each then has a new record, or an error.

    Code of a request (its logits processors, its stop check) and logits that are not finite fail
    that request alone: `Session.error` is set. Every other error is raised; what the caches hold of
    these sessions is then unknown, so they cannot continue.

    Args:
        sessions: Requests that are open and not finished, at least one.
        components: Target, drafter, verifier and controllers.
        num_waiting: Requests that wait for a place in the batch.

    Raises:
        DrafterError: If the drafter raises after it has drawn.
        Exception: Whatever else a component raises.
    """
    timer, forward_s = StageTimer(), components.forward_s
    for session in sessions:
        session.begin_round()
    plans = plan_round(sessions, components, num_waiting)
    drafts = draft_trees(sessions, plans, components)
    timer.lap("draft_s")
    pairs = zip(sessions, drafts, strict=True)
    logits = components.target.extend({session.request_id: draft.block for session, draft in pairs})
    drafts = [draft.result() for draft in drafts]  # the host waits for a device here, if at all
    timer.lap("score_s")
    laws = [
        NodeLaws(
            logits[session.request_id],
            draft.tree,
            session.context,
            session.processors,
            session.grammar,
            record=components.record,
            num_truncating=session.num_truncating,
        )
        for session, draft in zip(sessions, drafts, strict=True)
    ]
    verdicts = _verify(sessions, drafts, laws, components)
    timer.lap("verify_s")
    rows: list[Row] = []
    for session, plan, draft, law, verdict in zip(
        sessions, plans, drafts, laws, verdicts, strict=True
    ):
        if isinstance(verdict, Verdict):
            rows.append(row_of(session, plan, draft, law, verdict))
        else:
            session.fail(law.explain(verdict))
    components.target.commit({row.session.request_id: (0, *row.verdict.path) for row in rows})
    rows = [row for row in rows if row.session.commit(row.draft.tree, row.laws, row.verdict)]
    observe(rows, components)
    timer.lap("commit_s")
    times = timer.times(components.forward_s - forward_s)
    records = [_record(row, times, len(sessions), components) for row in rows]
    learn([row.session for row in rows], records, components)


def close_session(session: Session, components: Components) -> None:
    """Give back what a request holds in the caches.

    After an error the content of the caches is unknown, so closing may raise once more.
    """
    if session.is_open:
        if session.error is None:
            components.target.close(session.request_id)
        else:
            catch(lambda: components.target.close(session.request_id))
    if session.drafter_is_open and session.drafts:
        close_drafter(session, components)
    session.is_open = session.drafter_is_open = False


def _verify(
    sessions: Sequence[Session],
    drafts: Sequence[Draft[Any]],
    laws: Sequence[NodeLaws],
    components: Components,
) -> list[Verdict | Exception]:
    """Verify greedy and sampled requests: one call of the verifier of each kind."""
    outcomes: dict[int, Verdict | Exception] = {}
    for verifier, is_greedy in ((components.greedy_verifier, True), (components.verifier, False)):
        places = [
            place
            for place, session in enumerate(sessions)
            if (session.context.rules.temperature == 0) == is_greedy
        ]
        scored = [
            ScoredTree(
                tree=drafts[place].tree, target_laws=laws[place], draws=sessions[place].draws
            )
            for place in places
        ]
        if scored:
            outcomes |= zip(places, verifier.verify_many(scored), strict=True)
    return [outcomes[place] for place in range(len(sessions))]


def _record(row: Row, times: StageTimes, batch_size: int, components: Components) -> StepRecord:
    session, tree, verdict = row.session, row.draft.tree, row.verdict
    record = StepRecord(
        plan=row.plan,
        num_nodes=tree.num_nodes - 1,
        depth=max(tree.depths),
        num_accepted=verdict.num_accepted,
        examined=verdict.examined,
        next_kind=verdict.next_kind,
        token_ids=session.new_ids,
        times=times,
        batch_size=batch_size,
        context_length=len(session.context.token_ids) - len(session.new_ids),
        drafter=row.draft.drafter,
        counterfactuals=components.counterfactuals(session.drafter_state),
        tree=row.tree,
    )
    session.note(record)
    return record
