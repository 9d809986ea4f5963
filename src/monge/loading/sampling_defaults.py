"""What a checkpoint says of sampling: its `generation_config.json`, or the header of a GGUF file."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from monge.core.errors import OptionError
from monge.loading.sources import ModelSource
from monge.options import SamplingOptions, options_of

_OF_HEADER: Final = {
    "general.sampling.temp": "temperature",
    "general.sampling.top_k": "top_k",
    "general.sampling.top_p": "top_p",
    "general.sampling.min_p": "min_p",
    "general.sampling.penalty_repeat": "repetition_penalty",
}
_KEYS: Final = (*_OF_HEADER.values(), "max_new_tokens")
_FILE: Final = "generation_config.json"
_DIGITS: Final = 6
"""Of a header's numbers, which are float32: 0.95 is 0.949999988 there."""


def sampling_defaults(target: str | Path | None) -> dict[str, Any]:
    """Return the sampling options that a checkpoint recommends; without any, an empty dictionary.

    `do_sample: false` means temperature 0.

    Args:
        target: The target, as for `ModelSource.of`; `None` recommends nothing.

    Raises:
        OptionError: If a value lies outside its bounds.
    """
    if target is None:
        return {}
    source = ModelSource.of(target)
    path = Path(source.path)
    if source.is_gguf:
        if not path.is_file():
            return {}  # loading says so
        from monge.loading.gguf_header import Header

        fields = Header(path).fields
        found = {name: fields[key] for key, name in _OF_HEADER.items() if key in fields}
        found = {
            name: round(value, _DIGITS) if isinstance(value, float) else value
            for name, value in found.items()
        }
        return checked_defaults(found, path.name)
    from transformers.utils.hub import cached_file

    try:
        file = cached_file(str(source.path), _FILE, _raise_exceptions_for_missing_entries=False)
        stated = {} if file is None else json.loads(Path(file).read_text(encoding="utf-8"))
    except (OSError, ValueError):  # loading says what is wrong with the checkpoint
        return {}
    if stated.get("do_sample") is False:
        stated = stated | {"temperature": 0.0}
    return checked_defaults({name: stated.get(name) for name in _KEYS}, _FILE)


def checked_defaults(stated: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return defaults of sampling without those that ask for nothing.

    Raises:
        OptionError: If a name is unknown, or a value lies outside the bounds of a request.
    """
    known, kept = options_of(SamplingOptions), dict[str, Any]()
    for name, value in stated.items():
        if name not in _KEYS:
            raise OptionError(f"{where}: no default {name!r}; there are: {', '.join(_KEYS)}")
        if value is None or (name == "top_k" and value in {0, -1}):
            continue
        is_whole = name in {"top_k", "max_new_tokens"}
        bounds = {"ge": 1} if is_whole else known[name].bounds or {}
        is_number = isinstance(value, int if is_whole else (int, float))
        fits = is_number and not isinstance(value, bool)
        fits = fits and bounds.get("ge", value) <= value <= bounds.get("le", value)
        if not fits or ("gt" in bounds and value <= bounds["gt"]):
            text = ", ".join(f"{bound} {number:g}" for bound, number in bounds.items())
            raise OptionError(
                f"{where}: {name} must be a number with {text}; got {value!r}; "
                "--generation-config none ignores a checkpoint's"
            )
        kept[name] = value
    return kept
