"""`monge list`."""

import dataclasses
import json
import shutil
from collections.abc import Mapping
from typing import Annotated, Any, Final

import typer

from monge.backends.cpu.program_cache import cache_folder
from monge.cli import options
from monge.cli.console import output, plain_table, print_tables, reported, show
from monge.control.registry import CONTROLLERS
from monge.core.errors import OptionError, unknown_name
from monge.core.proposal import Arbitrary
from monge.core.proposal_kinds import PROPOSALS
from monge.core.registry import Registry
from monge.defaults import default_rule
from monge.draft.registry import DRAFTERS
from monge.draft.tree.base import ByRequest, TreeBuilder
from monge.draft.tree.children import CHILDREN
from monge.draft.tree.registry import TREES
from monge.loading.cache import kept
from monge.loading.named_models import NAMED, obstacle
from monge.options import OUTPUT
from monge.verify.base import unsupported_reason
from monge.verify.registry import VERIFIERS

ROOMS: Final[Mapping[str, Registry[Any]]] = {
    "verifiers": VERIFIERS,
    "drafters": DRAFTERS,
    "trees": TREES,
    "controllers": CONTROLLERS,
}


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
        _list_models(as_json=as_json, markdown=markdown)
        return
    if cache or clear_cache:
        _list_cache(clears=clear_cache, as_json=as_json, markdown=markdown)
        return
    if section is not None and section not in ROOMS:
        raise unknown_name("section", section, ROOMS)
    rooms = {
        room: [_described(registry, name) for name in registry]
        for room, registry in ROOMS.items()
        if section in {None, room}
    }
    about = dict[str, Any]()
    if "verifiers" in rooms:
        about = {"legal": legality(), "exactness": _exactness()}
    if "trees" in rooms:
        about["defaults"] = _default_verifiers()
    if as_json:
        print(json.dumps(rooms | about))
        return
    tables = []
    for room, components in rooms.items():
        table = plain_table(room, "name")
        table.add_column("what it does", ratio=3)
        table.add_column("settings and defaults", ratio=2)
        for one in components:
            settings = [f"{key}={value!r}" for key, value in one["settings"].items()]
            written = ", ".join([*one["required"], *settings]) or "-"
            table.add_row(one["name"], one["summary"], written)
        tables.append(table)
    if "verifiers" in rooms:
        title, kinds = (
            "which verifier is exact for which candidates",
            (k.__name__ for k in PROPOSALS),
        )
        table = plain_table(title, "verifier", ["known by", *kinds], "left")
        for name, legal in about["legal"].items():
            table.add_row(name, about["exactness"][name], *legal.values())
        tables.append(table)
    print_tables(tables, markdown=markdown)
    if "trees" in rooms:
        _show_verifiers_of_trees(about["defaults"])


def _show_verifiers_of_trees(defaults: Mapping[str, Mapping[str, str]]) -> None:
    output().print()
    for name in TREES:
        limits = TREES.make(name).limits
        ways = ", ".join(sorted(kind.__name__ for kind in limits.proposes))
        rules = [rule for rule in VERIFIERS if _fits(rule, limits.proposes, limits.max_width)]
        most = f"at most {limits.max_width} a node"
        show(f"tree {name} draws {ways} candidates, {most}: {', '.join(rules)}")
    output().print()
    for name, rules in defaults.items():
        ways_of = {
            rule: [way for way in rules if way and rules[way] == rule] for rule in rules.values()
        }
        usual = [f"{rule} ({', '.join(own)})" if own else rule for rule, own in ways_of.items()]
        show(f"tree {name} is verified by {', '.join(usual)} where no verifier is named")


def _list_models(*, as_json: bool, markdown: bool) -> None:
    known = {
        name: {
            "about": model.about,
            "head": model.head,
            "rounded": dict(model.rounded),
            "obstacle": obstacle(name),
        }
        for name, model in NAMED.items()
    }
    if as_json:
        print(json.dumps(known))
        return
    table = plain_table("models", "name")
    for column in ("model", "drafted by", "rounded weights beside exact ones", "here"):
        table.add_column(column)
    for name, model in known.items():
        rounded = "\n".join(f"{kind}: {words}" for kind, words in model["rounded"].items())
        table.add_row(name, model["about"], model["head"], rounded, model["obstacle"] or "yes")
    print_tables([table], markdown=markdown)


def _list_cache(*, clears: bool, as_json: bool, markdown: bool) -> None:
    folder = cache_folder()
    try:
        rows = kept()
        if clears:
            for row in rows:  # what a running process has mapped stays readable for it
                shutil.rmtree(row.path)
    except OSError as error:
        raise OptionError(f"the cache in {folder}: {error}") from error
    size = sum(one.num_bytes for one in rows)
    if as_json:
        listed = [dataclasses.asdict(one) | {"path": str(one.path)} for one in rows]
        document = {"folder": str(folder), "bytes": size, "cleared": clears, "kept": listed}
        print(json.dumps(document))
        return
    if not clears and rows:
        table = plain_table("cache", "what", ("MB", "days unused"))
        table.add_column("folder", overflow="fold")
        for one in rows:
            table.add_row(one.what, f"{one.num_bytes / 1e6:.1f}", f"{one.days:.0f}", one.path.name)
        print_tables([table], markdown=markdown)
    done = "freed from" if clears else "in"
    show(
        f"{size / 1e6:.1f} MB {done} {folder}" + ("" if clears else "; --clear-cache deletes them")
    )


def _described(registry: Registry[Any], name: str) -> dict[str, Any]:
    """Return name, first line of the docstring, settings with defaults, and those that have none."""
    settings = registry.settings(name)
    required = [key for key, value in settings.items() if value is dataclasses.MISSING]
    return {
        "name": name,
        "summary": registry.summary(name),
        "settings": {k: _plain(value) for k, value in settings.items() if k not in required},
        "required": required,
    }


def _plain(value: object) -> object:
    """Return a default; a tree as a user writes it."""
    if isinstance(value, ByRequest):
        return f"{_plain(value.greedy)} where greedy, else {_plain(value.sampled)}"
    if isinstance(value, TreeBuilder):
        return f"{TREES.name_of(value)}{repr(value).removeprefix(type(value).__name__)}"
    return value


def legality() -> dict[str, dict[str, str]]:
    """Return `yes`, `one candidate` or `no` for every verifier and way of drawing.

    `Arbitrary` nodes are always target-walked.
    """
    return {name: {kind.__name__: _legal(name, kind) for kind in PROPOSALS} for name in VERIFIERS}


def _legal(verifier: str, kind: type) -> str:
    if _fits(verifier, (kind,), 2):
        is_walked = kind is Arbitrary and Arbitrary not in VERIFIERS.make(verifier).accepts
        return "target walk" if is_walked else "yes"
    return "one candidate" if _fits(verifier, (kind,), 1) else "no"


def _fits(verifier: str, proposes: Any, max_width: int | None) -> bool:  # noqa: ANN401 (types of proposals)
    return unsupported_reason(VERIFIERS.make(verifier), proposes, max_width) is None


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
            rules[name][kind] = VERIFIERS.name_of(rule)
    return rules
