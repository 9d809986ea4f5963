"""The provenance of a result: enough to run it again, and to distrust it."""

import os
import platform
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from monge.core.extras import installed_version


def provenance(device: torch.device) -> dict[str, Any]:
    """Return arguments, commit, versions, machine and load, as plain values."""
    return {
        "argv": sys.argv,
        "time_utc": datetime.now(UTC).isoformat(timespec="seconds"),
        **commit_of(Path(__file__).parent),
        "versions": versions("monge", "torch", "transformers", "tokenizers", "numpy"),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "device": device_name(device),
        "num_threads": torch.get_num_threads(),
        "num_cpus": os.cpu_count(),
        "load_average": list(os.getloadavg()) if hasattr(os, "getloadavg") else None,
    }


def busy_note() -> str | None:
    """Return a warning where other processes want the processors too, or `None`."""
    load, count = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0, os.cpu_count() or 1
    if load <= count + 1:  # this process is one of those that run
        return None
    return f"the machine is busy (load {load:.1f} on {count} processors): trust no ratio whose range is wide"


def commit_of(folder: Path) -> dict[str, Any]:
    """Return the commit of the checkout of `folder`, and if tracked files differ; `None` outside a checkout."""
    try:
        commit = _git(folder, "rev-parse", "HEAD")
        status = _git(folder, "status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.CalledProcessError, subprocess.TimeoutExpired):
        return {"commit": None, "dirty": None}
    return {"commit": commit.strip(), "dirty": bool(status.strip())}


def versions(*names: str) -> dict[str, str | None]:
    """Return installed versions; `None` for what is not installed."""
    installed = {name: installed_version(name) for name in names}
    # The metadata of torch may lack the label of its build: `+cpu`, `+cu130`.
    return installed | ({"torch": str(torch.__version__)} if "torch" in names else {})


def device_name(device: torch.device) -> str:
    """Return the device in words."""
    if device.type == "cuda":
        return f"{device} ({torch.cuda.get_device_name(device)})"
    return f"{device} ({platform.processor() or platform.machine()})"


def _git(folder: Path, *arguments: str) -> str:
    command = ["git", "-C", str(folder), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout
