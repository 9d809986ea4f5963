"""`monge list`."""

import dataclasses
import json
import shutil
from collections.abc import Mapping
from typing import Annotated, Any, Final

import typer
from rich.table import Table

from monge.backends.cpu.code_cache import cache_folder
from monge.cli import options
from monge.cli.console import plain_table, print_tables, reported, show
from monge.control.registry import CONTROLLERS
from monge.core.errors import OptionError, unknown_name
from monge.core.registry import Registry
from monge.defaults import default_rule
from monge.draft.registry import DRAFTERS
from monge.draft.tree.children import CHILDREN
from monge.draft.tree.registry import TREES
from monge.laws.proposal import PROPOSALS, Arbitrary
from monge.loading.cache import kept
from monge.loading.named_models import NAMED, why_no_model
from monge.options import OUTPUT
from monge.verify.base import why_no_exactness
from monge.verify.registry import VERIFIERS

ROOMS: Final[Mapping[str, Registry[Any]]] = {
    "verifiers": VERIFIERS,
    "drafters": DRAFTERS,
    "trees": TREES,
    "controllers": CONTROLLERS,
}
Listing = tuple[dict[str, Any], list[Table], list[str]]
"""A document for JSON, and the tables and lines that show it."""


@reported
def list_components(
    section: Annotated[
        str | None,
        typer.Argument(help="verifiers, drafters, trees or controllers; without it, all of them."),
    ] = None,
    *,
    models: bool = options.switch("--models", OUTPUT, "Show the models that can be named."),
    cache: bool = options.switch("--cache", OUTPUT, "Show what is kept on disk, with its size."),
    clear_cache: bool = options.switch("--clear-cache", OUTPUT, "Delete it, and say how much."),
    as_json: options.Json = False,
    markdown: options.Markdown = False,
) -> None:
    """Show the verifiers, drafters, trees and controllers that can be named.

    Settings are shown too. They are written in parentheses after a name: `--tree "fixed_width((4,
    2), children='iid')"`.
    """
    if models + cache + clear_cache > 1:
        raise OptionError(
            "--models, --cache and --clear-cache exclude each other; give one of them"
        )
    if models:
        document, tables, lines = _models()
    elif cache or clear_cache:
        document, tables, lines = _cache(clears=clear_cache)
    else:
        document, tables, lines = _parts(section)
    if as_json:
        print(json.dumps(document))
        return
    print_tables(tables, markdown=markdown)
    for line in lines:
        show(line)


def _parts(section: str | None) -> Listing:
    if section is not None and section not in ROOMS:
        raise unknown_name("section", section, ROOMS)
    rooms = {
        room: [_described(registry, name) for name in registry]
        for room, registry in ROOMS.items()
        if section in {None, room}
    }
    about, tables, lines = dict[str, Any](), list[Table](), list[str]()
    for room, parts in rooms.items():
        table = plain_table(room, "name")
        table.add_column("what it does", ratio=3)
        table.add_column("settings and defaults", ratio=2)
        for part in parts:
            settings = [f"{key}={value!r}" for key, value in part["settings"].items()]
            written = ", ".join([*part["required"], *settings]) or "-"
            table.add_row(part["name"], part["summary"], written)
        tables.append(table)
    if "verifiers" in rooms:
        about = {"legal": legality(), "exactness": _exactness()}
        title = "which verifier is exact for which candidates"
        kinds = [kind.__name__ for kind in PROPOSALS]
        table = plain_table(title, "verifier", ["known by", *kinds], "left")
        for name, legal in about["legal"].items():
            table.add_row(name, about["exactness"][name], *legal.values())
        tables.append(table)
    if "trees" in rooms:
        about["defaults"] = _default_verifiers()
        lines = ["", *map(_verifiers_of, TREES), ""]
        for name, rules in about["defaults"].items():
            ways_of = {
                rule: [way for way in rules if way and rules[way] == rule]
                for rule in rules.values()
            }
            usual = [
                f"{rule} ({', '.join(ways)})" if ways else rule for rule, ways in ways_of.items()
            ]
            lines.append(
                f"tree {name} is verified by {', '.join(usual)} where no verifier is named"
            )
    return rooms | about, tables, lines


