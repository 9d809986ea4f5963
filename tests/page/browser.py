"""A headless Chromium, driven over plain HTTP by its own driver."""

import base64
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")
needs_chromium = pytest.mark.skipif(
    CHROMIUM is None or DRIVER is None, reason="needs chromium and chromedriver"
)
KEYS = {"Tab": "\ue004", "Enter": "\ue007", "Escape": "\ue00c", "End": "\ue010"}
KEYS |= {"Home": "\ue011", "Left": "\ue012", "Right": "\ue014"}


class Browser:
    """One window."""

    def __init__(self, session: str) -> None:
        self._session = session

    def _ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        answer = httpx.request(method, f"{self._session}/{path}", json=body, timeout=60)
        value = answer.json()["value"]
        assert answer.status_code == 200, value
        return value

    def go(self, url: str) -> None:
        """Open a page."""
        self._ask("POST", "url", {"url": url})

    def run(self, script: str, *arguments: Any) -> Any:
        """Return what a script returns."""
        return self._ask("POST", "execute/sync", {"script": script, "args": list(arguments)})

    def wait(self, script: str, *arguments: Any) -> Any:
        """Run a script until it returns something true."""
        end = time.monotonic() + 60
        while not (found := self.run(script, *arguments)):
            assert time.monotonic() < end, f"it did not happen: {script}"
            time.sleep(0.05)
        return found

    def press(self, *keys: str) -> None:
        """Press keys one after the other: names of `KEYS`, or text."""
        actions = [
            {"type": kind, "value": letter}
            for key in keys
            for letter in ([KEYS[key]] if key in KEYS else key)
            for kind in ("keyDown", "keyUp")
        ]
        self._ask("POST", "actions", {"actions": [{"type": "key", "id": "k", "actions": actions}]})

    def click(self, selector: str) -> None:
        """Click the first element that a selector finds."""
        self.run("document.querySelector(arguments[0]).click()", selector)

    def errors(self) -> list[str]:
        """Return what the console has shown since the last call, warnings included."""
        return [one["message"] for one in self._ask("POST", "se/log", {"type": "browser"})]

    def resize(self, width: int, height: int) -> None:
        """Set the size of the window."""
        self._ask("POST", "window/rect", {"width": width, "height": height})

    def dark(self, *, is_on: bool) -> None:
        """Prefer a dark page, or a light one."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if is_on else "light"}
        body = {"cmd": "Emulation.setEmulatedMedia", "params": {"features": [scheme]}}
        self._ask("POST", "goog/cdp/execute", body)

    def screenshot(self, path: Path) -> None:
        """Save what the window shows."""
        path.write_bytes(base64.b64decode(self._ask("GET", "screenshot")))


@contextmanager
def browser() -> Iterator[Browser]:
    """A window that is closed afterwards."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [str(DRIVER), f"--port={port}"]
    quiet = subprocess.DEVNULL
    with subprocess.Popen(command, stdout=quiet, stderr=quiet) as driver:
        url, session = f"http://127.0.0.1:{port}", None
        try:
            _wait_for(f"{url}/status")
            words = "--headless=new --no-sandbox --disable-gpu --window-size=1400,1000"
            options = {"binary": CHROMIUM, "args": words.split()}
            wanted = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
            body = {"capabilities": {"alwaysMatch": wanted}}
            value = httpx.post(f"{url}/session", json=body, timeout=120).json()["value"]
            assert "sessionId" in value, value
            session = f"{url}/session/{value['sessionId']}"
            yield Browser(session)
        finally:
            if session is not None:
                httpx.delete(session, timeout=60)
            driver.terminate()


def _wait_for(url: str) -> None:
    end = time.monotonic() + 60
    while True:
        try:
            httpx.get(url, timeout=60)
        except httpx.TransportError:
            assert time.monotonic() < end, "the driver does not answer"
            time.sleep(0.05)
        else:
            return
