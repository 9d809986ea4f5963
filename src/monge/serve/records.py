"""Records of requests, as the server sees them; `monge.audit.recorder.Recorder` makes them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from monge.engine.decoder import Decoder
from monge.engine.session import Request, Session


@runtime_checkable
class Certificate(Protocol):
    """The record of requests."""

    def document(self) -> dict[str, Any]:
        """The whole as JSON."""
        ...


@runtime_checkable
class Recorder(Protocol):
    """Records some of the requests that its decoder decodes."""

    decoder: Decoder

    def recorded(self, request: Request) -> Request:
        """The same request, to be recorded.

        Raises:
            OptionError: If it cannot be recorded.
        """
        ...

    def num_bytes(self, session: Session) -> int:
        """Memory that the record of a session takes so far."""
        ...

    def certificate(self, sessions: Sequence[Session]) -> Certificate:
        """The record of sessions that have ended."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """How a generation is recorded.

    Args:
        recorder: Records it; the scheduler decodes with its decoder.
        max_bytes: Most memory for the record; the generation ends when it takes more.
    """

    recorder: Recorder
    max_bytes: int

    def is_over(self, session: Session) -> bool:
        """Whether the record of this session takes more than it may."""
        return self.recorder.num_bytes(session) > self.max_bytes
