"""Read and write configuration files: options in TOML, as `monge tune --save` writes them."""

import json
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from monge.core.errors import OptionError, unknown_name
from monge.core.files import write_text
from monge.options import FORMER_KEYS, LoadOptions, Option, key_of, options_of, types_of

_NAMES: Final = {str: "text", list: "a list of texts", float: "a number", int: "a whole number"}


def read_config(path: str | Path, *groups: type) -> dict[str, Any]:
    """Return the options of a file, by key.

    Args:
        path: A TOML file. Paths in it are relative to the working directory.
        *groups: Dataclasses of options that it may have, beside those of `monge.load`.

    Raises:
        OptionError: If it cannot be read, has an unknown key, or a value of another type.
    """
    try:
        settings = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(f"cannot read the configuration {str(path)!r}: {error}") from error
    except tomllib.TOMLDecodeError as error:
        raise OptionError(
            f"configuration {str(path)!r} is not TOML: {error}; write lines like drafter = 'ngram'"
        ) from error
    options = options_of(LoadOptions, *groups)
    known = {key_of(name, option): option for name, option in options.items()}
    settings = {FORMER_KEYS.get(key, key): value for key, value in settings.items()}
    for key, value in settings.items():
        if key not in known:
            raise OptionError(f"configuration {str(path)!r}: {unknown_name('key', key, known)}")
        _check_type(path, key, value, known[key])
    return settings


def write_config(path: Path, settings: Mapping[str, Any], notes: Sequence[str] = ()) -> None:
    """Write options of `monge.load` to a file, with notes as comments at the top.

    Raises:
        OptionError: If it cannot be written.
    """
    lines = [f"# {' '.join(note.split())}" for note in notes]
    # Texts, numbers, truth values and lists of texts are written the same way in JSON and TOML.
    lines += [f"{key} = {json.dumps(value, ensure_ascii=False)}" for key, value in settings.items()]
    write_text(path, "\n".join(lines) + "\n", "the configuration")


def _check_type(path: str | Path, key: str, value: object, option: Option) -> None:
    types = types_of(option)
    fits = isinstance(value, types) and (not isinstance(value, bool) or bool in types)
    if fits and isinstance(value, list):
        fits = bool(value) and all(isinstance(entry, str) for entry in value)
    if not fits:
        expected = " or ".join(_NAMES.get(kind, "true or false") for kind in types)
        raise OptionError(f"configuration {str(path)!r}: {key} must be {expected}; got {value!r}")
