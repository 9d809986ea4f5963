"""`--trace`: a run round by round, as JSON."""

import json
from collections.abc import Sequence
from pathlib import Path

from monge.cli.completion import Completion
from monge.core.errors import OptionError


def check_trace(path: Path) -> None:
    """Refuse a file that cannot be written, before anything is decoded.

    Raises:
        OptionError: If the name does not end in `.json`, or its folder does not exist.
    """
    if path.suffix != ".json":
        raise OptionError(f"--trace {str(path)!r}: the name must end in .json")
    if not path.absolute().parent.is_dir():
        raise OptionError(
            f"--trace {str(path)!r}: there is no folder "
            f"{str(path.absolute().parent)!r}; make it first"
        )


def write_trace(path: Path, completions: Sequence[Completion]) -> None:
    """Write the file.

    Raises:
        OptionError: If it cannot be written.
    """
    document = {"completions": [completion.as_dict() for completion in completions]}
    try:
        path.write_text(json.dumps(document, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise OptionError(f"cannot write the trace to {str(path)!r}: {error}") from error
