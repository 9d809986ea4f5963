"""Run `python -m lab.NAME` as a command."""

from collections.abc import Callable

import typer

from monge.cli.lazy import SETTINGS


def app_of(command: Callable[..., None]) -> typer.Typer:
    """A program of one command."""
    app = typer.Typer(**SETTINGS)
    app.command()(command)
    return app


def run(command: Callable[..., None]) -> None:
    """Run a command with the arguments of this process."""
    app_of(command)()
