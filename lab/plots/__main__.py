"""`python -m lab.plots FILE`: draw what `monge bench decode`, `lab.matrix` or `monge generate --trace` wrote."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from lab.command import run
from monge.cli.console import output, reported
from monge.core.errors import OptionError
from monge.core.extras import require


@reported
def main(
    file: Annotated[Path, typer.Argument(help="The JSON file.", show_default=False)],
    out: Annotated[
        Path | None, typer.Option("--out", help="Folder of the plots; that of FILE by default.")
    ] = None,
) -> None:
    """Draw the plots of a result or a trace.

    **Examples**

        python -m lab.plots bench-decode/result.json
        python -m lab.plots rounds.json --out pictures
    """
    require("lab", "a plot")
    try:
        document: Any = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise OptionError(f"cannot read {str(file)!r}: {error}") from error
    folder = out or file.parent
    folder.mkdir(parents=True, exist_ok=True)
    if not isinstance(document, dict) or not document.keys() & {"arms", "completions"}:
        raise OptionError(
            f"{str(file)!r} is neither the result.json of `monge bench decode` nor a trace of "
            "`monge generate --trace`"
        )
    if "arms" in document:
        from lab.plots.decode import write_plots

        files = write_plots(document["arms"], folder)
    else:
        from lab.plots.trace import write_trace_plot

        files = [write_trace_plot(document["completions"], folder / f"{file.stem}.png")]
    output().print("written: " + ", ".join(map(str, files)), soft_wrap=True)


if __name__ == "__main__":
    run(main)
