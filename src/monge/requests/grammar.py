"""Compiled grammars: which tokens may come next, and which tokens must.

The process that tries the grammars of clients runs this module without torch.
"""

import json
import re
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from threading import Lock
from time import thread_time
from typing import Any, Final

import numpy as np

from monge.core.errors import GrammarError, OptionError
from monge.core.extras import require
from monge.core.grammar import Grammar
from monge.requests.gbnf import is_gbnf, lark_of_gbnf

FORCED: Final = "grammar"
"""Name of the drafter in records of rounds that offered forced tokens."""

_MOST_SHOWN: Final = 400
"""Characters of an error of the library, which may quote a whole grammar."""
_DUMP: Final = re.compile(r"\s*<(state|non-verbose|backtrace)\b.*", re.DOTALL)
"""Internals of the library at the end of its errors."""
_BYTES_PER_CHARACTER: Final = 512
"""Memory of a compiled grammar that was not measured; a list of 2,500 objects takes 400."""

ON_ONE_LINE: Final[Mapping[str, Any]] = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
}
ANY_WHITESPACE: Final[Mapping[str, Any]] = {
    "whitespace_flexible": True,
    "item_separator": ",",
    "key_separator": ":",
    "whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,64}",
}
"""Options of the library for JSON. Whitespace is bounded, since a model may write it without end."""

_LIMITS: Final[Mapping[str, Any]] = {
    # An object of n optional properties has 4 n items in a row.
    "max_items_in_row": 20_000,
    # They bound most masks, and the memory of a text's state.
    "step_lexer_fuel": 100_000,
    "max_lexer_states": 50_000,
    # A terminal of one character, as GBNF has them, takes items at every place of every token.
    "step_max_items": 2_000_000,
    "verbose_errors": False,
}
_REQUEST_S: Final = 5.0
_MASK_S: Final = 0.02
"""Seconds of processor time for the masks and forced tokens of a request, plus this many for each
mask. The thread that decodes computes them; the library does not bound ambiguous grammars."""


