"""Opening requests: their prompts are read, and controllers and drafters make their states."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from monge.control.base import PromptReader
from monge.core.context import Context
from monge.core.model import ReopenableModel
from monge.core.prompt import PromptProfile
from monge.draft.base import piece_reader
from monge.engine.clock import now
from monge.engine.components import Components
from monge.engine.drafting import leave_long_prompts, start_all
from monge.engine.prompts import ending_size, open_profiled, profiled, score
from monge.engine.session import Session


def open_sessions(sessions: Sequence[Session], components: Components) -> None:
    """Read the prompts of new requests.

    All but the last token, which is the root of the first tree.
    """
    start = now()
    prompts = _open_target(sessions, components)
    leave_long_prompts(sessions, components)
    drafting = [session for session in sessions if session.drafting != "off"]
    if drafting:
        start_all(drafting, [_opening(session, components) for session in drafting], components)
    for session, prompt in zip(sessions, prompts, strict=True):
        session.controller_state = controller_state(session, prompt, components)
    passed = now() - start
    for session in sessions:
        session.prefill_s = passed


def controller_state(session: Session, prompt: PromptProfile | None, components: Components) -> Any:
    """The controller's state for a new request; `prompt` is for controllers that read prompts."""
    planner = components.planner(session.request.controller)
    state = planner.controller.init(planner.shared)
    if isinstance(planner.controller, PromptReader) and prompt is not None:
        return planner.controller.read(state, prompt)
    return state


def reads_prompt_later(session: Session, components: Components) -> bool:
    """Whether the drafter's network reads the prompt only when its first draft is due."""
    if piece_reader(components.drafter) is None or not session.request.adaptive:
        return False
    planner = components.planner(session.request.controller)
    return not planner.controller.drafts_at_once(planner.shared)


def _opening(session: Session, components: Components) -> Context:
    """What the drafter is shown of a new request."""
    context = session.context
    return (
        replace(context, token_ids=context.token_ids[:1])
        if reads_prompt_later(session, components)
        else context
    )


def _open_target(
    sessions: Sequence[Session], components: Components
) -> Sequence[PromptProfile | None]:
    """Read all but the last token of every prompt; their profiles, for controllers that ask."""
    controllers = {
        one.context.request_id: components.planner(one.request.controller).controller
        for one in sessions
    }
    readers = {number: one for number, one in controllers.items() if isinstance(one, PromptReader)}
    profiles = {
        one.context.request_id: one.prompt for one in sessions if one.context.request_id in readers
    }
    continued = {
        one.context.request_id: _continue(one, components)
        for one in sessions
        if one.continues is not None
    }
    with_laws = {
        number: profiles[number] for number, one in readers.items() if one.reads_prompt_laws
    }
    with_laws = {
        number: profile for number, profile in with_laws.items() if not continued.get(number)
    }
    scored = [one for one in sessions if one.request.prompt_logprobs is not None]
    for session in scored:
        number = session.context.request_id
        profile = _open_scored(session, components, with_laws.pop(number, None))
        if profile is not None:
            profiles[number] = profile
    left = {
        one.context.request_id: one.context.token_ids[continued.get(one.context.request_id, 0) : -1]
        for one in sessions
        if one.request.prompt_logprobs is None
    }
    plain = {
        number: tokens
        for number, tokens in left.items()
        if not continued.get(number) and number not in with_laws
    }
    if rest := {
        number: left[number] for number, length in continued.items() if length and left[number]
    }:
        components.target.append(rest)
    if plain:
        components.target.open(plain)
    if with_laws:
        profiles |= open_profiled(components.target, with_laws)
    return [profiles.get(number) for number in controllers]


def _open_scored(
    session: Session, components: Components, profile: PromptProfile | None
) -> PromptProfile | None:
    """Read a prompt with the log-probabilities of its tokens; complete its profile, if one is wanted."""
    target, num_left = components.target, len(session.request.prompt_ids) - 1
    ending = 0 if profile is None else ending_size(target, profile)
    target.open({session.context.request_id: ()})
    if num_left > ending:
        score(session, target, 0, num_left - ending)
    if profile is None or not ending:
        return profile
    return profiled(profile, score(session, target, num_left - ending, ending))


def _continue(session: Session, components: Components) -> int:
    """Take over what an earlier request left in the target's cache.

    How many tokens of the prompt are read thereby.
    """
    assert session.continues is not None
    earlier, length = session.continues
    if session.request.prompt_logprobs is not None:  # those of tokens that are not read are unknown
        length = 0
    target, number = components.target, session.context.request_id
    if length and isinstance(target, ReopenableModel) and target.reopen(earlier, number, length):
        return length
    target.close(earlier)
    return 0
