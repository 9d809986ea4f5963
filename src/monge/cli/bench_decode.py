"""`monge bench decode`."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from rich.table import Table

from monge.bench.arms import (
    ASSISTANT_TOKENS,
    DEFAULT,
    NO_DRAFTS,
    QUICK_ASSISTANT_TOKENS,
    USUAL,
    arms_of,
)
from monge.bench.decode import (
    PROMPTS_PER_TASK,
    QUICK,
    QUICK_PROMPTS_PER_TASK,
    compare,
)
from monge.bench.pair import load_pair
from monge.bench.provenance import busy_note
from monge.bench.report import write_rounds
from monge.bench.runner import NOT_APPLICABLE, Settings
from monge.cli import options
from monge.cli.console import (
    output,
    plain_table,
    print_tables,
    say_raw_text,
    show,
    write_document,
)
from monge.cli.options import MEASURING, measuring, switch
from monge.cli.progress import call_bar, working
from monge.core.errors import OptionError
from monge.core.words import counted
from monge.options import OUTPUT, LoadOptions, changed
from monge.prompts import as_message, asked_prompts, interleaved

OUT: Final = Path("bench-decode")
RESULT: Final = "result.json"
_CAPTION: Final = (
    "block: tokens per target forward; engine: share of time\n"
    "inside the models; loops: completions that end in one"
)
_HEADLINE: Final = {
    "speedup_over_plain": "{:.2f} times the speed of transformers",
    "speedup_over_assisted": "{:.2f} times that of its best assisted decoding",
    "block_efficiency": "{:.2f} tokens per target forward",
    "engine_efficiency": "{:.0%} of the time inside the models",
}


@options.command(only=(*options.NETWORKS, "draft_backend"), quick=QUICK)
def decode(
    *,
    load: LoadOptions,
    prompts: Path | None = measuring(
        None,
        "Text lines, or *.jsonl with `prompt`, `question`, `turns` or `messages`.",
        "the shipped prompts",
    ),
    is_chat: options.Chat = False,
    mixed: bool = switch("--mixed", MEASURING, "Take prompts of all tasks in turns."),
    quick: bool = switch(
        "--quick", MEASURING, "Few prompts, short texts, batch 1: within a minute."
    ),
    arm: list[str] | None = measuring(
        None,
        "A further arm: `name: tree=chain(8), controller=goodput, verifier=block`; may be "
        "repeated.",
    ),
    named_only: bool = switch(
        "--named-only", MEASURING, "No arms but those of --arm, and monge without speculation."
    ),
    useless_draft: bool = switch(
        "--useless-draft", MEASURING, "Spoil the draft model: nothing that it guesses is right."
    ),
    settings: Settings,
    prompts_per_task: int | None = measuring(
        None, "Prompts of each task; of a file all.", PROMPTS_PER_TASK
    ),
    threads: options.Threads = None,
    out: Path = options.option(OUT, OUTPUT, "Folder for JSON."),
    as_json: options.Json = False,
    markdown: options.Markdown = False,
) -> None:
    """Compare ways of decoding the same prompts with the same networks.

    The arms are transformers plain, assisted and with prompt lookup, and monge with its defaults,
    with prompt lookup alone and without speculation; `--arm` adds others. They take turns in this
    process. With `--json` the last line of standard output is one JSON object.

    **Examples**

        monge bench decode --quick
        monge bench decode --out results --json | tail -n 1 > summary.json
        monge bench decode --quick --useless-draft --arm "model: drafter=model"
        monge bench decode --named-only --arm "model: drafter=model" --repeats 30 --backend compiled
        monge bench decode --quick --batch 1 --temperature 0.7 --top-p 0.9
        monge bench decode --quick --chat --target smollm2 --prompts questions.txt
        monge bench decode --target ./my-target --draft ./my-draft --prompts my.jsonl --batch 1 --temperature 0
    """
    if named_only and not arm:
        raise OptionError("bench: --named-only needs arms of --arm; got none")
    options.set_threads(threads)
    options.check_out_folder(out)
    per_task = QUICK_PROMPTS_PER_TASK if quick else PROMPTS_PER_TASK
    shown = asked_prompts(prompts, per_task=prompts_per_task, default=per_task)
    ours = arms_of([*([NO_DRAFTS] if named_only else USUAL), *(arm or ())])
    with working("loading the models"):
        pair = load_pair(useless_draft=useless_draft, **changed(load))
    if is_chat:
        shown = tuple(map(as_message, shown))
    say_raw_text(pair.tokenizer, shown, "--chat writes them as messages")
    counts = () if named_only else QUICK_ASSISTANT_TOKENS if quick else ASSISTANT_TOKENS
    shown = interleaved(shown) if mixed else shown
    with call_bar() as on_call:
        document, measurements = compare(
            pair, shown, settings, ours=ours, assistant_tokens=counts, on_call=on_call
        )
    files = [write_document(document, out, RESULT)]
    files += [write_rounds(measurements, out / "rounds.jsonl.gz")]
    report(document, files, markdown=markdown)
    if as_json:
        print(json.dumps(document))
    if all(arm["failure"] is not None for arm in document["arms"]):
        raise OptionError(
            "every arm failed, so nothing was measured; the reasons are listed with the tables"
        )


def report(document: dict[str, Any], files: Sequence[Path], *, markdown: bool = False) -> None:
    """Print the tables, the headline, and where the files are."""
    settings = document["settings"]
    truncation = Settings(**settings).truncation
    for size in settings["batch_sizes"]:
        for temperature in settings["temperatures"]:
            place = (size, temperature)
            cell = [a for a in document["arms"] if (a["batch_size"], a["temperature"]) == place]
            where, count = mode(temperature, truncation), len(document["prompts"])
            title = f"{where}, batch {size}, {counted(count, 'prompt')}"
            print_tables([table(cell, title)], markdown=markdown)
            for arm in cell:
                if arm["failure"] is not None:
                    show(f"{arm['arm']}: {arm['failure']}", "dim")
            output().print()
    for choice in document["assisted_tuning"]:
        if "failure" in choice:
            show(f"tuning assisted failed: {choice['failure']}", "dim")
            continue
        tokens = counted(choice["num_assistant_tokens"], "draft token")
        speed = f"{choice['tokens_per_s']:.1f} tokens/s"
        where = mode(choice["temperature"], truncation)
        show(f"assisted, {where}, {tokens}: {speed}", "dim")
    found = [
        text.format(document[name])
        for name, text in _HEADLINE.items()
        if document[name] is not None
    ]
    if found:
        show(f"{DEFAULT}, batch {document['batch_size']}: {', '.join(found)}")
    if settings["clock"] == "cpu":
        show("seconds are processor time of this process, not of the wall", "dim")
    if (note := busy_note()) is not None:
        show(f"{note}; fewer --threads may help", "yellow")
    show("written: " + ", ".join(map(str, files)))


def table(arms: Sequence[dict[str, Any]], title: str) -> Table:
    """Return a table of arms at a temperature and batch size.

    Speeds are compared with plain decoding of transformers, or of this library if transformers was
    not measured.
    """
    name, of, middle = "x plain", "ratio_to_plain", "median"
    caption = "x plain: times the speed of transformers"
    if not any(arm.get(of) for arm in arms):
        name, of, middle = "x none", "ratio_to_none_of_all", "mean"
        caption = "x none: all repeats together, with their 95% interval"
    shown = plain_table(title, "arm", ("tokens/s", name, "block", "engine", "loops"))
    shown.caption = f"median and range of the repeats;\n{caption};\n{_CAPTION}"
    shown.caption_justify = "left"
    for arm in arms:
        if arm["failure"] is not None:
            short = "n/a" if arm["failure"].startswith(NOT_APPLICABLE) else "failed"
            shown.add_row(arm["arm"], short, *[""] * 4, style="dim")
            continue
        rates = (arm.get("block_efficiency"), arm.get("engine_efficiency"))
        shown.add_row(
            arm["arm"],
            _ranged(arm["tokens_per_s"], 0 if arm["tokens_per_s"]["high"] >= 50 else 1),
            "" if arm[of] is None else _ranged(arm[of], 2, middle),
            *("" if rate is None else f"{rate:.2f}" for rate in rates),
            f"{arm['degenerate_share']:.0%}",
        )
    return shown


def _ranged(summary: dict[str, float], digits: int, middle: str = "median") -> str:
    value, low, high = (f"{summary[name]:.{digits}f}" for name in (middle, "low", "high"))
    return value if summary["low"] == summary["high"] else f"{value} {low}-{high}"


def mode(temperature: float, truncation: Mapping[str, Any]) -> str:
    """Return sampling rules in words."""
    if temperature == 0:
        return "greedy"
    rules = {"temperature": temperature, **truncation}
    return ", ".join(f"{name.replace('_', '-')} {value:g}" for name, value in rules.items())