class GrammarCompiler:
    """Compiles grammars for a vocabulary, with the library `llguidance`.

    Compiled grammars are kept up to a number of bytes; the least recently used grammars are dropped
    first.

    Args:
        tokenizer: A fast tokenizer of `transformers`, or the text of its `tokenizer.json`.
        vocab_size: Number of tokens of the target; a token that the tokenizer lacks never comes.
        end_ids: End-of-text tokens, which come only where a grammar may end.
        max_bytes: Bytes of compiled grammars that are kept.
    """

    def __init__(
        self, tokenizer: Any, vocab_size: int, end_ids: frozenset[int], max_bytes: int = 1 << 28
    ) -> None:
        self._tokenizer, self.vocab_size, self.end_ids = tokenizer, vocab_size, end_ids
        self._max_bytes, self._lock = max_bytes, Lock()
        # States never change, so that requests share them.
        self._states = OrderedDict[Grammar, tuple[GrammarState, int]]()

    def __contains__(self, grammar: Grammar) -> bool:
        """Return whether the grammar is compiled already."""
        return grammar in self._states

    def prepare(self) -> None:
        """Read the vocabulary now. The library may block other threads for some seconds.

        If grammars cannot be compiled, the first `compile` says why.
        """
        with suppress(OptionError):
            _ = self.vocabulary

    @property
    def tokenizer_text(self) -> str:
        """The tokenizer, as `tokenizer.json` has it.

        Raises:
            OptionError: If the library is missing, or the tokenizer is none that it reads.
        """
        require("grammar", "a grammar", "llguidance")
        if self._tokenizer is None or not self.end_ids:
            missing = "tokenizer" if self._tokenizer is None else "end-of-text token"
            raise OptionError(f"grammar: this decoder has no {missing}, and a grammar needs one")
        if isinstance(self._tokenizer, str):
            return self._tokenizer
        if (backend := copy(getattr(self._tokenizer, "backend_tokenizer", None))) is None:
            name = type(self._tokenizer).__name__
            raise OptionError(f"grammar: expected a fast tokenizer of transformers; got {name}")
        backend.no_padding()
        backend.no_truncation()
        return backend.to_str()

    @cached_property
    def vocabulary(self) -> Any:
        """The library's vocabulary; reading it takes up to a second. An `OptionError` if that fails."""
        text = self.tokenizer_text
        from llguidance import LLTokenizer

        try:
            return LLTokenizer(text, n_vocab=self.vocab_size, eos_token=sorted(self.end_ids))
        except Exception as error:
            text = f"grammar: the library cannot read this tokenizer: {_shortened(error)}"
            raise OptionError(text) from error

    def compile(self, grammar: Grammar, num_bytes: int | None = None) -> "GrammarState":
        """Return the state before the first token.

        Args:
            grammar: The grammar.
            num_bytes: Memory that it takes once compiled; `None` estimates it from its length.

        Raises:
            OptionError: If the grammar is malformed or uses something unsupported, or if no token
                can begin a text of it.
        """
        with self._lock:
            if grammar in self._states:
                self._states.move_to_end(grammar)
                return self._states[grammar][0]
        state = self._compile(grammar)
        if num_bytes is None:
            num_bytes = _BYTES_PER_CHARACTER * len(grammar.text)
        with self._lock:
            self._states[grammar] = state, num_bytes
            total = sum(size for _, size in self._states.values())
            while len(self._states) > 1 and total > self._max_bytes:
                total -= self._states.popitem(last=False)[1][1]
        return state

    def _compile(self, grammar: Grammar) -> "GrammarState":
        require("grammar", "a grammar", "llguidance")
        from llguidance import LLMatcher, LLParserLimits

        try:
            rules = _rules(grammar)
        except ValueError as error:
            raise OptionError(f"grammar: {grammar.kind}: {_shortened(error)}") from error
        # The library raises nothing: it keeps its errors.
        matcher = LLMatcher(self.vocabulary, rules, log_level=0, limits=LLParserLimits(**_LIMITS))
        state = GrammarState(matcher, self.vocab_size, self.end_ids)
        # Asked at once, so that a grammar without a text is refused before it waits.
        if (error := state.write(state.new_words(1)[0])) is not None:
            reason = f"it has no text ({error})" if error.isalpha() else error
            raise OptionError(f"grammar: {grammar.kind}: {reason}")
        return state


def _rules(grammar: Grammar) -> str:
    """Return the grammar in the library's notation; a `ValueError` if it has none."""
    from llguidance import LLMatcher

    if grammar.kind == "choice":
        # One terminal is one automaton; as alternatives of a rule, each text would be an item of
        # the parser.
        texts = " | ".join(json.dumps(text) for text in json.loads(grammar.text))
        return LLMatcher.grammar_from_lark(f"start: TEXT\nTEXT: {texts}")
    if grammar.kind == "json_schema":
        # A schema may bring options of the library, which must not win over these.
        style = ANY_WHITESPACE if grammar.any_whitespace else ON_ONE_LINE
        options: Any = {**style, "lenient": False}
        return LLMatcher.grammar_from_json_schema(grammar.text, overrides=options)
    if grammar.kind == "regex":
        return LLMatcher.grammar_from_regex(grammar.text)
    rules = lark_of_gbnf(grammar.text) if is_gbnf(grammar.text) else grammar.text
    return LLMatcher.grammar_from_lark(rules)


@dataclass(slots=True)
class _Meter:
    seconds: float = 0.0
    num_masks: int = 0

    @contextmanager
    def measured(self) -> Iterator[None]:
        begin = thread_time()
        yield
        self.seconds += thread_time() - begin


