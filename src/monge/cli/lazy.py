"""Groups of commands whose modules are imported when a command runs or shows its help, and not before.

Torch and its host take seconds to import, which `monge --help`, `--version` and a mistyped name do
not need. Names of parts, models and files in a command line are checked before.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

from monge.cli.console import reported
from monge.cli.early import check_early

SETTINGS: dict[str, Any] = {"rich_markup_mode": "markdown", "pretty_exceptions_enable": False}


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A command that is imported when it is needed.

    Args:
        place: `module:function`; the module lies in `monge.cli`.
        help: The first line of the function's docstring, which lists of commands show.
        first: As for `check_early`.
        is_early: Whether its options are checked before it is imported.
    """

    place: str
    help: str
    first: str | None = None
    is_early: bool = True

    def function(self) -> Callable[..., None]:
        """The function, imported now."""
        module, _, name = self.place.partition(":")
        return getattr(import_module(f"monge.cli.{module}"), name)


def group(
    help: str,
    commands: Mapping[str, "Command | typer.Typer"],
    *,
    name: str | None = None,
    add_completion: bool = False,
    callback: Callable[..., None] | None = None,
) -> typer.Typer:
    """A group of lazy commands and of other groups.

    Args:
        help: What it is for.
        commands: By name, in the order in which they are listed.
        name: Of the program, for the outermost group.
        add_completion: Whether shells can install completion.
        callback: Options of the group itself.
    """

    class LazyGroup(TyperGroup):
        def __init__(self, **settings: Any) -> None:
            super().__init__(**settings)
            self.commands = {name: _listed(name, one) for name, one in commands.items()}

        def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:  # noqa: ANN401
            name, command, rest = super().resolve_command(ctx, args)
            lazy = None if command is None else commands[str(name)]
            if not isinstance(lazy, Command):
                return name, command, rest
            if lazy.is_early and not ctx.resilient_parsing:  # nothing is run for completions
                reported(check_early)(rest, lazy.first)
            return name, _loaded(str(name), lazy), rest

    app = typer.Typer(
        name=name,
        help=help,
        cls=LazyGroup,
        no_args_is_help=True,
        context_settings={"help_option_names": ["-h", "--help"]},
        add_completion=add_completion,
        **SETTINGS,
    )
    app.callback()(callback or _no_options)
    return app


def _no_options() -> None:
    """A group without options."""


def _listed(name: str, command: "Command | typer.Typer") -> Any:  # noqa: ANN401 (typer's own commands)
    """What stands in lists of commands.

    A group, or the name and the help of a command that is not imported yet.
    """
    if isinstance(command, Command):
        return TyperCommand(name, help=command.help, rich_markup_mode="markdown")
    made: Any = get_command(command)
    made.name = name
    return made


def _loaded(name: str, command: Command) -> Any:  # noqa: ANN401 (typer's own commands)
    app = typer.Typer(
        add_completion=False, context_settings={"help_option_names": ["-h", "--help"]}, **SETTINGS
    )
    app.command(name)(command.function())
    return get_command(app)
