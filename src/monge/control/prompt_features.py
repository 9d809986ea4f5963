"""Numbers that describe a prompt, each about as large as 1."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from monge.core.prompt import PromptProfile

_CODE_MARKS: Final = frozenset("{}()[]<>=;_\\/#*+&|^~`")
_LARGEST: Final = 2.0
"""Bound of logarithmic features: a token that the target rules out has a surprisal beyond all bounds."""


def length(prompt: PromptProfile) -> float:
    """Logarithm of the number of tokens, over 8."""
    return math.log1p(len(prompt.token_ids)) / 8.0


def repeated_pairs(prompt: PromptProfile) -> float:
    """Share of pairs of tokens that occurred before."""
    return _repeated(prompt.token_ids, 2)


def repeated_quadruples(prompt: PromptProfile) -> float:
    """Share of runs of four tokens that occurred before."""
    return _repeated(prompt.token_ids, 4)


def surprisal(prompt: PromptProfile) -> float:
    """Logarithm of the prompt's perplexity under the target, over its last tokens, over 8 nats."""
    return min(_LARGEST, (prompt.surprisal or 0.0) / 8.0)


def entropy(prompt: PromptProfile) -> float:
    """Mean entropy of the target's laws of these tokens, over 8 nats."""
    return min(_LARGEST, (prompt.entropy or 0.0) / 8.0)


def digits(prompt: PromptProfile) -> float:
    """Share of digits among the characters."""
    return _share(prompt.text, str.isdigit)


def code(prompt: PromptProfile) -> float:
    """Share of characters that are frequent in programs."""
    return _share(prompt.text, _CODE_MARKS.__contains__)


def foreign(prompt: PromptProfile) -> float:
    """Share of letters that are not of the English alphabet, among the characters."""
    return _share(prompt.text, lambda character: character.isalpha() and not character.isascii())


FEATURES: Final[Mapping[str, Callable[[PromptProfile], float]]] = {
    feature.__name__: feature
    for feature in (
        length,
        repeated_pairs,
        repeated_quadruples,
        surprisal,
        entropy,
        digits,
        code,
        foreign,
    )
}
OF_LAWS: Final = frozenset({"surprisal", "entropy"})
"""Features for which the target's laws of the prompt are read."""


def _repeated(token_ids: Sequence[int], size: int) -> float:
    """Share of the runs of `size` tokens that occurred before; 0 where there is none."""
    runs = [tuple(token_ids[start : start + size]) for start in range(len(token_ids) - size + 1)]
    return (len(runs) - len(set(runs))) / len(runs) if runs else 0.0


def _share(text: str | None, belongs: Callable[[str], bool]) -> float:
    return sum(map(belongs, text)) / len(text) if text else 0.0