class GrammarState:
    """A grammar after some tokens. It never changes: a text that continues has another state.

    Args:
        matcher: The library's parser, which has read the tokens.
        vocab_size: Number of tokens of the target.
        end_ids: End-of-text tokens.
        run: Tokens that are known to be forced here.
        is_ended: Whether the last token ended the text.
        meter: Time and number of the masks of its request.
    """

    def __init__(
        self,
        matcher: Any,
        vocab_size: int,
        end_ids: frozenset[int],
        *,
        run: tuple[int, ...] = (),
        is_ended: bool = False,
        meter: _Meter | None = None,
    ) -> None:
        self._matcher, self.vocab_size, self._end_ids = matcher, vocab_size, end_ids
        self._run, self._is_ended, self._meter = run, is_ended, meter or _Meter()

    def of_request(self) -> "GrammarState":
        """Return the state for a request, whose masks are counted apart."""
        return GrammarState(self._matcher, self.vocab_size, self._end_ids)

    def after(self, token: int) -> "GrammarState | None":
        """Return the state after another token, or `None` where the grammar has no such text.

        Raises:
            GrammarError: If the library gives up.
        """
        if self._is_ended:
            return None
        # The library's rollback is not an exact inverse; a copy is.
        matcher, is_ended = self._matcher.deep_copy(), token in self._end_ids
        # Where only the end may follow, `try_consume_tokens` takes nothing.
        is_taken = (
            matcher.consume_token(token) if is_ended else matcher.try_consume_tokens([token]) == 1
        )
        if not is_taken:
            if not is_ended and matcher.is_error():
                reason = _shortened(matcher.get_error())
                raise GrammarError(f"grammar: the text cannot be followed any further: {reason}")
            return None
        run = self._run[1:] if self._run[:1] == (token,) else ()
        return GrammarState(
            matcher,
            self.vocab_size,
            self._end_ids,
            run=run,
            is_ended=is_ended,
            meter=self._meter,
        )

    def after_all(self, token_ids: Iterable[int]) -> "GrammarState":
        """Return the state after committed tokens.

        Raises:
            GrammarError: If the grammar has no such text, or the library gives up.
        """
        state = self
        for token in token_ids:
            if (following := state.after(token)) is None:
                raise GrammarError(f"grammar: the text cannot go on with token {token}")
            state = following
        return state

    def forced(self, most: int) -> tuple[int, ...]:
        """Return up to `most` tokens that the grammar forces next; each has probability 1.

        Where only a single text can follow, only the tokens in which the tokenizer writes it are
        allowed.
        """
        state, tokens = self, list[int]()
        while state is not None and not state._is_ended and len(tokens) < most:
            # Kept along the run, which may be long: a grammar can force a million characters.
            state._run = state._run or state._next_run()
            if not state._run:
                break
            tokens.append(state._run[0])
            try:
                state = state.after(tokens[-1])
            except GrammarError:  # raised again where the text comes to this token
                state = None
        return tuple(tokens if state is not None else tokens[:-1])

    def _next_run(self) -> tuple[int, ...]:
        with self._meter.measured():
            run = tuple(self._matcher.compute_ff_tokens())
        if run:
            return run
        words = self.new_words(1)
        if self.write(words[0]) is not None:
            return ()
        allowed = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))
        return (int(allowed[0]),) if len(allowed) == 1 else ()

    def new_words(self, count: int) -> Any:
        """Return masks of words of 32 tokens each, `[count, words]`, that allow all tokens."""
        return np.full((count, -(-self.vocab_size // 32)), 0xFFFFFFFF, dtype=np.uint32)

    def write(self, row: Any) -> str | None:
        """Write the mask of the next token into a row of `new_words`; return why there is none, if so.

        After the end of the text all tokens are allowed, since none is kept.
        """
        if self._is_ended:
            return None
        meter = self._meter
        if meter.seconds > _REQUEST_S + meter.num_masks * _MASK_S:
            return f"following it took {meter.seconds:.1f} s of processor time; make it simpler"
        with meter.measured():
            self._matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        meter.num_masks += 1
        # In its error state, the library allows the end of the text.
        if self._matcher.is_error():
            return _shortened(self._matcher.get_error())
        return None


def _shortened(error: object) -> str:
    """Return the first and the last words of an error of the library, in a single line."""
    text = " ".join(_DUMP.sub("", str(error)).split())
    half = _MOST_SHOWN // 2  # the reason stands before a long quotation, or behind it
    return text if len(text) <= _MOST_SHOWN else f"{text[:half]} ... {text[-half:]}"
