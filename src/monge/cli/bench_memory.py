"""`monge bench memory`."""

import json
import sys
from dataclasses import replace
from typing import Annotated, Any, Final

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from monge.bench.memory import MIB, MemorySettings, measure
from monge.cli import options
from monge.cli.bench_options import MEASURING
from monge.cli.console import notes, quiet_host, reported

_DEFAULT: Final = MemorySettings()


@reported
def memory(
    *,
    backend: Annotated[
        list[str] | None,
        options.option("--backend", help="May be repeated.", panel=MEASURING, default=", ".join(_DEFAULT.backends)),
    ] = None,
    rounds: Annotated[
        int | None, options.option("--rounds", help="Rounds in every backend.", panel=MEASURING, default=_DEFAULT.rounds)
    ] = None,
    samples: Annotated[
        int | None, options.option("--samples", help="Looks at memory.", panel=MEASURING, default=_DEFAULT.samples)
    ] = None,
    max_new_tokens: Annotated[
        int | None,
        options.option("--max-new-tokens", help="Length of every text.", panel=MEASURING, default=_DEFAULT.max_new_tokens),
    ] = None,
    tree: Annotated[
        str | None, options.option("--tree", help="Shape of the drafts.", panel=MEASURING, default=_DEFAULT.tree)
    ] = None,
    temperature: Annotated[
        float | None, options.option("--temperature", help="0 is greedy.", panel=MEASURING, default=_DEFAULT.temperature)
    ] = None,
    target: options.Target = None,
    draft: options.Draft = None,
    dtype: options.Dtype = None,
    threads: options.Threads = None,
    as_json: options.Json = False,
) -> None:
    """Decode thousands of rounds in every backend and say what the process holds, at its most and as time passes.

    Growth is that from the middle of the run to its end. Every backend runs in a process of its own. With `--json` the last
    line of standard output is one JSON object.

    **Examples**

        monge bench memory --threads 1
        monge bench memory --backend compiled --rounds 100000
    """
    quiet_host()
    given = options.given(
        rounds=rounds, samples=samples, max_new_tokens=max_new_tokens, tree=tree, temperature=temperature, threads=threads
    )
    loading = tuple(options.given(target=target, draft=draft, dtype=dtype).items())
    chosen = {} if not backend else {"backends": tuple(backend)}
    document = measure(replace(_DEFAULT, **chosen, **given, options=loading), notes().print)
    report(document)
    if as_json:
        print(json.dumps(document))


def report(document: dict[str, Any]) -> None:
    """A row a backend, in MiB, and below it what could not run."""
    console = Console(file=sys.stdout, highlight=False, width=None if sys.stdout.isatty() else 110)
    shown = Table(title="resident memory (MiB)", title_justify="left", box=SIMPLE_HEAD)
    columns = ("backend", "rounds", "loaded", "middle", "end", "growth", "peak")
    for column in columns:
        shown.add_column(column, justify="left" if column == "backend" else "right", no_wrap=True)
    for one in document["backends"]:
        sizes = (f"{one[name] / MIB:.1f}" for name in columns[2:])
        shown.add_row(one["backend"], str(one["samples"][-1]["round"]), *sizes)
    console.print(shown)
    for name, reason in document["missing"].items():
        console.print(f"{name}: {reason}", style="dim", markup=False, soft_wrap=True)
