"""`python -m lab.heads`."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Final

from rich.box import SIMPLE_HEAD
from rich.table import Table

from lab.command import run
from lab.heads.measure import (
    ArmResult,
    LoopResult,
    check_head,
    compare_arms,
    is_shape_folder,
    run_loops,
)
from monge.api import built_in
from monge.cli import options
from monge.cli.console import output, quiet_host, reported
from monge.cli.options import check_out_folder
from monge.cli.progress import working
from monge.loading.networks import load_network, load_tokenizer
from monge.prompts import encode, read_prompts, shipped
from monge.training.own_text import TextSettings, write_own_text

OUT: Final = Path("out/heads")
Heads = Annotated[
    list[Path] | None,
    options.option(
        "--head",
        options.MODELS,
        "Folder of a head, of any format; may be repeated.",
        "the built-in one",
    ),
]


@reported
def main(
    *,
    head: Heads = None,
    target: options.Target = None,
    dtype: options.Dtype = None,
    device: options.Device = None,
    threads: options.Threads = None,
    data: Path | None = options.measuring(
        None, "Prompts that the target continues.", "the shipped"
    ),
    tokens: int = options.measuring(TextSettings().num_tokens, "Tokens that it writes."),
    max_new_tokens: int = options.measuring(64, "Length of a decoded completion; 0 for none."),
    out: Path = options.option(OUT, options.OUTPUT, "Folder of text and result."),
    as_json: options.Json = False,
) -> None:
    """Measure heads on text that the target writes: alignments of SHAPE heads beside controls, and the loop.

    The alignments and the temperature are fitted on two thirds of the text and measured on the
    third; a ridge head is fitted there too. With `--json` the last line of standard output is one
    JSON object.
    """
    quiet_host()
    options.set_threads(threads)
    check_out_folder(out)
    for folder in head or ():
        check_head(folder)
    source = built_in("target") if target is None else target
    network, tokenizer = (
        load_network(source, **options.given(dtype=dtype, device=device)),
        load_tokenizer(source),
    )
    prompts = [
        encode(tokenizer, prompt.text)
        for prompt in (shipped() if data is None else read_prompts(data))
    ]
    folders, settings = head or [built_in("shape")], replace(TextSettings(), num_tokens=tokens)
    arms: list[ArmResult] = []
    loops: list[LoopResult] = []
    with working() as work:
        say = work.stage("starting").restart
        say("writing rows")
        rows = write_own_text(network, prompts, settings, out)
        for folder in folders:
            if is_shape_folder(folder):
                arms += compare_arms(network, folder, rows, say)
            if max_new_tokens > 0:
                limits = {"max_new_tokens": max_new_tokens, "temperatures": (0.0, 1.0)}
                loops += run_loops(network, folder, prompts[:24], **limits, on_loop=say)
    document = {
        "tokens": sum(len(prompt) + len(answer) for prompt, answer in rows),
        "arms": [asdict(one) for one in arms],
        "loops": [asdict(one) for one in loops],
    }
    (out / "result.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    _show(arms, loops)
    if as_json:
        print(json.dumps(document))


def _show(arms: list[ArmResult], loops: list[LoopResult]) -> None:
    console = output(110)
    table = _table(
        "head", "alignment", "block efficiency", "acceptance by step", "strength", "temperature"
    )
    for arm in arms:
        efficiency = f"{arm.quality.block_efficiency:.3f}"
        lists = (arm.quality.acceptance, arm.strengths, arm.temperatures)
        table.add_row(
            arm.head,
            arm.arm,
            efficiency,
            *(" ".join(f"{value:.3g}" for value in one) for one in lists),
        )
    if arms:
        console.print(table)
    if loops:
        table = _table("head", "temperature", "tree", "verifier", "block efficiency")
        for one in loops:
            table.add_row(
                one.head,
                f"{one.temperature:g}",
                one.tree,
                one.verifier,
                f"{one.block_efficiency:.3f}",
            )
        console.print(table)


def _table(*columns: str) -> Table:
    return Table(*columns, box=SIMPLE_HEAD)


if __name__ == "__main__":
    run(main)
