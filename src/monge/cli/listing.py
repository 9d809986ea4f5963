"""`monge list`."""

import dataclasses
import json
from typing import Annotated, Any, Final

from rich.console import Console
from rich.table import Table

from monge.cli import options
from monge.cli.console import output, reported
from monge.cli.tables import plain_table, print_tables
from monge.control.registry import CONTROLLERS
from monge.core.clocks import SharedClocks
from monge.core.errors import OptionError
from monge.core.hub_pairs import HubPairs
from monge.core.independent import Independent
from monge.core.proposal import Arbitrary, Deterministic, Iid, Mixed, WithoutReplacement
from monge.core.registry import Registry
from monge.core.systematic import Systematic
from monge.defaults import default_rule
from monge.draft.registry import DRAFTERS
from monge.draft.tree.base import ByRequest, TreeBuilder
from monge.draft.tree.children import CHILDREN
from monge.draft.tree.registry import TREES
from monge.loading.sources import NAMED, obstacle
from monge.verify.base import unsupported_reason
from monge.verify.registry import VERIFIERS

ROOMS: Final[tuple[tuple[str, Registry[Any]], ...]] = (
    ("verifiers", VERIFIERS),
    ("drafters", DRAFTERS),
    ("trees", TREES),
    ("controllers", CONTROLLERS),
)
PROPOSALS: Final = (
    Deterministic,
    Iid,
    Independent,
    WithoutReplacement,
    Mixed,
    HubPairs,
    Systematic,
    SharedClocks,
    Arbitrary,
)


Models = Annotated[
    bool,
    options.option("--models", help="Show the models that can be named.", panel=options.OUTPUT),
]


@reported
def list_parts(
    *,
    models: Models = False,
    as_json: options.Json = False,
    markdown: options.Markdown = False,
) -> None:
    """Show the verifiers, drafters, trees and controllers that can be named.

    Settings are shown too. They are written in parentheses after a name: `--tree "fixed_width((4,
    2), children='iid')"`.
    """
    if models:
        _list_models(as_json=as_json, markdown=markdown)
        return
    rooms = {room: [describe(registry, name) for name in registry] for room, registry in ROOMS}
    if as_json:
        more = {"legal": legality(), "exactness": exactness(), "defaults": default_verifiers()}
        print(json.dumps(rooms | more))
        return
    tables = [_room_table(room, parts) for room, parts in rooms.items()]
    print_tables([*tables, _legality_table()], markdown=markdown)
    _print_defaults(output())


def _list_models(*, as_json: bool, markdown: bool) -> None:
    """Targets by name: which they are, what drafts for them, and what rounding changes."""
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


def describe(registry: Registry[Any], name: str) -> dict[str, Any]:
    """Name, first line of the docstring, settings with their defaults, and those that have none."""
    options_of = registry.settings(name)
    return {
        "name": name,
        "summary": registry.summary(name),
        "settings": {
            key: _plain(value)
            for key, value in options_of.items()
            if value is not dataclasses.MISSING
        },
        "required": [key for key, value in options_of.items() if value is dataclasses.MISSING],
    }


def _plain(value: object) -> object:
    """A default; a tree as a user writes it."""
    if isinstance(value, ByRequest):
        return f"{_plain(value.greedy)} where greedy, else {_plain(value.sampled)}"
    if isinstance(value, TreeBuilder):
        return f"{TREES.name_of(value)}{repr(value).removeprefix(type(value).__name__)}"
    return value


def legality() -> dict[str, dict[str, str]]:
    """For every verifier and way of drawing.

    `yes`, `one candidate`, or `no`; `Arbitrary` nodes are always target-walked.
    """
    return {name: {kind.__name__: _legal(name, kind) for kind in PROPOSALS} for name in VERIFIERS}


def exactness() -> dict[str, str]:
    """How it is known, for every verifier, that texts have the target's law."""
    return {name: _exactness(name) for name in VERIFIERS}


def _exactness(verifier: str) -> str:
    rule = VERIFIERS.make(verifier)
    if not rule.is_lossless:
        return "lossy"
    if not VERIFIERS.is_built_in(verifier):
        return "claimed: monge acceptance " + verifier
    return "tested: enumeration" if rule.is_enumerable else "tested: integration"


def default_verifiers() -> dict[str, dict[str, str]]:
    """The verifier of every tree where the user names none, for each way of drawing children.

    `""` where a tree has its own.
    """
    rules: dict[str, dict[str, str]] = {}
    for name in TREES:
        trees = {"": TREES.make(name)}
        if "children" in TREES.settings(name):
            trees = {kind: tree for kind in CHILDREN if (tree := _drawn_by(name, kind)) is not None}
        rules[name] = {
            kind: VERIFIERS.name_of(default_rule(tree.limits.proposes, tree.limits.max_width))
            for kind, tree in trees.items()
        }
    return rules


def _drawn_by(tree: str, kind: str) -> TreeBuilder | None:
    """A tree with its usual sizes whose children are drawn in a given way.

    `None` where it is too narrow for that.
    """
    try:
        return TREES.make(tree, children=kind)
    except OptionError:
        return None


def tree_proposals(tree: TreeBuilder) -> str:
    """How a tree draws its children, in words."""
    return ", ".join(sorted(kind.__name__ for kind in tree.limits.proposes))


def _legal(verifier: str, kind: type) -> str:
    rule = VERIFIERS.make(verifier)
    if unsupported_reason(rule, (kind,), 2) is None:
        return "yes" if kind is not Arbitrary or Arbitrary in rule.accepts else "target walk"
    return "one candidate" if unsupported_reason(rule, (kind,), 1) is None else "no"


def _room_table(room: str, parts: list[dict[str, Any]]) -> Table:
    table = plain_table(room, "name")
    table.add_column("what it does", ratio=3)
    table.add_column("settings and defaults", ratio=2)
    for part in parts:
        settings = [f"{key}={value!r}" for key, value in part["settings"].items()]
        table.add_row(
            part["name"], part["summary"], ", ".join([*part["required"], *settings]) or "-"
        )
    return table


def _legality_table() -> Table:
    columns = ["known by", *(kind.__name__ for kind in PROPOSALS)]
    table = plain_table("which verifier is exact for which candidates", "verifier", columns, "left")
    known = exactness()
    for name, kinds in legality().items():
        table.add_row(name, known[name], *kinds.values())
    return table


def _print_defaults(console: Console) -> None:
    console.print()
    for name in TREES:
        tree = TREES.make(name)
        legal = [
            rule
            for rule in VERIFIERS
            if unsupported_reason(VERIFIERS.make(rule), tree.limits.proposes, tree.limits.max_width)
            is None
        ]
        console.print(
            f"tree {name} draws {tree_proposals(tree)} candidates, at most "
            f"{tree.limits.max_width} a node: {', '.join(legal)}"
        )
    console.print()
    for name, rules in default_verifiers().items():
        kinds_of = {
            rule: [kind for kind, own in rules.items() if kind and own == rule]
            for rule in rules.values()
        }
        shown = [
            f"{rule} ({', '.join(kinds)})" if kinds else rule for rule, kinds in kinds_of.items()
        ]
        console.print(f"tree {name} is verified by {', '.join(shown)} where no verifier is named")
