"""The loop: plan, draft, score, verify, commit, update. Nothing else in the library contains it."""

from collections.abc import Sequence
from functools import partial
from typing import Any

from monge.control.base import AnyController, RoundInfo
from monge.core.context import DraftPlan
from monge.core.errors import NonFiniteLogitsError
from monge.core.model import NodeBlock
from monge.core.verdict import RoundTiming, StageTimes, StepRecord, Verdict
from monge.engine.clock import StageTimer
from monge.engine.components import Components
from monge.engine.drafting import close_drafter, observe, propose
from monge.engine.logprobs import along
from monge.engine.round_slot import RoundSlot, run_each, run_stage
from monge.engine.sampling import NodeLaws
from monge.engine.session import Session, catch
from monge.verify.problem import ScoredTree


def run_round(
    sessions: Sequence[Session],
    components: Components,
    *,
    num_waiting: int = 0,
    isolated: bool = False,
) -> None:
    """One round for every session; afterwards each has a new record, and perhaps a reason to be finished.

    Args:
        sessions: Requests that are open and not finished.
        components: What they share.
        num_waiting: Requests that wait for a place in the batch.
        isolated: Whether a request for which a stage raises ends alone, with the error; else the
            error is raised.
    """
    timer, forward_s = StageTimer(), components.forward_s
    slots = [RoundSlot(session) for session in sessions]
    for session in sessions:
        session.begin_round()
    slots = _stage(
        slots,
        partial(_plan, components=components, batch_size=len(slots), num_waiting=num_waiting),
        components,
        isolated,
    )
    drafts = propose([slot.session for slot in slots], [slot.plan for slot in slots], components)
    for slot, draft in zip(slots, drafts, strict=True):
        slot.draft = draft
    timer.lap("draft_s")
    slots = [slot for slot in slots if slot.session.error is None]
    slots = _stage(
        slots, partial(_score_and_verify, components=components, timer=timer), components, isolated
    )
    if not slots:
        return
    components.target.commit({slot.context.request_id: (0, *slot.verdict.path) for slot in slots})
    slots = run_each(slots, _commit, isolated=isolated)
    observe([(slot.session, slot.drafted, slot.verdict, slot.scored) for slot in slots], components)
    timer.lap("commit_s")
    times = StageTimes(
        total_s=timer.total_s, forward_s=components.forward_s - forward_s, **timer.stages
    )
    slots = run_each(
        slots,
        partial(_record, times=times, components=components, batch_size=len(sessions)),
        isolated=isolated,
    )
    _learn_latency([slot.session.records[-1] for slot in slots], components)
    run_each(slots, partial(_update, components=components), isolated=isolated)


def _plan(
    slots: Sequence[RoundSlot], components: Components, *, batch_size: int, num_waiting: int
) -> None:
    """Plans of the requests that draft; the requests of each controller are planned together.

    A request that does not draft, or asks for the largest tree, has no part in a shared budget.
    """
    groups: dict[int, tuple[AnyController, list[RoundSlot]]] = {}
    for slot in slots:
        if slot.session.drafting == "off":
            continue
        if slot.session.request.adaptive:
            controller = components.planner(slot.session.request.controller).controller
            groups.setdefault(id(controller), (controller, []))[1].append(slot)
        else:
            slot.plan = slot.session.limit(DraftPlan(), components.draft_length)
    for controller, group in groups.values():
        info = RoundInfo(
            context_lengths=tuple(len(slot.context.token_ids) for slot in group),
            batch_size=batch_size,
            num_waiting=num_waiting,
        )
        plans = controller.plan(
            [slot.session.controller_state for slot in group],
            info,
            [slot.session.plan_draws for slot in group],
        )
        for slot, plan in zip(group, plans, strict=True):
            slot.plan = slot.session.limit(plan, components.draft_length)


def close_session(session: Session, components: Components) -> None:
    """Give back what a request holds in the caches."""
    if not session.stays_open:
        components.target.close(session.context.request_id)
    if session.drafting != "off":
        close_drafter(session, components)


def abandon_session(session: Session, components: Components) -> None:
    """Give back what a request holds that failed while it was opened.

    Some of the components may not know it.
    """
    catch(lambda: components.target.close(session.context.request_id))
    catch(lambda: components.drafter.close(session.context))


def _stage(
    slots: list[RoundSlot], stage: Any, components: Components, isolated: bool
) -> list[RoundSlot]:
    """Run a stage; the slots that got through.

    Networks read no empty batch, so without slots nothing runs.
    """
    if not slots:
        return slots
    if not isolated:
        stage(slots)
    return [
        slot
        for slot in (run_stage(slots, stage, components) if isolated else slots)
        if slot.session.error is None
    ]


