"""GBNF, the notation of llama.cpp.

It has no terminals: a rule tries every length of its parts. So the line end after optional blanks
may also be read as a blank.
"""

import re
from bisect import bisect_right
from collections.abc import Iterator
from typing import Final, cast

from monge.core.errors import OptionError
from monge.requests.character_rules import (
    HALVES,
    LAST_CHARACTER,
    Characters,
    Choice,
    Concatenation,
    Node,
    Repeat,
    Rule,
    lark_of,
    others,
)

_LARK: Final = re.compile(
    r"^[ \t]*(%llguidance\b|[?!]?start\s*(\[[^\]\n]*\])?\s*:(?!:=))", re.MULTILINE
)
_BLANKS: Final = re.compile(r"(?:[ \t]|#[^\r\n]*)*")
_BLANKS_AND_LINES: Final = re.compile(r"(?:[ \t\r\n]|#[^\r\n]*)*")
_NAME: Final = re.compile(r"[A-Za-z0-9_-]+")
_COUNT: Final = re.compile(r"[0-9]{1,9}(?![0-9])")
_REPETITIONS: Final = {"*": (0, None), "+": (1, None), "?": (0, 1)}
_ESCAPES: Final = {"n": "\n", "r": "\r", "t": "\t"} | {mark: mark for mark in '\\"[]-'}
_HEX_DIGITS: Final = {"x": 2, "u": 4, "U": 8}
_EMPTY: Final = Concatenation(())


def is_gbnf(rules: str) -> bool:
    """Return whether rules are read as GBNF, which is everything without the `start:` of Lark."""
    return _LARK.search(rules) is None


def lark_of_gbnf(rules: str) -> str:
    """Return rules of GBNF in the notation of Lark.

    Raises:
        OptionError: If they cannot be read; it names the line and the column.
    """
    try:
        return lark_of(_Reader(rules).read(), "root")
    except RecursionError as error:
        raise OptionError("the groups or the rules nest too deeply") from error


