"""Mistakes in names and files that are found before torch is imported, which takes seconds.

What is missed here is refused later, by the part that reads it.
"""

import ast
import re
from collections.abc import Iterable, Iterator, Sequence
from importlib.metadata import entry_points
from importlib.resources import files
from pathlib import Path
from typing import Final

from monge.config import read_config
from monge.core.errors import OptionError, unknown_name
from monge.loading.hub import check_model_name, nearest
from monge.options import ServeOptions
from monge.prompts import read_prompts

TABLES: Final = {
    "verifier": ("monge.verify.registry",),
    "drafter": ("monge.draft.registry",),
    "tree": ("monge.draft.tree.registry",),
    "controller": ("monge.control.windows", "monge.control.registry"),
    "backend": ("monge.backends.registry",),
}
"""Modules with the registries of parts that an option names."""
_MODELS: Final = {
    "target": ("monge.loading.sources",),
    "draft": ("monge.loading.sources", "monge.heads.readers.files"),
}
"""Modules with tables of models that need no folder."""
_PROMPTS: Final = ("prompts", "file", "data")
_NAME: Final = re.compile(r"\s*([A-Za-z_]\w*)\s*(\(|$)")


def check_early(arguments: Sequence[str], first: str | None = None) -> None:
    """Refuse names and files of a command line that cannot be right.

    Args:
        arguments: What follows the command's name.
        first: What a first argument that is no option names: `target`, or a file, and then what to
            do without it.

    Raises:
        MongeError: If a part, a model or a file is unknown, or a configuration cannot be read.
    """
    if {"-h", "--help"} & set(arguments):
        return
    if first is not None and arguments and not arguments[0].startswith("-"):
        if first == "target":
            _check(first, arguments[0])
        elif not Path(arguments[0]).exists():
            raise OptionError(f"{arguments[0]}: no such file{nearest(arguments[0])}; {first}")
    given = list(_options(arguments))
    for option, value in given:
        _check(option, value)
    for config in (value for option, value in given if option == "config"):
        for key, own in read_config(config, ServeOptions).items():
            option = key.replace("_", "-")
            if option in _MODELS or option in dict(given):
                continue  # another one may have been given, by place or by name
            for one in own if isinstance(own, list) else [own]:
                _check(option, str(one))


def _options(arguments: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Names of options without their dashes, and what stands beside them."""
    for text, following in zip(arguments, [*arguments[1:], "-"], strict=False):
        if text == "--":
            return
        option, is_joined, value = text.removeprefix("--").partition("=")
        if text.startswith("--") and (is_joined or not following.startswith("-")):
            yield option, value if is_joined else following


def _check(option: str, value: str) -> None:
    kind = option.removeprefix("draft-")
    if kind in TABLES:
        match = _NAME.match(value)
        if match is not None and match[1] not in names_of(kind):
            raise unknown_name(kind, match[1], names_of(kind))
    elif option in _MODELS:
        tables = (table for module in _MODELS[option] for table in _tables(module, ast.Dict))
        check_model_name(value, {"built-in"} | _keys(tables))
    elif option in _PROMPTS and not Path(value).exists():
        read_prompts(Path(value))


def names_of(kind: str) -> set[str]:
    """Names of parts in a registry, also those of installed packages."""
    tables = (table for module in TABLES[kind] for table in _tables(module, ast.Call))
    return {entry.name for entry in entry_points(group=f"monge.{kind}s")} | _keys(tables)


def _tables(module: str, kind: type[ast.Call] | type[ast.Dict]) -> Iterator[ast.expr]:
    """Tables that are values at the top of a module, or arguments of calls there."""
    for node in _parsed(module).body:
        value = node.value if isinstance(node, ast.Assign | ast.AnnAssign) else None
        if isinstance(value, kind):
            yield from value.args if isinstance(value, ast.Call) else [value]


def _keys(nodes: Iterable[ast.AST]) -> set[str]:
    keys = [key for node in nodes if isinstance(node, ast.Dict) for key in node.keys]
    return {str(key.value) for key in keys if isinstance(key, ast.Constant)}


def _parsed(module: str) -> ast.Module:
    """A module's text, which is not executed."""
    path = Path(str(files("monge"))).joinpath(*module.split(".")[1:]).with_suffix(".py")
    return ast.parse(path.read_text(encoding="utf-8"))
