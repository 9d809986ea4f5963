"""`--trace`: a run round by round, as JSON or as a plot."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from monge.cli.completion import Completion
from monge.cli.out import plotting
from monge.core.errors import OptionError

Writer = Callable[[Path, Sequence[dict[str, Any]]], object]
_KINDS: Final = (".json", ".png")


def check_trace(path: Path) -> Writer:
    """What writes a file of this name; asked for before anything is decoded.

    Raises:
        OptionError: If the name says neither JSON nor a plot, its folder is not there, or plots cannot be drawn.
    """
    if path.suffix not in _KINDS:
        raise OptionError(f"--trace {str(path)!r}: the name must end in {' or '.join(_KINDS)}")
    if not path.absolute().parent.is_dir():
        raise OptionError(f"--trace {str(path)!r}: there is no folder {str(path.absolute().parent)!r}; make it first")
    if path.suffix == ".json":
        return _write_json
    draw = plotting("monge.bench.trace_plot", "name a .json file").write_trace_plot
    return lambda path, requests: draw(requests, path)


def write_trace(path: Path, writer: Writer, completions: Sequence[Completion]) -> None:
    """Write the file.

    Raises:
        OptionError: If it cannot be written.
    """
    try:
        writer(path, [completion.as_dict() for completion in completions])
    except OSError as error:
        raise OptionError(f"cannot write the trace to {str(path)!r}: {error}") from error


def _write_json(path: Path, requests: Sequence[dict[str, Any]]) -> None:
    path.write_text(json.dumps({"completions": list(requests)}, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
