"""Reads the prompts of new requests, whole or in chunks, between the rounds of running requests."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from jaxtyping import Float
from torch import Tensor

from monge.control.base import PromptReader
from monge.core.context import Context
from monge.core.prompt import PromptProfile
from monge.draft.base import chunked_prefill
from monge.engine.components import Components
from monge.engine.drafting import ask_drafter
from monge.engine.session import Request, Session
from monge.networks.base import NodeBlock, SequenceModel, draft_length
from monge.networks.prefix_cache import PrefixCache
from monge.requests.logprobs import of_logits
from monge.runtime.clock import now, num_preparations

_UNBOUNDED: Final = 1 << 62
_LAST: Final = 32
"""Tokens whose distributions are read for the profile of a prompt.

A forward of that many nodes is a fraction of the prompt's own, and their mean is steady.
"""

_WAITED: Final = 64
"""A longer prompt waits while another request reads the same prompt."""

_SCORED: Final = 64
"""Tokens whose logits are held at a time where log-probabilities are wanted; at least `_LAST`."""


@dataclass(slots=True, eq=False)
class _Prompt:
    """A prompt while it is read: all but the last token, which is the root of the first tree."""

    session: Session
    profile: PromptProfile | None
    ending: int
    """Tokens at its end that are read last, with their distributions."""
    first: "_Prompt | None" = None
    """The same prompt of an earlier request, which puts it into the prefix cache."""
    num_read: int = 0

    @property
    def num_left(self) -> int:
        """Tokens to be read before the ending."""
        return max(0, len(self.session.request.prompt_ids) - 1 - self.ending - self.num_read)

    @property
    def is_read(self) -> bool:
        return self.num_read == len(self.session.request.prompt_ids) - 1


class Prefill:
    """Requests whose prompts are being read.

    Each prompt gets an equal share of the tokens that are read between two rounds, so a long prompt
    delays no other for long. Tokens that a prefix cache has are not read, unless their
    distributions are requested. A target whose state cannot be rolled back reads every prompt
    whole. A drafter whose network reads prompts reads the same chunks; other drafters get the
    prompt when the target has read it.

    Args:
        components: Target, drafter, verifier, controllers.
        chunk_s: Seconds that a chunk may take while other requests are being decoded, predicted
            from the last chunk; `None` for no limit. Without such requests the sizes of chunks
            depend on no clock.
        prefixes: Prefix cache of the target, if any.

    Attributes:
        num_tokens: Prompt tokens read so far.
    """

    def __init__(
        self,
        components: Components,
        *,
        chunk_s: float | None = None,
        prefixes: PrefixCache | None = None,
    ) -> None:
        self._components, self._chunk_s, self._prefixes = components, chunk_s, prefixes
        self._prompts: list[_Prompt] = []
        self._token_s: float | None = None
        self.num_tokens = 0

    def __len__(self) -> int:
        return len(self._prompts)

    @property
    def sessions(self) -> list[Session]:
        """The requests."""
        return [prompt.session for prompt in self._prompts]

    def join(self, session: Session) -> None:
        """Add a request, which is read from the next call of `read` on."""
        target, profile, ending = self._components.target, None, 0
        controller = self._components.controller_for(session.request.controller)
        if isinstance(controller, PromptReader):
            profile = session.prompt
            ending = ending_size(target, profile) if controller.reads_prompt_laws else 0
        draft_length = self._components.capabilities.max_length or _UNBOUNDED
        session.drafts &= len(session.request.prompt_ids) <= draft_length
        self._prompts.append(_Prompt(session, profile, ending, self._same(session.request)))

    def _same(self, request: Request) -> _Prompt | None:
        """Return the same prompt of a request that is being read, if it is worth waiting for."""
        is_short = len(request.prompt_ids) <= _WAITED or request.cache_salt is None
        if self._prefixes is None or is_short or request.prompt_logprobs is not None:
            return None
        key = request.prompt_ids, request.cache_salt
        for prompt in self._prompts:
            other = prompt.session.request
            if prompt.first is None and (other.prompt_ids, other.cache_salt) == key:
                return prompt
        return None

    def leave(self, session: Session) -> None:
        """Stop reading a request's prompt."""
        self._prompts = [prompt for prompt in self._prompts if prompt.session is not session]

    def read(self, most: int | None, *, is_awaited: bool = False) -> list[Session]:
        """Read a chunk of the prompts.

        Args:
            most: Most tokens to read; `None` reads all prompts whole.
            is_awaited: Whether other requests are being decoded, which wait meanwhile.

        Returns:
            The requests that are ready for rounds.
        """
        began, num_prepared = now(), num_preparations()
        self._begin()
        jobs = [
            (prompt, size)
            for prompt, size in zip(self._prompts, self._sizes(most, is_awaited), strict=True)
            if size or not prompt.num_left
        ]
        before = self.num_tokens
        self._read_target(jobs)
        self._show_drafter([prompt for prompt, _ in jobs])
        done = [prompt for prompt, _ in jobs if prompt.is_read]
        for prompt in done:
            prompt.session.controller_state = _first_state(prompt, self._components)
        passed = now() - began
        for prompt, _ in jobs:
            prompt.session.prefill_s += passed
        if self.num_tokens > before and num_preparations() == num_prepared:
            self._token_s = passed / (self.num_tokens - before)
        self._prompts = [prompt for prompt in self._prompts if not prompt.is_read]
        return [prompt.session for prompt in done]

    def _begin(self) -> None:
        """Open the prompts whose first tokens the prefix cache has."""
        kept = dict[int, tuple[int, ...]]()
        for prompt in self._prompts:
            session, text = prompt.session, prompt.session.request.prompt_ids
            has_scores = session.request.prompt_logprobs is not None
            if self._prefixes is None or session.is_open or has_scores:
                continue
            if is_read_whole(self._components.target, text):
                continue
            # The root of the first tree is read in its round.
            text = text[: len(text) - 1 - prompt.ending]
            salt, target = session.request.cache_salt, self._components.target
            if length := self._prefixes.length(target, text, salt):
                kept[session.request_id] = text[:length]
                prompt.num_read = session.num_cached = length
                session.is_open = True
        if kept:
            self._components.target.open(kept)

    def _sizes(self, most: int | None, is_awaited: bool) -> list[int]:
        sizes = [
            0 if prompt.first in self._prompts else prompt.num_left for prompt in self._prompts
        ]
        texts = (prompt.session.request.prompt_ids for prompt in self._prompts)
        if most is None or any(is_read_whole(self._components.target, text) for text in texts):
            return sizes
        if is_awaited and self._chunk_s is not None:
            most = self._bearable(most, self._chunk_s)
        return equal_shares(sizes, most)

    def _bearable(self, most: int, chunk_s: float) -> int:
        """Return the tokens of a chunk while running requests wait. Halving keeps the shapes of forwards few."""
        if self._token_s is None:  # nothing is known yet
            return -(-most // 8)
        while most > 1 and most * self._token_s > chunk_s:
            most = -(-most // 2)
        return most

    def _read_target(self, jobs: Sequence[tuple[_Prompt, int]]) -> None:
        target = self._components.target
        first, later = dict[int, tuple[int, ...]](), dict[int, tuple[int, ...]]()
        for prompt, size in jobs:
            session = prompt.session
            # Log-probabilities are made of logits, which `score` reads.
            plain = 0 if session.request.prompt_logprobs is not None else size
            tokens = session.request.prompt_ids[prompt.num_read : prompt.num_read + plain]
            if not session.is_open:
                first[session.request_id] = tokens
            elif tokens:
                later[session.request_id] = tokens
            session.is_open = True
        if first:
            target.open(first)
        if later:
            target.append(later)
        for prompt, size in jobs:
            if size and prompt.session.request.prompt_logprobs is not None:
                score(prompt.session, target, prompt.num_read, size)
            prompt.num_read += size
            self.num_tokens += size
            if prompt.ending and not prompt.num_left and not prompt.is_read:
                logits = score(prompt.session, target, prompt.num_read, prompt.ending)
                assert prompt.profile is not None, "endings are read for profiles"
                prompt.profile = profiled(prompt.profile, logits)
                prompt.num_read += prompt.ending
                self.num_tokens += prompt.ending

    def _show_drafter(self, prompts: Sequence[_Prompt]) -> None:
        reader = chunked_prefill(self._components.drafter)
        new, going_on = list[Context](), list[Context]()
        session_of = {prompt.session.request_id: prompt.session for prompt in prompts}
        for prompt in prompts:
            session = prompt.session
            if not session.drafts or not (reader is not None or prompt.is_read):
                continue
            reads_later = reader is not None and self._reads_later(session)
            count = 1 if reads_later else prompt.num_read + 1
            shown = replace(session.context, token_ids=session.request.prompt_ids[:count])
            if not session.drafter_is_open:
                session.drafter_is_open = True
                new.append(shown)
            elif not reads_later:
                going_on.append(shown)
        if new:
            opened = [session_of[context.request_id] for context in new]
            ask_drafter(opened, self._components, lambda: self._components.drafter.open(new))
        if going_on and reader is not None:
            readers = [session_of[context.request_id] for context in going_on]
            ask_drafter(readers, self._components, lambda: reader.read(going_on))

    def _reads_later(self, session: Session) -> bool:
        """Return whether the drafter's network reads the prompt only when its first draft is due."""
        if not session.request.adaptive:
            return False
        parts, name = self._components, session.request.controller
        return not parts.controller_for(name).prefills_drafter_eagerly(parts.shared_for(name))


def open_sessions(sessions: Sequence[Session], components: Components) -> None:
    """Read the prompts of requests whole, so that they are ready for `run_round`."""
    prefill = Prefill(components)
    for session in sessions:
        prefill.join(session)
    prefill.read(None)


def is_read_whole(target: SequenceModel, text: Sequence[int]) -> bool:
    """Return whether a target needs to know all of a prompt when it reads its first token."""
    bound = draft_length(target)
    return target.why_no_draft is not None or (bound is not None and len(text) > bound)


def equal_shares(sizes: Sequence[int], total: int) -> list[int]:
    """Share out a total: each gets its size, or as much as every other that needs more."""
    shares = [0] * len(sizes)
    for place, index in enumerate(sorted(range(len(sizes)), key=lambda index: sizes[index])):
        shares[index] = min(sizes[index], -(-total // (len(sizes) - place)))
        total -= shares[index]
    return shares


def _first_state(prompt: _Prompt, components: Components) -> Any:
    """Return the controller's state for a new request."""
    name = prompt.session.request.controller
    controller = components.controller_for(name)
    state = controller.init(components.shared_for(name))
    if isinstance(controller, PromptReader) and prompt.profile is not None:
        return controller.read(state, prompt.profile)
    return state


def score(
    session: Session, target: SequenceModel, first: int, size: int
) -> Float[Tensor, "nodes vocab"]:
    """Read and commit tokens of a prompt, and note log-probabilities of the tokens after them if requested.

    Args:
        session: Of the prompt; its sequence holds the first tokens.
        target: The target.
        first: How many tokens it holds.
        size: How many more are read, at least 1.

    Returns:
        The logits after the tokens that were read last, all of them if they are few.
    """
    text, number = session.request.prompt_ids, session.context.request_id
    wanted, end = session.request.prompt_logprobs, first + size
    step = size if is_read_whole(target, text) else _SCORED
    while True:
        count = min(step, end - first)
        logits = target.extend({number: NodeBlock.chain(text[first : first + count])})[number]
        target.commit({number: range(count)})
        first += count
        if wanted is not None:
            following = text[first - count + 1 : first + 1]
            session.prompt_logprobs += of_logits(logits, following, wanted.num_top)
        if first == end:
            return logits


def ending_size(target: SequenceModel, prompt: PromptProfile) -> int:
    """Return how many tokens before a prompt's last token are read with their distributions.

    0 if the distributions are known, or cannot be computed.
    """
    if prompt.surprisal is not None or is_read_whole(target, prompt.token_ids):
        return 0
    return min(_LAST, len(prompt.token_ids) - 1)


def profiled(prompt: PromptProfile, logits: Float[Tensor, "nodes vocab"]) -> PromptProfile:
    """Return the prompt with its surprisal and entropy, from the logits before its last token."""
    following = prompt.token_ids[-len(logits) :]
    logs = torch.log_softmax(logits.double(), dim=-1)
    masses = logs[torch.arange(len(following)), torch.tensor(following, device=logs.device)]
    # Tokens of mass zero add nothing to the entropy; one that is read all the same is infinitely
    # surprising.
    terms = torch.where(logs.isfinite(), logs.exp() * logs, 0.0)
    return replace(
        prompt, surprisal=float(-masses.mean()), entropy=float(-terms.sum(dim=-1).mean())
    )
