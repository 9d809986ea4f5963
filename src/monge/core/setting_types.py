"""Runtime checks of values that users write against the declared types and bounds of settings."""

import math
import operator
import types
from collections.abc import Callable, Mapping
from typing import Any, Final, Literal, SupportsIndex, Union, cast, get_args, get_origin

from monge.core.errors import OptionError

_UNIONS: Final = (Union, types.UnionType)


def _is_whole(value: object) -> bool:
    """Return whether it is a whole number, of Python, numpy or torch."""
    if isinstance(value, int):
        return not isinstance(value, bool)
    if not isinstance(value, SupportsIndex):
        return False
    try:
        operator.index(value)  # arrays have the method, and refuse
    except TypeError:
        return False
    return True


_PLAIN: Final[Mapping[object, Callable[[object], bool]]] = {
    # A truth value is an int to Python, and a whole number is not a float; users mean neither.
    int: _is_whole,
    float: lambda value: isinstance(value, float | int) and not isinstance(value, bool),
}


def is_of(value: object, declared: Any) -> bool:  # noqa: ANN401 (an annotation is no type)
    """Return whether a value has a declared type; entries are checked in tuples only.

    Examples:
        >>> is_of((1, 2), tuple[int, ...]), is_of(2.5, int), is_of(2, float), is_of(True, int | None)
        (True, False, True, False)
    """
    if declared in _PLAIN:  # first: token ids are asked about one by one
        return _PLAIN[declared](value)
    if declared is Any:
        return True
    origin, inside = get_origin(declared), get_args(declared)
    if origin in _UNIONS:
        return any(is_of(value, choice) for choice in inside)
    if origin is Literal:
        return any(type(value) is type(choice) and value == choice for choice in inside)
    if origin is tuple:
        return isinstance(value, tuple) and _are_of(cast(tuple[object, ...], value), inside)
    return isinstance(value, types.NoneType if declared is None else origin or declared)


def _are_of(values: tuple[object, ...], declared: tuple[Any, ...]) -> bool:
    if declared[1:] == (...,):
        return all(is_of(value, declared[0]) for value in values)
    return len(values) == len(declared) and all(
        is_of(value, kind) for value, kind in zip(values, declared, strict=True)
    )


def type_name(declared: Any) -> str:  # noqa: ANN401 (an annotation is no type)
    """A declared type as it is written, without modules.

    Examples:
        >>> type_name(tuple[int, ...] | None)
        'tuple[int, ...] | None'
    """
    origin, inside = get_origin(declared), get_args(declared)
    if origin in _UNIONS:
        return " | ".join(map(type_name, inside))
    if origin is Literal:
        return " | ".join(map(repr, inside))
    if declared is ...:
        return "..."
    if declared is None or declared is types.NoneType:
        return "None"
    name = (origin or declared).__name__
    return f"{name}[{', '.join(map(type_name, inside))}]" if inside else name


def check_bounds(
    part: str, least: float | int = 1, most: float | int = math.inf, /, **settings: float | int
) -> None:
    """Refuse settings of a part that lie outside [least, most], or are NaN.

    Raises:
        OptionError: With the name of the setting, its bounds and its value.
    """
    for name, value in settings.items():
        if not least <= value <= most:
            bounds = f"be at least {least}" if most == math.inf else f"lie in [{least}, {most}]"
            raise OptionError(f"{part}: {name} must {bounds}; got {value}")


def check_sampling(
    temperature: float | int = 1.0,
    top_k: int | None = None,
    top_p: float | int = 1.0,
    min_p: float | int = 0.0,
) -> None:
    """Refuse settings of `SamplingRules` that lie outside their bounds.

    Raises:
        OptionError: With the name of the setting, its bounds and its value.
    """
    settings = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    for name, value in settings.items():
        if isinstance(value, bool):
            raise OptionError(f"{name} must be a number; got {value}")
    if not (math.isfinite(temperature) and temperature >= 0):
        raise OptionError(f"temperature must be finite and >= 0 (0 = greedy); got {temperature}")
    if top_k is not None and top_k < 1:
        raise OptionError(
            f"top_k must be at least 1, or None for the whole vocabulary; got {top_k}"
        )
    if not 0 < top_p <= 1:
        raise OptionError(f"top_p must lie in (0, 1]; got {top_p}")
    if not 0 <= min_p <= 1:
        raise OptionError(f"min_p must lie in [0, 1]; got {min_p}")
