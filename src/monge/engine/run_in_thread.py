"""Work in a thread of its own."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import TypeVar

Result = TypeVar("Result")


def run_in_thread(work: Callable[[], Result]) -> Result:
    """What some work gives, done in a thread that ends with it.

    A thread that runs parallel operations keeps a pool of OpenMP threads for as long as it lives.
    GNU's OpenMP counts those of all pools: where they are more than the processors, threads that
    wait fall asleep at once, and every operation has to wake them. So what runs forwards before
    another thread decodes, as measuring costs before a server starts does, leaves no pool behind.

    Args:
        work: Is run in a copy of the caller's context.
    """
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="monge-thread") as pool:
        return pool.submit(copy_context().run, work).result()
