"""Run the real loop on logged texts."""

import warnings
from dataclasses import replace

from monge.control.base import PromptReader, Reads
from monge.core.draws import Draws
from monge.core.model import SequenceModel
from monge.core.prompt import PromptProfile
from monge.core.verdict import StepRecord
from monge.engine.components import Components
from monge.engine.loop import close_session, run_round
from monge.engine.opening import open_sessions
from monge.engine.session import Request, Session
from monge.replay.errors import UnavailableError
from monge.replay.log import LawLog, LoggedText
from monge.replay.rules import conditional_candidates
from monge.replay.text import ReplayTarget, TextDraws, TextVerifier


def replay_text(
    components: Components, log: LawLog, text: LoggedText, draws: Draws
) -> tuple[StepRecord, ...]:
    """The rounds of one text.

    Args:
        components: What is replayed; its target runs only where the drafter lives on what it says,
            see `following`.
        log: Where the text is from.
        text: One of its texts.
        draws: Source of randomness: what was drafted on the way to the text is random still.

    Returns:
        One record a round. The last token of the text always counts as the round's own token, not
        as accepted.

    Raises:
        UnavailableError: If the log cannot say what the verifier would have accepted.
    """
    session, guide = open_text(components, log, text, draws)
    playing = replace(
        components, greedy_rule=None, rule=TextVerifier(), target=following(components, log)
    )
    open_sessions([session], playing)
    try:
        while session.finish_reason is None:
            play_round(session, guide, playing)
    finally:
        close_session(session, playing)
    return tuple(session.records)


def following(components: Components, log: LawLog) -> SequenceModel:
    """What stands for the target in a replay.

    Nothing that runs, or the target for a drafter that lives on what it says.

    The target then reads every round's tree, and the text is followed all the same.
    """
    can = components.drafter.capabilities
    return (
        components.target
        if can.reads_states or can.num_successors
        else ReplayTarget(log.model.vocab_size)
    )


def play_round(session: Session, guide: TextDraws, components: Components) -> None:
    """One round, after which nothing has gone wrong unnoticed.

    The loop goes on without a drafter that fails, replay must not.

    Raises:
        UnavailableError: If the candidates cannot be drawn given the text, or the drafter fails.
    """
    guide.begin(len(session.context.token_ids))
    before = session.drafting
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*the drafter failed")
        run_round([session], components)
    if guide.error is not None:
        raise guide.error
    if session.drafting != before or session.error is not None:
        raise UnavailableError(
            f"replay: the drafter failed after {guide.start} tokens of a text; "
            "decode it once to see how"
        )


def open_text(
    components: Components, log: LawLog, text: LoggedText, draws: Draws
) -> tuple[Session, TextDraws]:
    """A session that follows a text, and the draws that lead it."""
    if components.drafter.capabilities.num_successors and isinstance(
        components.target, ReplayTarget
    ):
        raise UnavailableError(
            f"replay: {type(components.drafter).__name__} learns what the target says at every "
            "node that it drafts; a log has "
            "that along its texts only; use it where the target runs (monge tune, monge bench "
            "decode)"
        )
    reads_confidence = Reads.CONFIDENCE in components.controller.reads
    given = conditional_candidates(
        components.rule,
        components.drafter.capabilities,
        is_compact=log.top is not None,
        reads_confidence=reads_confidence,
    )
    guide = TextDraws(text, given, draws)
    reader = components.controller
    if text.profile is None and isinstance(reader, PromptReader) and reader.reads_prompt_laws:
        raise UnavailableError(
            "replay: the controller asks how surprising the target finds a prompt, and the log "
            "does not say; make the log "
            "again with `monge replay record`, or leave out the features 'surprisal' and 'entropy'"
        )
    total = len(text.all_ids)
    request = Request(
        prompt_ids=text.prompt_ids,
        max_new_tokens=text.max_new_tokens,
        rules=log.rules,
        seed=0,
        stop_check=lambda token_ids: len(token_ids) >= total,
        draws=guide,
        profile=text.profile or PromptProfile(token_ids=text.prompt_ids),
    )
    return Session(request, 0), guide
