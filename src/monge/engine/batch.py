"""Many requests over one set of parts: admitted as room allows, decoded together, released when they finish."""

from collections import deque
from collections.abc import Iterable, Iterator

from monge.core.errors import OptionError
from monge.engine.loop import close_session, open_sessions, run_round
from monge.engine.parts import Parts
from monge.engine.session import Session


def decode(sessions: Iterable[Session], parts: Parts, *, max_batch_size: int) -> Iterator[Session]:
    """Decode requests, at most `max_batch_size` at a time; a finished one leaves the batch and the next one joins.

    Yields:
        After every round, each session that took part in it. However the iteration ends, all caches are given back.
    """
    if max_batch_size < 1:
        raise OptionError(f"max_batch_size must be at least 1; got {max_batch_size}")
    waiting, active = deque(sessions), list[Session]()
    try:
        while waiting or active:
            joining = [waiting.popleft() for _ in range(min(len(waiting), max_batch_size - len(active)))]
            if joining:
                active.extend(joining)
                open_sessions(joining, parts)
            run_round(active, parts)
            served, active = active, [session for session in active if session.finish_reason is None]
            for session in served:
                if session.finish_reason is not None:
                    close_session(session, parts)
            yield from served
    finally:
        for session in active:
            close_session(session, parts)
