"""`python -m lab.memory`: what a decoder holds, and whether it grows, over thousands of rounds in every backend.

Every backend decodes in a process of its own, so that none is charged for what another left behind.
"""

import json
import multiprocessing
import os
import sys
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

import torch

from monge.api import load
from monge.backends.registry import BACKENDS
from monge.bench.provenance import provenance
from monge.core.errors import BackendError, MongeError, OptionError

MIB: Final = 2**20
_TEXTS: Final = 8  # prompts that take turns, of other lengths each
_STATM: Final = Path("/proc/self/statm")


@dataclass(frozen=True, slots=True, kw_only=True)
class MemorySettings:
    """Settings of a run.

    Args:
        backends: Names of backends, with settings.
        rounds: Rounds that each decodes.
        samples: How often memory is looked at, at even distances.
        max_new_tokens: Length of a text; with `prompt_tokens` less than the networks read.
        prompt_tokens: Tokens of the longest prompt.
        tree: Shape of the drafts.
        temperature: 0 is greedy.
        threads: Threads of torch; `None` leaves them as they are.
        options: Further options of `monge.load`: target, draft, dtype.
    """

    backends: tuple[str, ...] = ("eager", "compiled")
    rounds: int = 10_000
    samples: int = 20
    max_new_tokens: int = 256
    prompt_tokens: int = 64
    tree: str = "chain(3)"
    temperature: float | int = 1.0
    threads: int | None = None
    options: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        for name, least in (
            ("rounds", 2),
            ("samples", 2),
            ("max_new_tokens", 1),
            ("prompt_tokens", _TEXTS),
        ):
            if getattr(self, name) < least:
                raise OptionError(
                    f"memory: {name} must be at least {least}; got {getattr(self, name)}"
                )
        if self.threads is not None and self.threads < 1:
            raise OptionError(f"memory: threads must be at least 1; got {self.threads}")
        if self.rounds < self.samples:
            raise OptionError(
                f"memory: {self.samples} looks at memory need as many rounds; got {self.rounds}"
            )
        for name in self.backends:
            BACKENDS.parse(name)  # an unknown name or setting is an error that lists the known ones


def measure(
    settings: MemorySettings, notify: Callable[[str], None] = lambda _: None
) -> dict[str, Any]:
    """Decode in every backend: provenance, settings, one record a backend, and who cannot run and why.

    Raises:
        BackendError: If the system does not say what a process holds, or none of the backends runs.
    """
    if not _STATM.exists():
        raise BackendError(
            f"memory: this system ({sys.platform}) does not say what a process "
            f"holds: there is no {_STATM}"
        )
    records: list[dict[str, Any]] = []
    missing: dict[str, str] = {}
    for name in settings.backends:
        notify(f"{name}: {settings.rounds} rounds")
        samples, reason = _apart(settings, name, notify)
        if reason is not None:
            missing[name] = reason
        else:
            records.append({"backend": name, "samples": samples, **summary(samples)})
    if not records:
        raise BackendError("; ".join(f"{name}: {reason}" for name, reason in missing.items()))
    return {
        "provenance": provenance(torch.device("cpu")),
        "settings": asdict(settings),
        "backends": records,
        "missing": missing,
    }


def summary(samples: list[dict[str, int]]) -> dict[str, int]:
    """Figures of one backend, in bytes.

    Memory is taken from the system as the longest text needs it, so growth is that from the middle
    of the run to its end.

    Args:
        samples: By round: `round`, `resident` and `peak`; the first is before any round.

    Returns:
        `loaded` before the first round, `middle`, `end`, `growth` as the difference of the last
        two, and `peak`.
    """
    middle, end = samples[len(samples) // 2], samples[-1]
    return {
        "loaded": samples[0]["resident"],
        "middle": middle["resident"],
        "end": end["resident"],
        "growth": end["resident"] - middle["resident"],
        "peak": end["peak"],
    }


def _apart(
    settings: MemorySettings, backend: str, notify: Callable[[str], None]
) -> tuple[list[dict[str, int]], str | None]:
    """Samples of one backend, or why there are none."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_decode, args=(settings, backend, sender), daemon=True)
    process.start()
    sender.close()
    samples: list[dict[str, int]] = []
    try:
        while (told := json.loads(receiver.recv_bytes()))["kind"] == "sample":
            samples.append({name: told[name] for name in ("round", "resident", "peak")})
            notify(f"{backend}: {told['round']} rounds, {told['resident'] / MIB:.0f} MiB")
    except EOFError:
        process.join()
        told = {"kind": "failed", "reason": f"its process ended with status {process.exitcode}"}
    finally:
        process.join(timeout=30)
        process.kill()
    return samples, told.get("reason")


def _decode(settings: MemorySettings, backend: str, sender: Connection) -> None:
    """Decode one request after another, in a process of its own; tell what it holds."""
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    try:
        with warnings.catch_warnings():
            # What runs eagerly after all would be measured under its name.
            warnings.simplefilter("error", UserWarning)
            decoder = load(backend=backend, tree=settings.tree, **dict[str, Any](settings.options))
        numbers = range(3, 3 + settings.prompt_tokens)
        length, number, count, following = settings.prompt_tokens // _TEXTS, 0, 0, 0
        while True:
            if count >= following:
                _tell(sender, {"kind": "sample", "round": count} | _held())
                following += max(1, settings.rounds // settings.samples)
            if count >= settings.rounds:
                break
            prompt = tuple(numbers[: length * (1 + number % _TEXTS)])
            (result,) = decoder.generate(
                [prompt],
                max_new_tokens=settings.max_new_tokens,
                temperature=settings.temperature,
                seed=number,
                ignore_eos=True,
            )
            number, count = number + 1, count + result.stats.num_rounds
        _tell(sender, {"kind": "done"})
    except (MongeError, UserWarning) as error:
        _tell(sender, {"kind": "failed", "reason": str(error)})


def _tell(sender: Connection, message: dict[str, Any]) -> None:
    sender.send_bytes(json.dumps(message).encode())


def _held() -> dict[str, int]:
    """Bytes of this process that lie in memory, and the most that ever did."""
    import resource  # not on every system; who has no `_STATM` never comes here

    resident = int(_STATM.read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")
    # In kibibytes, and counted a little later.
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"resident": resident, "peak": max(resident, peak)}
