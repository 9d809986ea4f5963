"""The texts of an audit on disk."""

import json
from pathlib import Path
from typing import Any, Final

from monge.audit.client import Completion
from monge.core.errors import OptionError

_KEPT: Final = ("text", "finish", "tokens", "logprobs")
"""Fields of a completion that are kept."""


class TextLog:
    """The texts of an audit as JSON lines, so that it can be continued and judged again.

    A file with another header belongs to another audit and is an `OptionError`; `None` keeps
    nothing.
    """

    def __init__(self, path: Path | None, header: dict[str, Any]) -> None:
        self._found: dict[tuple[str, int], Completion] = {}
        self._file = None
        if path is None:
            return
        content = path.read_text() if path.exists() else ""
        if content:
            self._read(path, content.splitlines(), header)
        self._file = path.open("a")
        if not content:
            self._write(header)
        elif not content.endswith("\n"):
            self._file.write("\n")  # ends the line that was cut off

    def find(self, situation: str, index: int) -> Completion | None:
        """Return a completion of an earlier run."""
        return self._found.get((situation, index))

    def keep(self, situation: str, index: int, completion: Completion) -> None:
        """Write a completion."""
        fields = {name: getattr(completion, name) for name in _KEPT}
        self._write({"situation": situation, "index": index} | fields)

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()

    def _write(self, line: dict[str, Any]) -> None:
        if self._file is not None:
            self._file.write(json.dumps(line) + "\n")
            self._file.flush()

    def _read(self, path: Path, lines: list[str], header: dict[str, Any]) -> None:
        try:
            # The last line may be cut off.
            first, *entries = [json.loads(line) for line in lines if line.endswith("}")]
            for entry in entries:
                tokens = entry["tokens"]
                self._found[entry["situation"], entry["index"]] = Completion(
                    text=entry["text"],
                    finish=entry["finish"],
                    tokens=None if tokens is None else tuple(tokens),
                    logprobs=tuple(entry["logprobs"]),
                )
        except (KeyError, TypeError, ValueError) as error:
            raise OptionError(f"{path} holds no texts of an audit; name another file") from error
        if first != header:
            raise OptionError(
                f"{path} holds the texts of another audit ({first}); name another file"
            )
