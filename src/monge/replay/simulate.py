"""Simulate the rounds of a configuration on all texts of a log: the real loop follows each logged text."""

import hashlib
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from monge.control.base import PromptReader, SharedState
from monge.core.draws import Draws, SeededDraws
from monge.core.errors import DrafterError
from monge.core.prompt import PromptProfile
from monge.core.verdict import StepRecord
from monge.engine.components import Components
from monge.engine.follow import KnownVerdicts, follow
from monge.engine.session import Request, Session
from monge.replay.conditional import Conditional
from monge.replay.costs import RoundCosts, fixed_latency, predicted
from monge.replay.log import LawLog, LoggedText, UnavailableError
from monge.replay.rules import conditional_candidates
from monge.replay.text import ReplayTarget, TextDraws

PLAIN: Final = RoundCosts.linear(plain=1.0, node=0.0, draft=0.0)
"""Costs if none are known: every round costs the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedText:
    """A pass over text number `text` of a log: its rounds, with predicted times."""

    text: int
    records: tuple[StepRecord, ...]


def seeded(*names: object) -> SeededDraws:
    """Return draws that are a function of names."""
    digest = hashlib.blake2b(repr(names).encode(), digest_size=8).digest()
    return SeededDraws(int.from_bytes(digest, "big"))


def simulate(
    components: Components,
    log: LawLog,
    costs: RoundCosts = PLAIN,
    *,
    nodes: Sequence[int] | None = None,
    repeats: int = 1,
    seed: int = 0,
    on_text: Callable[[], None] = lambda: None,
) -> tuple[SimulatedText, ...]:
    """Run the rounds of a configuration along every text of a log.

    Args:
        components: Drafter, verifier and controller; the target is not used.
        log: The texts.
        costs: Predicted times, for the controller and for the records.
        nodes: Drafted nodes of depth 0, 1, ...; `None` for a chain.
        repeats: Passes over the log: what is drafted on the way to a text is random.
        seed: Of all passes.
        on_text: Called after every text.

    Raises:
        UnavailableError: If the log cannot say what the verifier would have accepted.
    """
    if nodes is None:
        nodes = range(components.drafter.capabilities.max_depth + 1)
    latency = fixed_latency(costs, components, nodes)
    passes: list[SimulatedText] = []
    for repeat in range(repeats):
        # A controller may learn across requests, as a decoder's own does; every pass starts afresh.
        fresh = replace(components, shared=SharedState(latency))
        for number, text in enumerate(log.texts):
            records = replay_text(fresh, log, text, seeded(seed, "replay", repeat, number))
            timed = tuple(
                predicted(record, costs, runs_network=fresh.runs_network(record.drafter))
                for record in records
            )
            passes.append(SimulatedText(text=number, records=timed))
            on_text()
    return tuple(passes)


def plain_seconds(text: LoggedText, costs: RoundCosts) -> float:
    """Return the predicted seconds of plain decoding of a text."""
    return len(text.token_ids) * costs.verify_s(0)


def replay_text(
    components: Components, log: LawLog, text: LoggedText, draws: Draws
) -> tuple[StepRecord, ...]:
    """Return the rounds of one text of a log; the target runs only if the drafter needs it.

    Returns:
        One record a round. The last token of the text counts as the round's own, not as accepted.

    Raises:
        UnavailableError: If the log cannot say what the verifier would have accepted, or the drafter fails.
    """
    can = components.drafter.capabilities
    draws = TextDraws(text, _candidates(components, log, text), draws)
    request = Request(
        prompt_ids=text.prompt_ids,
        max_new_tokens=text.max_new_tokens,
        rules=log.rules,
        seed=0,
        stop_check=lambda token_ids: len(token_ids) >= len(text.all_ids),
        draws=draws,
        profile=text.profile or PromptProfile(token_ids=text.prompt_ids),
    )
    target = components.target if can.reads_states else ReplayTarget(log.model.vocab_size)
    session = Session(request, 0)
    following = replace(components, greedy_rule=None, rule=KnownVerdicts(), target=target)
    with warnings.catch_warnings():
        # The loop goes on without a drafter that fails; replay raises.
        warnings.filterwarnings("error", message=r".*the drafter failed \(")
        try:
            follow(session, following)
        except (DrafterError, UserWarning) as error:
            raise UnavailableError(
                f"replay: the drafter failed after {draws.start} tokens of a text; "
                "decode it once to see how"
            ) from error
    return tuple(session.records)


def _candidates(components: Components, log: LawLog, text: LoggedText) -> Conditional:
    """Return the law of candidates given the text, or raise `UnavailableError` if the log does not determine it."""
    controller = components.controller
    conditional = conditional_candidates(components.rule, components.drafter.capabilities)
    if (
        text.profile is None
        and isinstance(controller, PromptReader)
        and controller.reads_prompt_laws
    ):
        raise UnavailableError(
            "replay: the controller asks how surprising the target finds a prompt, and the log does not "
            "say; make the log again with `monge replay record`, or leave out the features 'surprisal' "
            "and 'entropy'"
        )
    return conditional
