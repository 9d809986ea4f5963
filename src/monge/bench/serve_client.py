"""One streamed completion over a socket, with the time of every chunk.

Nothing between the clock and the bytes.
"""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """What came back.

    Args:
        chunk_s: Seconds from sending to every chunk with text, in order.
        total_s: Seconds to the end.
        num_tokens: Generated tokens, as the server counts them.
        metrics: The server's own figures of the request.
        failure: What went wrong; a failed request has no numbers.
    """

    chunk_s: tuple[float, ...] = ()
    total_s: float = 0.0
    num_tokens: int = 0
    metrics: dict[str, Any] | None = None
    failure: str | None = None

    @property
    def per_token_s(self) -> float | None:
        """Seconds per token between the first chunk and the last.

        `None` where that is the same one.
        """
        if len(self.chunk_s) < 2 or self.num_tokens < 2:
            return None
        return (self.chunk_s[-1] - self.chunk_s[0]) / (self.num_tokens - 1)


async def complete(host: str, port: int, body: dict[str, Any]) -> Reply:
    """Ask `/v1/completions` for a stream.

    Args:
        host: Where the server is.
        port: Its port.
        body: Fields of the request; streaming and usage are added.
    """
    payload = json.dumps(
        body | {"stream": True, "stream_options": {"include_usage": True}}
    ).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\n"
        f"content-length: {len(payload)}\r\nconnection: close\r\n\r\n"
    )
    try:
        reader, writer = await asyncio.open_connection(host, port)
    except OSError as error:
        return Reply(failure=f"no connection: {error}")
    start = time.perf_counter()
    try:
        writer.write(head.encode() + payload)
        await writer.drain()
        status = (await reader.readline()).split(b" ")
        while (await reader.readline()).strip():
            pass
        if status[1:2] != [b"200"]:
            return Reply(
                failure=f"status {b' '.join(status).decode(errors='replace').strip()}: "
                f"{(await reader.read(500))!r}"
            )
        return await _read(reader, start)
    except (OSError, EOFError, ValueError) as error:
        return Reply(failure=f"{type(error).__name__}: {error}")
    finally:
        writer.close()


async def _read(reader: asyncio.StreamReader, start: float) -> Reply:
    times, end = list[float](), dict[str, Any]()
    async for event in _events(reader):
        if (error := event.get("error")) is not None:
            return Reply(failure=str(error.get("message") if isinstance(error, dict) else error))
        if event["choices"] and event["choices"][0]["text"]:
            times.append(time.perf_counter() - start)
        if event.get("usage") is not None:  # on a chunk of its own, or on the last one with text
            end = event
    if not end:
        return Reply(failure="the stream ended without usage")
    return Reply(
        chunk_s=tuple(times),
        total_s=time.perf_counter() - start,
        num_tokens=int(end["usage"]["completion_tokens"]),
        metrics=end.get("metrics"),
    )


async def _events(reader: asyncio.StreamReader) -> AsyncIterator[dict[str, Any]]:
    """The events of a chunked answer, up to the last."""
    held = b""
    while size := int(await reader.readline(), 16):
        held += (await reader.readexactly(size + 2))[:-2]
        *whole, held = held.split(b"\n\n")
        for line in whole:
            text = line.removeprefix(b"data: ")
            if text == b"[DONE]":
                return
            yield json.loads(text)
