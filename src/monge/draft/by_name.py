"""Drafters from what a user wrote: one name, or a pool of several, with the resources that they need."""

import ast
from collections.abc import Mapping, Sequence
from typing import Any, Final

from monge.core.errors import OptionError
from monge.draft.base import AnyDrafter
from monge.draft.pool import PoolDrafter
from monge.draft.registry import DRAFTERS

_WORDS: Final = {"model": "draft model (draft=...)", "tree": "tree", "rules": "draft temperature", "top_k": "draft top-k"}


def drafters_in(text: str) -> tuple[str, ...]:
    """The drafters that a text names, with their settings: those of a pool, or the one.

    Raises:
        OptionError: If a pool's list cannot be read, has fewer than two entries, or the same one twice.
    """
    if _name(text) != "pool":
        return (text,)
    try:
        call = ast.parse(text.strip(), mode="eval").body
        listed = [ast.literal_eval(value) for value in call.args] if isinstance(call, ast.Call) and not call.keywords else []
    except (SyntaxError, ValueError):
        listed = []
    if len(listed) < 2 or not all(isinstance(one, str) for one in listed) or len(set(listed)) < len(listed):
        raise OptionError(
            f"cannot read drafter {text!r}; a pool lists at least two different drafters, as in pool('ngram', 'model') or "
            "pool('ngram(max_ngram=5)', 'suffix', 'none')"
        )
    for one in listed:
        if _name(one) == "pool":
            raise OptionError(f"drafter {text!r}: a pool cannot be in a pool; list its drafters instead")
    return tuple(listed)


def options_of(text: str) -> Mapping[str, Any]:
    """The settings of a named drafter and their defaults."""
    return DRAFTERS.options(_name(text))


def make_drafter(text: str, resources: Mapping[str, Any]) -> AnyDrafter:
    """Build a drafter, or a pool of them.

    Args:
        text: What the user wrote.
        resources: What drafters may need, by setting; `None` where it is missing. Each drafter gets what it takes.

    Raises:
        OptionError: If nobody takes a resource that was given, or somebody needs one that was not.
    """
    texts = drafters_in(text)
    for key, value in resources.items():
        if value is not None and not any(key in options_of(one) for one in texts):
            raise OptionError(f"drafter {text!r} takes no {_WORDS[key]}; leave it out or choose another drafter")
    made = [DRAFTERS.parse(one, **_wanted(one, resources)) for one in texts]
    return made[0] if _name(text) != "pool" else PoolDrafter(drafters=dict(zip(_labels(texts), made, strict=True)))


def _wanted(text: str, resources: Mapping[str, Any]) -> dict[str, Any]:
    known = options_of(text)
    for key, value in resources.items():
        if value is None and key in known:
            raise OptionError(f"drafter {text!r} needs a {_WORDS[key]}; give one, or use drafter='ngram'")
    return {key: value for key, value in resources.items() if value is not None and key in known}


def _labels(texts: Sequence[str]) -> list[str]:
    """The drafters' names; with their settings where one name occurs twice."""
    names = [_name(text) for text in texts]
    return [text if names.count(name) > 1 else name for text, name in zip(texts, names, strict=True)]


def _name(text: str) -> str:
    return text.partition("(")[0].strip()
