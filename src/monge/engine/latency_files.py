"""Keeping measured latency in a folder."""

import hashlib
import json
import os
import warnings
from pathlib import Path

from monge.control.latency import Latency
from monge.core.errors import OptionError


def load_latency(path: Path, key: str) -> Latency | None:
    """Costs that were kept for these parts on this device, or `None` where there are none.

    A file that holds no costs, such as one that was cut off, is the same as none: a warning says
    so.

    Args:
        path: Folder.
        key: What they depend on, see `monge.engine.latency_measurement.latency_key`.

    Raises:
        OptionError: If the file cannot be read.
    """
    file = _file(path, key)
    if not file.exists():
        return None
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
        return Latency.from_dict(values["costs"]) if values["key"] == key else None
    except OSError as error:
        raise OptionError(
            f"cannot read costs from {str(file)!r}: {error}; delete the file to measure anew"
        ) from error
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        text = f"{str(file)!r} holds no costs ({type(error).__name__}: {error}); they are measured again"
        warnings.warn(text, RuntimeWarning, stacklevel=2)
        return None


def save_latency(latency: Latency, path: Path, key: str) -> Path:
    """Keep costs in a folder.

    The file is replaced as a whole, so a reader finds the old file or the new one.

    Raises:
        OptionError: If it cannot be written to.
    """
    file = _file(path, key)
    try:
        path.mkdir(parents=True, exist_ok=True)
        fresh = file.with_name(f"{file.name}.{os.getpid()}")
        with fresh.open("w", encoding="utf-8") as stream:
            stream.write(json.dumps({"key": key, "costs": latency.as_dict()}, indent=1) + "\n")
            stream.flush()
            os.fsync(stream.fileno())
        fresh.replace(file)
    except OSError as error:
        raise OptionError(f"cannot write costs to {str(path)!r}: {error}") from error
    return file


def _file(folder: Path, key: str) -> Path:
    return folder / f"costs-{hashlib.blake2b(key.encode(), digest_size=8).hexdigest()}.json"
