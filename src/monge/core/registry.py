"""Named parts: each room has one immutable table from names to classes."""

import ast
import dataclasses
import inspect
from collections.abc import Iterator, Mapping
from typing import Any, Generic, TypeVar

from monge.core.errors import OptionError, unknown_name

Part = TypeVar("Part")


class Registry(Mapping[str, type[Part]], Generic[Part]):
    """An immutable table of parts; a part is its own configuration, a frozen dataclass.

    Args:
        kind: What the parts are, for messages ("verifier").
        parts: Names to classes.
    """

    def __init__(self, kind: str, parts: Mapping[str, type[Part]]) -> None:
        if len(set(parts.values())) != len(parts):
            raise OptionError(f"registry of {kind}s: one class is registered under two names")
        self.kind = kind
        self._parts = dict(parts)

    def __getitem__(self, name: str) -> type[Part]:
        if name not in self._parts:
            raise unknown_name(self.kind, name, self._parts)
        return self._parts[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts)

    def __len__(self) -> int:
        return len(self._parts)

    def name_of(self, part: Part) -> str:
        """The name under which the class of `part` is registered."""
        for name, cls in self._parts.items():
            if type(part) is cls:
                return name
        raise OptionError(f"{type(part).__name__} is not a registered {self.kind}")

    def summary(self, name: str) -> str:
        """First line of a part's docstring."""
        return (inspect.getdoc(self[name]) or "").partition("\n")[0]

    def options(self, name: str) -> Mapping[str, Any]:
        """The settings of a part and their defaults (`dataclasses.MISSING` where the caller must choose)."""
        cls: Any = self[name]
        if not dataclasses.is_dataclass(cls):
            return {}
        return {field.name: field.default for field in dataclasses.fields(cls) if field.init}

    def parse(self, text: str, **settings: Any) -> Part:
        """Build a part from `name`, `name()` or `name(value, option=value)`; values are Python literals.

        Args:
            text: What the user wrote.
            **settings: Further settings.

        Raises:
            OptionError: If the text is not of this form, or a name in it is unknown.
        """
        name, positional, named = self._read(text)
        names = list(self.options(name))
        if len(positional) > len(names):
            raise OptionError(f"{self.kind} {name!r} takes at most {len(names)} settings; got {len(positional)}")
        first = dict(zip(names, positional, strict=False))
        repeated = sorted(first.keys() & named.keys() | (first.keys() | named.keys()) & settings.keys())
        if repeated:
            raise OptionError(f"{self.kind} {name!r}: {', '.join(repeated)} is given twice; leave one out")
        return self.make(name, **first, **named, **settings)

    def _read(self, text: str) -> tuple[str, list[Any], dict[str, Any]]:
        try:
            call = ast.parse(text.strip(), mode="eval").body
            if isinstance(call, ast.Name):
                return call.id, [], {}
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Name):
                named = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in call.keywords}
                return call.func.id, [ast.literal_eval(value) for value in call.args], named
        except (SyntaxError, ValueError) as error:
            raise self._unreadable(text) from error
        raise self._unreadable(text)

    def _unreadable(self, text: str) -> OptionError:
        return OptionError(
            f"cannot read {self.kind} {text!r}; write a name ({', '.join(sorted(self._parts))}), or a name with settings such "
            "as name(option=1)"
        )

    def make(self, name: str, **settings: Any) -> Part:
        """Build a part; an unknown setting is refused with the nearest valid one."""
        known = self.options(name)
        for key in settings:
            if key not in known:
                raise unknown_name(f"option of {self.kind} {name!r}:", key, known or ("(none)",))
        return self[name](**settings)