class _Reader:
    def __init__(self, text: str) -> None:
        self._text, self._at = text, 0
        self._begins = [0, *(match.end() for match in re.finditer("\n", text))]
        self._bodies, self._uses = dict[str, Node](), dict[str, int]()

    def read(self) -> dict[str, Node]:
        """Return the rules by their names."""
        self._skip(_BLANKS_AND_LINES)
        while self._at < len(self._text):
            self._read_rule()
        for name, place in self._uses.items():
            if name not in self._bodies:
                raise self._error(f"the rule {name!r} is not defined", place)
        if "root" not in self._bodies:
            raise OptionError("no rule is named `root`, with which a text begins")
        return self._bodies

    def _read_rule(self) -> None:
        begin = self._at
        name = self._taken(
            _NAME, "the name of a rule; a rule goes on behind a `|` that ends a line"
        )
        self._skip(_BLANKS)
        self._take("::=", f"`::=` behind the name {name!r}")
        self._skip(_BLANKS_AND_LINES)
        if name in self._bodies:
            raise self._error(f"the rule {name!r} is defined twice", begin)
        self._bodies[name] = self._alternatives(_BLANKS)
        if self._at < len(self._text) and self._text[self._at] not in "\r\n":
            raise self._expected("a text, a class, a group, a rule, `|`, or the end of the line")
        self._skip(_BLANKS_AND_LINES)

    def _alternatives(self, blanks: re.Pattern[str]) -> Node:
        sequences = [self._sequence(blanks)]
        while self._next == "|":
            self._at += 1
            self._skip(_BLANKS_AND_LINES)
            sequences.append(self._sequence(blanks))
        return sequences[0] if len(sequences) == 1 else Choice(tuple(sequences))

    def _sequence(self, blanks: re.Pattern[str]) -> Node:
        items = list[Node]()
        while True:
            begin = self._at
            if (count := self._repetition(blanks)) is not None:
                if not items:
                    raise self._error("nothing stands before a repetition", begin)
                least, most = count
                items[-1] = _EMPTY if most == 0 else Repeat(items[-1], least, most)
            elif (item := self._item()) is not None:
                items.append(item)
            else:
                return items[0] if len(items) == 1 else Concatenation(tuple(items))
            self._skip(blanks)

    def _item(self) -> Node | None:
        """Read what stands between blanks, if anything does."""
        begin, first = self._at, self._next
        if first == '"':
            self._at += 1
            return Concatenation(tuple(self._literal(begin)))
        if first == "[":
            return self._character_class()
        if first == ".":
            self._at += 1
            return Characters(others([]))
        if first == "(":
            self._at += 1
            self._skip(_BLANKS_AND_LINES)
            body = self._alternatives(_BLANKS_AND_LINES)
            self._take(")", f"`)` for the group of {self._where(begin)}")
            return body
        if first in ("<", "!"):
            raise self._error("tokens (`<...>`) are not read; write their text in quotes", begin)
        if (match := _NAME.match(self._text, self._at)) is None:
            return None
        self._at = match.end()
        self._uses.setdefault(match[0], begin)
        return Rule(match[0])

    def _repetition(self, blanks: re.Pattern[str]) -> tuple[int, int | None] | None:
        """Read how often at least and at most the last item comes, if that is said."""
        begin, first = self._at, self._next
        if first in _REPETITIONS:
            self._at += 1
            least, most = _REPETITIONS[first]
        elif first == "{":
            self._at += 1
            least = most = self._count(blanks)
            if self._next == ",":
                self._at += 1
                self._skip(blanks)
                most = None if self._next == "}" else self._count(blanks)
            self._take("}", "`}` or `,` behind a number of repetitions")
        else:
            return None
        if most is not None and most < least:
            raise self._error(f"at least {least} and at most {most} repetitions are none", begin)
        return least, most

    def _count(self, blanks: re.Pattern[str]) -> int:
        self._skip(blanks)
        count = int(self._taken(_COUNT, "a number of repetitions, of at most 9 digits"))
        self._skip(blanks)
        return count

    def _literal(self, begin: int) -> Iterator[Characters]:
        while self._next != '"':
            place = self._at
            code = self._character(f'`"` for the text of {self._where(begin)}')
            if code in HALVES:
                raise self._error("half of a pair; write one `\\U` with 8 digits", place)
            yield Characters(((code, code),))
        self._at += 1

    def _character_class(self) -> Characters:
        begin, ranges = self._at, list[tuple[int, int]]()
        self._at += 1
        if is_negated := self._next == "^":
            self._at += 1
        closing = f"`]` for the class of {self._where(begin)}"
        while self._next != "]":
            place = self._at
            low = high = self._character(closing)
            if self._next == "-" and self._text[self._at + 1 : self._at + 2] != "]":
                self._at += 1
                high = self._character(closing)
            if high < low:
                raise self._error("the range ends before it begins", place)
            ranges.append((low, high))
        self._at += 1
        rest = others(ranges)
        ranges = rest if is_negated else others(rest)
        if not ranges:
            raise self._error("no character is in this class", begin)
        return Characters(ranges)

    def _character(self, expected: str) -> int:
        """Read a character, which may be escaped; return its code point."""
        begin, first = self._at, self._next
        if not first:
            raise self._expected(expected)
        self._at += 1
        if first != "\\":
            return ord(first)
        kind = self._next
        self._at += 1
        if kind in _ESCAPES:
            return ord(_ESCAPES[kind])
        if (size := _HEX_DIGITS.get(kind)) is None:
            raise self._error(f"the escape {first + kind!r} is unknown", begin)
        digits = self._text[self._at : self._at + size]
        if re.fullmatch(f"[0-9A-Fa-f]{{{size}}}", digits) is None:
            raise self._error(f"`\\{kind}` takes {size} hexadecimal digits", begin)
        self._at += size
        if (code := int(digits, 16)) > LAST_CHARACTER:
            raise self._error(f"the last character is U+{LAST_CHARACTER:X}", begin)
        return code

    @property
    def _next(self) -> str:
        return self._text[self._at : self._at + 1]

    def _skip(self, blanks: re.Pattern[str]) -> None:
        self._at = cast(re.Match[str], blanks.match(self._text, self._at)).end()

    def _take(self, text: str, expected: str) -> None:
        if not self._text.startswith(text, self._at):
            raise self._expected(expected)
        self._at += len(text)

    def _taken(self, pattern: re.Pattern[str], expected: str) -> str:
        if (match := pattern.match(self._text, self._at)) is None:
            raise self._expected(expected)
        self._at = match.end()
        return match[0]

    def _where(self, place: int) -> str:
        line = bisect_right(self._begins, place)
        return f"line {line}, column {place - self._begins[line - 1] + 1}"

    def _expected(self, expected: str) -> OptionError:
        got = repr(self._text[self._at : self._at + 10]) if self._next else "the end"
        return self._error(f"expected {expected}; got {got}", self._at)

    def _error(self, reason: str, place: int) -> OptionError:
        return OptionError(f"{self._where(place)}: {reason}")
