"""`python -m lab.never_slower`."""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import geometric_mean
from typing import Any, Final

from rich.table import Table

from lab.command import run
from lab.never_slower.measure import DROP_IN, GOAL, Cell, measured_cells
from monge.backends.registry import BACKENDS
from monge.bench.arms import DEFAULT
from monge.bench.pair import load_pair
from monge.bench.provenance import busy_note, provenance
from monge.bench.runner import OnCall, Settings
from monge.cli import options
from monge.cli.bench_decode import mode as rules_in_words
from monge.cli.console import (
    plain_table,
    print_tables,
    quiet_host,
    show,
    write_document,
)
from monge.cli.progress import call_bar, working
from monge.core.errors import OptionError, unknown_name
from monge.options import LoadOptions, changed
from monge.prompts import as_message, read_prompts

PROMPTS: Final = Path(__file__).with_name("prompts.jsonl")
OUT: Final = Path("out/never-slower")
WAYS: Final = (DEFAULT, DROP_IN)
QUICK: Final = Settings(max_new_tokens=32, batch_sizes=(1, 4))
_FULL: Final = {"batch_sizes": (1, 4, 16), "temperatures": (0.0, 0.7, 1.0)}
_TOP_P: Final[dict[str, Any]] = {"temperatures": (0.7,), "top_p": 0.9}
_MOST_REPEATS: Final = 1000  # the time limit ends them


@options.command(
    only=options.NETWORKS, without=("repeats", "time_limit_s"), defaults=_FULL, quick=QUICK
)
def main(
    *,
    load: LoadOptions,
    prompts: Path | None = options.measuring(
        None, "*.jsonl with `task` and `prompt`, or text lines.", "those of this folder"
    ),
    task: list[str] | None = options.measuring(
        None, "A class of prompts; may be repeated.", "all of them"
    ),
    per_task: int | None = options.measuring(
        None, "Prompts of each class.", "all", "--prompts-per-task"
    ),
    way: list[str] | None = options.measuring(None, "A way of calling; may be repeated.", WAYS),
    quick: bool = options.switch(
        "--quick", options.MEASURING, "Five minutes: 2 prompts a class, 32 tokens, batches 1 and 4."
    ),
    settings: Settings,
    minutes: float | None = options.measuring(
        None, "Time for all cells; each is measured at least once.", 60
    ),
    threads: options.Threads = None,
    out: Path = options.option(OUT, options.OUTPUT, "Folder for JSON."),
    as_json: options.Json = False,
) -> None:
    """Compare the defaults with plain decoding, and show the worst cell first.

    Cells are classes of prompts, temperatures, batch sizes and ways of calling the library: as it
    is, and inside `transformers`. T = 0.7 is also measured with top-p 0.9, unless --top-k, --top-p
    or --min-p is given. Intervals are of 95 %, by resampling prompts. Prints Markdown; with `--json`
    the last line of standard output is one JSON object.

    **Examples**

        python -m lab.never_slower --quick
        python -m lab.never_slower --target smollm2 --draft smollm2-head --backend compiled
        python -m lab.never_slower --target smollm2 --draft smollm2-head --temperature 0.7 --top-p 0.9
        python -m lab.never_slower --target smollm2 --backend compiled --way drop-in --task chat --quick
    """
    quiet_host()
    options.set_threads(threads)
    options.check_out_folder(out)
    for name in way or ():
        if name not in WAYS:
            raise unknown_name("way", name, WAYS)
    shown = read_prompts(prompts or PROMPTS, per_task=per_task or (2 if quick else None))
    tasks = list(dict.fromkeys(one.task for one in shown))
    for name in task or ():
        if name not in tasks:
            raise unknown_name("class of prompts", name, tasks)
    chosen = [(name, kind) for name in task or tasks for kind in way or WAYS]
    total_s = 60 * (minutes or (5 if quick else 60))
    passes = [settings, *usual_top_p(settings)]
    limit_s = total_s / (len(chosen) * len(passes))
    passes = [replace(rules, repeats=_MOST_REPEATS, time_limit_s=limit_s) for rules in passes]
    loading = changed(load)
    target, draft = loading.pop("target", None), loading.pop("draft", None)
    with working("loading the models"):
        pairs: dict[str, Any] = dict.fromkeys(WAYS, load_pair(target, draft, **loading))
        pair = next(iter(pairs.values()))
        backend = BACKENDS.parse(pair.backend) if isinstance(pair.backend, str) else pair.backend
        # `accelerate` takes no matrices in a file's types: both arms of these cells have floats.
        if backend.keeps_file_types and any(kind == DROP_IN for _, kind in chosen):
            pairs[DROP_IN] = load_pair(target, draft, **{**loading, "backend": "compiled"})
    if target is None or getattr(pair.tokenizer, "chat_template", None):
        shown = tuple(map(as_message, shown))
    token_ids = {
        name: tuple(pair.encode(one) for one in shown if one.task == name) for name in tasks
    }
    before, cells = provenance(pair.target.device), list[Cell]()
    with call_bar() as tell:
        for number, (name, kind) in enumerate(chosen, start=1):
            on_call = named(tell, f"{number} of {len(chosen)}: {name}")
            for rules in passes:
                cells += measured_cells(
                    pairs[kind], name, kind, token_ids[name], rules, on_call=on_call
                )
    cells.sort(key=lowest)
    document: dict[str, Any] = {
        "worst": asdict(cells[0]),
        "cells": list(map(asdict, cells)),
        "settings": asdict(settings),
        "models": dict(pair.names),
        "target_model": repr(pair.target_model),
        "num_prompts": {name: len(ids) for name, ids in token_ids.items()},
        "provenance": before
        | {"load_average_after": provenance(pair.target.device)["load_average"]},
    }
    file = write_document(document, out, "never_slower.json")
    print_tables([table(cells)], markdown=True)
    for failure in dict.fromkeys(cell.failure for cell in cells):
        show(failure, "dim")
    if (note := busy_note()) is not None:
        show(note, "yellow")
    show(f"written: {file}")
    if as_json:
        print(json.dumps(document))
    if all(cell.failure is not None for cell in cells):
        raise OptionError("every cell failed, so nothing was measured; the reasons are listed")


