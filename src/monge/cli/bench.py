"""`monge bench`."""

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from monge.bench.decode import (
    PROMPTS_PER_TASK,
    QUICK,
    QUICK_PROMPTS_PER_TASK,
    Choice,
    Watch,
    compare,
    write_outcome,
)
from monge.bench.pair import load_pair
from monge.bench.provenance import busy_note
from monge.bench.report import table
from monge.bench.runner import Settings
from monge.bench.tasks import asked_prompts, interleaved
from monge.cli import bench_options as asked
from monge.cli import options
from monge.cli.bench_verify import verify
from monge.cli.console import notes, quiet_host, reported
from monge.cli.out import check_out_folder
from monge.core.errors import OptionError

OUT: Final = Path("bench-decode")

bench = typer.Typer(no_args_is_help=True, help="Measure speed side by side.", rich_markup_mode="markdown")
bench.command("verify")(verify)


@bench.callback()
def root() -> None:
    """Measure speed side by side."""


@bench.command("decode")
@reported
def decode(
    *,
    target: options.Target = None,
    draft: options.Drafts = None,
    dtype: options.Dtype = None,
    device: options.Device = None,
    attention: options.Attention = None,
    backend: options.Backend = None,
    draft_backend: options.DraftBackend = None,
    prompts: asked.Prompts = None,
    mixed: asked.Mixed = False,
    quick: asked.Quick = False,
    controllers: asked.Controllers = False,
    arm: asked.NamedArms = None,
    named_only: asked.NamedOnly = False,
    useless_draft: asked.UselessDraft = False,
    grow: asked.Grow = None,
    max_new_tokens: asked.MaxNewTokens = None,
    repeats: asked.Repeats = None,
    batch: asked.Batch = None,
    temperature: asked.Temperature = None,
    per_task: asked.PerTask = None,
    seed: asked.Seed = None,
    time_limit: asked.TimeLimit = None,
    clock: asked.Clock = None,
    threads: options.Threads = None,
    out: Annotated[Path, options.option("--out", help="Folder for JSON and plots.", panel=options.OUTPUT, default=OUT)] = OUT,
    plots: Annotated[bool, options.option("--plots/--no-plots", help="Draw PNG plots.", panel=options.OUTPUT)] = True,
    as_json: options.Json = False,
) -> None:
    """Compare ways of decoding: transformers plain, assisted and prompt lookup, and monge with its parts.

    All arms decode the same prompts with the same networks in this process, in turns. Without `--quick` the full matrix of
    drafters, trees and verifiers runs, which takes a quarter of an hour on two cores. With `--json` the last line of standard
    output is one JSON object.

    **Examples**

        monge bench decode --quick
        monge bench decode --out results --json | tail -n 1 > summary.json
        monge bench decode --controllers --mixed --batch 1 --batch 16
        monge bench decode --quick --useless-draft --arm "price: controller=goodput"
        monge bench decode --named-only --arm "price: controller=goodput" --repeats 30 --backend compiled
        monge bench decode --target ./my-target --draft ./my-draft --prompts my.jsonl --batch 1 --temperature 0
    """
    quiet_host()
    draw = _plotter() if plots else None
    options.set_threads(threads)
    check_out_folder(out)
    shown = asked_prompts(prompts, per_task=per_task, default=_default_prompts(quick))
    given = options.given(max_new_tokens=max_new_tokens, repeats=repeats, seed=seed, time_limit_s=time_limit, clock=clock)
    lists = {"batch_sizes": tuple(batch or ()), "temperatures": tuple(temperature or ())}
    settings = replace(QUICK if quick else Settings(), **given, **{name: some for name, some in lists.items() if some})
    choice = Choice(is_quick=quick, controllers=controllers, named=tuple(arm or ()), named_only=named_only)
    loading = options.given(dtype=dtype, device=device, attention=attention, backend=backend, draft_backend=draft_backend)
    pair = load_pair(target, draft, useless_draft=useless_draft, grow=grow, **loading)
    with call_bar(notes()) as watch:
        outcome = compare(pair, interleaved(shown) if mixed else shown, settings, choice=choice, watch=watch)
    files = write_outcome(outcome, out)
    files += [] if draw is None else draw(outcome.document["arms"], out)
    report(outcome.document, files)
    if as_json:
        print(json.dumps(outcome.document))
    _check_measured(outcome.document)


