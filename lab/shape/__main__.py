"""`python -m lab.shape`."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from lab.command import run
from lab.shape.material import QUICK, ReportSettings
from lab.shape.report import shape_report
from monge.api import built_in
from monge.cli import options
from monge.cli.console import plain_table, print_tables, quiet_host, reported
from monge.cli.options import check_out_folder
from monge.cli.progress import working
from monge.loading.networks import load_network, load_tokenizer
from monge.prompts import read_prompts, shipped

OUT: Final = Path("out/shape")


@reported
def main(
    *,
    target: options.Target = None,
    head: Path | None = options.option(
        None,
        options.MODELS,
        "Folder of a SHAPE head for the target.",
        "the built-in one, or for another target a ridge head that is fitted here",
    ),
    dtype: options.Dtype = None,
    device: options.Device = None,
    threads: options.Threads = None,
    data: list[Path] | None = options.measuring(
        None, "Prompts of one task; may be repeated, one file a task.", "shipped"
    ),
    rows: int | None = options.measuring(
        None, "Rows of 192 tokens that the target writes for every task."
    ),
    quick: bool = options.switch(
        "--quick", options.MEASURING, "Little text and few settings: a look."
    ),
    out: Path = options.option(OUT, options.OUTPUT, "Folder of text and JSON."),
    as_json: options.Json = False,
) -> None:
    """Measure how far a SHAPE head carries.

    Step by step: acceptance beside its bound, and how errors add up. The ceiling of heads that see
    no drafted token. Heads that were fitted on one task, measured on others.

    Writes `report.json`. The target's own text is kept in the folder and used again.

    **Examples**

        python -m lab.shape --quick
        python -m lab.shape --target ./my-target --head ./my-head --data chat.jsonl --data code.jsonl
    """
    options.set_threads(threads)
    check_out_folder(out)
    trained = head or (built_in("shape") if target is None else None)
    size = replace(QUICK if quick else ReportSettings(), **options.given(rows_per_task=rows))
    prompts = (
        shipped()
        if data is None
        else tuple(prompt for path in data for prompt in read_prompts(path))
    )
    quiet_host()
    source = built_in("target") if target is None else target
    with working() as work:
        say = work.stage("starting").restart
        network = load_network(source, **options.given(dtype=dtype, device=device))
        document = shape_report(
            network, load_tokenizer(source), prompts, out, trained=trained, settings=size, say=say
        )
    (out / "report.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    if as_json:
        print(json.dumps(document))
    else:
        _show(document)


def _show(document: dict[str, Any]) -> None:
    """Print the tables; `report.json` has the spreads too."""
    for name in ("steps", "ceiling", "transfer"):
        rows = document[name]
        columns = [key for key in rows[0] if not isinstance(rows[0][key], dict | list)]
        table = plain_table(
            name, columns[0].replace("_", " "), [key.replace("_", " ") for key in columns[1:]]
        )
        for row in rows:
            table.add_row(*(_cell(row[key]) for key in columns))
        print_tables([table])


def _cell(value: object) -> str:
    return f"{value:.3f}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    run(main)
