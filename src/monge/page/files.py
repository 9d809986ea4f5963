"""The files of the page, and the same view of finished runs in a single file."""

import base64
import hashlib
import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, Final

_FOLDER: Final = Path(__file__).parent
FILES: Final[Mapping[str, tuple[str, str]]] = {
    "/": ("index.html", "text/html"),
    "/page/page.css": ("page.css", "text/css"),
    **{
        f"/page/{name}.js": (f"{name}.js", "text/javascript")
        for name in ("view", "client", "markdown", "chat", "app")
    },
}
"""Name and type of the file at each path of a server."""
_POLICY: Final = "default-src 'none'; img-src data:; base-uri 'none'; form-action 'none'"
HEADERS: Final[Mapping[str, str]] = {
    "content-security-policy": f"{_POLICY}; frame-ancestors 'none'; script-src 'self'; "
    "style-src 'self'; connect-src 'self'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}
"""Headers of the files: nothing from outside is loaded, and no script that stands in the page."""


@cache
def content_of(name: str) -> str:
    """Return the text of a file of the page."""
    return (_FOLDER / name).read_text(encoding="utf-8")


def page_of(document: Mapping[str, Any]) -> str:
    """Return an HTML file that shows the runs of a document, and that loads nothing."""
    style, script = content_of("page.css"), content_of("view.js")
    policy = f"{_POLICY}; script-src {_hash(script)}; style-src {_hash(style)}"
    # No text can end the element that holds it, or begin a comment in it.
    data = json.dumps(document, ensure_ascii=True, allow_nan=False).replace("<", "\\u003c")
    parts = {"policy": policy, "style": style, "data": data, "script": script}
    pieces = content_of("run.html").split("%%")
    return "".join(parts[piece] if place % 2 else piece for place, piece in enumerate(pieces))


def _hash(text: str) -> str:
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    return f"'sha256-{digest}'"
