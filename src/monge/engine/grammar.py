"""Grammars at the nodes of a tree: which tokens may come next, and which tokens must."""

from collections.abc import Iterable
from contextlib import suppress
from functools import cached_property, lru_cache
from typing import Any, Final

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from monge.core.errors import GrammarError, OptionError
from monge.core.extras import require
from monge.core.grammar import Grammar
from monge.core.tree import TokenTree

FORCED: Final = "grammar"
"""Name of the drafter in records of rounds that offered forced tokens."""

_MOST_SHOWN: Final = 400
"""Characters of an error of the library, which may quote a whole grammar."""


class GrammarCompiler:
    """Compiles grammars for one vocabulary, with the library `llguidance`.

    Args:
        tokenizer: A fast tokenizer of `transformers`.
        vocab_size: Number of tokens of the target; a token that the tokenizer lacks never comes.
        end_ids: End-of-text tokens, which come only where a grammar may end.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, end_ids: frozenset[int]) -> None:
        self._tokenizer, self._vocab_size, self._end_ids = tokenizer, vocab_size, end_ids
        # States never change, so that requests share them.
        self.compile = lru_cache(maxsize=32)(self._compile)

    def prepare(self) -> None:
        """Read the vocabulary now: for up to seconds, the library lets no other thread run meanwhile.

        Where grammars cannot be compiled, the first one says why.
        """
        with suppress(OptionError):
            require("grammar", "a grammar", "llguidance")
            _ = self._vocabulary

    @cached_property
    def _vocabulary(self) -> Any:
        from llguidance.hf import from_tokenizer

        if self._tokenizer is None or not self._end_ids:
            missing = "tokenizer" if self._tokenizer is None else "end-of-text token"
            raise OptionError(f"grammar: this decoder has no {missing}, and a grammar needs one")
        try:
            return from_tokenizer(
                self._tokenizer, n_vocab=self._vocab_size, eos_token=sorted(self._end_ids)
            )
        except Exception as error:
            name = type(self._tokenizer).__name__
            raise OptionError(
                f"grammar: expected a fast tokenizer of transformers that the library reads; got "
                f"{name} ({_shortened(error)})"
            ) from error

    def _compile(self, grammar: Grammar) -> "GrammarState":
        """Return the state before the first token.

        Raises:
            OptionError: If the grammar is malformed or uses something unsupported, or if no token
                can begin a text of it.
        """
        require("grammar", "a grammar", "llguidance")
        from llguidance import LLMatcher, grammar_from

        # A schema may bring options of the library, which must not win over these.
        options: Any = {
            "whitespace_flexible": grammar.any_whitespace,
            "item_separator": "," if grammar.any_whitespace else ", ",
            "key_separator": ":" if grammar.any_whitespace else ": ",
            "lenient": False,
        }
        try:
            rules = (
                LLMatcher.grammar_from_json_schema(grammar.text, overrides=options)
                if grammar.kind == "json_schema"
                else grammar_from(grammar.kind, grammar.text)
            )
        except ValueError as error:
            raise OptionError(f"grammar: {grammar.kind}: {_shortened(error)}") from error
        # The library raises nothing: it keeps its errors.
        matcher = LLMatcher(self._vocabulary, rules, log_level=0)
        state = GrammarState(matcher, self._vocab_size, self._end_ids)
        # Asked at once, so that a grammar without a text is refused before it waits.
        if (error := state.write(state.new_words(1)[0])) is not None:
            raise OptionError(f"grammar: {grammar.kind}: {error}")
        return state


class GrammarState:
    """A grammar after some tokens. It never changes: a text that goes on has a state of its own.

    Args:
        matcher: The library's parser, which has read the tokens.
        vocab_size: Number of tokens of the target.
        end_ids: End-of-text tokens.
        run: Tokens that are known to be forced here.
        is_ended: Whether the last token ended the text.
    """

    def __init__(
        self,
        matcher: Any,
        vocab_size: int,
        end_ids: frozenset[int],
        *,
        run: tuple[int, ...] = (),
        is_ended: bool = False,
    ) -> None:
        self._matcher, self.vocab_size, self._end_ids = matcher, vocab_size, end_ids
        self._run, self._is_ended = run, is_ended

    def after(self, token: int) -> "GrammarState | None":
        """Return the state after one more token, or `None` where the grammar has no such text."""
        if self._is_ended:
            return None
        # The library's rollback is not an exact inverse; a copy is.
        matcher, is_ended = self._matcher.deep_copy(), token in self._end_ids
        # Where only the end may follow, `try_consume_tokens` takes nothing.
        is_taken = (
            matcher.consume_token(token) if is_ended else matcher.try_consume_tokens([token]) == 1
        )
        if not is_taken:
            return None
        run = self._run[1:] if self._run[:1] == (token,) else ()
        return GrammarState(matcher, self.vocab_size, self._end_ids, run=run, is_ended=is_ended)

    def after_all(self, token_ids: Iterable[int]) -> "GrammarState":
        """Return the state after committed tokens.

        Raises:
            GrammarError: If the grammar has no such text.
        """
        state = self
        for token in token_ids:
            if (following := state.after(token)) is None:
                raise GrammarError(f"grammar: the text cannot go on with token {token}")
            state = following
        return state

    def forced(self, most: int) -> tuple[int, ...]:
        """Return up to `most` tokens that the grammar forces next; each has probability one.

        Where one text alone can follow, only the tokens in which the tokenizer writes it are
        allowed.
        """
        state, found = self, list[int]()
        while state is not None and not state._is_ended and len(found) < most:
            # Kept along the run, which may be long: a grammar can force a million characters.
            state._run = state._run or state._next_run()
            if not state._run:
                break
            found.append(state._run[0])
            state = state.after(found[-1])
        return tuple(found if state is not None else found[:-1])

    def _next_run(self) -> tuple[int, ...]:
        if run := tuple(self._matcher.compute_ff_tokens()):
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
        self._matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        # In its error state, the library allows the end of the text.
        if self._matcher.is_error():
            return _shortened(self._matcher.get_error())
        return None


class TreeMask:
    """The tokens that a grammar allows after every node of a tree, each by its own path.

    Args:
        state: The grammar after the committed text, the root included.
        tree: The tree.
    """

    def __init__(self, state: GrammarState, tree: TokenTree) -> None:
        words, states = state.new_words(tree.num_nodes), list[GrammarState | None]()
        self._errors = dict[int, str]()
        for node, parent in enumerate(tree.parents):
            above = None if node == 0 else states[parent]
            own = state if node == 0 else above and above.after(tree.token_ids[node])
            states.append(own)
            # Where the path is no text of the grammar, no law is asked for.
            if own is not None and (error := own.write(words[node])) is not None:
                self._errors[node] = error
        bits = np.unpackbits(
            words.view(np.uint8), axis=1, count=state.vocab_size, bitorder="little"
        )
        self._banned: Bool[Tensor, "nodes vocab"] = torch.from_numpy(bits ^ 1).view(torch.bool)

    def apply(self, scores: Float[Tensor, " vocab"], node: int) -> Float[Tensor, " vocab"]:
        """Return the scores after a node, -inf for tokens that are not allowed.

        Raises:
            GrammarError: If the library gave up there, or no token of the vocabulary can go on.
        """
        if node in self._errors:
            raise GrammarError(f"grammar: no token can come next: {self._errors[node]}")
        return scores.masked_fill(self._banned[node].to(scores.device), -torch.inf)

    def apply_all(self, logits: Float[Tensor, "nodes vocab"]) -> Float[Tensor, "nodes vocab"]:
        """Return the logits after all nodes; NaN where `apply` raises."""
        logits = logits.masked_fill(self._banned.to(logits.device, non_blocking=True), -torch.inf)
        for node in self._errors:
            logits[node] = torch.nan
        return logits


def _shortened(error: object) -> str:
    """Return the first words of an error of the library, in one line."""
    text = " ".join(str(error).partition("<state>")[0].split())
    return text if len(text) <= _MOST_SHOWN else text[:_MOST_SHOWN] + " ..."
