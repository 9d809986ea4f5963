"""`monge bench decode`."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Final

from monge.bench.arms import (
    ASSISTANT_TOKENS,
    QUICK_ASSISTANT_TOKENS,
    Arm,
    plain_arm,
    usual_arms,
    with_named,
)
from monge.bench.decode import (
    PROMPTS_PER_TASK,
    QUICK,
    QUICK_PROMPTS_PER_TASK,
    compare,
    write_outcome,
)
from monge.bench.pair import Pair, load_pair
from monge.bench.provenance import busy_note
from monge.bench.report import table
from monge.bench.runner import Settings
from monge.cli import options
from monge.cli.console import output, quiet_host, reported, say_raw_text
from monge.cli.options import each, measuring
from monge.cli.out import check_out_folder
from monge.cli.progress import call_bar, working
from monge.cli.tables import print_tables
from monge.core.errors import OptionError
from monge.core.words import counted
from monge.engine.chat_format import ChatFormat, chat_format
from monge.options import LoadOptions, changed
from monge.prompts import Prompt, asked_prompts, interleaved

OUT: Final = Path("bench-decode")

Prompts = Annotated[
    Path | None,
    measuring(
        "--prompts",
        "Text lines, or *.jsonl with `prompt`, `question`, `turns` or `messages`.",
        "the shipped prompts",
    ),
]
Mixed = Annotated[bool, measuring("--mixed", "Take prompts of all tasks in turns.")]
Quick = Annotated[bool, measuring("--quick", "Few prompts, short texts, batch 1: within a minute.")]
NamedArms = Annotated[
    list[str] | None,
    measuring(
        "--arm",
        "A further arm: `name: tree=chain(8), controller=goodput, verifier=block`; "
        "may be repeated.",
    ),
]
NamedOnly = Annotated[
    bool, measuring("--named-only", "No arms but those of --arm, and monge without speculation.")
]
UselessDraft = Annotated[
    bool, measuring("--useless-draft", "Spoil the draft model: nothing that it guesses is right.")
]
MaxNewTokens = Annotated[
    int | None,
    measuring("--max-new-tokens", "Length of every completion.", Settings().max_new_tokens),
]
Repeats = Annotated[
    int | None, measuring("--repeats", "Measured passes over the prompts.", Settings().repeats)
]
Batch = Annotated[
    list[int] | None,
    measuring("--batch", "Batch size; may be repeated.", each(Settings().batch_sizes)),
]
Temperature = Annotated[
    list[float] | None,
    measuring("--temperature", "0 is greedy; may be repeated.", each(Settings().temperatures)),
]
PerTask = Annotated[
    int | None,
    measuring("--prompts-per-task", "Prompts of each task; of a file all.", PROMPTS_PER_TASK),
]
Seed = Annotated[int | None, measuring("--seed", "Seed of the sampled arms.", Settings().seed)]
TimeLimit = Annotated[
    float | None,
    measuring("--time-limit", "Start no further repeat after so many seconds.", "none"),
]
Clock = Annotated[
    str | None,
    measuring(
        "--clock",
        "`wall`, or `cpu`: processor time of this process, for a busy machine.",
        Settings().clock,
    ),
]
Out = Annotated[
    Path,
    options.option("--out", help="Folder for JSON.", panel=options.OUTPUT, default=OUT),
]


@reported
@options.command(only=(*options.NETWORKS, "draft_backend"))
def decode(
    *,
    load: LoadOptions,
    prompts: Prompts = None,
    is_chat: options.Chat = False,
    mixed: Mixed = False,
    quick: Quick = False,
    arm: NamedArms = None,
    named_only: NamedOnly = False,
    useless_draft: UselessDraft = False,
    max_new_tokens: MaxNewTokens = None,
    repeats: Repeats = None,
    batch: Batch = None,
    temperature: Temperature = None,
    per_task: PerTask = None,
    seed: Seed = None,
    time_limit: TimeLimit = None,
    clock: Clock = None,
    threads: options.Threads = None,
    out: Out = OUT,
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
        monge bench decode --quick --chat --target smollm2 --prompts questions.txt
        monge bench decode --target ./my-target --draft ./my-draft --prompts my.jsonl --batch 1 --temperature 0
    """
    if named_only and not arm:
        raise OptionError("bench: --named-only needs arms of --arm; got none")
    quiet_host()
    options.set_threads(threads)
    check_out_folder(out)
    shown = asked_prompts(
        prompts, per_task=per_task, default=QUICK_PROMPTS_PER_TASK if quick else PROMPTS_PER_TASK
    )
    given = options.given(
        max_new_tokens=max_new_tokens,
        repeats=repeats,
        seed=seed,
        time_limit_s=time_limit,
        clock=clock,
    )
    lists = {"batch_sizes": tuple(batch or ()), "temperatures": tuple(temperature or ())}
    settings = replace(
        QUICK if quick else Settings(),
        **given,
        **{name: some for name, some in lists.items() if some},
    )
    ours = with_named([plain_arm()] if named_only else usual_arms(), arm or ())
    loading = changed(load)
    with working("loading the models"):
        pair = load_pair(
            loading.pop("target", None),
            loading.pop("draft", None),
            useless_draft=useless_draft,
            **loading,
        )
    if is_chat:
        shown = tuple(
            one
            if one.messages is not None
            else replace(one, messages=({"role": "user", "content": one.text},))
            for one in shown
        )
    say_raw_text(pair.tokenizer, shown, "--chat writes them as messages")
    counts = () if named_only else QUICK_ASSISTANT_TOKENS if quick else ASSISTANT_TOKENS
    measured(
        pair,
        interleaved(shown) if mixed else shown,
        settings,
        ours,
        counts,
        out=out,
        as_json=as_json,
        markdown=markdown,
        chat=chat_format(pair.tokenizer, is_built_in=load.target is None),
    )


