"""The `monge` command: its commands, and their places."""

from typing import Annotated, Final

import typer

from monge.cli.lazy import group
from monge.core.extras import installed_version

COMMANDS: Final = {
    "generate": "generate",
    "chat": "chat",
    "serve": "serve",
    "batch": "batch",
    "list": "listing:list_components",
    "demo": "demo",
    "acceptance": "acceptance",
    "tune": "tune",
    "audit": "audit",
    "train": group(
        "Train heads that draft.",
        {"shape": "train:shape", "eagle3": "train:eagle3"},
    ),
    "bench": group(
        "Measure speed side by side.",
        {"decode": "bench_decode:decode", "micro": "bench_micro:micro"},
    ),
}


def _print_version(wanted: bool) -> bool:
    if wanted:
        names = ("monge", "torch", "transformers")
        said = (f"{name} {installed_version(name) or '(not installed)'}" for name in names)
        typer.echo(", ".join(said))
        raise typer.Exit
    return wanted


def _root(
    show_version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """Lossless speculative decoding, seen as optimal transport.

    A small drafter proposes several tokens, the target model checks them in one forward, and an
    acceptance rule keeps what leaves the target's distribution exactly as it was. Without
    `--target`, the pair of models that ships with the package is used.
    """


app = group(str(_root.__doc__), COMMANDS, _root, name="monge", add_completion=True)
