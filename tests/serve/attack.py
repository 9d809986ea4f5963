"""Attacks on a server of this machine, and how long `/health` takes meanwhile.

`python -m tests.serve.attack URL`.
"""

import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from http.client import HTTPConnection
from pathlib import Path
from urllib.parse import urlsplit

SIZE = 4 * 1024 * 1024 - 1000
CLIENTS = 5
COMPLETIONS = "/v1/completions"


def posted(path: str, body: str) -> bytes:
    """A whole request."""
    fields = f"Host: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    return f"POST {path} HTTP/1.1\r\n{fields}\r\n\r\n{body}".encode()


def chunks() -> bytes:
    """As many chunks of a byte as a body holds."""
    head = posted(COMPLETIONS, "").replace(b"Content-Length: 0", b"Transfer-Encoding: chunked")
    return head + b"1\r\n[\r\n" * SIZE + b"0\r\n\r\n"


def wide() -> bytes:
    """UTF-16, which a scan of bytes does not see through."""
    lists = ('{"prompt":[' + ",".join(["[]"] * (SIZE // 6)) + "]}").encode("utf-16")
    return posted(COMPLETIONS, "").replace(b"Length: 0", b"Length: %d" % len(lists)) + lists


def repeated(item: str) -> str:
    """As many items as a body holds."""
    return '{"prompt":[' + ",".join([item] * (SIZE // (1 + len(item)))) + "]}"


def fields() -> str:
    """As many unknown fields as a body holds."""
    return '{"prompt":"a",' + ",".join(f'"{one:06x}":1' for one in range(SIZE // 11)) + "}"


BIAS = {str(token): 1.0 for token in range(1024)}
ANSWER = {"prompt": [5] * 1500, "n": 8, "max_tokens": 1, "echo": True, "logprobs": 20}
CHOICES = {"prompt": "The", "n": 32, "max_tokens": 100, "logit_bias": BIAS, "stream": True}
BODIES: dict[str, Callable[[], bytes]] = {
    "messages": lambda: posted("/v1/chat/completions", json.dumps({"messages": [1] * 48_000})),
    "fields": lambda: posted(COMPLETIONS, fields()),
    "lists": lambda: posted(COMPLETIONS, repeated("[]")),
    "token_ids": lambda: posted(COMPLETIONS, repeated("1")),
    "letters": lambda: posted(COMPLETIONS, json.dumps({"prompt": "a" * SIZE})),
    "chunks": chunks,
    "wide": wide,
    "answers": lambda: posted(COMPLETIONS, json.dumps(ANSWER)),
    "choices": lambda: posted(COMPLETIONS, json.dumps(CHOICES)),
}
ATTACKS = (*BODIES, "left", "silent", "hung")
"""`left`: clients that hang up after their letters.

`silent`: three hundred connections that say nothing.

`hung`: requests to a server of its own, whose target hangs.
"""


def run(address: tuple[str, int], name: str, seconds: float) -> None:
    """Attack for so long."""
    end = time.monotonic() + seconds
    if name == "silent":
        with ExitStack() as stack:
            for _ in range(300):
                with suppress(OSError):
                    stack.enter_context(socket.create_connection(address, timeout=1))
            time.sleep(max(0.0, end - time.monotonic()))
        return
    content = BODIES[{"left": "letters", "hung": "choices"}.get(name, name)]()

    def client() -> None:
        while time.monotonic() < end:
            with (
                suppress(OSError),
                socket.create_connection(address, timeout=seconds) as connection,
            ):
                connection.sendall(content)
                while name != "left" and time.monotonic() < end and connection.recv(65536):
                    pass

    threads = [threading.Thread(target=client) for _ in range(CLIENTS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def health(url: str, name: str, *, seconds: float = 8.0) -> Sequence[float]:
    """Seconds that `/health` takes, again and again, while an attack runs in another process.

    Raises:
        TimeoutError: If it takes half a minute.
    """
    command = [sys.executable, str(Path(__file__)), url, name, str(seconds)]
    taken: list[float] = []
    with subprocess.Popen(command) as attack:
        time.sleep(1)  # until the attack has begun, more or less
        while attack.poll() is None:
            began = time.perf_counter()
            connection = HTTPConnection(urlsplit(url).netloc, timeout=30)
            connection.request("GET", "/health")
            status = connection.getresponse().status
            connection.close()
            assert status == 200 or name == "hung"
            taken.append(time.perf_counter() - began)
            time.sleep(0.05)
    return taken


def hung() -> Sequence[float]:
    """As `health`, of a server whose target hangs."""
    from tests.serve.process import told_address

    with told_address([sys.executable, "-m", "tests.serve.hung"]) as (_, url):
        return health(url, "hung")


def _say(name: str, text: str) -> None:
    sys.stdout.write(f"{name:10} {text}\n")
    sys.stdout.flush()


def table(url: str, names: Sequence[str] = ATTACKS) -> dict[str, Sequence[float]]:
    """All of them, printed."""
    rows = dict[str, Sequence[float]]()
    for name in names:
        try:
            rows[name] = sorted(hung() if name == "hung" else health(url, name))
        except OSError as error:
            rows[name] = ()
            _say(name, str(error))
            continue
        taken = rows[name]
        median, late = taken[len(taken) // 2], taken[int(0.95 * len(taken))]
        _say(
            name,
            f"{1000 * median:6.0f} ms median {1000 * late:6.0f} ms p95 "
            f"{1000 * taken[-1]:6.0f} ms most",
        )
    return rows


if __name__ == "__main__":
    parts = urlsplit(sys.argv[1])
    assert parts.hostname in ("127.0.0.1", "localhost"), "for servers of this machine"
    assert parts.port is not None
    if len(sys.argv) > 2:
        run((parts.hostname, parts.port), sys.argv[2], float(sys.argv[3]))
    else:
        table(sys.argv[1])
