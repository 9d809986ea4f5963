"""Adds the reference to the pages from the registries, so that it cannot drift.

The site shows the class of a component below its page, the public names below `reference.md`, and
what `SHOWN` names below other pages.
The tables of components are written in the index pages, which are read on code hosts too. A test
compares them with `components` and `children`; `python docs/hooks.py` writes them anew.
"""

import dataclasses
import inspect
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import monge
from monge.control.registry import CONTROLLERS
from monge.core.registry import Registry
from monge.draft.registry import DRAFTERS
from monge.draft.tree.children import CHILDREN
from monge.draft.tree.registry import TREES
from monge.verify.registry import VERIFIERS

ROOMS: Mapping[str, Registry[Any]] = {
    "verifiers": VERIFIERS,
    "drafters": DRAFTERS,
    "trees": TREES,
    "controllers": CONTROLLERS,
}
SHOWN: Mapping[str, Sequence[str]] = {
    "controllers/index.md": ("monge.control.base.Controller", "monge.control.base.RoundInfo"),
}
_TABLE = {
    "components": re.compile(r"^\| name \|.*\n(?:\|.*\n)+", re.MULTILINE),
    "children": re.compile(r"^\| way \|.*\n(?:\|.*\n)+", re.MULTILINE),
}


def on_page_markdown(markdown: str, page: Any, **_: object) -> str:
    """Called by mkdocs for every page."""
    return markdown + reference(page.file.src_uri)


def reference(page: str) -> str:
    """What the site shows below a page, named as `verifiers/rrs.md`."""
    if page == "reference.md":
        return f"\n{public_names()}\n"
    if page in SHOWN:
        return "\n## API\n\n" + "\n\n".join(f"::: {path}" for path in SHOWN[page]) + "\n"
    room, _, name = page.removesuffix(".md").rpartition("/")
    if name not in list(ROOMS.get(room, ())):  # a registry refuses unknown names
        return ""
    return f"\n{figure(room, name)}## API\n\n::: {_path(ROOMS[room][name])}\n"


def figure(room: str, name: str) -> str:
    """The picture of a verifier's acceptance, where `docs/figures.py` has drawn one."""
    picture = f"figures/acceptance/{name}.png"
    if room != "verifiers" or not (Path(__file__).parent / picture).is_file():
        return ""
    return (
        f"## Against the optimum\n\n![acceptance of {name} against the optimum](../{picture})\n\n"
    )


def components(room: str) -> str:
    """One row per component: its name, linked to its page, and its first docstring line."""
    registry = ROOMS[room]
    rows = [[f"[`{name}`]({name}.md)", registry.summary(name)] for name in registry]
    return _table(["name", "what it does"], rows)


def children() -> str:
    """One row per way of drawing children, with the verifiers that accept it."""
    rows = [
        [
            f"`{name}`",
            _codes(settings(CHILDREN, name)),
            CHILDREN.summary(name),
            f"`{way.proposes.__name__}`",
            _exact_for(way.proposes),
        ]
        for name, way in CHILDREN.items()
    ]
    return _table(
        ["way", "settings", "what is offered", "proposal", "verifiers that are exact for it"], rows
    )


def _exact_for(proposal: type) -> str:
    exact = [name for name in VERIFIERS if proposal in VERIFIERS.make(name).accepts]
    others = [name for name in VERIFIERS if name not in exact]
    if len(others) < len(exact) / 2:
        return f"all but {_codes(others)}" if others else "all"
    return _codes(exact)


def public_names() -> str:
    """A reference block for every class and function of the front door."""
    parts = [getattr(monge, name) for name in sorted(monge.__all__)]
    return "\n\n".join(
        f"::: {_path(part)}" for part in parts if inspect.isclass(part) or inspect.isfunction(part)
    )


def _path(part: Any) -> str:
    return f"{part.__module__}.{part.__qualname__}"


def settings(registry: Registry[Any], name: str) -> list[str]:
    """The settings of a part with their defaults, as its page lists them."""
    return [f"{field}{_default(value)}" for field, value in registry.settings(name).items()]


def _default(value: Any) -> str:
    return "" if value is dataclasses.MISSING else f"={value!r}"


def _codes(texts: Sequence[str]) -> str:
    return ", ".join(f"`{text}`" for text in texts) or "none"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(
        "| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines
    )


def rewritten(room: str, page: str) -> str:
    """The index page of a room with its tables as the registries have them."""
    page = _TABLE["components"].sub(lambda _: components(room) + "\n", page, count=1)
    return _TABLE["children"].sub(lambda _: children() + "\n", page, count=1)


if __name__ == "__main__":
    for name in ROOMS:
        index = Path(__file__).parent / name / "index.md"
        index.write_text(rewritten(name, index.read_text(encoding="utf-8")), encoding="utf-8")