def _score_and_verify(
    slots: Sequence[RoundSlot], components: Components, timer: StageTimer
) -> None:
    """Score the trees in one forward and verify them.

    Every slot gets a verdict, or its session has failed.
    """
    trees = [slot.drafted.tree for slot in slots]
    logits = components.target.extend(
        {
            slot.context.request_id: NodeBlock(tree.token_ids, tree.parents)
            for slot, tree in zip(slots, trees, strict=True)
        }
    )
    timer.lap("score_s")
    for slot, tree in zip(slots, trees, strict=True):
        slot.laws = NodeLaws(
            logits[slot.context.request_id], tree, slot.context, slot.session.processors
        )
    scored = [
        ScoredTree(tree=tree, target_laws=slot.target_laws, draws=slot.session.draws)
        for slot, tree in zip(slots, trees, strict=True)
    ]
    outcomes: dict[int, Verdict | NonFiniteLogitsError] = {}
    is_greedy = [slot.context.rules.temperature == 0 for slot in slots]
    for greedy, verifier in ((True, components.greedy_verifier), (False, components.verifier)):
        places = [place for place, own in enumerate(is_greedy) if own == greedy]
        if places:
            outcomes |= zip(
                places, verifier.verify_many([scored[place] for place in places]), strict=True
            )
    for place, (slot, one) in enumerate(zip(slots, scored, strict=True)):
        outcome = outcomes[place]
        slot.outcome = outcome
        wanted = slot.session.request.logprobs
        if isinstance(outcome, NonFiniteLogitsError):
            slot.session.fail(outcome)
        elif wanted is not None:
            tokens = [one.tree.token_ids[node] for node in outcome.path] + [outcome.next_token]
            slot.logprobs = along(wanted, one.target_laws, slot.scored, (0, *outcome.path), tokens)
    timer.lap("verify_s")


def _commit(slot: RoundSlot) -> None:
    tree, verdict, session = slot.drafted.tree, slot.verdict, slot.session
    slot.length = len(session.context.token_ids)
    session.processors = slot.target_laws.processors_after(verdict.path[-1] if verdict.path else 0)
    slot.token_ids = session.commit(
        [*(tree.token_ids[node] for node in verdict.path), verdict.next_token]
    )
    session.logprobs = slot.logprobs[: len(slot.token_ids)]


def _record(slot: RoundSlot, times: StageTimes, components: Components, batch_size: int) -> None:
    tree, verdict = slot.drafted.tree, slot.verdict
    record = StepRecord(
        plan=slot.plan,
        num_nodes=tree.num_nodes - 1,
        depth=max(tree.depths),
        num_accepted=verdict.num_accepted,
        examined=verdict.examined,
        next_kind=verdict.next_kind,
        token_ids=slot.token_ids,
        times=times,
        batch_size=batch_size,
        context_length=slot.length,
        drafter=slot.drafted.drafter,
        counterfactuals=components.counterfactuals(slot.session.drafter_state),
        token_probs=_token_probs(slot),
    )
    slot.session.note(record)


def _token_probs(slot: RoundSlot) -> tuple[float, ...]:
    """Return the draft probabilities along the accepted path and on through first candidates."""
    noted, tree, path = slot.drafted.token_probs, slot.drafted.tree, list(slot.verdict.path)
    if not noted:
        return ()
    while candidates := tree.candidates[path[-1] if path else 0]:
        path.append(candidates[0])
    tokens = tuple(tree.token_ids[node] for node in path)
    found = (noted.get(tokens[:depth]) for depth in range(1, len(tokens) + 1))
    return tuple(prob for prob in found if prob is not None)


def _update(slot: RoundSlot, components: Components) -> None:
    session = slot.session
    if session.request.adaptive and session.drafting != "off":
        controller = components.planner(session.request.controller).controller
        session.controller_state = controller.update(session.controller_state, session.records[-1])


def _learn_latency(records: Sequence[StepRecord], components: Components) -> None:
    """Let the latency learn from a round.

    The drafts of lookups count only in rounds in which no network drafts.

    Args:
        records: One record of each request that shared it.
        components: The components.
    """
    latency = components.shared.latency
    drafted = [record for record in records if record.depth]
    networks = {record.drafter for record in drafted if components.runs_network(record.drafter)}
    # Where two networks drafted for one batch, their times cannot be told apart.
    if latency is None or not records or len(networks) > 1:
        return
    by_network = [record for record in drafted if record.drafter in networks]
    deepest = max(by_network or drafted or records, key=lambda record: record.depth)
    latency.observe(
        RoundTiming(
            depth=deepest.depth,
            batch_size=deepest.batch_size,
            seconds=deepest.times.total_s,
            drafter=deepest.drafter,
        )
    )
