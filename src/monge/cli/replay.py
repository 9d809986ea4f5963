"""`monge replay record` and `monge replay run`."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich.table import Table

from monge.cli import options
from monge.cli.console import output, quiet_host, reported, say_raw_text
from monge.cli.networks import Networks, load_draft, load_networks
from monge.cli.out import check_out_file, check_out_folder, write_document
from monge.cli.progress import working
from monge.cli.tables import plain_table, print_tables
from monge.core.errors import OptionError
from monge.core.sampling_rules import SamplingRules
from monge.core.words import counted
from monge.defaults import STEADY
from monge.loading.networks import load_network, load_tokenizer
from monge.options import SAMPLING, SPECULATION, LoadOptions, SamplingOptions, changed
from monge.prompts import Prompt, asked_prompts, written
from monge.replay.compare import REPEATS, compare
from monge.replay.configuration import Configuration, grid
from monge.replay.file import read_log, write_log
from monge.replay.log import LawLog
from monge.replay.record import identity_of, record_log

LOG: Final = Path("run.mlog")
PER_TASK: Final = 2
RECORD: Final = "Record"
LAW: Final = ("temperature", "top_k", "top_p", "min_p")
LENGTH: Final = 64
"""Most tokens of a recorded text."""
Top = Annotated[
    int | None,
    options.option(
        "--top",
        help="Keep so many tokens of every law, and the mass of the others.",
        panel=RECORD,
        default="all",
    ),
]
LogOut = Annotated[
    Path, options.option("--out", help="The log.", panel=options.OUTPUT, default=LOG)
]


@reported
@options.command(
    only=(*options.NETWORKS, *LAW, "max_new_tokens", "ignore_eos"),
    one=("draft",),
    defaults={"max_new_tokens": LENGTH},
)
def record(
    *,
    prompts: options.File = None,
    load: LoadOptions,
    sampling: SamplingOptions,
    seed: Annotated[
        int, typer.Option("--seed", help="Of the first text.", rich_help_panel=SAMPLING)
    ] = 0,
    per_task: Annotated[
        int | None,
        options.option(
            "--prompts-per-task",
            help="Prompts of each task; of a file all.",
            panel=RECORD,
            default=PER_TASK,
        ),
    ] = None,
    top: Top = None,
    drafter: Annotated[
        list[str] | None,
        options.option(
            "--drafter",
            help="Time this drafter too; may be repeated.",
            panel=RECORD,
            default="none, ngram, --draft",
        ),
    ] = None,
    no_costs: Annotated[
        bool, options.option("--no-costs", help="Do not time rounds.", panel=RECORD)
    ] = False,
    out: LogOut = LOG,
    as_json: options.Json = False,
) -> None:
    """Let the target write once, and keep its distributions and its times.

    `monge replay run` then tries drafters, trees, verifiers and controllers on them. The texts are
    those of the target: speculation is lossless, so a draft model or a head only makes the log
    sooner. The log also keeps who the target is and, unless told otherwise, how long its rounds and
    the drafters take on this machine. A complete distribution takes 8 bytes per token of the
    vocabulary; `--top` makes small logs for large vocabularies, from which rules that test several
    draws a node cannot be replayed.

    **Examples**

        monge replay record --out run.mlog
        monge replay record --prompts prompts.jsonl --temperature 0.8 --out mine.mlog
        monge replay record --target ./my-target --draft ./my-draft --prompts prompts.txt --top 64 --out mine.mlog
    """
    quiet_host()
    check_out_file(out)
    shown = asked_prompts(prompts, per_task=per_task, default=PER_TASK)
    if drafter and no_costs:
        raise OptionError(
            "--drafter says whose rounds are timed, and --no-costs that none are; leave one out"
        )
    networks = load_networks(**changed(load))
    rules = SamplingRules(**{name: getattr(sampling, name) for name in LAW})
    with working() as work:
        found = recorded(
            networks,
            shown,
            rules,
            on_text=work.stage("target writes", len(shown)).advance,
            seed=seed,
            max_new_tokens=sampling.max_new_tokens,
            ignore_eos=sampling.ignore_eos,
            top=top,
        )
        if not no_costs:
            with work.waiting("measuring costs"):
                found = replace(found, costs=networks.costs(networks.further(drafter or ())))
    path = write_log(replace(found, about=networks.about()), out)
    say_log(found, path)
    if as_json:
        print(json.dumps(described(found) | {"file": str(path), "bytes": path.stat().st_size}))


def recorded(
    networks: Networks,
    prompts: Sequence[Prompt],
    rules: SamplingRules,
    **recording: Any,
) -> LawLog:
    """Texts and laws of prompts, by task."""
    decoder = networks.decoder(Configuration())
    grouped: dict[str, list[str | Sequence[int]]] = {}
    for prompt in prompts:
        grouped.setdefault(prompt.task, []).append(written(prompt, decoder.encode_chat))
    say_raw_text(networks.tokenizer, prompts, "a *.jsonl file may hold `messages`")
    return record_log(decoder, grouped, model=networks.identity, rules=rules, **recording)


def by_task(prompts: Sequence[Prompt]) -> list[Prompt]:
    """The prompts in the order of a log's texts."""
    order = {task: place for place, task in enumerate(dict.fromkeys(p.task for p in prompts))}
    return sorted(prompts, key=lambda prompt: order[prompt.task])


