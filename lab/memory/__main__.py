"""`python -m lab.memory`."""

import json
from dataclasses import replace
from typing import Any, Final

from rich.box import SIMPLE_HEAD
from rich.table import Table

from lab.command import run
from lab.memory.measure import MIB, MemorySettings, measure
from monge.cli import options
from monge.cli.console import notes, output, quiet_host, reported

_DEFAULT: Final = MemorySettings()


@reported
def main(
    *,
    backend: list[str] | None = options.measuring(
        None, "May be repeated.", ", ".join(_DEFAULT.backends)
    ),
    rounds: int | None = options.measuring(None, "Rounds in every backend.", _DEFAULT.rounds),
    samples: int | None = options.measuring(None, "Looks at memory.", _DEFAULT.samples),
    max_new_tokens: int | None = options.measuring(
        None, "Length of every text.", _DEFAULT.max_new_tokens
    ),
    tree: str | None = options.measuring(None, "Shape of the drafts.", _DEFAULT.tree),
    temperature: float | None = options.measuring(None, "0 is greedy.", _DEFAULT.temperature),
    target: options.Target = None,
    draft: options.Draft = None,
    dtype: options.Dtype = None,
    threads: options.Threads = None,
    as_json: options.Json = False,
) -> None:
    """Decode thousands of rounds in every backend and say what the process holds, at its most and as time passes.

    Growth is that from the middle of the run to its end. Every backend runs in a process of its
    own. With `--json` the last line of standard output is one JSON object.

    **Examples**

        python -m lab.memory --threads 1
        python -m lab.memory --backend compiled --rounds 100000
    """
    quiet_host()
    given = options.given(
        rounds=rounds,
        samples=samples,
        max_new_tokens=max_new_tokens,
        tree=tree,
        temperature=temperature,
        threads=threads,
    )
    loading = tuple(options.given(target=target, draft=draft, dtype=dtype).items())
    chosen = {} if not backend else {"backends": tuple(backend)}
    document = measure(replace(_DEFAULT, **chosen, **given, options=loading), notes().print)
    report(document)
    if as_json:
        print(json.dumps(document))


def report(document: dict[str, Any]) -> None:
    """A row a backend, in MiB, and below it what could not run."""
    console = output(110)
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


if __name__ == "__main__":
    run(main)
