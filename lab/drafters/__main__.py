"""`python -m lab.drafters`."""

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Final

from rich.box import SIMPLE_HEAD
from rich.table import Table

from lab.command import run
from lab.drafters.table import NODES, REPEATS, TREES, Line, entries, table
from lab.heads.__main__ import Heads
from lab.heads.measure import check_head
from monge.bench.pair import Pair, load_pair
from monge.bench.provenance import busy_note, provenance
from monge.bench.runner import Settings
from monge.cli import options
from monge.cli.console import output, quiet_host, reported
from monge.cli.options import check_out_folder
from monge.cli.progress import working
from monge.core.parts import built_in
from monge.prompts import encode, interleaved, read_prompts, shipped
from monge.training.own_text import TextSettings, write_own_text

OUT: Final = Path("out/drafters")
NUM_PROMPTS: Final = 18


@reported
def main(
    *,
    head: Heads = None,
    target: options.Target = None,
    draft: options.Draft = None,
    dtype: options.Dtype = None,
    device: options.Device = None,
    backend: options.Backend = None,
    draft_backend: options.DraftBackend = None,
    threads: options.Threads = None,
    data: Path | None = options.measuring(None, "Prompts.", "the shipped ones"),
    tokens: int = options.measuring(24576, "Tokens that heads are fitted to."),
    num_prompts: int = options.measuring(NUM_PROMPTS, "Prompts that are decoded."),
    max_new_tokens: int = options.measuring(48, "Length of every completion."),
    repeats: int = options.measuring(REPEATS, "Timed passes, drafters in turns."),
    clock: str | None = options.measuring(
        None, "`wall`, or `cpu`: processor time of this process, for a busy machine."
    ),
    out: Path = options.option(OUT, options.OUTPUT, "Folder of text and result."),
    as_json: options.Json = False,
) -> None:
    """Compare drafters on equal terms.

    One target, the same prompts, at most 16 drafted nodes a round, batch 1.

    Those that have laws of their own build one tree and are verified by one rule; sample and match
    verifies the others. Beside the draft model and the drafters that nobody trains stand the heads
    that are named, and SHAPE without training, fitted to text that the target writes; SHAPE heads
    with every alignment that the question of transport needs: none, one temperature for each step,
    and the Gaussian map. Tokens per second are ratios to plain decoding in the same pass. With
    `--json` the last line of standard output is one JSON object.

    **Examples**

        python -m lab.drafters
        python -m lab.drafters --head my-shape --head my-eagle3 --num-prompts 12
        python -m lab.drafters --backend compiled --clock cpu --threads 1
    """
    quiet_host()
    options.set_threads(threads)
    _check(head or (), num_prompts, out)
    settings = Settings(
        max_new_tokens=max_new_tokens, repeats=repeats, **options.given(clock=clock)
    )
    loading = options.given(
        dtype=dtype, device=device, backend=backend, draft_backend=draft_backend
    )
    pair = load_pair(target, draft, **loading)
    shown = shipped() if data is None else read_prompts(data)
    chosen = tuple(
        encode(pair.tokenizer, prompt.text) for prompt in interleaved(shown)[:num_prompts]
    )
    with working() as work:
        say = work.stage("starting").restart
        say("writing rows")
        texts = [encode(pair.tokenizer, prompt.text) for prompt in shown]
        rows = write_own_text(pair.target, texts, replace(TextSettings(), num_tokens=tokens), out)
        lines = table(
            pair, entries(pair, head or _built_in(target), rows, out, say), chosen, settings, say
        )
    document = {
        **_circumstances(pair, settings),
        "num_prompts": len(chosen),
        "num_nodes": NODES,
        "drafters": [asdict(line) for line in lines],
    }
    (out / "drafters.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    _show(lines, len(chosen))
    if as_json:
        print(json.dumps(document))


def _check(heads: Sequence[Path], num_prompts: int, out: Path) -> None:
    """Refuse what would only be found out after the target has written its text."""
    options.check_positive(num_prompts=num_prompts)
    check_out_folder(out)
    for folder in heads:
        check_head(folder)


def _circumstances(pair: Pair, settings: Settings) -> dict[str, Any]:
    return {
        "provenance": provenance(pair.target.device),
        "models": dict(pair.names),
        "backend": pair.backend,
        "draft_backend": pair.draft_backend,
        "settings": asdict(settings),
    }


def _built_in(target: str | None) -> list[Path]:
    """The head that ships, for the target that ships."""
    return [built_in("shape")] if target is None else []


def _show(lines: Sequence[Line], num_prompts: int) -> None:
    console = output(120)
    for temperature in TREES:
        title = f"temperature {temperature:g}, {num_prompts} prompts, at most {NODES} drafted nodes a round"
        shown = Table(title=title, title_justify="left", box=SIMPLE_HEAD)
        for column in (
            "drafter",
            "block efficiency",
            "nodes a round",
            "tokens/s over plain",
            "training",
            "on tokens",
        ):
            shown.add_column(column, justify="left" if column == "drafter" else "right")
        for line in (one for one in lines if one.temperature == temperature):
            spread, seconds = line.over_plain, line.training_s
            shown.add_row(
                line.name,
                f"{line.block_efficiency:.3f}",
                f"{line.nodes_per_round:.1f}",
                f"{spread.median:.2f} ({spread.low:.2f}..{spread.high:.2f})",
                "-" if seconds is None else f"{seconds:.0f} s",
                "-" if line.training_tokens is None else str(line.training_tokens),
            )
        console.print(shown)
    if (note := busy_note()) is not None:
        console.print(note, style="yellow", markup=False)


if __name__ == "__main__":
    run(main)
