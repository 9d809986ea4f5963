"""Reads calls of functions out of an answer that comes in pieces."""

import hashlib
import json
import re
from typing import Any, Final

from pydantic_core import from_json

from monge.serve.api.tools import ToolUse, json_value

_HEAD: Final = re.compile(
    r'\{\s*"name"\s*:\s*"([\w-]+)"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
)


class CallReader:
    """Reads calls out of an answer that comes in chunks; the result does not depend on the chunks.

    A call is returned when it is complete, since until then it may turn out to be text. A call that
    a grammar forces is returned as it comes. Everything else, calls of unknown functions included,
    is text.

    Args:
        use: Which functions may be called, and how.
        name: Names the answer; ids of calls are made of it.
    """

    def __init__(self, use: ToolUse, name: str) -> None:
        hidden, self._is_forced = use.form.hidden, use.is_forced
        self._begin, self._end = (
            "" if mark in hidden else mark for mark in (use.form.begin, use.form.end)
        )
        self._lead = re.compile(rf"\s*(?:{re.escape(self._begin)})?[\s\[,;]*")
        self._names, self._name = {function.name for function in use.functions}, name
        self._left, self._sent = "", -1
        self._content, self._calls = "", list[dict[str, Any]]()
        self._step = self._text if self._begin else self._call
        self.num_calls = 0
        """Calls that have begun."""

    def read(self, text: str, finish: str | None = None) -> tuple[str, list[dict[str, Any]]]:
        """Return the text and the deltas of calls that a chunk adds.

        Args:
            text: The chunk.
            finish: With the last chunk, why the answer ends.
        """
        self._left += text
        self._content, self._calls = "", []
        while self._step(finish):
            pass
        return self._content, self._calls

    def _text(self, finish: str | None) -> bool:
        left, begin, is_last = self._left, self._begin, finish is not None
        place = left.find(begin) if begin else -1
        held = (size for size in range(len(begin) - 1, 0, -1) if left.endswith(begin[:size]))
        shown = left[: place if place >= 0 else len(left) - (0 if is_last else next(held, 0))]
        if place >= 0 or not is_last or self.num_calls:
            shown = shown.rstrip()  # space around calls is none of the text
        self._content, self._left = self._content + shown, left[len(shown) :]
        self._step = self._call if place >= 0 else self._text
        return place >= 0

    def _call(self, finish: str | None) -> bool:
        lead = self._lead.match(self._left)
        size = lead.end() if lead else 0
        rest = self._left[size:]
        if not self._read_call(rest, finish):
            self._content, self._left = self._content + self._left[:size], rest
            self._step = self._text
        return self._step != self._call

    def _read_call(self, rest: str, finish: str | None) -> bool:
        """Add the certain part of a call, if it is a call, and remove it when it is complete."""
        if not rest.startswith("{"):
            return not rest and finish is None
        head = _HEAD.match(rest)
        start, end = (head.end(), json_value(rest, head.end())[1]) if head else (0, 0)
        arguments = rest[start:] if end < 0 else rest[start:end]
        value, stop = json_value(rest, 0)
        if stop < 0:
            is_cut = finish == "length" and _is_begun(rest)
            if head and head[1] in self._names and (self._is_forced or is_cut):
                self._give(head[1], arguments)
                return True
            return finish is None
        name, values = value.get("name"), value.get("arguments", value.get("parameters", {}))
        if not (isinstance(name, str) and name in self._names and isinstance(values, dict)):
            return False
        self._give(name, arguments if head and head[1] == name else json.dumps(values))
        self._left, self._step, self._sent = rest[stop:], self._after, -1
        return True

    def _after(self, finish: str | None) -> bool:
        rest, end = self._left.lstrip(), self._end
        if rest.startswith("]"):
            self._left = rest[1:]
        elif end and rest.startswith(end):
            self._left, self._step = rest[len(end) :], self._text if self._begin else self._call
        elif not rest or (end.startswith(rest) and finish in {None, "length"}):
            return False
        else:
            self._step = self._call if rest[0] in "{,;" else self._text
        return True

    def _give(self, name: str, arguments: str) -> None:
        """Give out a call, or what is new of it."""
        if self._sent < 0:
            words = f"{self._name}/{self.num_calls}".encode()
            # Some templates take ids of nine letters and digits only.
            call = {"id": hashlib.blake2b(words, digest_size=8).hexdigest()[:9], "type": "function"}
            function = {"name": name, "arguments": arguments}
            self._calls.append({"index": self.num_calls, **call, "function": function})
            self.num_calls += 1
        elif len(arguments) > self._sent:
            function = {"arguments": arguments[self._sent :]}
            self._calls.append({"index": self.num_calls - 1, "function": function})
        self._sent = len(arguments)


def _is_begun(text: str) -> bool:
    """Return whether a text is the beginning of a JSON value."""
    try:
        from_json(text, allow_partial="trailing-strings")
    except ValueError:
        return False
    return True
