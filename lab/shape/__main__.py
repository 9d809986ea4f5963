"""`python -m lab.shape`."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from lab.command import plotting, run
from lab.shape.material import QUICK, ReportSettings
from lab.shape.page import page
from lab.shape.report import shape_report
from monge.api import built_in
from monge.bench.provenance import busy_note
from monge.cli import options
from monge.cli.console import notes, output, quiet_host, reported
from monge.cli.options import check_out_folder
from monge.cli.progress import working
from monge.loading.networks import load_network, load_tokenizer
from monge.prompts import Prompt, read_prompts, shipped

OUT: Final = Path("report-shape")


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
    beside: list[Path] | None = options.option(
        None, options.MODELS, "Folder of a head of another kind, to compare with; may be repeated."
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
    max_new_tokens: int | None = options.measuring(None, "Length of a decoded completion."),
    quick: bool = options.switch(
        "--quick", options.MEASURING, "Little text and few settings: a look."
    ),
    out: Path = options.option(OUT, options.OUTPUT, "Folder of page and JSON."),
    as_json: options.Json = False,
) -> None:
    """Answer what is asked about SHAPE by measuring.

    Similarity, bounds, errors, times, sampling, contexts, tasks, transport.

    Writes `report.html`, `report.json` and the pictures. The target's own text is kept in the
    folder and used again.

    **Examples**

        python -m lab.shape --quick
        python -m lab.shape --beside my-eagle3 --beside my-dflash
        python -m lab.shape --target ./my-target --head ./my-head --data chat.jsonl --data code.jsonl
    """
    options.set_threads(threads)
    check_out_folder(out)
    trained = head or (built_in("shape") if target is None else None)
    size = replace(
        QUICK if quick else ReportSettings(),
        **options.given(rows_per_task=rows, max_new_tokens=max_new_tokens),
    )
    prompts = (
        shipped()
        if data is None
        else tuple(prompt for path in data for prompt in read_prompts(path))
    )
    heads = {"trained": trained, "beside": tuple(beside or ())}
    document = _written(
        target, prompts, size, out, heads, **options.given(dtype=dtype, device=device)
    )
    if as_json:
        print(json.dumps(document), file=sys.stdout)
    else:
        output().print(
            f"{out / 'report.html'}\n{out / 'report.json'}", markup=False, soft_wrap=True
        )


def _written(
    target: str | None,
    prompts: tuple[Prompt, ...],
    size: ReportSettings,
    out: Path,
    heads: dict[str, Any],
    **loading: Any,
) -> dict[str, Any]:
    """Measure, and write page and JSON."""
    quiet_host()
    if (note := busy_note()) is not None:
        notes().print(note, style="yellow")
    source, draw = (
        built_in("target") if target is None else target,
        plotting("lab.shape.plots", "measure elsewhere").draw,
    )
    with working() as work:
        say = work.stage("starting").restart
        network, tokenizer = load_network(source, **loading), load_tokenizer(source)
        document = shape_report(network, tokenizer, prompts, out, **heads, settings=size, say=say)
    (out / "report.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    (out / "report.html").write_text(page(document, draw(document, out)), encoding="utf-8")
    return document


if __name__ == "__main__":
    run(main)
