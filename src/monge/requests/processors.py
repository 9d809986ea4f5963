"""Logits processors and their copies: a processor with state has a copy for each path."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from inspect import unwrap
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any, Final

from torch import Tensor, nn

from monge.core.errors import OptionError

Processor = Callable[[Tensor, Tensor], Tensor]
"""`(token_ids [1, seq], scores [1, vocab]) -> scores [1, vocab]`, the form of `transformers`' logits processors."""

_SHARED: Final = frozenset(
    {
        "builtins.LLTokenizer",
        "tokenizers.Tokenizer",
        "transformers.PreTrainedTokenizerBase",
        "xgrammar.CompiledGrammar",
        "xgrammar.GrammarCompiler",
        "xgrammar.TokenizerInfo",
    }
)
"""Classes, by package and name, that hold nothing of a text: the copies of a processor share them."""
_OWN_METHODS: Final = ("fork", "deep_copy")
"""Methods with which the matchers of grammar libraries copy themselves."""


@dataclass(frozen=True, slots=True, eq=False)
class Stateless:
    """A processor that is known to be a function of its arguments, so it is never copied."""

    function: Processor

    @property
    def __wrapped__(self) -> Processor:
        return self.function

    def __call__(self, token_ids: Tensor, scores: Tensor) -> Tensor:
        return self.function(token_ids, scores)


class OnePath:
    """A processor that cannot be copied; called once after every token of a text, in order."""

    def __init__(self, processor: Processor) -> None:
        self.__wrapped__ = processor
        self._length = 0
        self._answer: Tensor | Exception | None = None

    def __call__(self, token_ids: Tensor, scores: Tensor) -> Tensor:
        # A round that is tried again asks again, and the processor has moved on.
        if token_ids.shape[1] != self._length:
            self._length = token_ids.shape[1]
            try:
                self._answer = self.__wrapped__(token_ids, scores)
            except Exception as error:  # noqa: BLE001  it is the user's, who gets it
                self._answer = error
        if isinstance(self._answer, Exception):
            raise self._answer
        check_scores(self, self._answer, scores)
        assert self._answer is not None, "it has been checked"
        return self._answer.clone()


def has_state(processors: Sequence[Processor]) -> bool:
    """Return whether a processor may depend on earlier calls."""
    return not all(isinstance(processor, Stateless) for processor in processors)


def copy_error(processor: Processor) -> Exception | None:
    """The reason why a processor cannot be copied, or `None`."""
    try:
        fork(processor)
    except Exception as error:  # noqa: BLE001  its own methods are asked, which may raise anything
        return error
    return None


def check_shared(processors: Sequence[Processor]) -> None:
    """Refuse processors that cannot follow several texts.

    Raises:
        OptionError: With the name of the first that cannot be copied, and the reason.
    """
    for processor in processors:
        if (error := copy_error(processor)) is not None:
            raise OptionError(
                f"processor {name_of(processor)}: several texts need a copy each, and it cannot be "
                f"copied ({type(error).__name__}: {error}); decode one text at a time, or give its "
                "class a __deepcopy__"
            ) from error


def check_scores(processor: Processor, found: object, given: Tensor) -> None:
    """Refuse scores of another shape than those that the processor was given.

    Raises:
        OptionError: With the processor's name and both shapes.
    """
    if not isinstance(found, Tensor) or found.shape != given.shape:
        got = list(found.shape) if isinstance(found, Tensor) else type(found).__name__
        raise OptionError(
            f"processor {name_of(processor)}: expected scores of shape {list(given.shape)}, as "
            f"given; got {got}"
        )


def name_of(processor: Processor) -> str:
    """The name under which a user knows a processor."""
    given = unwrap(processor)
    return (
        given.__qualname__ if isinstance(given, FunctionType | MethodType) else type(given).__name__
    )


def fork(value: Any, memo: dict[int, Any] | None = None) -> Any:
    """A copy that goes its own way: of processors, with everything inside that can change.

    `copy.deepcopy`, which also copies the variables of closures, shares objects without state, and
    calls an object's own `fork` or `deep_copy` if it cannot be copied otherwise.

    Raises:
        Exception: Anything, if it cannot be copied.
    """
    memo = {} if memo is None else memo
    if id(value) in memo:
        return memo[id(value)]
    if _holds_no_state(value):
        return value
    if isinstance(value, nn.Module):
        raise TypeError(f"it holds a network, {type(value).__name__}")
    try:
        copied = _copied(value, memo)
    except Exception:
        methods = [getattr(type(value), name, None) for name in _OWN_METHODS]
        method = next((candidate for candidate in methods if candidate is not None), None)
        if method is None:
            raise
        copied = method(value)
    memo[id(value)] = copied
    return copied


def _holds_no_state(value: object) -> bool:
    kind = type(value)
    if isinstance(value, Stateless | OnePath | ModuleType | type):
        return True
    return any(
        f"{base.__module__.split('.')[0]}.{base.__name__}" in _SHARED for base in kind.__mro__
    )


def _copied(value: Any, memo: dict[int, Any]) -> Any:
    kind = type(value)
    if kind in {list, dict, tuple, set, frozenset}:
        return _copied_items(value, memo)
    if kind is partial:
        named = fork(value.keywords, memo)
        return partial(fork(value.func, memo), *fork(value.args, memo), **named)
    if kind is MethodType:
        return MethodType(fork(value.__func__, memo), fork(value.__self__, memo))
    if kind is FunctionType:
        return _copied_function(value, memo)
    if _is_plain(kind):
        memo[id(value)] = copied = object.__new__(kind)
        vars(copied).update(fork(vars(value), memo))
        return copied
    return copy.deepcopy(value, memo)


def _copied_items(value: Any, memo: dict[int, Any]) -> Any:
    if not isinstance(value, list | dict):
        return type(value)(fork(item, memo) for item in value)
    # First in the memo, since it may hold what refers to it.
    copied: Any = type(value)()
    memo[id(value)] = copied
    if isinstance(value, dict):
        copied.update((fork(name, memo), fork(item, memo)) for name, item in value.items())
    else:
        copied.extend(fork(item, memo) for item in value)
    return copied


def _copied_function(function: FunctionType, memo: dict[int, Any]) -> FunctionType:
    cells = function.__closure__ or ()
    if not (cells or function.__defaults__ or function.__kwdefaults__ or vars(function)):
        return function  # nothing of its own to change
    # Functions that share a variable go on sharing it.
    copies = [memo.setdefault(id(cell), CellType()) for cell in cells]
    copied = FunctionType(
        function.__code__, function.__globals__, function.__name__, None, tuple(copies)
    )
    memo[id(function)] = copied
    for cell, copied_cell in zip(cells, copies, strict=True):
        copied_cell.cell_contents = fork(cell.cell_contents, memo)
    copied.__defaults__ = fork(function.__defaults__, memo)
    copied.__kwdefaults__ = fork(function.__kwdefaults__, memo)
    copied.__qualname__ = function.__qualname__
    vars(copied).update(fork(vars(function), memo))
    return copied


def _is_plain(kind: type) -> bool:
    """Return whether an object is no more than its attributes, copied as Python copies them."""
    hooks = ("__deepcopy__", "__setstate__", "__getnewargs__", "__getnewargs_ex__")
    return (
        kind.__dictoffset__ != 0
        and all(
            getattr(kind, name) is getattr(object, name)
            for name in ("__reduce_ex__", "__reduce__", "__getstate__")
        )
        and not any(hasattr(kind, name) for name in hooks)
        and not any(vars(base).get("__slots__") for base in kind.__mro__)
    )
