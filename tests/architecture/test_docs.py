"""Every registered component has its row and its paper, no page describes a ghost, and docstring examples run."""

import doctest
import importlib.util
import inspect
import pkgutil
import re
from collections.abc import Iterable

import pytest

import monge
from monge.control.registry import CONTROLLERS
from monge.draft.registry import DRAFTERS
from monge.draft.tree.registry import TREES
from monge.verify.registry import VERIFIERS
from tests.architecture.sources import PACKAGE, ROOT, modules, name_of

DOCS = ROOT / "docs"
ROOMS = {"verifiers": VERIFIERS, "drafters": DRAFTERS, "trees": TREES, "controllers": CONTROLLERS}
COMPONENTS = [(room, name) for room, registry in ROOMS.items() for name in registry]
DOCSTRING_PARTS = ("Law:", "Rule:", "Cost:", "Reference:")


def missing_parts(text: str, parts: Iterable[str]) -> list[str]:
    """Lines that should stand in a text and do not."""
    lines = {line.strip() for line in text.splitlines()}
    return [part for part in parts if part not in lines]


WHERE = (DOCS / "architecture.md").read_text().partition("## Where is")[2]
PLACES = re.findall(r"`(monge[\w.]*:[\w.]+)`", WHERE)


@pytest.mark.parametrize("place", PLACES)
def test_every_place_that_the_architecture_names_is_there(place):
    assert len(PLACES) >= 15, "the table is read"
    assert pkgutil.resolve_name(place) is not None


@pytest.mark.parametrize(
    "words",
    [
        *("stop strings", "KV cache", "a verifier", "a drafter is asked", "drafter, tree or"),
        *("temperature.* on a CPU", "top-p.* on a device", "GGUF", "prefix hits", "grammar"),
    ],
)
def test_a_search_ends_at_one_place(words):
    rows = re.findall(rf"^\| (?:.*{words}.*) \| (.+) \|$", WHERE, re.MULTILINE)
    assert len(rows) == 1
    assert re.fullmatch(r"`[^`]+`", rows[0]), "a single place"


@pytest.fixture(scope="module")
def hooks():
    spec = importlib.util.spec_from_file_location("hooks", DOCS / "hooks.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(("room", "name"), COMPONENTS)
def test_component_has_a_row_a_command_and_its_paper(room, name, hooks):
    page = (DOCS / f"{room}.md").read_text()
    cells = re.findall(rf"^\| `{name}` \| (.+) \| `monge (.+)` \| (.+) \|$", page, re.MULTILINE)
    assert len(cells) == 1, f"{name} is registered, but no row of docs/{room}.md"
    _, command, _ = cells[0]
    assert re.search(rf"--[a-z-]+ \W*{name}\b", command) or name in {"head", "shape"}, command
    docstring = inspect.getdoc(ROOMS[room][name]) or ""
    assert name == "none" or "Reference:" in docstring, "its source"
    described = re.findall(r"^    (\w+): ", docstring.partition("Args:\n")[2], re.MULTILINE)
    assert set(ROOMS[room].settings(name)) <= set(described), "settings"
    shown = hooks.with_reference(f"{room}.md", page)
    assert len(re.findall(rf"^## {name}$", shown, re.MULTILINE)) == 1
    section = shown.partition(f"\n## {name}\n")[2].partition("\n## ")[0]
    part = ROOMS[room][name]
    assert f"\n::: {part.__module__}.{part.__qualname__}\n" in section
    assert f"[`{name}`]({room}.md#{name})" in (DOCS / "paper_index.md").read_text()
    summary = ROOMS[room].summary(name)
    assert summary.endswith("."), f"{name}: {summary!r} is not one sentence on one line"


@pytest.mark.parametrize("room", ROOMS)
def test_no_page_describes_a_ghost(room):
    page = (DOCS / f"{room}.md").read_text()
    index = (DOCS / "paper_index.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| .+ \| `monge ", page, re.MULTILINE)
    assert set(rows) == set(re.findall(rf"\({room}\.md#(\w+)\)", index)) == set(ROOMS[room])


def test_the_site_keeps_what_a_page_says(hooks):
    page = (DOCS / "drafters.md").read_text()
    shown = hooks.with_reference("drafters.md", page).splitlines()
    assert [line for line in page.splitlines() if line not in shown] == []


@pytest.mark.parametrize("name", VERIFIERS)
def test_verifier_docstring_is_a_contract(name):
    assert missing_parts(VERIFIERS[name].__doc__ or "", DOCSTRING_PARTS) == []


def test_the_trees_list_the_ways_of_drawing(hooks):
    """Written out, since code hosts show the pages as they are."""
    page = (DOCS / "trees.md").read_text()
    assert hooks.children() in page, "python docs/hooks.py writes the table"
    assert hooks.rewritten(page) == page, "python docs/hooks.py writes the table"


def test_the_public_names_are_listed():
    page = (DOCS / "reference.md").read_text()
    assert [name for name in monge.__all__ if f"`{name}`" not in page] == []


def test_the_picture_shows_every_room():
    rooms = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    picture = (DOCS / "assets" / "rooms.svg").read_text()
    assert rooms <= set(re.findall(r"\w+", picture))


WITH_EXAMPLES = [path for path in modules() if ">>> " in path.read_text()]


@pytest.mark.parametrize("module", WITH_EXAMPLES, ids=name_of)
def test_docstring_examples_run(module):
    dotted = ".".join(("monge", *module.relative_to(PACKAGE).with_suffix("").parts))
    assert doctest.testmod(importlib.import_module(dotted.removesuffix(".__init__"))).failed == 0