def described(found: LawLog) -> dict[str, Any]:
    """A log in a few plain values."""
    return {
        "texts": len(found.texts),
        "tokens": found.num_tokens,
        "target": found.model.name,
        "vocab_size": found.model.vocab_size,
        "temperature": found.rules.temperature,
        "top": found.top,
        "costs": sorted(found.costs),
    }


def say_log(found: LawLog, path: Path) -> None:
    """What was logged, and what to do with it."""
    laws = (
        "complete laws"
        if found.top is None
        else f"the {counted(found.top, 'most probable token')} of each law, the rest as one"
    )
    costs = f"costs of {', '.join(sorted(found.costs))}" if found.costs else "no costs"
    size = path.stat().st_size / 1e6
    output().print(
        f"{path}: {counted(len(found.texts), 'text')} of {found.model.name}, "
        f"{counted(found.num_tokens, 'token')}, "
        f"{laws}, {costs}, {size:.1f} MB",
        markup=False,
        soft_wrap=True,
    )
    output().print(f"next: monge replay run {path}", style="dim", markup=False, soft_wrap=True)


OUT: Final = Path("replay")
REPLAY: Final = "Replay"
MANY: Final = ("drafter", "tree", "verifier")


Repeats = Annotated[
    int,
    typer.Option(
        "--repeats", help="Passes over the log; drafting is random.", rich_help_panel=REPLAY
    ),
]


