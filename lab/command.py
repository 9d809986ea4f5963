"""Run `python -m lab.NAME` as a command."""

from collections.abc import Callable
from importlib import import_module
from typing import Any

import typer

from monge.cli.lazy import SETTINGS
from monge.core.extras import require


def app_of(command: Callable[..., None]) -> typer.Typer:
    """A program of one command."""
    app = typer.Typer(**SETTINGS)
    app.command()(command)
    return app


def run(command: Callable[..., None]) -> None:
    """Run a command with the arguments of this process."""
    app_of(command)()


def plotting(module: str, otherwise: str) -> Any:  # noqa: ANN401 (matplotlib is optional)
    """Import a module that draws, before anything is measured.

    Raises:
        OptionError: If matplotlib is missing.
    """
    require("lab", "a plot", otherwise=otherwise)
    return import_module(module)
