"""Prompts in, completions out."""

import operator
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, cast

import numpy as np
from torch import Tensor

from monge.core.errors import OptionError
from monge.core.grammar import grammar_of
from monge.core.sampling_rules import SamplingRules
from monge.core.setting_types import is_of
from monge.core.text import token_ids_of
from monge.engine.batch import decode
from monge.engine.components import Components
from monge.engine.result import GenerationResult, result_of
from monge.engine.session import FinishReason, Request, Session, check_length
from monge.laws.draws import check_seed
from monge.networks.forward import backend_of
from monge.options import LAW, PENALTIES, SamplingOptions, sampling_options, takes
from monge.requests.banned_tokens import token_masks
from monge.requests.chat_format import (
    ChatFormat,
    Message,
    TemplateFormat,
    chat_format,
)
from monge.requests.grammar import GrammarCompiler
from monge.requests.logprobs import LogprobOptions, TokenLogprob
from monge.requests.penalties import text_processors
from monge.requests.processors import check_shared
from monge.requests.sampling import Processor

Prompt = str | Sequence[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamChunk:
    """A step of a stream: what one round added.

    Args:
        text: New text; empty while a character or a possible stop string is incomplete.
        token_ids: New tokens: the accepted tokens, then the correction or bonus token.
        num_accepted: How many of them were drafted.
        finish_reason: Set on the last piece.
        logprobs: Log-probabilities of the new tokens, if requested.
    """

    text: str
    token_ids: tuple[int, ...]
    num_accepted: int
    finish_reason: FinishReason | None
    logprobs: tuple[TokenLogprob, ...] = ()


class Decoder:
    """Decodes prompts with one set of components. Made by `load`. Threads may share it: their rounds take turns.

    Args:
        components: Target, drafter, verifier, controller.
        tokenizer: Turns text into ids and back; if `None`, prompts are token ids.
        eos_ids: Tokens that end a text, beside the token with which a chat template closes an
            answer.
        max_batch_size: Requests decoded together.
        chat: How conversations are written; `None` takes the tokenizer's own template.

    Raises:
        OptionError: If `max_batch_size` is below 1.
    """

    def __init__(
        self,
        components: Components,
        *,
        tokenizer: Any = None,
        eos_ids: frozenset[int] = frozenset(),
        max_batch_size: int = 8,
        chat: ChatFormat | None = None,
    ) -> None:
        if max_batch_size < 1:
            raise OptionError(f"max_batch_size must be at least 1; got {max_batch_size}")
        self.components, self.tokenizer, self.max_batch_size = (
            components,
            tokenizer,
            max_batch_size,
        )
        self.chat_format = chat_format(tokenizer) if chat is None else chat
        self.eos_ids = eos_ids
        if isinstance(self.chat_format, TemplateFormat):
            # Not every checkpoint names the end of a turn among its ends of text.
            self.eos_ids |= self.chat_format.end_ids()
        self._request_ids = count()
        self.grammars = GrammarCompiler(tokenizer, components.target.vocab_size, self.eos_ids)
        components.prepare(max_batch_size)

    def __repr__(self) -> str:
        parts = self.components
        networks = {"target": parts.target}
        networks |= {
            "draft" if len(parts.draft_models) == 1 else f"draft {number}": network
            for number, network in enumerate(parts.draft_models, start=1)
        }
        shown = {
            **networks,
            "drafter": parts.drafter,
            "verifier": parts.rule,
            "controller": parts.controller,
            "max_batch_size": self.max_batch_size,
        }
        return "Decoder(\n" + "".join(f"  {name}={part!r},\n" for name, part in shown.items()) + ")"

    def update_weights(self) -> None:
        """Decode with the weights that the networks have now, after training, `load_state_dict` or another adapter.

        Only the backend `compiled` needs it, which runs copies: it refuses to decode with those of changed
        weights. All copies are made again, which takes about as long as a few forwards, and texts
        that were kept for later prompts are dropped.

        Raises:
            MongeError: If texts are being decoded.
        """
        with self.components.lock:
            self.components.update_weights()

    @takes(SamplingOptions)
    def generate(
        self, prompts: Prompt | Sequence[Prompt], **options: Any
    ) -> list[GenerationResult]:
        """Complete prompts.

        Args:
            prompts: Text or token ids; a single prompt or a list of prompts.
            **options: As for `requests`.

        Returns:
            `n` results per prompt, in order.
        """
        sessions = self.sessions(prompts, **options)
        logprobs: dict[int, list[TokenLogprob]] = {}
        for result in decode(sessions, self.components, max_batch_size=self.max_batch_size):
            if result.error is None:
                logprobs.setdefault(result.context.request_id, []).extend(result.logprobs)
        backend = self.backend
        return [
            result_of(session, backend, logprobs.get(session.context.request_id, ()))
            for session in sessions
        ]

    @takes(SamplingOptions)
    def chat(self, messages: Sequence[Message], **options: Any) -> GenerationResult:
        """Answer a conversation.

        A `Conversation` answers turn by turn, and reads earlier turns once.

        Args:
            messages: The turns so far, each with its `role` and its `content`.
            **options: As for `requests`.

        Raises:
            OptionError: If a message is malformed, or the model has no chat template, or its
                template refuses the turns.
        """
        return self.generate([self.encode_chat(messages)], **options)[0]

    def encode_chat(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """Token ids of a conversation, up to where the assistant's answer starts.

        Raises:
            OptionError: As `chat`.
        """
        return self.chat_format.encode(messages)

    @takes(SamplingOptions)
    def stream(self, prompt: Prompt, **options: Any) -> Iterator[StreamChunk]:
        """Complete a prompt, piece by piece: each round gives a piece.

        Args:
            prompt: Text or token ids.
            **options: As for `requests`, but for `n`.

        Raises:
            OptionError: If `n` is given: only a single text can be streamed.
        """
        if options.pop("n", 1) != 1:
            raise OptionError("stream: n must be 1; call generate for several texts")
        (session,) = self.sessions([prompt], **options)
        for _ in decode([session], self.components, max_batch_size=1):
            yield chunk_of(session)

    @takes(SamplingOptions)
    def sessions(self, prompts: Prompt | Sequence[Prompt], **options: Any) -> list[Session]:
        """Sessions for `monge.engine.batch.decode`, checked against the target's context."""
        return [self.session(request) for request in self.requests(prompts, **options)]

    def session(self, request: Request, *, keeps_records: bool = True) -> Session:
        """Return a session for a request, checked against the models.

        Raises:
            OptionError: If the prompt has token ids that the target does not have, or no controller
                has the requested name.
            ContextLengthError: If prompt and completion do not fit.
        """
        _check_tokens(request.prompt_ids, self.components.target.vocab_size)
        check_length(request, self.components.target.max_length, "target")
        self.components.controller_for(request.controller)  # which refuses names that nobody has
        session = Session(
            request, next(self._request_ids), self.tokenizer, keeps_records=keeps_records
        )
        if self.components.capabilities.max_depth == 0:
            session.drafts = False
        return session

    @takes(SamplingOptions)
    def requests(self, prompts: Prompt | Sequence[Prompt], **options: Any) -> list[Request]:
        """Requests for prompts that share their options.

        The same seed gives the same text, whatever else is in the batch. Exception: sampled texts
        with a controller that reads clocks. `load`'s default controller reads none for a request
        with a seed. A result has its seed if the seed gives the text again. It does not where a
        network computes in bfloat16 or float16, whose sums depend on the other rows of the batch.
        `seed=result.seed, row=result.row` gives the text of a row of a batch again.

        Args:
            prompts: Text or token ids; a single prompt or a list of prompts.
            **options: Fields of `monge.options.SamplingOptions`.

        Raises:
            OptionError: If an option is unknown or cannot be honoured.
        """
        sampling = sampling_options(options)
        stop_ids, allowed_ids = self._ids(sampling.stop_token_ids, "stop_token_ids"), None
        if sampling.allowed_token_ids is not None:
            allowed_ids = self._ids(sampling.allowed_token_ids, "allowed_token_ids")
        bad_ids = self._spelled(sampling.bad_words)
        start = (grammar := grammar_of(sampling.grammar)) and self.grammars.compile(grammar)
        end_ids = (frozenset() if sampling.ignore_eos else self.eos_ids) | frozenset(stop_ids)
        encoded = [
            ids for prompt in _as_list(prompts) for ids in [self.encode(prompt)] * sampling.n
        ]
        check_seed(0, sampling.row)  # before rows are counted on from it
        if len(encoded) > 1:
            check_shared(sampling.logits_processors)
        rules = SamplingRules(**sampling.only(*LAW))
        is_seeded = sampling.seed is not None
        controller = self.components.controller_name_for(
            sampling.controller, rules, is_seeded=is_seeded
        )
        seed = secrets.randbits(63) if sampling.seed is None else sampling.seed

        def processors(num_prompt_tokens: int) -> tuple[Processor, ...]:
            sizes = num_prompt_tokens, self.components.target.vocab_size
            late = end_ids if sampling.min_tokens else frozenset[int]()
            masks = token_masks(*sizes, allowed_ids=allowed_ids, bad_words=bad_ids, late_ids=late)
            penalties = text_processors(*sizes, end_ids=end_ids, **sampling.only(*PENALTIES))
            return *sampling.logits_processors, *penalties, *masks

        return [
            Request(
                prompt_ids=ids,
                max_new_tokens=sampling.max_new_tokens,
                rules=rules,
                seed=seed,
                row=sampling.row + number,
                eos_ids=end_ids,
                stop=tuple(sampling.stop),
                processors=processors(len(ids)),
                grammar=start,
                stopping_criteria=sampling.stopping_criteria,
                logprobs=None
                if sampling.logprobs is None
                else LogprobOptions(num_top=sampling.logprobs, drawn=True),
                controller=controller,
                is_repeatable=self.components.repeats(controller, rules),
                return_trees=sampling.return_trees,
            )
            for number, ids in enumerate(encoded)
        ]

    def _spelled(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Token ids of words, with and without a space before them."""
        if words and self.tokenizer is None:
            raise OptionError("bad_words: this decoder has no tokenizer; load with tokenizer=...")
        spellings = dict[tuple[int, ...], None]()
        for place, word in enumerate(words):
            where = f"bad_words[{place}]"
            if not word.strip():
                raise OptionError(f"{where}: expected a word; got {word!r}")
            for text in (word, f" {word.lstrip()}"):
                ids = token_ids_of(self.tokenizer, text, where, add_special_tokens=False)
                spellings[ids] = None
        return tuple(spellings)

    @property
    def backend(self) -> str:
        """Name of the target's backend, with its rounded weights if it has any."""
        return backend_of(self.components.target)

    @property
    def max_length(self) -> int | None:
        """Most tokens of a prompt and its completion; `None` if the target has no bound."""
        return self.components.target.max_length

    def encode(self, prompt: Prompt) -> tuple[int, ...]:
        """Token ids of a prompt.

        Raises:
            OptionError: If it is text and there is no tokenizer, text that is none, or ids that are
                no whole numbers or not in the target's vocabulary.
        """
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise OptionError(
                    "this decoder has no tokenizer: give token ids, or load with tokenizer=..."
                )
            return token_ids_of(self.tokenizer, prompt)
        return self._ids(prompt, "prompt")

    def _ids(self, given: object, where: str) -> tuple[int, ...]:
        ids = _whole_numbers(given, where)
        _check_tokens(ids, self.components.target.vocab_size, where)
        return ids


def chunk_of(session: Session) -> StreamChunk:
    """Return the piece that the last round added to a session."""
    last = session.finish_reason is not None
    text = "" if session.text is None else session.text.take(last=last)
    # A request that failed has no record of its last round.
    record = None if session.finish_reason == "error" else session.records[-1]
    return StreamChunk(
        text=text,
        token_ids=() if record is None else record.token_ids,
        num_accepted=0 if record is None else min(record.num_accepted, len(record.token_ids)),
        finish_reason=session.finish_reason,
        logprobs=() if record is None else session.logprobs,
    )


def _check_tokens(ids: Sequence[int], vocab_size: int, where: str = "prompt") -> None:
    """Refuse token ids that have no embedding."""
    # Quick: a server asks while all its clients wait.
    if ids and not (min(ids) >= 0 and max(ids) < vocab_size):
        wrong = next(token for token in ids if not 0 <= token < vocab_size)
        raise OptionError(f"{where}: token ids must lie in 0..{vocab_size - 1}; got {wrong}")


def _whole_numbers(given: object, where: str) -> tuple[int, ...]:
    items: object = given.tolist() if isinstance(given, np.ndarray | Tensor) else given
    if not isinstance(items, Sequence) or isinstance(items, str | bytes | bytearray | memoryview):
        expected = "a str or whole numbers" if where == "prompt" else "whole numbers"
        raise OptionError(
            f"{where}: {type(given).__name__} is neither text nor token ids; give {expected}"
        )
    for place, item in enumerate(cast(Sequence[object], items)):
        if not is_of(item, int):
            raise OptionError(
                f"{where}: token ids must be whole numbers; got {item!r} at place {place}"
            )
    return tuple(map(operator.index, items))


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Return a list of prompts from a single prompt or several."""
    items: Any = prompts.tolist() if isinstance(prompts, np.ndarray | Tensor) else prompts
    if isinstance(items, str):
        return [items]
    if not isinstance(items, Sequence) or isinstance(items, bytes | bytearray | memoryview):
        raise OptionError(
            f"prompts must be text, token ids or a list of either; got {type(prompts).__name__}"
        )
    if len(items) == 0:
        raise OptionError("no prompts were given")
    is_id = [isinstance(item, float | bool) or is_of(item, int) for item in items]
    if any(is_id) and not all(is_id):
        raise OptionError(
            "prompts: token ids stand beside other prompts; put the ids of each "
            "prompt into a list of their own"
        )
    return [tuple(items)] if all(is_id) else list(items)
