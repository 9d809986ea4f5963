"""Work in another thread at the full speed of OpenMP.

Each thread that runs parallel operations keeps a pool of OpenMP threads. GNU's OpenMP counts the
threads of all pools. Where they are more than the processors, idle ones fall asleep at once, and
waking them makes a forward of a small model take 1.5 times as long. So only one thread may have a
pool at a time.
"""

import ctypes
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from functools import cache
from pathlib import Path
from typing import Any, Final, TypeVar

Result = TypeVar("Result")

_MAPS: Final = Path("/proc/self/maps")
_SOFT_PAUSE: Final = 1  # `omp_pause_soft`


def run_in_thread(work: Callable[[], Result]) -> Result:
    """Return what some work gives, done in a thread that ends with it.

    Neither the thread nor the caller has a pool of OpenMP threads afterwards.

    Args:
        work: Is run in a copy of the caller's context.
    """
    release_openmp_pool()
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="monge-thread") as pool:
        return pool.submit(copy_context().run, work).result()


def release_openmp_pool() -> None:
    """End the calling thread's pool of OpenMP threads; its next parallel operation makes a new one.

    Does nothing where no GNU OpenMP is loaded.

    Reference:
        `omp_pause_resource_all`, OpenMP 5.0, section 3.2.44.
    """
    for runtime in _runtimes():
        runtime.omp_pause_resource_all(_SOFT_PAUSE)


@cache
def _runtimes() -> tuple[Any, ...]:
    """The loaded libraries of GNU's OpenMP that can release their threads."""
    try:
        maps = _MAPS.read_text(encoding="utf-8")
    except OSError:  # not on Linux
        return ()
    names = {line.split()[-1] for line in maps.splitlines() if "libgomp" in line}
    found = [ctypes.CDLL(name) for name in sorted(names)]
    return tuple(one for one in found if hasattr(one, "omp_pause_resource_all"))
