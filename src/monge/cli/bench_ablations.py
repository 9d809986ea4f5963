"""`monge bench ablations`."""

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from monge.bench.ablations import ablate, num_replays
from monge.cli import options
from monge.cli.bench import call_bar
from monge.cli.console import notes, quiet_host, reported
from monge.cli.networks import load_draft
from monge.cli.replay import Repeats
from monge.core.errors import OptionError
from monge.replay.compare import REPEATS, Settings
from monge.replay.file import read_log


@reported
def bench_ablations(
    log: Annotated[Path, typer.Argument(help="A log made by `monge log`.")],
    *,
    draft: options.Draft = None,
    dtype: options.Dtype = None,
    device: options.Device = None,
    repeats: Repeats = REPEATS,
    seed: Annotated[int, typer.Option("--seed", help="Of all passes.", rich_help_panel="Replay")] = 0,
    as_json: options.Json = False,
) -> None:
    """Say what each setting of the adaptive controllers is worth on a log: predicted speed, one setting changed at a time.

    Length of the history, rate of the probes, every feature of the prompt, exploration. No target pass; times are those that
    were measured when the log was made. A pass takes some minutes on two cores.

    **Example**

        monge log --out run.mlog --temperature 1 && monge bench ablations run.mlog
    """
    quiet_host()
    if repeats < 1:
        raise OptionError(f"--repeats must be at least 1; got {repeats}")
    found = read_log(log)
    model = load_draft(found, draft, **options.given(dtype=dtype, device=device))
    if model is None:
        raise OptionError("ablations need a draft model; give --draft")
    settings = Settings(repeats=repeats, seed=seed)
    with call_bar(notes()) as watch:
        watch.total(num_replays(found, settings))
        rows = ablate(found, model, settings, on_text=lambda: watch.step("replaying"))
    console = Console(file=sys.stdout, highlight=False, width=None if sys.stdout.isatty() else 110)
    for name in dict.fromkeys(row["study"] for row in rows):
        console.print(_table(name, [row for row in rows if row["study"] == name]))
    if as_json:
        print(json.dumps({"texts": len(found.texts), "repeats": repeats, "seed": seed, "arms": rows}))


def _table(name: str, rows: list[dict[str, Any]]) -> Table:
    shown = Table("arm", "speed over the base's (95% over texts)", "tokens a round", "plain rounds", title=name)
    for row in rows:
        speed = row["speed"]
        shown.add_row(
            row["arm"],
            f"{speed['mean']:.3f} ({speed['low']:.3f}..{speed['high']:.3f})",
            f"{row['block_efficiency']:.2f}",
            f"{row['plain_share']:.0%}",
        )
    return shown
