"""The type checker of the tests: it checks the first calls of every test, since proofs make the same calls for minutes."""

import functools
from collections.abc import Callable
from typing import Any

import jaxtyping
from beartype import beartype

CHECKED_CALLS = 1000
"""Checks a test: enough for every function that it reaches, and a fraction of a second of work."""

_left = CHECKED_CALLS


def start() -> None:
    """Check from here on; called before every test."""
    global _left  # noqa: PLW0603 (one budget, shared by all functions)
    _left = CHECKED_CALLS
    jaxtyping.config.update("jaxtyping_disable", False)


def first_calls(function: Callable[..., Any]) -> Callable[..., Any]:
    """`beartype`, until the budget of the test is spent."""
    checked = beartype(function)

    @functools.wraps(function)
    def counted(*args: Any, **kwargs: Any) -> Any:
        global _left  # noqa: PLW0603
        _left -= 1
        if _left <= 0:
            jaxtyping.config.update("jaxtyping_disable", True)
        return checked(*args, **kwargs)

    return counted
