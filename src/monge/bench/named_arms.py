"""Arms that a user writes down: `name: tree=chain(8), controller=goodput`."""

import ast
from collections.abc import Mapping, Sequence
from typing import Any, Final

from monge.bench.arms import Arm, MongeArm
from monge.control.registry import CONTROLLERS
from monge.core.errors import OptionError, unknown_name
from monge.core.registry import Registry
from monge.draft.by_name import drafters_in
from monge.draft.registry import DRAFTERS
from monge.draft.tree.registry import TREES
from monge.engine.backends.registry import BACKENDS
from monge.verify.registry import VERIFIERS

_ROOMS: Final[Mapping[str, Registry[Any]]] = {
    "drafter": DRAFTERS,
    "tree": TREES,
    "verifier": VERIFIERS,
    "controller": CONTROLLERS,
    "draft_backend": BACKENDS,
}
_NUMBERS: Final = ("draft_temperature", "draft_top_k")
_FORM: Final = (
    "write 'name: part=value, ...', e.g. 'deep: tree=chain(8), controller=goodput, verifier=block'"
)


def named_arm(text: str) -> MongeArm:
    """An arm from its name and the parts that differ from the defaults.

    Args:
        text: `name: part=value, ..`; parts are written as on the command line (`drafter`, `tree`,
            `verifier`, `controller`, `draft_backend`, `draft_temperature`, `draft_top_k`). `name:`
            is an arm with the default parts.

    Raises:
        OptionError: If it cannot be read, or names a part, setting or value that does not exist, or
            a part twice.
    """
    name, colon, given = text.partition(":")
    if not colon or not name.strip():
        raise OptionError(f"arm {text!r} has no name; {_FORM}, or 'name:' for the default parts")
    settings = {
        key: _value(text, key, node, source) for key, node, source in _keywords(text, given.strip())
    }
    return MongeArm(name=name.strip(), settings=settings)


def with_named(arms: Sequence[Arm], texts: Sequence[str]) -> list[Arm]:
    """The arms and the named ones.

    Raises:
        OptionError: As `named_arm`, or if two arms have one name.
    """
    together = [*arms, *map(named_arm, texts)]
    names = [arm.name for arm in together]
    for name in names:
        if names.count(name) > 1:
            raise OptionError(f"two arms are called {name!r}; give the new one another name")
    return together


def _keywords(text: str, given: str) -> list[tuple[str, ast.expr, str]]:
    source = f"f({given})"
    try:
        call = ast.parse(source, mode="eval").body
    except (SyntaxError, ValueError) as error:
        raise OptionError(f"cannot read arm {text!r}; {_FORM}") from error
    if (
        not isinstance(call, ast.Call)
        or call.args
        or any(keyword.arg is None for keyword in call.keywords)
    ):
        raise OptionError(f"cannot read arm {text!r}; {_FORM}")
    keys = [keyword.arg for keyword in call.keywords]
    if repeated := [key for key in keys if keys.count(key) > 1]:
        raise OptionError(f"arm {text!r}: {repeated[0]} is given twice; leave one out")
    return [
        (str(word.arg), word.value, ast.get_source_segment(source, word.value) or "")
        for word in call.keywords
    ]


def _value(text: str, key: str, node: ast.expr, source: str) -> Any:  # noqa: ANN401 (a part's text, or a number)
    if key in _ROOMS:
        room = _ROOMS[key]
        # Drafters need a network, which a bench has: only their names and settings are looked at
        # here.
        if key == "drafter":
            for one in drafters_in(source):
                room.read(one)
        else:
            room.parse(source)
        return source
    if key not in _NUMBERS:
        raise unknown_name(f"part of arm {text!r}:", key, (*_ROOMS, *_NUMBERS))
    if (
        not isinstance(node, ast.Constant)
        or not isinstance(node.value, int | float)
        or isinstance(node.value, bool)
    ):
        raise OptionError(f"arm {text!r}: {key} must be a number; got {source!r}")
    return node.value
