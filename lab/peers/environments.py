"""Environments of peers: engines pin versions that exclude each other, so each has its own."""

import os
import subprocess
import sys
import venv
from collections.abc import Callable
from pathlib import Path
from typing import Final

from lab.peers.engines import Peer
from monge.core.errors import BackendError

_READY: Final = "monge-peer.txt"  # what was installed, written last


def python_of(peer: Peer, work: Path) -> Path:
    """The interpreter of a peer's environment.

    Raises:
        BackendError: If there is no finished environment; the message says how to make it.
    """
    if not peer.packages:
        return Path(sys.executable)
    folder = environment(peer, work)
    ready = folder / _READY
    if not ready.is_file() or ready.read_text(encoding="utf-8") != _contents(peer):
        raise BackendError(f"{peer.name} is not installed in {str(folder)!r}; run with --install")
    return folder / "bin" / "python"


def environment(peer: Peer, work: Path) -> Path:
    """Folder of a peer's environment."""
    return work / "environments" / peer.name


def install(peer: Peer, work: Path, notify: Callable[[str], None]) -> None:
    """Make a peer's environment, unless it is there.

    Args:
        peer: The peer.
        work: Where environments and converted models are kept.
        notify: Told what takes long.

    Raises:
        BackendError: If it cannot be installed; the message holds the installer's last words.
    """
    try:
        python_of(peer, work)
    except BackendError:
        notify(
            f"installing {', '.join(peer.packages)} in an environment of its own; it can take "
            "minutes"
        )
        folder = environment(peer, work)
        try:
            venv.create(folder, clear=True, with_pip=True)
        except (OSError, subprocess.CalledProcessError) as error:
            raise BackendError(f"{peer.name} cannot be installed: {error}") from error
        # Published wheels have the instructions of old processors.
        source = () if peer.built is None else ("--no-binary", peer.built)
        _pip(peer, folder, "install", *source, *peer.packages)
        if peer.removed:
            _pip(peer, folder, "uninstall", "--yes", *peer.removed)
        if peer.stub is not None:
            _stub(folder, *peer.stub)
        (folder / _READY).write_text(_contents(peer), encoding="utf-8")


def _pip(peer: Peer, folder: Path, *arguments: str) -> None:
    command = [
        str(folder / "bin" / "python"),
        "-m",
        "pip",
        "--disable-pip-version-check",
        "--quiet",
        *arguments,
    ]
    env = {**os.environ, **peer.variables}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    if done.returncode != 0:
        words = (done.stderr.strip() or done.stdout.strip() or "no message").splitlines()
        raise BackendError(f"{peer.name} cannot be installed: {words[-1][:300]}")


def _stub(folder: Path, name: str, version: str) -> None:
    """A distribution that has a name and a version and nothing else."""
    (packages,) = (folder / "lib").glob("python*/site-packages")
    info = packages / f"{name}-{version}.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n", encoding="utf-8"
    )


def _contents(peer: Peer) -> str:
    return (
        "\n".join(
            (
                *peer.packages,
                *(f"without {name}" for name in peer.removed),
                *(peer.stub or ()),
                *(f"{name}={value}" for name, value in peer.variables.items()),
            )
        )
        + "\n"
    )
