"""Text files that commands write."""

from pathlib import Path

from monge.core.errors import OptionError


def write_text(path: Path, text: str, what: str) -> Path:
    """Write a UTF-8 file, with the folders above it, and return its path.

    Args:
        path: The file; an existing file is replaced.
        text: Its contents.
        what: Its name in the error: "the page".

    Raises:
        OptionError: If it cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise OptionError(f"cannot write {what} to {str(path)!r}: {error}") from error
    return path
