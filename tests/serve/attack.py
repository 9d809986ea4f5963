"""Attacks on a server of this machine, and how long `/health` takes meanwhile.

`python -m tests.serve.attack URL`.
"""

import json
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from urllib.parse import urlsplit

SIZE = 4 * 1024 * 1024 - 1000
CLIENTS = 5


def posted(path: str, body: str) -> bytes:
    """A whole request."""
    head = (
        f"POST {path} HTTP/1.1",
        "Host: localhost",
        "Content-Type: application/json",
        f"Content-Length: {len(body)}",
    )
    return "\r\n".join((*head, "", body)).encode()


def messages() -> bytes:
    """Forty-eight thousand messages that are none."""
    return posted("/v1/chat/completions", json.dumps({"messages": [1] * 48_000}))


def fields() -> bytes:
    """As many unknown fields as a body holds."""
    return posted(
        "/v1/completions",
        '{"prompt":"a",' + ",".join(f'"{number:06x}":1' for number in range(SIZE // 11)) + "}",
    )


def lists() -> bytes:
    """As many empty lists as a body holds."""
    return posted("/v1/completions", '{"prompt":[' + ",".join(["[]"] * (SIZE // 3)) + "]}")


def token_ids() -> bytes:
    """As many token ids as a body holds."""
    return posted("/v1/completions", '{"prompt":[' + ",".join(["1"] * (SIZE // 2)) + "]}")


def letters() -> bytes:
    """One letter, four million times."""
    return posted("/v1/completions", json.dumps({"prompt": "a" * SIZE}))


BODIES: dict[str, Callable[[], bytes]] = {
    one.__name__: one for one in (messages, fields, lists, token_ids, letters)
}
ATTACKS = (*BODIES, "left", "silent")
"""`left`: clients that hang up after their letters.

`silent`: three hundred connections that say nothing.
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
    content = BODIES["letters" if name == "left" else name]()

    def client() -> None:
        while time.monotonic() < end:
            with (
                suppress(OSError),
                socket.create_connection(address, timeout=seconds) as connection,
            ):
                connection.sendall(content)
                if name != "left":
                    connection.recv(65536)

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
            with urllib.request.urlopen(f"{url}/health", timeout=30) as answer:
                assert answer.status == 200
            taken.append(time.perf_counter() - began)
            time.sleep(0.05)
    return taken


def _say(name: str, text: str) -> None:
    sys.stdout.write(f"{name:10} {text}\n")
    sys.stdout.flush()


def table(url: str, names: Sequence[str] = ATTACKS) -> dict[str, Sequence[float]]:
    """All of them, printed."""
    rows = dict[str, Sequence[float]]()
    for name in names:
        try:
            rows[name] = sorted(health(url, name))
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
