"""`monge replay`."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich.console import Console
from rich.table import Table

from monge.cli import options
from monge.cli.bench import call_bar
from monge.cli.console import notes, output, quiet_host, reported
from monge.cli.networks import load_draft
from monge.cli.out import check_out_folder
from monge.core.errors import OptionError
from monge.engine.loading import load_network, load_tokenizer
from monge.replay.compare import REPEATS, Settings, compare
from monge.replay.configuration import grid
from monge.replay.file import read_log
from monge.replay.play import DEPTH
from monge.replay.record import identity_of

OUT: Final = Path("replay")
REPLAY: Final = "Replay"


def _many(name: str, help: str, default: str) -> Any:  # noqa: ANN401 (typer's own type is private)
    return options.option(name, help=f"{help}; may be repeated.", panel=options.SPECULATION, default=default)


Repeats = Annotated[int, typer.Option("--repeats", help="Passes over the log; drafting is random.", rich_help_panel=REPLAY)]
Depth = Annotated[int, typer.Option("--depth", help="Deepest fixed window, and of the oracle.", rich_help_panel=REPLAY)]


@reported
def replay(
    log: Annotated[Path, typer.Argument(help="A log made by `monge log`.")],
    *,
    draft: options.Draft = None,
    dtype: options.Dtype = None,
    device: options.Device = None,
    drafter: Annotated[list[str] | None, _many("--drafter", "What proposes tokens", "the library's")] = None,
    tree: Annotated[list[str] | None, _many("--tree", "Shape of the proposals", "the library's")] = None,
    verifier: Annotated[list[str] | None, _many("--verifier", "Acceptance rule", "the library's")] = None,
    controller: Annotated[list[str] | None, _many("--controller", "How much to draft", "fixed")] = None,
    draft_temperature: options.DraftTemperature = None,
    draft_top_k: options.DraftTopK = None,
    check_target: Annotated[
        str | None, options.option("--check-target", help="Refuse the log if this is not its target.", panel=options.MODELS)
    ] = None,
    repeats: Repeats = REPEATS,
    depth: Depth = DEPTH,
    seed: Annotated[int, typer.Option("--seed", help="Of all passes.", rich_help_panel=REPLAY)] = 0,
    out: Annotated[Path, options.option("--out", help="Folder for JSON and plots.", panel=options.OUTPUT, default=OUT)] = OUT,
    plots: Annotated[bool, options.option("--plots/--no-plots", help="Draw PNG plots.", panel=options.OUTPUT)] = True,
    as_json: options.Json = False,
) -> None:
    """Say what other parts would have done on a logged run: no target pass, only the drafter runs.

    All combinations of the parts that are named are replayed; each combination that does not fit together, or that the log
    cannot answer exactly, is listed with the reason. *Regret* is the share of speed lost to the best fixed window in hindsight,
    and to an oracle that picks the best window at every position knowing all chances of acceptance.

    **Examples**

        monge replay run.mlog
        monge replay run.mlog --tree "chain(2)" --tree "chain(6)" --verifier single_draft --verifier block
        monge replay run.mlog --tree "chain(8)" --controller fixed --controller on_the_fly --json
    """
    quiet_host()
    check_out_folder(out)
    draw = plotter() if plots else None
    if repeats < 1 or depth < 1:
        raise OptionError(f"--repeats and --depth must be at least 1; got {repeats} and {depth}")
    found = read_log(log)
    if check_target is not None:
        network = load_network(check_target)
        found.check_model(identity_of(network, load_tokenizer(check_target), check_target), "the target")
    parts = {"drafter": drafter, "tree": tree, "verifier": verifier, "controller": controller}
    chosen = list(grid(**parts, draft_temperature=[draft_temperature], draft_top_k=[draft_top_k]))
    model = load_draft(found, draft, **options.given(dtype=dtype, device=device))
    settings = Settings(repeats=repeats, depth=depth, seed=seed)
    with call_bar(notes()) as watch:
        watch.total(len(chosen) * len(found.texts) * (1 + repeats))
        document = compare(chosen, found, model, settings, on_text=lambda: watch.step("replaying"))
    files = write_document(document, out, "replay.json") + ([] if draw is None else draw(document["replayed"], out))
    show(document)
    output().print("written: " + ", ".join(map(str, files)), soft_wrap=True)
    if as_json:
        print(json.dumps(document))
    if not document["replayed"]:
        raise typer.Exit(2)


def show(document: dict[str, Any]) -> None:
    """The table, and what could not be answered."""
    console = Console(file=sys.stdout, highlight=False, width=None if sys.stdout.isatty() else 120)
    if document["replayed"]:
        console.print(table(document["replayed"]))
        tags = {tag for found in document["replayed"] for tag in found["tags"]}
        if len(tags) > 1:
            console.print(tag_table(document["replayed"]))
    if any(found["stands_in"] for found in document["replayed"]):
        console.print(
            "compact log: rejected candidates stand in for those that complete laws would give; acceptance is exact",
            style="dim",
            soft_wrap=True,
        )
    for found in document["replayed"]:
        if found["untimed"] is not None:
            console.print(f"{found['label']}: {found['untimed']}", style="dim", markup=False, soft_wrap=True)
    for refused in document["refused"]:
        console.print(f"{refused['label']}: {refused['reason']}", style="yellow", markup=False, soft_wrap=True)


def table(replayed: Sequence[dict[str, Any]]) -> Table:
    """The main figures of every configuration."""
    title = "replayed without the target; best: fixed window in hindsight; regret: share of speed lost to it, and to the oracle"
    shown = _plain_table(title, "configuration")
    for column in ("tokens a round", "tokens/s", "speed-up", "window", "best", "regret", "to oracle"):
        shown.add_column(column, justify="right", no_wrap=True)
    for found in replayed:
        efficiency, regret = found["block_efficiency"], found["controller_regret"]
        speed, gain = found["tokens_per_s"], found["speedup"]
        shown.add_row(
            found["label"],
            f"{efficiency['mean']:.3f} ({efficiency['low']:.2f}..{efficiency['high']:.2f})",
            "-" if speed is None else f"{speed['mean']:.1f}",
            "-" if gain is None else f"{gain['mean']:.2f}x",
            f"{found['mean_window']:.1f}",
            str(found["hindsight"]["best_window"]),
            f"{100 * regret['best_fixed']:.1f}%",
            f"{100 * regret['oracle']:.1f}%",
        )
    return shown


def tag_table(replayed: Sequence[dict[str, Any]]) -> Table:
    """Tokens a round, and the speed-up, by kind of text."""
    tags = list(dict.fromkeys(tag for found in replayed for tag in found["tags"]))
    shown = _plain_table("tokens a round (and speed-up) by kind of text", "configuration")
    for tag in tags:
        shown.add_column(tag, justify="right", no_wrap=True)
    for found in replayed:
        cells: list[str] = []
        for tag in tags:
            figures = found["tags"][tag]
            gain = "" if figures["speedup"] is None else f" ({figures['speedup']['mean']:.2f}x)"
            cells.append(f"{figures['block_efficiency']['mean']:.2f}{gain}")
        shown.add_row(found["label"], *cells)
    return shown


def write_document(document: dict[str, Any], folder: Path, name: str) -> list[Path]:
    """The document as JSON.

    Raises:
        OptionError: If the folder cannot be written to.
    """
    path = folder / name
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise OptionError(f"cannot write results to {str(folder)!r}: {error}") from error
    return [path]


def plotter() -> Any:  # noqa: ANN401 (matplotlib is optional)
    """The drawing function; asked for before anything runs."""
    try:
        from monge.replay.plots import write_plots
    except ImportError as error:
        raise OptionError("plots need matplotlib: pip install 'monge[bench]', or run with --no-plots") from error
    return write_plots


def _plain_table(title: str, first: str) -> Table:
    shown = Table(title=title, title_justify="left", title_style="bold", header_style="dim", show_edge=False, pad_edge=False)
    shown.add_column(first, style="bold cyan", overflow="fold")
    return shown
