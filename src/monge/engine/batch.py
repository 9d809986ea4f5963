"""Many requests over one set of components.

They join and leave between rounds, and give back their room when they finish.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence

from monge.core.errors import OptionError
from monge.engine.components import Components
from monge.engine.loop import abandon_session, close_session, run_round
from monge.engine.opening import open_sessions
from monge.engine.prefill import Prefills
from monge.engine.session import Session, catch


class Batch:
    """Requests that share rounds.

    Args:
        components: Target, drafter, verifier, controller.
        prefill_chunk: Prompt tokens that are read between two rounds, in equal shares; `None` reads
            prompts whole.
        piece_s: Seconds that this may take where others wait, by what it took before; then fewer
            tokens are read.
        isolated: Whether a request whose part of a round raises ends alone, with the error; else
            the error is raised. Draws must then be such that they can come again, as those made of
            a seed are.
    """

    def __init__(
        self,
        components: Components,
        *,
        prefill_chunk: int | None = None,
        piece_s: float | None = None,
        isolated: bool = False,
    ) -> None:
        if prefill_chunk is not None and prefill_chunk < 1:
            raise OptionError(
                "prefill_chunk must be at least 1, or None to read prompts whole; "
                f"got {prefill_chunk}"
            )
        self._components, self._prefill_chunk, self._isolated = components, prefill_chunk, isolated
        self._active: list[Session] = []
        self._prefills = Prefills(components, piece_s=piece_s)
        self.num_prompt_tokens = 0

    def __len__(self) -> int:
        return len(self._active) + (0 if self._prefill_chunk is None else len(self._prefills))

    @property
    def num_prefilling(self) -> int:
        """Requests whose prompt is being read."""
        return len(self._prefills)

    def join(self, sessions: Sequence[Session]) -> None:
        """Take in new requests."""
        if self._prefill_chunk is not None:
            for session in sessions:
                self._prefills.join(session)
        elif sessions:
            error = catch(lambda: open_sessions(sessions, self._components))
            if error is not None:
                for session in sessions:
                    abandon_session(session, self._components)
                raise error
            self._active.extend(sessions)
            self.num_prompt_tokens += sum(
                len(session.request.prompt_ids) - 1 for session in sessions
            )

    def leave(self, session: Session) -> None:
        """Drop a request between two rounds, finished or not."""
        if session in self._active:
            self._active.remove(session)
            close_session(session, self._components)
        else:
            self._prefills.leave(session)

    def step(self, *, num_waiting: int = 0) -> list[Session]:
        """Read pieces of prompts, then run one round.

        Args:
            num_waiting: Requests that wait for the place of one that ends; controllers may weigh
                it.

        Returns:
            The requests that took part in the round, and those that failed before it; finished ones
            have left.
        """
        failed = self._read() if self._prefill_chunk is not None and len(self._prefills) else []
        if self._active:
            run_round(
                self._active, self._components, num_waiting=num_waiting, isolated=self._isolated
            )
        served, self._active = (
            self._active,
            [session for session in self._active if session.finish_reason is None],
        )
        for session in served:
            if session.finish_reason is not None:
                close_session(session, self._components)
        return failed + served

    def close(self) -> None:
        """Drop all requests."""
        for session in self._active:
            close_session(session, self._components)
        self._active = []
        self._prefills.close()

    def _read(self) -> list[Session]:
        assert self._prefill_chunk is not None, "prompts are read in pieces"
        num_tokens, done = self._prefills.read(self._prefill_chunk, is_awaited=bool(self._active))
        self.num_prompt_tokens += num_tokens
        self._active.extend(session for session in done if session.error is None)
        return [session for session in done if session.error is not None]


def decode(
    sessions: Iterable[Session], components: Components, *, max_batch_size: int
) -> Iterator[Session]:
    """Decode requests, at most `max_batch_size` at a time.

    A finished one leaves the batch and the next one joins.

    Yields:
        After every round, each session that took part in it. However the iteration ends, all caches
        are given back.
    """
    if max_batch_size < 1:
        raise OptionError(f"max_batch_size must be at least 1; got {max_batch_size}")
    waiting, batch = deque(sessions), Batch(components)
    try:
        while waiting or len(batch):
            batch.join(
                [waiting.popleft() for _ in range(min(len(waiting), max_batch_size - len(batch)))]
            )
            yield from batch.step(num_waiting=len(waiting))
    finally:
        batch.close()
