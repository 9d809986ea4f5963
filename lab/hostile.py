"""`python -m lab.hostile`: what grammars that attack a server do to its other clients."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import httpx

_CHAIN: Final = {f"a{number}": {"$ref": f"#/$defs/a{number + 1}"} for number in range(3000)}
ATTACKS: Final[dict[str, Any]] = {
    "multiples of a prime": {"json": {"type": "integer", "multipleOf": 99999989}},
    "3,000 references": {"json": {"$ref": "#/$defs/a0", "$defs": _CHAIN | {"a3000": {}}}},
    "a million counted": {"regex": "[xy]a{1000000}"},
    "nested counts": {"regex": "((a{0,100}){0,100}){0,100}"},
    "doublings": {
        "grammar": 'start: R30\nR0: "a"\n'
        + "\n".join(f"R{n}: R{n - 1} R{n - 1}" for n in range(1, 31))
    },
    "5,000 optional properties": {
        "json": {"type": "object", "properties": {f"p{n}": {"type": "null"} for n in range(5000)}}
    },
}
"""Values of `structured_outputs`."""
_WAIT_S: Final = 300.0


def main() -> None:
    """Attack a server of the built-in pair, print what others see meanwhile, and end it during an attack."""
    with _served() as (process, url):
        base = _completion_s(url)
        print(f"a completion alone: {base * 1e3:.0f} ms; memory {_resident_mib(process.pid)} MiB")
        for name, outputs in ATTACKS.items():
            with ThreadPoolExecutor() as pool:
                begin = time.perf_counter()
                attack = pool.submit(_ask, url, structured_outputs=outputs, max_tokens=60)
                probes, completions = [], []
                while not attack.done() or not completions:
                    probes.append(_timed(lambda: httpx.get(f"{url}/health").raise_for_status()))
                    completions.append(_completion_s(url))
                answer, took = attack.result(), time.perf_counter() - begin
            text = answer.text if answer.status_code != 200 else "a text"
            print(
                f"{name}: {answer.status_code} after {took:.1f} s; slowest /health "
                f"{max(probes) * 1e3:.0f} ms, completion {max(completions) * 1e3:.0f} ms; memory "
                f"{_resident_mib(process.pid)} MiB\n    {text[:200]}"
            )
        with ThreadPoolExecutor() as pool:
            attack = pool.submit(_ask, url, structured_outputs=ATTACKS["multiples of a prime"])
            time.sleep(0.5)
            process.send_signal(signal.SIGTERM)
            took = _timed(lambda: process.wait(_WAIT_S))
            print(
                f"ended {took:.1f} s after SIGTERM with --lame-duck 0 --drain 1, during an attack"
            )
            attack.exception()


@contextmanager
def _served() -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    options = ["--port", "0", "--lame-duck", "0", "--drain", "1"]
    with TemporaryDirectory() as folder, Path(folder, "log").open("w+b") as log:
        command = [sys.executable, "-m", "monge", "serve", *options]
        process = subprocess.Popen(command, stdout=log, stderr=log, env=os.environ)
        try:
            while not (found := re.search(rb"at (http://\S+?)/v1", Path(log.name).read_bytes())):
                if process.poll() is not None:
                    raise SystemExit(Path(log.name).read_text(encoding="utf-8"))
                time.sleep(0.1)
            yield process, found[1].decode()
        finally:
            process.kill()
            process.wait()


def _ask(url: str, **fields: Any) -> httpx.Response:
    body = {"prompt": "A thing:", "max_tokens": 8, "seed": 1, **fields}
    return httpx.post(f"{url}/v1/completions", json=body, timeout=_WAIT_S)


def _completion_s(url: str) -> float:
    return _timed(lambda: _ask(url).raise_for_status())


def _timed(work: Any) -> float:  # noqa: ANN401 (any call)
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def _resident_mib(pid: int) -> int:
    pages = Path(f"/proc/{pid}/statm").read_text(encoding="utf-8").split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE") >> 20


if __name__ == "__main__":
    main()
