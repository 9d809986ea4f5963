"""A server in a process of its own that takes an exact time for a request: it replays texts that a toy server wrote before."""

import asyncio
import json
import multiprocessing
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import cycle
from typing import Any

from tests.audit.toy import client_of
from tests.kit.wrong_servers import ToyServer

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
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(
        target=_serve, args=(theirs, answers, latency_s), daemon=True
    )
    process.start()
    try:
        yield f"http://127.0.0.1:{ours.recv()}"
    finally:
        process.terminate()
        process.join()


def _serve(pipe: Any, answers: Answers, latency_s: float) -> None:
    sources = {key: cycle(bodies) for key, bodies in answers.items()}

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            fields = json.loads(self.rfile.read(int(self.headers["content-length"])))
            self.do_GET(next(sources[fields["prompt"], fields["temperature"] > 0]))

        def do_GET(self, body: bytes = b'{"data": [{"id": "toy"}]}') -> None:
            time.sleep(latency_s)
            self.send_response(200)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    pipe.send(server.server_port)
    server.serve_forever()
