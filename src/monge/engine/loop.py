"""The loop: plan, draft, score, verify, commit, update. Nothing else in the library contains it."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from monge.control.base import PromptReader
from monge.core.context import Context
from monge.core.errors import NonFiniteLogitsError
from monge.core.model import NodeBlock
from monge.core.prompt import PromptProfile
from monge.core.splits import splits_along
from monge.core.verdict import StageTimes, StepRecord, Verdict
from monge.draft.base import piece_reader
from monge.engine.attempt import attempt
from monge.engine.clock import now
from monge.engine.drafting import is_told, observe, propose
from monge.engine.logprobs import along
from monge.engine.parts import Parts
from monge.engine.planning import make_plans, plans_stand
from monge.engine.prompts import open_profiled
from monge.engine.row import Row, every, together
from monge.engine.sampling import NodeLaws
from monge.engine.session import Session
from monge.engine.telling import is_told_later, tell, tell_left
from monge.verify.problem import ScoredTree


@dataclass(slots=True)
class _Timer:
    """Seconds by stage."""

    last: float = field(default_factory=now)
    stages: dict[str, float] = field(default_factory=dict[str, float])

    def lap(self, stage: str) -> float:
        before, self.last = self.last, now()
        passed = self.last - before
        self.stages[stage] = self.stages.get(stage, 0.0) + passed
        return passed


def open_sessions(sessions: Sequence[Session], parts: Parts, *, num_running: int = 0) -> None:
    """Read the prompts of new requests; all but the last token, which is the root of the first tree.

    Args:
        sessions: The requests.
        parts: What they share.
        num_running: Requests that they join.
    """
    timer = _Timer()
    prompts = _open_target(sessions, parts)
    drafting = [session for session in sessions if session.drafting != "off"]
    contexts = [_opening(session, parts, len(sessions) + num_running) for session in drafting]
    began = now()
    states = parts.drafter.open(contexts) if drafting else ()
    if parts.memory.costs is not None:
        parts.memory.costs.note_reading(sum(len(one.token_ids) - 1 for one in contexts), now() - began)
    for session, state in zip(drafting, states, strict=True):
        session.drafter_state = state
    for session, prompt in zip(sessions, prompts, strict=True):
        session.controller_state = controller_state(session, prompt, parts)
    passed = timer.lap("prefill_s")
    for session in sessions:
        session.prefill_s = passed


def run_round(sessions: Sequence[Session], parts: Parts, *, isolated: bool = False) -> None:
    """One round for every session; afterwards each has a new record, and perhaps a reason to be finished.

    Args:
        sessions: Requests that are open and not finished.
        parts: What they share.
        isolated: Whether a request for which a stage raises ends alone, with the error; else the error is raised.
    """
    timer, forward_s = _Timer(start := now()), parts.forward_s
    rows = [Row(session) for session in sessions]
    if not plans_stand(rows):
        rows = tell_left(rows, parts, isolated=isolated)
    for session in sessions:
        session.begin_round()
    if parts.memory.costs is not None:
        # Who drafts makes all wait, those too that the controller does not plan for.
        parts.memory.costs.batch_size = len(sessions)
    rows = _stage(rows, partial(make_plans, parts=parts), parts, isolated=isolated)
    if not rows:
        return
    if _ran_whole(rows, parts):
        timer.lap("score_s")
    else:
        drafts = propose([row.session for row in rows], [row.plan for row in rows], parts)
        for row, draft in zip(rows, drafts, strict=True):
            row.draft = draft
        timer.lap("draft_s")
        rows = _stage(rows, partial(_decide, parts=parts, timer=timer), parts, isolated=isolated)
    rows = _accepted(rows)
    parts.target.commit({row.context.request_id: (0, *row.verdict.path) for row in rows})
    rows = every(rows, _commit, isolated=isolated)
    told = [(row.session, row.drafted, row.verdict) for row in rows if is_told(row.session, row.drafted, row.plan, parts)]
    if told:
        observe(told, {row.context.request_id: row.logits for row in rows if row.logits is not None}, parts)
    timer.lap("commit_s")
    times = StageTimes(total_s=timer.last - start, forward_s=parts.forward_s - forward_s, **timer.stages)
    rows = every(rows, partial(_record, times=times, parts=parts, batch_size=len(sessions)), isolated=isolated)
    if not rows or is_told_later(rows, parts):
        return
    num_told = tell(rows, parts, isolated=isolated)
    if parts.memory.costs is not None:
        tail_s = timer.lap("tail_s") / num_told
        parts.memory.costs.note_tail(any(row.drafted.tree.num_nodes > 1 for row in rows), tail_s)


def close_session(session: Session, parts: Parts) -> None:
    """Give back the room that a request had."""
    parts.target.close(session.context.request_id)
    if session.drafting != "off":
        parts.drafter.close(session.context)


def abandon_session(session: Session, parts: Parts) -> None:
    """Give back what a request has that failed while it was opened: some of the parts may not know it."""
    attempt(lambda: parts.target.close(session.context.request_id))
    attempt(lambda: parts.drafter.close(session.context))


def controller_state(session: Session, prompt: PromptProfile | None, parts: Parts) -> Any:
    """The controller's state for a new request, whose prompt is looked at if the controller asks."""
    planner = parts.planner(session.request.controller)
    _note_length(session, parts)
    state = planner.controller.init(planner.memory)
    if isinstance(planner.controller, PromptReader) and prompt is not None:
        return planner.controller.read(state, prompt)
    return state


