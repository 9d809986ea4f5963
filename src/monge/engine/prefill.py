"""Prompts read in pieces, between the rounds of requests that are being decoded."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from monge.control.base import PromptReader
from monge.core.context import Context
from monge.core.prompt import PromptProfile
from monge.draft.base import PieceReader, piece_reader
from monge.engine.clock import now
from monge.engine.components import Components
from monge.engine.drafting import give_up, leave_long_prompts, start
from monge.engine.loop import close_session
from monge.engine.opening import controller_state, reads_prompt_later
from monge.engine.prompts import ending_size, profiled, score
from monge.engine.session import Session, catch


@dataclass(slots=True, eq=False)
class _Prompt:
    """A prompt while it is read: all but the last token, which is the root of the first tree."""

    session: Session
    profile: PromptProfile | None = None
    ending: int = 0
    num_read: int = 0
    alone: bool = False

    @property
    def num_left(self) -> int:
        return len(self.session.request.prompt_ids) - 1 - self.ending - self.num_read

    def piece(self, size: int) -> tuple[int, ...]:
        return self.session.request.prompt_ids[self.num_read : self.num_read + size]

    def context(self) -> Context:
        """The text as far as it has been read, and the token after it."""
        return replace(
            self.session.context, token_ids=self.session.request.prompt_ids[: self.num_read + 1]
        )


class Prefills:
    """Prompts that are being read.

    Every prompt gets an equal share of the tokens that are read between two rounds, so a long one
    delays nobody for long. A target whose state cannot be rolled back reads every prompt whole,
    since some of them start from nothing with every piece. A drafter whose network reads prompts
    reads the same pieces; others are shown the prompt when the target has read it.

    What reading raises fails its own request, or costs it the drafter.

    Args:
        components: Target, drafter, verifier, controller.
        piece_s: Seconds that a piece may take while other requests are being decoded, predicted
            from the last piece; `None` for no limit. Without such requests the sizes of pieces
            depend on no clock.
    """

    def __init__(self, components: Components, *, piece_s: float | None = None) -> None:
        self._components, self._piece_s = components, piece_s
        self._prompts: list[_Prompt] = []
        self._token_s: float | None = None

    def __len__(self) -> int:
        return len(self._prompts)

    def join(self, session: Session) -> None:
        """Begin with a prompt."""
        self._open(session)
        prompt, controller = (
            _Prompt(session),
            self._components.planner(session.request.controller).controller,
        )
        if isinstance(controller, PromptReader):
            prompt.profile = session.prompt
            prompt.ending = (
                ending_size(self._components.target, prompt.profile)
                if controller.reads_prompt_laws
                else 0
            )
        self._prompts.append(prompt)

    def leave(self, session: Session) -> None:
        """Stop reading a request's prompt and give back its room."""
        self._prompts = [prompt for prompt in self._prompts if prompt.session is not session]
        self._close(session)

    def close(self) -> None:
        """Stop reading all of them."""
        for prompt in list(self._prompts):
            self.leave(prompt.session)

    def read(self, most: int, *, is_awaited: bool = False) -> tuple[int, list[Session]]:
        """Read up to so many tokens.

        Args:
            most: How many.
            is_awaited: Whether other requests are being decoded, which wait meanwhile.

        Returns:
            How many tokens were read, and the requests that need no more: ready for rounds, or
            failed and closed.
        """
        began = now()
        sizes = [prompt.num_left for prompt in self._prompts]
        most = self._bearable(most) if is_awaited else most
        if self._components.target.no_draft_reason is None:
            sizes = equal_shares(sizes, most)
        jobs = [
            (prompt, size) for prompt, size in zip(self._prompts, sizes, strict=True) if size > 0
        ]
        for group in (
            [job for job in jobs if not job[0].alone],
            *([job] for job in jobs if job[0].alone),
        ):
            if group:
                self._read(group)
        if jobs:
            self._token_s = (now() - began) / sum(size for _, size in jobs)
        done = [
            prompt
            for prompt in self._prompts
            if prompt.num_left == 0 or prompt.session.error is not None
        ]
        self._prompts = [prompt for prompt in self._prompts if prompt not in done]
        for prompt in done:
            error = prompt.session.error or catch(partial(self._finish, prompt))
            if error is not None:
                prompt.session.fail(error)
                self._close(prompt.session)
        return sum(size for _, size in jobs) + sum(prompt.ending for prompt in done), [
            prompt.session for prompt in done
        ]

    def _bearable(self, most: int) -> int:
        """Tokens of a piece for which others wait. Halving keeps the shapes of forwards few."""
        if self._piece_s is None:
            return most
        if self._token_s is None:  # nothing is known yet
            return -(-most // 8)
        while most > 1 and most * self._token_s > self._piece_s:
            most = -(-most // 2)
        return most

    def _read(self, group: Sequence[tuple[_Prompt, int]]) -> None:
        began = now()
        error = catch(lambda: self._read_target(group))
        for prompt, size in group:
            if error is None:
                prompt.num_read += size
            elif len(group) == 1:
                prompt.session.fail(error)
            else:
                self._restart(prompt)
        if error is None:
            self._read_drafter(group)
        for prompt, _ in group:
            prompt.session.prefill_s += now() - began

    def _read_target(self, group: Sequence[tuple[_Prompt, int]]) -> None:
        scored = [
            (prompt, size)
            for prompt, size in group
            if prompt.session.request.prompt_logprobs is not None
        ]
        plain = {
            prompt.session.context.request_id: prompt.piece(size)
            for prompt, size in group
            if (prompt, size) not in scored
        }
        if plain:
            self._components.target.append(plain)
        for prompt, size in scored:
            score(prompt.session, self._components.target, prompt.num_read, size)

    def _read_drafter(self, group: Sequence[tuple[_Prompt, int]]) -> None:
        drafter = piece_reader(self._components.drafter)
        drafting = [(prompt, size) for prompt, size in group if prompt.session.drafting != "off"]
        drafting = [
            job for job in drafting if not reads_prompt_later(job[0].session, self._components)
        ]
        if drafter is None or not drafting:
            return
        error = catch(lambda: drafter.read([prompt.context() for prompt, _ in drafting]))
        for prompt, _ in drafting if error is not None else ():
            again = (
                error
                if len(drafting) == 1
                else catch(partial(_read_again, drafter, prompt.context()))
            )
            if again is not None:
                give_up(prompt.session, self._components, again)

    def _finish(self, prompt: _Prompt) -> None:
        session, profile = prompt.session, prompt.profile
        if prompt.ending and profile is not None:
            logits = score(session, self._components.target, prompt.num_read, prompt.ending)
            profile = profiled(profile, logits)
        session.controller_state = controller_state(session, profile, self._components)
        if session.drafting != "off" and piece_reader(self._components.drafter) is None:
            start(session, self._components)

    def _restart(self, prompt: _Prompt) -> None:
        """Begin again, apart from the others: somebody's piece in their common forward raised."""
        self._close(prompt.session)
        prompt.num_read, prompt.alone, prompt.session.prompt_logprobs = 0, True, ()
        self._open(prompt.session)

    def _open(self, session: Session) -> None:
        self._components.target.open({session.context.request_id: ()})
        leave_long_prompts([session], self._components)
        if session.drafting != "off" and piece_reader(self._components.drafter) is not None:
            start(session, self._components, first=_Prompt(session).context())

    def _close(self, session: Session) -> None:
        if piece_reader(self._components.drafter) is not None:
            close_session(session, self._components)
        else:
            self._components.target.close(session.context.request_id)


def _read_again(drafter: PieceReader[Any], context: Context) -> None:
    """Read a prompt from its beginning, after a forward that it shared with others has failed."""
    drafter.close(context)
    drafter.open([replace(context, token_ids=context.token_ids[:1])])
    drafter.read([context])


def equal_shares(sizes: Sequence[int], total: int) -> list[int]:
    """What each gets of a total: as much as it needs, or as much as every other that needs more."""
    shares = [0] * len(sizes)
    for place, index in enumerate(sorted(range(len(sizes)), key=lambda index: sizes[index])):
        shares[index] = min(sizes[index], -(-total // (len(sizes) - place)))
        total -= shares[index]
    return shares
