"""Run the real loop on logged texts."""

import warnings
from dataclasses import replace

from monge.control.base import PromptReader, Reads
from monge.core.draws import Draws
from monge.core.errors import DrafterError
from monge.core.model import SequenceModel
from monge.core.prompt import PromptProfile
from monge.core.verdict import StepRecord
from monge.engine.components import Components
from monge.engine.loop import close_session, run_round
from monge.engine.opening import open_sessions
from monge.engine.session import Request, Session
from monge.replay.log import LawLog, LoggedText, UnavailableError
from monge.replay.rules import conditional_candidates
from monge.replay.text import ReplayTarget, TextDraws, TextVerifier


def replay_text(
    components: Components, log: LawLog, text: LoggedText, draws: Draws
) -> tuple[StepRecord, ...]:
    """Return the rounds of one text of a log; the target runs only if the drafter needs it.

    Returns:
        One record a round. The last token of the text counts as the round's own, not as accepted.

    Raises:
        UnavailableError: If the log cannot say what the verifier would have accepted.
    """
    session, text_draws = open_text(components, log, text, draws)
    following = replace(
        components, greedy_rule=None, rule=TextVerifier(), target=stand_in(components, log)
    )
    open_sessions([session], following)
    try:
        while session.finish_reason is None:
            simulate_round(session, text_draws, following)
    finally:
        close_session(session, following)
    return tuple(session.records)


def stand_in(components: Components, log: LawLog) -> SequenceModel:
    """Return the target if the drafter needs what it says, and else a model that reads nothing."""
    can = components.drafter.capabilities
    if can.reads_states or can.num_successors:
        return components.target
    return ReplayTarget(log.model.vocab_size)


def simulate_round(session: Session, text_draws: TextDraws, components: Components) -> None:
    """Run one round. The loop goes on without a drafter that fails; replay raises.

    Raises:
        UnavailableError: If the candidates cannot be drawn given the text, or the drafter fails.
    """
    text_draws.begin(len(session.context.token_ids))
    before, error = session.drafts, None
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*the drafter failed")
        try:
            run_round([session], components)
        except DrafterError as raised:
            error = raised
    if text_draws.error is not None:
        raise text_draws.error
    if error is not None or session.drafts != before or session.error is not None:
        raise UnavailableError(
            f"replay: the drafter failed after {text_draws.start} tokens of a text; "
            "decode it once to see how"
        ) from error


def open_text(
    components: Components, log: LawLog, text: LoggedText, draws: Draws
) -> tuple[Session, TextDraws]:
    """Return a session that follows a text, and its draws."""
    can, reader = components.drafter.capabilities, components.controller
    if can.num_successors and isinstance(components.target, ReplayTarget):
        raise UnavailableError(
            f"replay: {type(components.drafter).__name__} learns what the target says at every node that it "
            "drafts; a log has that along its texts only; use it where the target runs (monge tune, "
            "monge bench decode)"
        )
    conditional = conditional_candidates(
        components.rule,
        can,
        is_compact=log.top is not None,
        reads_confidence=Reads.CONFIDENCE in reader.reads,
    )
    text_draws = TextDraws(text, conditional, draws)
    if text.profile is None and isinstance(reader, PromptReader) and reader.reads_prompt_laws:
        raise UnavailableError(
            "replay: the controller asks how surprising the target finds a prompt, and the log does not "
            "say; make the log again with `monge replay record`, or leave out the features 'surprisal' "
            "and 'entropy'"
        )
    total = len(text.all_ids)
    request = Request(
        prompt_ids=text.prompt_ids,
        max_new_tokens=text.max_new_tokens,
        rules=log.rules,
        seed=0,
        stop_check=lambda token_ids: len(token_ids) >= total,
        draws=text_draws,
        profile=text.profile or PromptProfile(token_ids=text.prompt_ids),
    )
    return Session(request, 0), text_draws