def _verifiers_of(tree: str) -> str:
    limits = TREES.make(tree).limits
    ways = ", ".join(sorted(kind.__name__ for kind in limits.proposes))
    rules = [rule for rule in VERIFIERS if _fits(rule, limits.proposes, limits.max_width)]
    return f"tree {tree} draws {ways} candidates, at most {limits.max_width} a node: {', '.join(rules)}"


def _models() -> Listing:
    document = {
        name: {
            "about": model.about,
            "head": model.head,
            "rounded": dict(model.rounded),
            "obstacle": why_no_model(name),
        }
        for name, model in NAMED.items()
    }
    table = plain_table("models", "name")
    for column in ("model", "drafted by", "rounded weights beside exact ones", "here"):
        table.add_column(column)
    for name, model in document.items():
        rounded = "\n".join(f"{kind}: {words}" for kind, words in model["rounded"].items())
        table.add_row(name, model["about"], model["head"], rounded, model["obstacle"] or "yes")
    return document, [table], []


def _cache(*, clears: bool) -> Listing:
    folder = cache_folder()
    try:
        entries = kept()
        if clears:
            for entry in entries:  # what a running process has mapped stays readable for it
                shutil.rmtree(entry.path)
    except OSError as error:
        raise OptionError(f"the cache in {folder}: {error}") from error
    size = sum(entry.num_bytes for entry in entries)
    listed = [dataclasses.asdict(entry) | {"path": str(entry.path)} for entry in entries]
    document = {"folder": str(folder), "bytes": size, "cleared": clears, "kept": listed}
    table = plain_table("cache", "what", ("MB", "days unused"))
    table.add_column("folder", overflow="fold")
    for entry in entries:
        size_mb = f"{entry.num_bytes / 1e6:.1f}"
        table.add_row(entry.what, size_mb, f"{entry.days:.0f}", entry.path.name)
    done, hint = ("freed from", "") if clears else ("in", "; --clear-cache deletes them")
    tables = [table] if entries and not clears else []
    return document, tables, [f"{size / 1e6:.1f} MB {done} {folder}{hint}"]


def _described(registry: Registry[Any], name: str) -> dict[str, Any]:
    """Return name, first line of the docstring, settings with defaults, and those that have none."""
    settings = registry.settings(name)
    required = [key for key, value in settings.items() if value is dataclasses.MISSING]
    return {
        "name": name,
        "summary": registry.summary(name),
        "settings": {k: value for k, value in settings.items() if k not in required},
        "required": required,
    }


def legality() -> dict[str, dict[str, str]]:
    """Return `yes`, `one candidate` or `no` for every verifier and kind of candidate sampling.

    `Arbitrary` nodes are always target-walked.
    """
    return {name: {kind.__name__: _legal(name, kind) for kind in PROPOSALS} for name in VERIFIERS}


def _legal(verifier: str, kind: type) -> str:
    if _fits(verifier, (kind,), 2):
        is_walked = kind is Arbitrary and Arbitrary not in VERIFIERS.make(verifier).accepts
        return "sample and match" if is_walked else "yes"
    return "one candidate" if _fits(verifier, (kind,), 1) else "no"


def _fits(verifier: str, proposes: Any, max_width: int | None) -> bool:  # noqa: ANN401 (types of proposals)
    return why_no_exactness(VERIFIERS.make(verifier), proposes, max_width) is None


def _exactness() -> dict[str, str]:
    """Return, for every verifier, how it is known that texts have the target's law."""
    known: dict[str, str] = {}
    for name in VERIFIERS:
        rule = VERIFIERS.make(name)
        known[name] = "tested: enumeration" if rule.is_enumerable else "tested: integration"
        if not VERIFIERS.is_built_in(name):
            known[name] = f"claimed: monge acceptance {name}"
        if not rule.is_lossless:
            known[name] = "lossy"
    return known


def _default_verifiers() -> dict[str, dict[str, str]]:
    """Return the default verifier of every tree, for each way of drawing children.

    `""` where a tree has its own. A tree whose usual sizes are too narrow for a way has none.
    """
    rules: dict[str, dict[str, str]] = {}
    for name in TREES:
        rules[name] = {}
        for kind in CHILDREN if "children" in TREES.settings(name) else ("",):
            try:
                tree = TREES.make(name, children=kind) if kind else TREES.make(name)
            except OptionError:
                continue
            rule = default_rule(tree.limits.proposes, tree.limits.max_width)
            rules[name][kind] = repr(rule).partition("(")[0]
    return rules
