"""Configuration files: arguments of `monge.load` in TOML, as `monge tune --save` writes them."""

import json
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from monge.core.errors import OptionError, unknown_name

_TEXT: Final = (str,)
_SEVERAL: Final = (str, list)
KEYS: Final[Mapping[str, tuple[type, ...]]] = {
    "target": _TEXT,
    "draft": _SEVERAL,
    "drafter": _TEXT,
    "tree": _TEXT,
    "verifier": _TEXT,
    "controller": _SEVERAL,
    "draft_temperature": (float, int),
    "draft_top_k": (int,),
    "dtype": _TEXT,
    "device": _TEXT,
    "attention": _TEXT,
    "backend": _TEXT,
    "draft_backend": _TEXT,
    "max_batch_size": (int,),
    "cross_tokenizer": (bool,),
    "exact_numerics": (bool,),
    "chat_template": _TEXT,
}
"""Keys of a file and the types of their values; they mean what they mean for `monge.load`."""
_NAMES: Final = {str: "text", list: "a list of texts", float: "a number", int: "a whole number"}


def read_config(
    path: str | Path, more: Mapping[str, tuple[type, ...]] | None = None
) -> dict[str, Any]:
    """Arguments of `monge.load` from a file.

    Args:
        path: A TOML file with some of `KEYS`. Paths in it are relative to the working directory.
        more: Further keys, with the types of their values.

    Raises:
        OptionError: If it cannot be read, has an unknown key, or a value of another type.
    """
    try:
        found = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(f"cannot read the configuration {str(path)!r}: {error}") from error
    except tomllib.TOMLDecodeError as error:
        raise OptionError(
            f"configuration {str(path)!r} is not TOML: {error}; write lines like drafter = 'ngram'"
        ) from error
    known = {**KEYS, **(more or {})}
    for key, value in found.items():
        if key not in known:
            raise OptionError(f"configuration {str(path)!r}: {unknown_name('key', key, known)}")
        _check_type(path, key, value, known[key])
    return found


def write_config(path: Path, settings: Mapping[str, Any], notes: Sequence[str] = ()) -> None:
    """Write arguments of `monge.load` to a file.

    Args:
        path: The file.
        settings: By key; of the types in `KEYS`.
        notes: Lines of comments at the top.

    Raises:
        OptionError: If it cannot be written.
    """
    lines = [f"# {' '.join(note.split())}" for note in notes]
    # Texts, numbers, truth values and lists of texts are written the same way in JSON and TOML.
    lines += [f"{key} = {json.dumps(value, ensure_ascii=False)}" for key, value in settings.items()]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    except OSError as error:
        raise OptionError(f"cannot write the configuration {str(path)!r}: {error}") from error


def _check_type(path: str | Path, key: str, value: object, types: tuple[type, ...]) -> None:
    is_truth = isinstance(value, bool)
    fits = isinstance(value, types) and (not is_truth or bool in types)
    if fits and isinstance(value, list):
        fits = bool(value) and all(isinstance(one, str) for one in value)
    if not fits:
        expected = " or ".join(_NAMES.get(one, "true or false") for one in types)
        raise OptionError(f"configuration {str(path)!r}: {key} must be {expected}; got {value!r}")
