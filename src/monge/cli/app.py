"""The `monge` command."""

from typing import Annotated

import typer

from monge.bench.provenance import versions
from monge.cli.acceptance import acceptance
from monge.cli.audit import audit
from monge.cli.batch import batch
from monge.cli.bench import bench
from monge.cli.bench_ablations import bench_ablations
from monge.cli.bench_acceptance import bench_acceptance
from monge.cli.bench_capacity import bench_capacity
from monge.cli.bench_control import bench_control
from monge.cli.bench_drafters import drafters
from monge.cli.bench_grow import grow
from monge.cli.bench_heads import heads
from monge.cli.bench_memory import memory
from monge.cli.bench_peers import peers
from monge.cli.bench_serve import bench_serve
from monge.cli.bench_steps import steps
from monge.cli.chat import chat
from monge.cli.demo import demo
from monge.cli.generate import generate
from monge.cli.listing import list_parts
from monge.cli.log import log
from monge.cli.replay import replay
from monge.cli.report import report
from monge.cli.serve import serve
from monge.cli.train import train
from monge.cli.tune import tune

app = typer.Typer(
    name="monge",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("generate")(generate)
app.command("chat")(chat)
app.command("batch")(batch)
app.command("audit")(audit)
app.command("list")(list_parts)
app.command("demo")(demo)
app.command("acceptance")(acceptance)
bench.command("acceptance")(bench_acceptance)
bench.command("ablations")(bench_ablations)
bench.command("capacity")(bench_capacity)
bench.command("control")(bench_control)
bench.command("grow")(grow)
bench.command("drafters")(drafters)
bench.command("heads")(heads)
bench.command("memory")(memory)
bench.command("peers")(peers)
bench.command("serve")(bench_serve)
bench.command("steps")(steps)
app.command("log")(log)
app.command("replay")(replay)
app.command("tune")(tune)
app.command("serve")(serve)
app.add_typer(bench, name="bench")
app.add_typer(train, name="train")
app.add_typer(report, name="report")


def _print_version(wanted: bool) -> bool:
    if wanted:
        shown = versions("monge", "torch", "transformers")
        typer.echo(", ".join(f"{name} {number or '(not installed)'}" for name, number in shown.items()))
        raise typer.Exit
    return wanted


@app.callback()
def root(
    show_version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Lossless speculative decoding, seen as optimal transport.

    A small drafter proposes several tokens, the target model checks them in one forward, and an acceptance rule keeps what
    leaves the target's law exactly as it was. Without `--target`, the pair of models that ships with the package is used.
    """


def main() -> None:
    """Console script."""
    app()
