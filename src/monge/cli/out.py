"""`--out`: refused before any work if results cannot be kept there; and how results are written."""

import json
import os
from importlib import import_module
from pathlib import Path
from typing import Any

from monge.core.errors import OptionError
from monge.core.extras import require


def check_out_folder(folder: Path, option: str = "--out") -> None:
    """Refuse a folder that cannot be made or written to; nothing is made yet.

    Raises:
        OptionError: If it, or the nearest folder above it that is there, is a file, or may not be
            written to.
    """
    path = folder.absolute()
    nearest = next(one for one in (path, *path.parents) if one.exists())
    if not nearest.is_dir():
        raise OptionError(
            f"{option} {str(folder)!r}: cannot write results: {str(nearest)!r} is a "
            "file; name a folder"
        )
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise OptionError(
            f"{option} {str(folder)!r}: cannot write results: no permission to write "
            f"to {str(nearest)!r}"
        )


def check_out_file(file: Path, option: str = "--out", example: str = "run.mlog") -> None:
    """Refuse a file that cannot be written; nothing is made yet.

    Raises:
        OptionError: If it is a folder, or as `check_out_folder` for the folder that it is in.
    """
    if file.is_dir():
        raise OptionError(
            f"{option} {str(file)!r} is a folder; name a file in it, such as "
            f"{str(file / example)!r}"
        )
    check_out_folder(file.parent, option)


def write_document(document: dict[str, Any], folder: Path, name: str) -> Path:
    """Write a document as JSON.

    Raises:
        OptionError: If the folder cannot be written to.
    """
    path = folder / name
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise OptionError(f"cannot write results to {str(folder)!r}: {error}") from error
    return path


def plotting(module: str, otherwise: str) -> Any:  # noqa: ANN401 (matplotlib is optional)
    """Import a module that draws, before anything is measured.

    Raises:
        OptionError: If matplotlib is missing.
    """
    require("lab", "a plot", otherwise=otherwise)
    return import_module(module)
