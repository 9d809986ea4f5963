"""Groups of commands whose modules are imported when a command runs or shows its help, and not before.

Importing torch takes seconds, which `monge --help`, `--version` and a mistyped name do not need.
"""

import ast
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Final, cast

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

from monge.cli.console import reported, say
from monge.config import read_config
from monge.core.errors import OptionError, unknown_name
from monge.core.parts import FORMER_NAMES, HEADS, PARTS
from monge.loading.hub import check_model_name, nearest
from monge.options import (
    FORMER_KEYS,
    LoadOptions,
    SamplingOptions,
    ServeOptions,
    flag_of,
    options_of,
)
from monge.prompts import read_prompts

SETTINGS: Final[dict[str, Any]] = {
    "add_completion": False,
    "context_settings": {"help_option_names": ["-h", "--help"]},
    "pretty_exceptions_enable": False,
    "rich_markup_mode": "markdown",
}
_MODELS: Final = ("target", "draft")
_PROMPTS: Final = ("prompts", "file", "data")
NO_PROMPT: Final = (
    'no prompt; write one, e.g. monge generate "The history of", or use --prompts or a pipe'
)
_TEXTS: Final = ("--system", "--config", "--trace", "--html")
"""Options of `monge generate` with a value, beside those of `monge.options`."""
_NAME: Final = re.compile(r"\s*([A-Za-z_]\w*)\s*(\(|$)")
_FILES: Final = {
    "batch": "give a file of rows, *.jsonl",
}
"""Commands whose first argument is a file, and what to do without it."""


def group(
    help: str,
    places: Mapping[str, str | typer.Typer],
    callback: Callable[..., None] = lambda: None,
    **settings: Any,
) -> typer.Typer:
    """Return a group of commands.

    A place is that of a command in `monge.cli`, `module` for a function of that name or
    `module:function`, or another group. The callback has the options of the group itself.
    """

    class LazyGroup(TyperGroup):
        def __init__(self, **settings: Any) -> None:
            super().__init__(**settings)
            for name, place in places.items():
                lazy = TyperCommand(name, rich_markup_mode="markdown")
                command: Any = lazy if isinstance(place, str) else get_command(place)
                command.name = name
                self.commands[name] = command

        def get_command(self, ctx: Any, cmd_name: str) -> Any:  # noqa: ANN401 (typer's own types)
            command, place = super().get_command(ctx, cmd_name), places.get(cmd_name)
            if command is not None and isinstance(place, str):
                command.help = _first_line(place)
            return command

        def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:  # noqa: ANN401
            name, command, rest = super().resolve_command(ctx, args)
            place = places.get(str(name))
            if not isinstance(place, str):
                return name, command, rest
            flags = rest[: rest.index("--")] if "--" in rest else rest
            rest = [*map(_present_flag, flags), *rest[len(flags) :]]
            if not ctx.resilient_parsing:  # nothing is run for completions
                reported(check_early)(rest, place)
            app = typer.Typer(**SETTINGS)
            module, function = _split(place)
            app.command(name)(getattr(import_module(f"monge.cli.{module}"), function))
            return name, get_command(app), rest

    app = typer.Typer(help=help, cls=LazyGroup, no_args_is_help=True, **{**SETTINGS, **settings})
    app.callback()(callback)
    return app


def _present_flag(word: str) -> str:
    """Return a word of a command line with the present name of a flag that had another one."""
    flag, *value = word.split("=", 1)
    key = flag.removeprefix("--").replace("-", "_")
    if not flag.startswith("--") or key not in FORMER_KEYS:
        return word
    present = f"--{FORMER_KEYS[key].replace('_', '-')}"
    say(f"{flag} is {present} now; the next release takes no other name", "yellow")
    return "=".join((present, *value))


def _first_line(place: str) -> str:
    """Return what lists show of a command, the first line of its docstring, without importing it."""
    module, function = _split(place)
    path = Path(__file__).with_name(f"{module}.py")
    tree = ast.parse(path.read_text(encoding="utf-8")).body
    named = (node for node in tree if getattr(node, "name", None) == function)
    return (ast.get_docstring(cast(ast.FunctionDef, next(named))) or "").partition("\n")[0]


def _split(place: str) -> tuple[str, str]:
    module, _, function = place.partition(":")
    return module, function or module


def check_early(arguments: Sequence[str], place: str) -> None:
    """Refuse names and files of a command line that cannot be right, without importing torch.

    What is missed here is refused later, by the part that reads it. The arguments are those after
    the command's name.

    Raises:
        MongeError: If a component, a model or a file is unknown, or a configuration cannot be read.
    """
    if {"-h", "--help"} & set(arguments):
        return
    _check_place(place, arguments)
    given: dict[str, list[str]] = {}
    for text, following in zip(arguments, [*arguments[1:], "-"], strict=False):
        if text == "--":
            break
        option, is_joined, value = text.removeprefix("--").partition("=")
        if text.startswith("--") and (is_joined or not following.startswith("-")):
            given.setdefault(option, []).append(value if is_joined else following)
    groups = (ServeOptions,) if place == "serve" else ()
    for config in given.get("config", ()):
        for key, value in read_config(config, *groups).items():
            if key not in _MODELS:  # another one may be given by its place
                values = value if isinstance(value, list) else [value]
                given.setdefault(key.replace("_", "-"), [str(item) for item in values])
    for option, values in given.items():
        for value in values:
            _check(option, value)


def _check_place(place: str, arguments: Sequence[str]) -> None:
    if place == "generate" and sys.stdin.isatty() and not _has_prompt(arguments):
        raise OptionError(NO_PROMPT)
    if not arguments or arguments[0].startswith("-"):
        return
    if place == "serve":
        _check("target", arguments[0])
    elif place in _FILES and not Path(arguments[0]).exists():
        near = nearest(arguments[0])
        raise OptionError(f"{arguments[0]}: no such file{near}; {_FILES[place]}")


def _has_prompt(arguments: Sequence[str]) -> bool:
    """Return whether a word can be a prompt, or a file of prompts is named."""
    named = options_of(LoadOptions, SamplingOptions).items()
    valued = {*_TEXTS, *(flag_of(name, entry) for name, entry in named if entry.kind is not bool)}
    return any(
        word.partition("=")[0] in {"--", "--prompts", "--file"}
        or not (word.startswith("-") or before in valued)
        for before, word in zip(["", *arguments], arguments, strict=False)
    )


def _check(option: str, value: str) -> None:
    kind = option.removeprefix("draft-")
    if kind in PARTS:
        match = _NAME.match(value)
        if match is not None and match[1] not in names_of(kind) | FORMER_NAMES.keys():
            raise unknown_name(kind, match[1], names_of(kind))
    elif option in _MODELS:
        check_model_name(value, HEADS if option == "draft" else ())
    elif option in _PROMPTS and not Path(value).exists():
        read_prompts(Path(value))


def names_of(kind: str) -> set[str]:
    """Return the names of parts of a kind, also those of installed packages."""
    return {entry.name for entry in entry_points(group=f"monge.{kind}s")} | PARTS[kind].keys()
