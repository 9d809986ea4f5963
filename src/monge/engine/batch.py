"""Many requests over one set of components: they join and leave between rounds."""

import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

from monge.core.errors import NonFiniteLogitsError, OptionError
from monge.engine.components import Components
from monge.engine.loop import close_session, run_round
from monge.engine.opening import Prefill
from monge.engine.session import Session, catch
from monge.networks.prefix_cache import PrefixCache, PrefixModel


class Batch:
    """Requests that share rounds.

    An error of a request's own code (its logits processors, its stop check) fails that request. Any
    other error fails all requests that were being served, and their caches are given back. A prefix
    cache keeps only texts of requests that had a round without an error.

    Args:
        components: Target, drafter, verifier, controllers.
        prefill_chunk: Prompt tokens that are read between two rounds, in equal shares; `None` reads
            prompts whole.
        chunk_s: Seconds that this may take where others wait; see `Prefill`.
        isolated: Whether failed requests end with `Session.error`. Otherwise the error is raised,
            except for logits that are not finite.
        prefixes: Keeps the texts of the networks for which it can, and their beginnings are not
            read again; `None` reads every prompt.

    Raises:
        OptionError: If `prefill_chunk` is below 1.
    """

    def __init__(
        self,
        components: Components,
        *,
        prefill_chunk: int | None = None,
        chunk_s: float | None = None,
        isolated: bool = False,
        prefixes: PrefixCache | None = None,
    ) -> None:
        if prefill_chunk is not None and prefill_chunk < 1:
            raise OptionError(
                "prefill_chunk must be at least 1, or None to read prompts whole; "
                f"got {prefill_chunk}"
            )
        self._components, self._prefill_chunk, self._isolated = components, prefill_chunk, isolated
        self._active: list[Session] = []
        self._prefixes, self._is_between_rounds = prefixes, True
        self._networks = _prefix_models(components)
        shared = prefixes if components.target in self._networks else None
        self._prefill = Prefill(components, chunk_s=chunk_s, prefixes=shared)

    def __len__(self) -> int:
        return len(self._active) + len(self._prefill)

    @property
    def num_prefilling(self) -> int:
        """Requests whose prompt is being read."""
        return len(self._prefill)

    @property
    def num_prompt_tokens(self) -> int:
        """Prompt tokens read so far."""
        return self._prefill.num_tokens

    def join(self, sessions: Sequence[Session]) -> None:
        """Take in new requests."""
        for session in sessions:
            self._prefill.join(session)
            if self._prefixes is not None:
                self._prefixes.salts[session.request_id] = session.request.cache_salt

    def leave(self, session: Session) -> None:
        """Drop a request between two rounds, finished or not."""
        self._prefill.leave(session)
        if session in self._active:
            self._active.remove(session)
        if session.error is None and session.num_rounds:
            self._keep(session, session.context.token_ids)
        if self._prefixes is not None:
            self._prefixes.salts.pop(session.request_id, None)
        close_session(session, self._components)

    def step(self, *, num_waiting: int = 0) -> list[Session]:
        """Read prompts, then run one round.

        Args:
            num_waiting: Requests that wait for a place in the batch; controllers may weigh it.

        Returns:
            The requests that took part in the round, and those that failed before it. Finished
            requests have left the batch.
        """
        # Networks may serve several batches, in turns.
        for model in self._networks:
            if model.prefixes is not self._prefixes:
                model.prefixes = self._prefixes
        reading, self._is_between_rounds = self._prefill.sessions, False
        if reading:
            self._guard(reading, self._read)
        served = [*self._active, *(session for session in reading if session.error is not None)]
        if self._active:
            active, components = self._active, self._components
            self._guard(active, lambda: run_round(active, components, num_waiting=num_waiting))
        self._is_between_rounds = True
        for session in served:
            if session.finish_reason is not None:
                self.leave(session)
            elif session.num_rounds == 1:
                self._keep(session, session.request.prompt_ids)
        return served

    def close(self) -> None:
        """Drop all requests."""
        for session in [*self._active, *self._prefill.sessions]:
            self.leave(session)

    def _read(self) -> None:
        is_awaited = bool(self._active)
        self._active.extend(self._prefill.read(self._prefill_chunk, is_awaited=is_awaited))

    def _keep(self, session: Session, token_ids: Sequence[int]) -> None:
        """Keep a text, unless a round was interrupted: what the caches hold is then unknown."""
        prefixes = self._prefixes
        if prefixes is None or not self._is_between_rounds:
            return

        def keep(model: PrefixModel) -> None:
            new = prefixes.keep(model, session.request_id, token_ids)
            if model is self._components.target:
                num_prompt = session.context.num_prompt_tokens
                session.num_written += sum(place < num_prompt for place in new)

        for model in self._networks:
            if (
                error := catch(partial(keep, model))
            ) is not None:  # there may be no memory for a copy
                prefixes.clear()
                warnings.warn(
                    f"request {session.request_id}: its text could not be kept for later ones "
                    f"({type(error).__name__}: {error}); the prefix cache was emptied",
                    stacklevel=2,
                )

    def _guard(self, sessions: Sequence[Session], work: Callable[[], None]) -> None:
        """Do some work for requests; an error that it raises fails all of them."""
        if (error := catch(work)) is not None:
            for session in sessions:
                session.fail(error)
        errors = [session.error for session in sessions if session.error is not None]
        raised = [error for error in errors if not isinstance(error, NonFiniteLogitsError)]
        if raised and not self._isolated:
            raise raised[0]


def _prefix_models(components: Components) -> list[PrefixModel]:
    """Return the networks whose texts can be kept."""
    target = components.target
    models = (target, *components.draft_models)
    inner = (getattr(model, "resized", model) for model in models)
    return [model for model in inner if isinstance(model, PrefixModel)]


def decode(
    sessions: Iterable[Session],
    components: Components,
    *,
    max_batch_size: int,
    **options: Any,
) -> Iterator[Session]:
    """Decode requests, at most `max_batch_size` at a time, in a `Batch` with these options.

    When a request finishes, it leaves the batch and the next request joins.

    Yields:
        After every round, each session that took part in it. All caches are released, however the
        iteration ends.

    Raises:
        OptionError: If `max_batch_size` is below 1.
    """
    if max_batch_size < 1:
        raise OptionError(f"max_batch_size must be at least 1; got {max_batch_size}")
    waiting, batch = deque(sessions), Batch(components, **options)
    try:
        while waiting or len(batch):
            batch.join(
                [waiting.popleft() for _ in range(min(len(waiting), max_batch_size - len(batch)))]
            )
            with components.lock:
                served = batch.step(num_waiting=len(waiting))
            yield from served
    finally:
        with components.lock:
            batch.close()