@reported
@options.command(
    only=("draft", "dtype", "device", *MANY, "draft_temperature", "draft_top_k"),
    one=("draft",),
    many=MANY,
)
def run(
    log: Annotated[Path, typer.Argument(help="A log made by `monge replay record`.")],
    *,
    load: LoadOptions,
    controller: Annotated[
        list[str] | None,
        options.option(
            "--controller",
            help="How much to draft; may be repeated.",
            panel=SPECULATION,
            default=STEADY,
        ),
    ] = None,
    check_target: Annotated[
        str | None,
        options.option(
            "--check-target", help="Refuse the log if this is not its target.", panel=options.MODELS
        ),
    ] = None,
    repeats: Repeats = REPEATS,
    seed: Annotated[int, typer.Option("--seed", help="Of all passes.", rich_help_panel=REPLAY)] = 0,
    out: Annotated[
        Path, options.option("--out", help="Folder for JSON.", panel=options.OUTPUT, default=OUT)
    ] = OUT,
    as_json: options.Json = False,
    markdown: options.Markdown = False,
) -> None:
    """Compare drafters, trees, verifiers and controllers on a recorded run, without the target.

    Only the drafter runs. All combinations of the parts that are named are replayed; each
    combination that does not fit together, or that the log cannot answer exactly, is listed with
    the reason. `--controller "fixed(max_depth=2)"` and others like it show the best fixed depth.

    **Examples**

        monge replay run run.mlog
        monge replay run run.mlog --tree "chain(2)" --tree "chain(6)" --verifier single_draft --verifier block
        monge replay run run.mlog --tree "chain(8)" --controller fixed --controller on_the_fly --json
    """
    quiet_host()
    check_out_folder(out)
    options.check_positive(repeats=repeats)
    found = read_log(log)
    if check_target is not None:
        with working("loading the target"):
            network, tokenizer = load_network(check_target), load_tokenizer(check_target)
            found.check_model(identity_of(network, tokenizer, check_target), "the target")
    parts = {name: getattr(load, name) for name in MANY} | {"controller": controller}
    laws = {name: [getattr(load, name)] for name in ("draft_temperature", "draft_top_k")}
    chosen = list(grid(**parts, **laws))
    with working("loading the draft model"):
        model = load_draft(found, load.draft, dtype=load.dtype, device=load.device)
    num_passes = len(chosen) * len(found.texts) * repeats
    with working() as work:
        advance = work.stage("replaying", num_passes).advance
        document = compare(chosen, found, model, repeats=repeats, seed=seed, on_text=advance)
    file = write_document(document, out, "replay.json")
    show(document, markdown=markdown)
    output().print(f"written: {file}", soft_wrap=True)
    if as_json:
        print(json.dumps(document))
    if not document["replayed"]:
        raise typer.Exit(2)


def show(document: dict[str, Any], *, markdown: bool = False) -> None:
    """Print the table, and the reasons of what could not be replayed."""
    console, replayed = output(), document["replayed"]
    if replayed:
        tags = {tag for found in replayed for tag in found["tags"]}
        further = [tag_table(replayed)] if len(tags) > 1 else []
        print_tables([table(replayed), *further], markdown=markdown)
    if any(found["stands_in"] for found in document["replayed"]):
        console.print(
            "compact log: rejected candidates stand in for those that complete laws would give; "
            "acceptance is exact",
            style="dim",
            soft_wrap=True,
        )
    for found in document["replayed"]:
        if found["untimed"] is not None:
            console.print(
                f"{found['label']}: {found['untimed']}", style="dim", markup=False, soft_wrap=True
            )
    for refused in document["refused"]:
        console.print(
            f"{refused['label']}: {refused['reason']}", style="yellow", markup=False, soft_wrap=True
        )


def table(replayed: Sequence[dict[str, Any]]) -> Table:
    """Return the main figures of every configuration."""
    columns = ("tokens a round", "tokens/s", "speed-up", "depth")
    shown = plain_table("replayed without the target", "configuration", columns)
    for found in replayed:
        efficiency = found["block_efficiency"]
        speed, gain = found["tokens_per_s"], found["speedup"]
        shown.add_row(
            found["label"],
            f"{efficiency['mean']:.3f} ({efficiency['low']:.2f}..{efficiency['high']:.2f})",
            "-" if speed is None else f"{speed['mean']:.1f}",
            "-" if gain is None else f"{gain['mean']:.2f}x",
            f"{found['mean_depth']:.1f}",
        )
    return shown


def tag_table(replayed: Sequence[dict[str, Any]]) -> Table:
    """Return tokens a round, and the speed-up, by kind of text."""
    tags = list(dict.fromkeys(tag for found in replayed for tag in found["tags"]))
    shown = plain_table("tokens a round (and speed-up) by kind of text", "configuration", tags)
    for found in replayed:
        cells: list[str] = []
        for tag in tags:
            figures = found["tags"][tag]
            gain = "" if figures["speedup"] is None else f" ({figures['speedup']['mean']:.2f}x)"
            cells.append(f"{figures['block_efficiency']['mean']:.2f}{gain}")
        shown.add_row(found["label"], *cells)
    return shown
