"""`python -m lab.gates`: measure again what `baselines.json` records, and compare."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import typer
from rich.table import Table

from lab.command import run
from monge.cli import options
from monge.cli.console import notes, output, reported
from monge.core.errors import MongeError, OptionError

BOUNDS = ("share", "least", "most")
BASELINES = Path(__file__).with_name("baselines.json")


@reported
def main(
    *,
    names: list[str] | None = options.option(
        None, options.RUNNING, "Only this gate; may be repeated.", "all", "--gate"
    ),
) -> None:
    """Run the commands of the recorded baselines and compare their figures.

    Exit status 1 if one does not hold. Gates that measure speed need a machine that does nothing
    else. Every gate names its command, the figure in the command's JSON, the recorded value, and a
    bound: `share`, the smallest share of the recorded value, or `least` or `most`, a number.
    `python -m lab.gates.house` compares counts of the sources with their ceilings.

    **Examples**

        python -m lab.gates
        python -m lab.gates --gate simulation
    """
    gates: dict[str, dict[str, Any]] = json.loads(BASELINES.read_text(encoding="utf-8"))
    unknown = sorted(set(names or ()) - gates.keys())
    if unknown:
        raise OptionError(f"--gate: there is no {unknown[0]!r}; there are {', '.join(gates)}")
    table = Table("gate", "figure", "recorded", "now", "bound", "")
    failed = False
    for name in names or gates:
        gate = gates[name]
        arms = measured(gate["command"])
        for figure in gate["figures"]:
            value = found(arms, figure["arm"], figure["field"])
            is_held = holds(figure, value)
            failed |= not is_held
            bound = ", ".join(f"{kind} {figure[kind]:g}" for kind in BOUNDS if kind in figure)
            label = ", ".join(map(str, figure["arm"].values()))
            cells = (f"{figure['recorded']:.6g}", f"{value:.6g}", bound)
            table.add_row(name, label, *cells, "holds" if is_held else "[red]fails[/]")
    output(120).print(table)
    if failed:
        raise typer.Exit(1)


def holds(figure: dict[str, Any], value: float) -> bool:
    """Return whether a figure is within all of its bounds."""
    return (
        value >= figure.get("share", 0.0) * figure["recorded"]
        and value >= figure.get("least", value)
        and value <= figure.get("most", value)
    )


def measured(command: list[str]) -> list[dict[str, Any]]:
    """The arms in the last line that a command prints.

    Raises:
        MongeError: If the command fails.
    """
    notes().print(f"python {' '.join(command)}", style="dim", markup=False, soft_wrap=True)
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, check=False)
    if done.returncode:
        raise MongeError(
            f"python {' '.join(command)} ended with {done.returncode}: {done.stderr.strip()[-300:]}"
        )
    return json.loads(done.stdout.strip().splitlines()[-1])["arms"]


def found(arms: list[dict[str, Any]], wanted: dict[str, Any], field: str) -> float:
    """A figure of the arm with these entries.

    `field` is a path such as `ratio_to_none_of_all.mean`.
    """
    value: Any = next(arm for arm in arms if all(arm[name] == one for name, one in wanted.items()))
    for name in field.split("."):
        value = value[name]
    return float(value)


if __name__ == "__main__":
    run(main)
