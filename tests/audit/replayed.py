"""A server in a process of its own that takes an exact time for a request: it replays texts that a toy server wrote before."""

import asyncio
import json
import multiprocessing
import socket
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import cycle
from typing import Any

from tests.audit.toy import client_of
from tests.kit.wrong_servers import ToyServer

_HEAD_END = b"\r\n\r\n"
Answers = dict[tuple[str, bool], list[bytes]]
"""Bodies by prompt, and by whether they are sampled."""


def texts_of(
    server: ToyServer, prompts: Sequence[str], *, num_texts: int, **fields: Any
) -> Answers:
    """Texts of a server after each prompt: one greedy text, the others sampled."""
    answers: Answers = defaultdict(list)

    async def write() -> None:
        async with client_of(server) as client:
            for prompt in prompts:
                for index in range(num_texts + 1):
                    found = await client.complete(prompt, temperature=float(index > 0), **fields)
                    logprobs = {"tokens": found.tokens, "token_logprobs": found.logprobs}
                    choice = {
                        "text": found.text,
                        "finish_reason": found.finish,
                        "logprobs": {**logprobs, "top_logprobs": found.top},
                    }
                    answers[prompt, index > 0].append(json.dumps({"choices": [choice]}).encode())

    asyncio.run(write())
    return answers


@contextmanager
def replayed(answers: Answers, latency_s: float) -> Iterator[str]:
    """Serve them; the address."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        process = multiprocessing.get_context("spawn").Process(
            target=_serve, args=(listener, answers, latency_s), daemon=True
        )
        process.start()
        try:  # the system holds requests back until the process is there
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            process.terminate()
            process.join()


def _serve(listener: socket.socket, answers: Answers, latency_s: float) -> None:
    sources = {key: cycle(bodies) for key, bodies in answers.items()}

    def body_of(content: bytes) -> bytes:
        if not content:
            return b'{"data": [{"id": "toy"}]}'
        fields = json.loads(content)
        return next(sources[fields["prompt"], fields["temperature"] > 0])

    class Connection(asyncio.Protocol):
        def connection_made(self, transport: Any) -> None:
            self._transport, self._read = transport, b""

        def data_received(self, data: bytes) -> None:
            self._read += data
            head, _, content = self._read.partition(_HEAD_END)
            _, _, length = head.lower().partition(b"content-length:")
            if _HEAD_END not in self._read or len(content) < int(
                length.split()[0] if length else 0
            ):
                return
            self._read, body = b"", body_of(content)
            answer = b"HTTP/1.1 200 OK\r\ncontent-length: %d%s%s" % (len(body), _HEAD_END, body)
            asyncio.get_running_loop().call_later(latency_s, self._transport.write, answer)

    async def serve() -> None:
        server = await asyncio.get_running_loop().create_server(Connection, sock=listener)
        await server.serve_forever()

    asyncio.run(serve())