def measured(
    pair: Pair,
    prompts: Sequence[Prompt],
    settings: Settings,
    ours: Sequence[Arm],
    assistant_tokens: Sequence[int],
    *,
    out: Path,
    as_json: bool,
    markdown: bool = False,
    chat: ChatFormat | None = None,
) -> None:
    """Measure, and write and show what was measured.

    Raises:
        OptionError: If every arm failed.
    """
    with call_bar() as progress:
        outcome = compare(
            pair,
            prompts,
            settings,
            ours=ours,
            assistant_tokens=assistant_tokens,
            progress=progress,
            chat=chat,
        )
    files = write_outcome(outcome, out)
    report(outcome.document, files, markdown=markdown)
    if as_json:
        print(json.dumps(outcome.document))
    if all(one["failure"] is not None for one in outcome.document["arms"]):
        raise OptionError(
            "every arm failed, so nothing was measured; the reasons are listed with the tables"
        )


def report(document: dict[str, Any], files: Sequence[Path], *, markdown: bool = False) -> None:
    """The tables, the headline, and where the files are."""
    console = output()
    for size in document["settings"]["batch_sizes"]:
        for temperature in document["settings"]["temperatures"]:
            cell = [
                arm
                for arm in document["arms"]
                if (arm["batch_size"], arm["temperature"]) == (size, temperature)
            ]
            mode = "greedy" if temperature == 0 else f"temperature {temperature:g}"
            title = f"{mode}, batch {size}, {counted(len(document['prompts']), 'prompt')}"
            print_tables([table(cell, title)], markdown=markdown)
            for arm in cell:
                if arm["failure"] is not None:
                    console.print(
                        f"{arm['arm']}: {arm['failure']}", style="dim", markup=False, soft_wrap=True
                    )
            console.print()
    for choice in document["assisted_tuning"]:
        console.print(tuning_line(choice), style="dim", markup=False)
    for name in (
        "speedup_over_plain",
        "speedup_over_assisted",
        "engine_efficiency",
        "block_efficiency",
    ):
        value = document[name]
        console.print(f"{name:<24}{'not measured' if value is None else format(value, '.3f')}")
    if (slowest := document["slowest_adaptive"]) is not None:
        place = f"{slowest['arm']}, temperature {slowest['temperature']:g}, batch {slowest['batch_size']}"
        console.print(
            f"{'slowest_adaptive':<24}{slowest['ratio_to_faster_plain']:.3f} of plain decoding "
            f"({place})",
            markup=False,
        )
    if document["settings"]["clock"] == "cpu":
        console.print("seconds are processor time of this process, not of the wall", style="dim")
    if (note := busy_note()) is not None:
        console.print(f"{note}; fewer --threads may help", style="yellow", markup=False)
    console.print("written: " + ", ".join(map(str, files)), soft_wrap=True)


def tuning_line(choice: dict[str, Any]) -> str:
    """One candidate of the search for the host's best settings."""
    if "failure" in choice:
        return f"tuning assisted failed: {choice['failure']}"
    mode = "greedy" if choice["temperature"] == 0 else f"temperature {choice['temperature']:g}"
    return f"assisted, {mode}, {counted(choice['num_assistant_tokens'], 'draft token')}: {choice['tokens_per_s']:.1f} tokens/s"