def _check_measured(document: dict[str, Any]) -> None:
    if all(arm["failure"] is not None for arm in document["arms"]):
        raise OptionError("every arm failed, so nothing was measured; the reasons are listed with the tables")


def report(document: dict[str, Any], files: Sequence[Path]) -> None:
    """The tables, the headline, and where the files are."""
    console = Console(file=sys.stdout, highlight=False, width=None if sys.stdout.isatty() else 110)
    for size in document["settings"]["batch_sizes"]:
        for temperature in document["settings"]["temperatures"]:
            cell = [arm for arm in document["arms"] if (arm["batch_size"], arm["temperature"]) == (size, temperature)]
            mode = "greedy" if temperature == 0 else f"temperature {temperature:g}"
            console.print(table(cell, f"{mode}, batch {size}, {len(document['prompts'])} prompts"))
            for arm in cell:
                if arm["failure"] is not None:
                    console.print(f"{arm['arm']}: {arm['failure']}", style="dim", markup=False, soft_wrap=True)
            console.print()
    for choice in document["assisted_tuning"]:
        console.print(tuning_line(choice), style="dim", markup=False)
    for name in ("speedup_over_plain", "speedup_over_assisted", "engine_efficiency", "block_efficiency"):
        value = document[name]
        console.print(f"{name:<24}{'not measured' if value is None else format(value, '.3f')}")
    if (slowest := document["slowest_adaptive"]) is not None:
        place = f"{slowest['arm']}, temperature {slowest['temperature']:g}, batch {slowest['batch_size']}"
        console.print(
            f"{'slowest_adaptive':<24}{slowest['ratio_to_faster_plain']:.3f} of plain decoding ({place})", markup=False
        )
    for record in document["arms"]:
        if record.get("prepare_s") and (record["batch_size"], record["temperature"]) == _first_cell(document):
            console.print(
                f"{record['arm']}: {record['prepare_s']:.1f} s of measuring costs, not counted", style="dim", markup=False
            )
    if document["settings"]["clock"] == "cpu":
        console.print("seconds are processor time of this process, not of the wall", style="dim")
    if (note := busy_note()) is not None:
        console.print(f"{note}; fewer --threads may help", style="yellow", markup=False)
    console.print("written: " + ", ".join(map(str, files)), soft_wrap=True)


def tuning_line(choice: dict[str, Any]) -> str:
    """One candidate of the search for the host's best settings."""
    if "failure" in choice:
        return f"tuning assisted failed: {choice['failure']}"
    mode = "greedy" if choice["temperature"] == 0 else f"temperature {choice['temperature']:g}"
    return f"assisted, {mode}, {choice['num_assistant_tokens']} draft tokens: {choice['tokens_per_s']:.1f} tokens/s"


@contextmanager
def call_bar(console: Console) -> Iterator[Watch]:
    """A progress bar of calls, on a terminal."""
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=None)
        started = False

        def total(count: int) -> None:
            nonlocal started
            started = True
            progress.reset(task, total=count)

        def step(name: str) -> None:
            progress.update(task, description=name, advance=int(started))

        yield Watch(total=total, step=step)


def _first_cell(document: dict[str, Any]) -> tuple[int, float]:
    return document["settings"]["batch_sizes"][0], document["settings"]["temperatures"][0]


def _default_prompts(quick: bool) -> int:
    return QUICK_PROMPTS_PER_TASK if quick else PROMPTS_PER_TASK


def _plotter() -> Any:  # noqa: ANN401 (matplotlib is optional)
    """The drawing function; asked for before anything is measured."""
    try:
        from monge.bench.plots import write_plots
    except ImportError as error:
        raise OptionError("plots need matplotlib: pip install 'monge[bench]', or run with --no-plots") from error
    return write_plots
