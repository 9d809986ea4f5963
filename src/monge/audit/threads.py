"""Work of an audit that would block its event loop."""

import asyncio
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


async def one_at_a_time(
    lock: asyncio.Lock, function: Callable[P, T], /, *arguments: P.args, **options: P.kwargs
) -> T:
    """Run a function in a thread, while no other caller with this lock runs one.

    A thread cannot be cancelled. A cancelled caller keeps the lock until its function returns, so
    that no other one runs beside it.
    """
    async with lock:
        work = asyncio.ensure_future(asyncio.to_thread(function, *arguments, **options))
        try:
            return await asyncio.shield(work)
        finally:
            await asyncio.wait([work])
