"""The `monge` command: which commands there are, and where they are found when they run."""

from importlib.metadata import PackageNotFoundError, version
from typing import Annotated, Final

import typer

from monge.cli.lazy import Command, group

BENCH: Final = {
    "decode": Command(
        place="bench_decode:decode",
        help="Compare ways of decoding the same prompts with the same networks.",
    ),
    "micro": Command(
        place="bench_micro:micro",
        help="Time one forward in every backend, and the reading of prompts.",
    ),
}
REPLAY: Final = {
    "record": Command(
        place="replay:record",
        help="Let the target write once, and keep its distributions and its times.",
    ),
    "run": Command(
        place="replay:run",
        first="make a log with `monge replay record`",
        help="Compare drafters, trees, verifiers and controllers on a recorded run, without the target.",
    ),
}
TRAIN: Final = {
    "shape": Command(
        place="train:shape",
        help="Fit a SHAPE head to a target: it drafts from the target's own hidden states.",
    ),
    "medusa": Command(
        place="train:medusa",
        help="Train Medusa heads on text that the target writes, in the published format.",
    ),
    "eagle3": Command(
        place="train:eagle3",
        help="Train an EAGLE-3 head on answers that the target writes, in the published format.",
    ),
    "eagle": Command(
        place="train:eagle",
        help="Train an EAGLE head on text that the target writes, in the published format.",
    ),
}
COMMANDS: Final = {
    "generate": Command(place="generate:generate", help="Continue a prompt, or many at once."),
    "chat": Command(place="chat:chat", help="Talk with a model, turn by turn."),
    "serve": Command(
        place="serve:serve",
        help="Serve a model over HTTP, as the OpenAI API does.",
        first="target",
    ),
    "batch": Command(
        place="batch:batch",
        help="Complete every row of a file.",
        first="give a file of rows, *.jsonl or *.parquet",
    ),
    "list": Command(
        place="listing:list_parts",
        help="Show the verifiers, drafters, trees and controllers that can be named.",
    ),
    "demo": Command(
        place="demo:demo",
        help="Chat with SmolLM2, or complete with the built-in pair, and time "
        "it beside transformers.",
    ),
    "acceptance": Command(
        place="acceptance:acceptance",
        help="Compute how often every acceptance rule keeps a drafted token, exactly.",
        is_early=False,  # its --tree is a file
    ),
    "tune": Command(
        place="tune:tune", help="Find the fastest configuration for your prompts on this machine."
    ),
    "audit": Command(
        place="audit:audit",
        help="Test whether a server samples from the distribution of its target model.",
    ),
    "certify": Command(
        place="certify:certify",
        help="Replay the record of a run, and check that every round of it is exact.",
        first="make one with `monge generate --certificate FILE`",
    ),
    "replay": group(
        "Record a run of the target, and replay other parts on it.",
        REPLAY,
    ),
    "train": group("Train heads that draft.", TRAIN),
    "bench": group(
        "Measure speed side by side.",
        BENCH,
    ),
}


def _print_version(wanted: bool) -> bool:
    if wanted:
        typer.echo(
            ", ".join(f"{name} {_version(name)}" for name in ("monge", "torch", "transformers"))
        )
        raise typer.Exit
    return wanted


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "(not installed)"


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


app = group(
    str(_root.__doc__),
    COMMANDS,
    name="monge",
    add_completion=True,
    callback=_root,
)


def main() -> None:
    """Console script."""
    app()
