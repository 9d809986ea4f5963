"""`--out`: refused before the work is done whose results could not be kept."""

import os
from pathlib import Path

from monge.core.errors import OptionError


def check_out_folder(folder: Path) -> None:
    """Refuse a folder that cannot be made or written to; nothing is made yet.

    Raises:
        OptionError: If it, or the nearest folder above it that is there, is a file, or may not be written to.
    """
    path = folder.absolute()
    nearest = next(one for one in (path, *path.parents) if one.exists())
    if not nearest.is_dir():
        raise OptionError(f"--out {str(folder)!r}: cannot write results: {str(nearest)!r} is a file; name a folder")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise OptionError(f"--out {str(folder)!r}: cannot write results: no permission to write to {str(nearest)!r}")


def check_out_file(file: Path) -> None:
    """Refuse a file that cannot be written; nothing is made yet.

    Raises:
        OptionError: If it is a folder, or as `check_out_folder` for the folder that it is in.
    """
    if file.is_dir():
        raise OptionError(f"--out {str(file)!r} is a folder; name a file in it, such as {str(file / 'run.mlog')!r}")
    check_out_folder(file.parent)
