"""Named parts: each kind of part has a table from names to classes, which installed packages can extend."""

import ast
import dataclasses
import inspect
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property, lru_cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Generic, TypeVar, cast, get_type_hints

from monge.core.errors import MongeError, OptionError, unknown_name
from monge.core.parts import FORMER_NAMES, present_name
from monge.core.setting_types import is_of, type_name

Part = TypeVar("Part")


class Registry(Mapping[str, type[Part]], Generic[Part]):
    """A table of parts; a part is its own configuration, a frozen dataclass.

    A user gives a part as an object or as its text, and `of` returns the object of both. Other
    packages add parts by entry points. A part is loaded when it is named, and all of them
    when the table is listed; those that fail are left out of the list, with a warning.

    Args:
        kind: Noun for messages ("verifier").
        parts: Names to classes, or to their places in the form of entry points.
        base: Class or classes of the parts, as `isinstance` takes them.
        group: Entry point group of further parts, such as `monge.verifiers`; `None` for a table
            without them.
        provided: Settings that the engine gives and no text can: networks, histories.
        inside: Tables of the settings that are parts themselves and that the engine may give.
    """

    def __init__(
        self,
        kind: str,
        parts: Mapping[str, type[Part] | str],
        *,
        base: Any = object,  # noqa: ANN401 (`isinstance` takes unions of classes)
        group: str | None = None,
        provided: Iterable[str] = (),
        inside: Mapping[str, "Registry[Any]"] | None = None,
    ) -> None:
        if len(set(parts.values())) != len(parts):
            raise OptionError(f"registry of {kind}s: one class is registered under two names")
        self.kind, self._base, self._group = kind, base, group
        self._parts, self._inside = dict(parts), dict(inside or {})
        self._provided = frozenset(provided)

    def __getitem__(self, name: str) -> type[Part]:
        name = name if name in self._names else FORMER_NAMES.get(name, name)
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
        """Return the settings that are not provided, in positional order."""
        return {
            key: default
            for key, default in self.options(name).items()
            if key not in self._provided and key not in self._inside
        }

    def of(self, given: object) -> Part:
        """Return the part that a user gave, as an object or as text.

        Raises:
            OptionError: If it is neither, or as `parse`.
        """
        if isinstance(given, str):
            return self.parse(given)
        if isinstance(given, self._base):
            return cast(Part, given)
        got = f"{given!r} of type {type(given).__name__}"
        use = "give its name, or an object"
        if isinstance(given, type):
            got, use = f"the class {given.__name__}", f"make an object: {given.__name__}(...)"
        raise OptionError(f"{self.kind}: expected a {self.kind} or its name; got {got}; {use}")

    def parse(self, text: str) -> Part:
        """Build a part from `name`, `name()` or `name(value, option=value)`.

        Values are Python literals, or the text of a part without quotation marks.

        Raises:
            OptionError: If the text is not of this form, a name in it is unknown, a value has the
                wrong type, or the part refuses its settings.
        """
        name, positional, named = self._split(text)
        name = name if name in self._names else present_name(name)
        known = self.settings(name)
        parameters = inspect.signature(self[name]).parameters.values()
        # The first values of a pool are parts of its own kind.
        is_pool = any(each.kind is each.VAR_POSITIONAL for each in parameters)
        parts = [self.of(part) for part in positional] if is_pool else []
        first = {} if parts else dict(zip(known, positional, strict=False))
        if len(positional) > len(first) + len(parts):
            raise OptionError(
                f"{self.kind} {name!r} takes at most {len(known)} settings; got {len(positional)}"
            )
        self._refuse_twice(name, first.keys() & named.keys())
        return self._made(name, parts, self._checked(name, first | named, known))

    def _split(self, text: str) -> tuple[str, list[Any], dict[str, Any]]:
        """Return the name, the positional and the named values of a text, without checking them."""
        try:
            call = ast.parse(text.strip(), mode="eval").body
            if isinstance(call, ast.Name):
                return call.id, [], {}
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Name):
                keys = [str(keyword.arg) for keyword in call.keywords]
                values = [_value(keyword.value) for keyword in call.keywords]
                positional = [_value(value) for value in call.args]
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
            if key in self._inside and key in declared:
                checked[key] = self._inside[key].of(given)
                continue
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
        return self._made(name, (), self._checked(name, settings, self.options(name)))

    def _made(self, name: str, parts: Sequence[Any], checked: Mapping[str, Any]) -> Part:
        try:
            return self[name](*parts, **checked)
        except MongeError:
            raise
        except (TypeError, AttributeError, ValueError) as error:
            given = ", ".join(
                f"{key}={value!r}" for key, value in checked.items() if key not in self._provided
            )
            raise OptionError(
                f"{self.kind} {name!r} cannot be made with {given or 'its defaults'}: {error}"
            ) from error


def _value(node: ast.expr) -> Any:  # noqa: ANN401 (of any type)
    """Return what a literal stands for; the text of a part needs no quotation marks."""
    is_part = isinstance(node, ast.Name) or (
        isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    )
    return ast.unparse(node) if is_part else ast.literal_eval(node)


@lru_cache(maxsize=256)
def _declared(part: type[Any]) -> Mapping[str, Any]:
    """Return the types of a part's settings; cached, because parts are built often."""
    return get_type_hints(part)
