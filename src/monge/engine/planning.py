"""Plans of the controllers of a batch before a round, and their updates after it."""

from collections.abc import Sequence

from monge.control.base import RoundInfo
from monge.core.context import PLAIN, DraftPlan
from monge.core.verdict import StepRecord
from monge.engine.components import Components
from monge.engine.session import Session
from monge.requests.grammar import FORCED


def plan_round(
    sessions: Sequence[Session], components: Components, num_waiting: int
) -> list[DraftPlan]:
    """Return the plan of each session. A controller plans for all of its sessions together.

    A request that does not draft, or asks for the largest tree, has no part in a shared budget.
    """
    plans = {session.request_id: DraftPlan() if session.drafts else PLAIN for session in sessions}
    groups: dict[int, list[Session]] = {}
    for session in sessions:
        if session.drafts and session.request.adaptive:
            controller = components.controller_for(session.request.controller)
            groups.setdefault(id(controller), []).append(session)
    for group in groups.values():
        name = group[0].request.controller
        info = RoundInfo(
            context_lengths=tuple(len(session.context.token_ids) for session in group),
            batch_size=len(sessions),
            num_waiting=num_waiting,
            memory=components.shared_for(name).memory,
        )
        states = [session.controller_state for session in group]
        draws = [session.plan_draws for session in group]
        group_plans = components.controller_for(name).plan(states, info, draws)
        plans |= zip((session.request_id for session in group), group_plans, strict=True)
    return [
        session.limit(plans[session.request_id], components.capabilities.max_length)
        if session.drafts
        else plans[session.request_id]
        for session in sessions
    ]


def learn(
    sessions: Sequence[Session], records: Sequence[StepRecord], components: Components
) -> None:
    """Let the latency and the controllers learn from a round; forced tokens tell nothing about drafters."""
    _learn_latency([record for record in records if record.drafter != FORCED], components)
    for session, record in zip(sessions, records, strict=True):
        if record.drafter != FORCED and session.request.adaptive and session.drafts:
            name = session.request.controller
            controller, shared = components.controller_for(name), components.shared_for(name)
            session.controller_state = controller.update(session.controller_state, record)
            shared.memory = controller.learn(shared.memory, session.controller_state, record)


def _learn_latency(records: Sequence[StepRecord], components: Components) -> None:
    """Note the time of a round, unless something was prepared in it.

    Drafts of lookups count only where no network drafted.
    """
    latency = components.shared.latency
    drafted = [record for record in records if record.depth]
    networks = {record.drafter for record in drafted if components.runs_network(record.drafter)}
    # Where two networks drafted for one batch, their times cannot be told apart.
    if latency is None or not records or len(networks) > 1 or records[0].times.is_warm_up:
        return
    by_network = [record for record in drafted if record.drafter in networks]
    deepest = max(by_network or drafted or records, key=lambda record: record.depth)
    latency.observe(
        deepest.times.total_s,
        depth=deepest.depth,
        batch_size=deepest.batch_size,
        drafter=deepest.drafter,
    )