def reads_later(session: Session, parts: Parts, num_requests: int) -> bool:
    """Whether the drafter need not read a new request's prompt before the first draft for it is wanted.

    Args:
        session: The request.
        parts: The parts.
        num_requests: Requests that it will share rounds with, itself counted.
    """
    if piece_reader(parts.drafter) is None or not session.request.adaptive:
        return False
    planner = parts.planner(session.request.controller)
    _note_length(session, parts)
    return planner.controller.rests(planner.memory, num_requests)


def _note_length(session: Session, parts: Parts) -> None:
    """Note the length of a text that is about to begin: what reading it takes decides whether drafting pays."""
    if parts.memory.costs is not None:
        parts.memory.costs.context_length = len(session.context.token_ids)


def _opening(session: Session, parts: Parts, num_requests: int) -> Context:
    """What the drafter is shown of a new request."""
    context = session.context
    if reads_later(session, parts, num_requests):
        return replace(context, token_ids=context.token_ids[:1])
    return context


def _open_target(sessions: Sequence[Session], parts: Parts) -> Sequence[PromptProfile | None]:
    """Read all but the last token of every prompt; their profiles, for controllers that ask."""
    controllers = {one.context.request_id: parts.planner(one.request.controller).controller for one in sessions}
    readers = {number: one for number, one in controllers.items() if isinstance(one, PromptReader)}
    profiles = {one.context.request_id: one.prompt for one in sessions if one.context.request_id in readers}
    surprised = {number: profiles[number] for number, one in readers.items() if one.reads_prompt_laws}
    plain = {one.context.request_id: one.context.token_ids[:-1] for one in sessions if one.context.request_id not in surprised}
    if plain:
        parts.target.open(plain)
    if surprised:
        profiles |= open_profiled(parts.target, surprised)
    return [profiles.get(number) for number in controllers]


def _stage(rows: list[Row], stage: Any, parts: Parts, *, isolated: bool) -> list[Row]:
    if isolated:
        return together(rows, stage, parts)
    stage(rows)
    return rows


def _ran_whole(rows: Sequence[Row], parts: Parts) -> bool:
    """Whether the round has run as one: then it has its draft and its verdict, and none of the seconds is drafting's own."""
    whole, chain, (row, *others) = parts.whole_round, parts.own_chain, rows
    if whole is None or chain is None or others or not whole.takes(row.session, row.plan, chain):
        return False
    if (made := whole.run(row.session, row.plan, chain)) is None:
        return False
    row.as_one, (row.draft, row.outcome) = True, made
    return True


def _decide(rows: Sequence[Row], parts: Parts, timer: _Timer) -> None:
    """Score and verify: afterwards every row has its outcome."""
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
        if wanted is not None and not isinstance(outcome, NonFiniteLogitsError):
            tokens = [one.tree.token_ids[node] for node in outcome.path] + [outcome.next_token]
            row.logprobs = along(wanted, one.target_laws, row.scored, (0, *outcome.path), tokens)
    timer.lap("verify_s")


def _accepted(rows: Sequence[Row]) -> list[Row]:
    """The rows with a verdict; one whose logits are not finite has failed."""
    for row in rows:
        if isinstance(row.outcome, NonFiniteLogitsError):
            row.session.fail(row.outcome)
    return [row for row in rows if row.session.error is None]


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
        hindsight=parts.hindsight(row.session.drafter_state),
        as_one=row.as_one,
        **_evidence(row),
    )
    row.session.note(record)


def _evidence(row: Row) -> dict[str, Any]:
    """What the drafter noted along the accepted path and on through first candidates."""
    noted, tree, path = row.drafted.evidence, row.drafted.tree, list(row.verdict.path)
    if noted is None:
        return {}
    while offers := tree.offers[path[-1] if path else 0]:
        path.append(offers[0])
    tokens = [tree.token_ids[node] for node in path]
    return {
        "levels_read": noted.levels_read,
        "confidences": noted.confidences_along(tokens),
        "token_probs": noted.token_probs_along(tokens),
    }
