"""Keeping measured costs in a folder."""

import hashlib
import json
from pathlib import Path

from monge.control.base import CostModel
from monge.core.errors import OptionError


def load_costs(path: Path, key: str) -> CostModel | None:
    """Costs that were kept for these parts on this device, or `None` where there are none.

    Args:
        path: Folder.
        key: What they depend on, see `monge.engine.costs.costs_key`.

    Raises:
        OptionError: If the file cannot be read, or holds no costs.
    """
    file = _file(path, key)
    if not file.exists():
        return None
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
        return CostModel.from_dict(values["costs"]) if values["key"] == key else None
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise OptionError(f"cannot read costs from {str(file)!r}: {error}; delete the file to measure anew") from error


def save_costs(costs: CostModel, path: Path, key: str) -> Path:
    """Keep costs in a folder.

    Raises:
        OptionError: If it cannot be written to.
    """
    file = _file(path, key)
    try:
        path.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps({"key": key, "costs": costs.as_dict()}, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise OptionError(f"cannot write costs to {str(path)!r}: {error}") from error
    return file


def _file(folder: Path, key: str) -> Path:
    return folder / f"costs-{hashlib.blake2b(key.encode(), digest_size=8).hexdigest()}.json"
