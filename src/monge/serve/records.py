"""Records of requests; `monge.audit.recorder.Recorder` makes them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from monge.engine.decoder import Decoder
from monge.engine.session import Request, Session


@runtime_checkable
class Recorder(Protocol):
    """Records some of the requests that its decoder decodes."""

    decoder: Decoder

    def recorded(self, request: Request) -> Request:
        """Return the same request, to be recorded.

        Raises:
            OptionError: If it cannot be recorded.
        """
        ...

    def num_bytes(self, session: Session) -> int:
        """Return the memory that the record of a session takes so far."""
        ...

    def certificate(self, sessions: Sequence[Session]) -> Any:  # noqa: ANN401 (a record of `monge.audit`)
        """Return the record of sessions that have ended; its `document()` is JSON."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """A recorder and its limit for one generation.

    Args:
        recorder: Records it; the scheduler decodes with its decoder.
        max_bytes: Most memory for the record; the generation ends when it takes more.
    """

    recorder: Recorder
    max_bytes: int

    def is_over(self, session: Session) -> bool:
        """Return whether the record of this session takes more than it may."""
        return self.recorder.num_bytes(session) > self.max_bytes
