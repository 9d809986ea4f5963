"""Adds the reference to the pages from the registries, so that it cannot drift.

The site shows each class of a room in the section of its name, the public names below
`reference.md`, and what `SHOWN` names below other pages.
The table of ways of drawing is written in `trees.md`, which is read on code hosts too. A test
compares it with `children`; `python docs/hooks.py` writes it anew.
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
    "controllers.md": (
        "monge.control.base.Controller",
        "monge.control.base.Controller.learn",
        "monge.control.base.RoundInfo",
    ),
}
TREES_PAGE = Path(__file__).parent / "trees.md"
_WAYS = re.compile(r"^\| way \|.*\n(?:\|.*\n)+", re.MULTILINE)


def on_page_markdown(markdown: str, page: Any, **_: object) -> str:
    """Called by mkdocs for every page."""
    return with_reference(page.file.src_uri, markdown)


def with_reference(page: str, markdown: str) -> str:
    """What the site shows as the page of a name, such as `verifiers.md`."""
    room = page.removesuffix(".md")
    if room in ROOMS:
        markdown = with_parts(room, markdown)
    if page == "reference.md":
        markdown += f"\n{public_names()}\n"
    if page in SHOWN:
        markdown += "\n## API\n\n" + "\n\n".join(f"::: {path}" for path in SHOWN[page]) + "\n"
    return markdown


def with_parts(room: str, markdown: str) -> str:
    """The page of a room with a section for every part, which ends with its class.

    Sections that the page has for parts come last, in the order of the registry.
    """
    head, *sections = re.split(r"^(?=## )", markdown, flags=re.MULTILINE)
    written = {section.split("\n", 1)[0].removeprefix("## "): section for section in sections}
    parts = [
        f"{written.pop(name, f'## {name}')}\n\n{figure(room, name)}::: {_path(part)}\n\n"
        for name, part in ROOMS[room].items()
    ]
    return "".join([head, *written.values(), "\n", *parts])


def figure(room: str, name: str) -> str:
    """The picture of a verifier's acceptance, where `docs/figures.py` has drawn one."""
    picture = f"figures/acceptance/{name}.png"
    if room != "verifiers" or not (Path(__file__).parent / picture).is_file():
        return ""
    return f"![acceptance of {name} against the optimum]({picture})\n\n"


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
    """A reference block for every class and function of the front door; parts have their pages."""
    shown = [part for registry in ROOMS.values() for part in registry.values()]
    parts = [getattr(monge, name) for name in sorted(monge.__all__)]
    return "\n\n".join(
        f"::: {_path(part)}"
        for part in parts
        if part not in shown and (inspect.isclass(part) or inspect.isfunction(part))
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


def rewritten(page: str) -> str:
    """The page of the trees with its table as the registries have it."""
    return _WAYS.sub(lambda _: children() + "\n", page, count=1)


if __name__ == "__main__":
    TREES_PAGE.write_text(rewritten(TREES_PAGE.read_text(encoding="utf-8")), encoding="utf-8")
