"""An engine in a process of its own, spoken to in JSON lines."""

import json
import os
import select
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, Final

import monge
from monge.core.errors import BackendError

WORKER: Final = Path(__file__).with_name("workers") / "worker.py"
_CHUNK: Final = 65536


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """The answer of an engine.

    Args:
        token_ids: New tokens.
        seconds: Wall seconds of the call, inside the engine's process.
    """

    token_ids: tuple[int, ...]
    seconds: float


class PeerProcess:
    """A running worker; a context manager, at whose end the process is gone.

    Args:
        python: Interpreter of its environment.
        engine: Name of the engine.
        timeout_s: Longest wait for an answer.

    Attributes:
        start_s: Seconds from the start of the process until its engine was loaded.
    """

    start_s = 0.0

    def __init__(self, python: Path, engine: str, *, timeout_s: float | int = 600) -> None:
        # Ours runs from where this one does; other engines see their own packages only.
        source = {"PYTHONPATH": str(Path(monge.__file__).parents[1])} if engine == "monge" else {}
        inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        self._errors = TemporaryFile()  # noqa: SIM115 (closed with the process)
        self._timeout_s, self._engine = timeout_s, engine
        self._buffer, self._started = b"", time.monotonic()
        self._process = subprocess.Popen(
            [str(python), str(WORKER), engine],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=inherited | source,
        )

    def __enter__(self) -> "PeerProcess":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def open(self, **request: Any) -> str:
        """Load an engine; its version. The keywords are those of the worker."""
        version = str(self._ask({"op": "open", **request})["version"])
        self.start_s = time.monotonic() - self._started
        return version

    def peak_bytes(self) -> int:
        """The most memory that the process had at once."""
        return int(self._ask({"op": "memory"})["peak_bytes"])

    def nats(self, token_ids: Sequence[int]) -> float:
        """Negative log-probability of the tokens after the second."""
        return float(self._ask({"op": "score", "token_ids": list(token_ids)})["nats"])

    def generate(
        self, prompt_ids: Sequence[int], *, max_new_tokens: int, temperature: float | int, seed: int
    ) -> Completion:
        """Decode one prompt.

        Raises:
            BackendError: If the engine fails, dies, does not answer, or gives another number of
                tokens.
        """
        rules = {"max_new_tokens": max_new_tokens, "temperature": float(temperature), "seed": seed}
        answer = self._ask({"op": "generate", "prompt_ids": list(prompt_ids), **rules})
        token_ids = tuple(answer["token_ids"])
        if len(token_ids) != max_new_tokens:
            raise BackendError(
                f"{self._engine} gave {len(token_ids)} tokens where {max_new_tokens} were asked for"
            )
        return Completion(token_ids=token_ids, seconds=float(answer["seconds"]))

    def stop(self) -> None:
        """End the process."""
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(10)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._errors):
            if stream is not None:
                stream.close()

    def _ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise BackendError(self._last_words("has ended")) from error
        answer = json.loads(self._line())
        if "error" in answer:
            raise BackendError(f"{self._engine}: {answer['error']}"[:500])
        return answer

    def _line(self) -> bytes:
        assert self._process.stdout is not None
        stream, end = self._process.stdout.fileno(), time.monotonic() + self._timeout_s
        while b"\n" not in self._buffer:
            ready, _, _ = select.select([stream], [], [], max(0.0, end - time.monotonic()))
            if not ready:
                raise BackendError(f"{self._engine} did not answer within {self._timeout_s:g} s")
            chunk = os.read(stream, _CHUNK)
            if not chunk:
                raise BackendError(self._last_words("has ended"))
            self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line

    def _last_words(self, what: str) -> str:
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        return f"{self._engine} {what}: {lines[-1][:300] if lines else 'it said nothing'}"