def usual_top_p(settings: Settings) -> list[Settings]:
    """Return the settings of the cells with top-p, if there are any."""
    if settings.truncation or _TOP_P["temperatures"][0] not in settings.temperatures:
        return []
    return [replace(settings, **_TOP_P)]


def named(tell: OnCall, where: str) -> OnCall:
    """Say where a call is; how many calls there are is left to the time limit."""

    def on_call(arm: str, total: int | None = None) -> None:
        if total is None:
            tell(f"{where}, {arm}")

    return on_call


def lowest(cell: Cell) -> float:
    """The lower end of an interval, or the ratio where there is none; failures come last."""
    ends = (one for one in (cell.low, cell.ratio) if one is not None)
    return next(ends, math.inf)


def table(cells: Sequence[Cell]) -> Table:
    """Return a table of cells as they come, and how many reach the goal."""
    names = ("rules", "batch", "over plain", "95 % interval", "tokens/s", "plain")
    made = plain_table("The defaults over plain decoding", "prompts, way", names)
    for cell in cells:
        mode = rules_in_words(cell.temperature, cell.truncation)
        place = (f"{cell.task}, {cell.way}", mode, str(cell.batch_size))
        if cell.ratio is None:
            made.add_row(*place, "failed", "", "", "")
            continue
        interval = "one call" if cell.low is None else f"{cell.low:.3f} to {cell.high:.3f}"
        speeds = (f"{cell.tokens_per_s:.1f}", f"{cell.plain_tokens_per_s:.1f}")
        made.add_row(*place, f"{cell.ratio:.3f}", interval, *speeds)
    known = [cell for cell in cells if cell.low is not None]
    reached = sum(lowest(cell) >= GOAL for cell in known)
    made.caption = f"{reached} of {len(known)} intervals begin at {GOAL} or above"
    groups: dict[str, list[float]] = {}
    for cell in cells:
        if cell.ratio is not None:
            groups.setdefault(f"{cell.way}, batch {cell.batch_size}", []).append(cell.ratio)
    means = (f"{name}: {geometric_mean(ratios):.2f}" for name, ratios in groups.items())
    made.caption += f"; geometric means: {'; '.join(means)}"
    return made


if __name__ == "__main__":
    run(main)
