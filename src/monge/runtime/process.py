"""Threads and memory of this process.

Each thread that runs parallel operations keeps a pool of OpenMP threads. GNU's OpenMP counts the
threads of all pools. If they are more than the processors, idle threads fall asleep at once. To
wake them makes a forward of a small model take 1.5 times as long. So only one thread may have a
pool at a time.
"""

import ctypes
import gc
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from functools import cache
from pathlib import Path
from threading import Lock, RLock
from typing import Any, Final, TypeVar
from weakref import WeakSet

Result = TypeVar("Result")

_MAPS: Final = Path("/proc/self/maps")
_MEMORY: Final = Path("/proc/meminfo")
_STATUS: Final = Path("/proc/self/status")
_SOFT_PAUSE: Final = 1  # `omp_pause_soft`
_SPINS: Final = {"GOMP_SPINCOUNT": "10000"}
_SPIN_POLICIES: Final = ("OMP_WAIT_POLICY", *_SPINS)


def bound_spinning() -> None:
    """Let threads of GNU's OpenMP wait actively for about 0.2 ms, the time between two products.

    Their default is 300,000 spins, about 6 ms: on busy processors they take the time of the thread
    that they wait for, and decoding becomes ten times slower. Settings of the environment stay as
    they are. Has an effect only before torch is imported, and on processes that this process
    starts.
    """
    if not any(name in os.environ for name in _SPIN_POLICIES):
        os.environ.update(_SPINS)


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
    """End the calling thread's pool of OpenMP threads; its next parallel operation makes another.

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
    libraries = [ctypes.CDLL(name) for name in sorted(names)]
    return tuple(library for library in libraries if hasattr(library, "omp_pause_resource_all"))


def free_memory() -> int | None:
    """Return the bytes that this process can still take without paging, or `None` if that is not known."""
    free = _size_of(_MEMORY, "MemAvailable:")
    if free is None:  # not on Linux
        return None
    import resource

    # As `ulimit -v` sets it.
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    taken = _size_of(_STATUS, "VmSize:")
    if limit == resource.RLIM_INFINITY or taken is None:
        return free
    return max(0, min(free, limit - taken))


def _size_of(path: Path, name: str) -> int | None:
    """Return the number of bytes that the line `name` of a file of the system states, or `None`."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    sizes = [line.split()[1] for line in lines if line.startswith(name)]
    return 1024 * int(sizes[0]) if sizes else None


def settle_objects() -> None:
    """Leave all objects that live by now out of later collections, which with them would take as long as hundreds of rounds.

    For programs of our own, once networks are loaded: which objects last is not for a library to
    say. `gc.unfreeze` undoes it.
    """
    gc.collect()
    gc.freeze()


def trim_heap() -> None:
    """Give memory that is free back to the system, where the C library can (glibc).

    It takes milliseconds.

    Activations of long prompts leave holes of up to 32 MB in the heap, which glibc keeps otherwise.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if os.name == "posix" else None
    if trim is not None:
        trim(0)


_ROUND_LOCKS: Final = WeakSet[Any]()
_FORK: Final = Lock()  # two threads that fork at once would wait for each other's locks


def round_lock() -> Any:
    """Return a lock that is held during a round, and that a fork of the process waits for."""
    lock = RLock()
    _ROUND_LOCKS.add(lock)
    return lock


def _before_fork() -> None:
    """Finish rounds, whose threads do not exist in the child, and end the pool whose threads neither do."""
    _FORK.acquire()
    _held.extend(_ROUND_LOCKS)
    for lock in _held:
        lock.acquire()
    release_openmp_pool()


def _after_fork() -> None:
    while _held:
        _held.pop().release()
    _FORK.release()


_held: Final = list[Any]()
if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(
        before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork
    )
