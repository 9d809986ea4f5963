"""Named parts: each kind of part has a table from names to classes, which installed packages can extend."""

import ast
import dataclasses
import inspect
import warnings
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property, lru_cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Generic, TypeVar, get_type_hints

from monge.core.errors import MongeError, OptionError, unknown_name
from monge.core.setting_types import is_of, type_name

Part = TypeVar("Part")


class Registry(Mapping[str, type[Part]], Generic[Part]):
    """A table of parts; a part is its own configuration, a frozen dataclass.

    Other packages add parts by entry points. A part is loaded when it is named, and all of them
    when the table is listed; those that fail are left out of the list, with a warning.

    Args:
        kind: Noun for messages ("verifier").
        parts: Names to classes, or to their places in the form of entry points.
        group: Entry point group of further parts, such as `monge.verifiers`; `None` for a table
            without them.
        provided: Settings that the engine gives and no user writes: networks, trees.
    """

    def __init__(
        self,
        kind: str,
        parts: Mapping[str, type[Part] | str],
        *,
        group: str | None = None,
        provided: Iterable[str] = (),
    ) -> None:
        if len(set(parts.values())) != len(parts):
            raise OptionError(f"registry of {kind}s: one class is registered under two names")
        self.kind, self._group = kind, group
        self._parts, self._provided = dict(parts), frozenset(provided)

    def __getitem__(self, name: str) -> type[Part]:
        if name in self._parts:
            place = self._parts[name]
            part: Any = EntryPoint(name, place, "").load() if isinstance(place, str) else place
            return part
        if name not in self._entries:
            raise unknown_name(self.kind, name, self._names)
        entry = self._entries[name]
        try:
            return entry.load()
        except Exception as error:
            raise OptionError(
                f"{self.kind} {name!r} cannot be loaded from {entry.value}: "
                f"{type(error).__name__}: {error}"
            ) from error

    def __iter__(self) -> Iterator[str]:
        return iter(self._all)

    def __len__(self) -> int:
        return len(self._all)

    @cached_property
    def _entries(self) -> Mapping[str, EntryPoint]:
        """Entry points of installed packages, which are not loaded yet."""
        entries = entry_points(group=self._group) if self._group else ()
        return {entry.name: entry for entry in entries}

    @property
    def _names(self) -> Iterable[str]:
        return {**self._parts, **self._entries}

    @cached_property
    def _all(self) -> Mapping[str, type[Part]]:
        """The built-in parts, then those of installed packages that can be loaded."""
        parts = {name: self[name] for name in self._parts}
        for name, entry in self._entries.items():
            problem = f"{self.kind} {name!r} of {entry.value} is ignored: the name is taken"
            if name not in self._parts:
                try:
                    parts[name] = self[name]
                    continue
                except OptionError as error:  # a broken package must not stop the others
                    problem = str(error)
            warnings.warn(problem, stacklevel=3)
        return parts

    def is_built_in(self, name: str) -> bool:
        """Return whether a part belongs to this library, and not to an installed package."""
        return name in self._parts

    def name_of(self, part: Part) -> str:
        """Return the name of the class of `part`."""
        cls = type(part)
        places = {cls, f"{cls.__module__}:{cls.__qualname__}"}
        for table in (self._parts, self):  # only a part of another package loads all
            for name, place in table.items():
                if place in places:
                    return name
        raise OptionError(f"{type(part).__name__} is not a registered {self.kind}")

    def summary(self, name: str) -> str:
        """Return the first line of a part's docstring."""
        return (inspect.getdoc(self[name]) or "").partition("\n")[0]

    def options(self, name: str) -> Mapping[str, Any]:
        """Return the settings of a part and their defaults (`dataclasses.MISSING` if required)."""
        cls: Any = self[name]
        if not dataclasses.is_dataclass(cls):
            return {}
        return {field.name: field.default for field in dataclasses.fields(cls) if field.init}

    def settings(self, name: str) -> Mapping[str, Any]:
        """Return the settings that a user can write, in positional order."""
        return {
            key: default for key, default in self.options(name).items() if key not in self._provided
        }

    def read(self, text: str) -> tuple[str, dict[str, Any]]:
        """Read `name`, `name()` or `name(value, option=value)`; values are Python literals.

        Raises:
            OptionError: If the text is not of this form, a name in it is unknown, or a value has
                the wrong type.
        """
        name, positional, named = self.split(text)
        known = self.settings(name)
        if len(positional) > len(known):
            raise OptionError(
                f"{self.kind} {name!r} takes at most {len(known)} settings; got {len(positional)}"
            )
        first = dict(zip(known, positional, strict=False))
        self._refuse_twice(name, first.keys() & named.keys())
        return name, self._checked(name, first | named, known)

    def parse(self, text: str, **settings: Any) -> Part:
        """Build a part from text, as `read` takes it, and further settings.

        Raises:
            OptionError: As `read`, or if the part refuses its settings.
        """
        name, written = self.read(text)
        self._refuse_twice(name, written.keys() & settings.keys())
        return self.make(name, **written, **settings)

    def split(self, text: str) -> tuple[str, list[Any], dict[str, Any]]:
        """Return the name, the positional and the named values of a text, without checking them.

        Raises:
            OptionError: If the text is not of the form that `read` takes.
        """
        try:
            call = ast.parse(text.strip(), mode="eval").body
            if isinstance(call, ast.Name):
                return call.id, [], {}
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Name):
                keys = [str(keyword.arg) for keyword in call.keywords]
                values = [ast.literal_eval(keyword.value) for keyword in call.keywords]
                positional = [ast.literal_eval(value) for value in call.args]
                self._refuse_twice(call.func.id, (key for key in keys if keys.count(key) > 1))
                return call.func.id, positional, dict(zip(keys, values, strict=True))
            reason: Exception | None = None
        except (SyntaxError, ValueError, TypeError) as error:
            if isinstance(error, MongeError):
                raise
            reason = error
        raise OptionError(
            f"cannot read {self.kind} {text!r}; write a name ({', '.join(sorted(self._names))}), or "
            "a name with settings such as name(option=1)"
        ) from reason

    def _refuse_twice(self, name: str, repeated: Iterable[str]) -> None:
        if keys := sorted(set(repeated)):
            raise OptionError(
                f"{self.kind} {name!r}: {', '.join(keys)} is given twice; leave one out"
            )

    def _checked(
        self, name: str, settings: Mapping[str, Any], known: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Check names and types of settings, and turn lists into tuples."""
        declared = _declared(self[name]) if settings else {}
        checked: dict[str, Any] = {}
        for key, given in settings.items():
            if key not in known:
                raise unknown_name(f"option of {self.kind} {name!r}:", key, known or ("(none)",))
            value = tuple(given) if isinstance(given, list) else given
            if key not in self._provided and not is_of(value, declared[key]):
                has_example = known[key] not in (None, dataclasses.MISSING)
                such = f", such as {known[key]!r}" if has_example else ""
                raise OptionError(
                    f"{self.kind} {name!r}: {key} must be "
                    f"{type_name(declared[key])}{such}; got {given!r}"
                )
            checked[key] = value
        return checked

    def make(self, name: str, **settings: Any) -> Part:
        """Build a part.

        Raises:
            OptionError: If a setting is unknown (the message names the nearest valid setting), has
                the wrong type, or is refused.
        """
        checked = self._checked(name, settings, self.options(name))
        try:
            return self[name](**checked)
        except MongeError:
            raise
        except (TypeError, AttributeError, ValueError) as error:
            given = ", ".join(
                f"{key}={value!r}" for key, value in checked.items() if key not in self._provided
            )
            raise OptionError(
                f"{self.kind} {name!r} cannot be made with {given or 'its defaults'}: {error}"
            ) from error


@lru_cache(maxsize=256)
def _declared(part: type[Any]) -> Mapping[str, Any]:
    """Return the types of a part's settings; cached, because parts are built often."""
    return get_type_hints(part)
