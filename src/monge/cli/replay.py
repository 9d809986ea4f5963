"""`monge replay record` and `monge replay run`."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich.table import Table

from monge.api import drafts_of
from monge.bench.pair import Pair, load_pair
from monge.bench.provenance import provenance
from monge.cli import options
from monge.cli.console import (
    plain_table,
    print_tables,
    say_raw_text,
    show,
    write_document,
)
from monge.cli.options import option, panel, switch
from monge.cli.progress import working
from monge.core.errors import OptionError
from monge.core.model import SequenceModel
from monge.core.parts import built_in
from monge.core.sampling_rules import SamplingRules
from monge.core.words import counted
from monge.defaults import STEADY
from monge.draft.by_name import drafters_in
from monge.engine.decoder import Decoder
from monge.loading.networks import (
    as_draft_model,
    load_network,
    load_tokenizer,
    prepare,
)
from monge.loading.sources import BUILT_IN, ModelSource
from monge.options import (
    LAW,
    MODELS,
    OUTPUT,
    SPECULATION,
    LoadOptions,
    SamplingOptions,
    changed,
)
from monge.prompts import Prompt, asked_prompts, written
from monge.replay.compare import REPEATS, compare
from monge.replay.configuration import Configuration, grid
from monge.replay.file import read_log, write_log
from monge.replay.log import LawLog, ModelIdentity
from monge.replay.measure import TIMED, measured_costs
from monge.replay.record import identity_of, record_log
from monge.replay.text import ReplayTarget

PER_TASK: Final = 2
_record: Final = panel("Record")
_replay: Final = panel("Replay")
MANY: Final = ("drafter", "tree", "verifier")
LENGTH: Final = 64
"""Most tokens of a recorded text."""


@options.command(
    only=(*options.NETWORKS, *LAW, "max_new_tokens", "ignore_eos", "seed"),
    one=("draft",),
    defaults={"max_new_tokens": LENGTH, "seed": 0},
)
def record(
    *,
    prompts: options.File = None,
    load: LoadOptions,
    sampling: SamplingOptions,
    prompts_per_task: int | None = _record(None, "Prompts of each task; of a file all.", PER_TASK),
    top: int | None = _record(
        None, "Keep so many tokens of every law, and the mass of the others.", "all"
    ),
    drafter: list[str] | None = _record(
        None, "Time this drafter too; may be repeated.", "none, ngram, --draft"
    ),
    no_costs: bool = switch("--no-costs", "Record", "Do not time rounds."),
    out: Path = option(Path("run.mlog"), OUTPUT, "The log."),
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
    options.check_out_file(out)
    shown = asked_prompts(prompts, per_task=prompts_per_task, default=PER_TASK)
    if drafter and no_costs:
        raise OptionError(
            "--drafter says whose rounds are timed, and --no-costs that none are; leave one out"
        )
    with working("loading the models"):
        pair = load_pair(**changed(load))
    log = recorded(
        pair,
        shown,
        SamplingRules(**sampling.only(*LAW)),
        drafters=None if no_costs else drafter or (),
        seed=sampling.seed,
        max_new_tokens=sampling.max_new_tokens,
        ignore_eos=sampling.ignore_eos,
        top=top,
    )
    path = write_log(log, out)
    _say_log(log, path)
    if as_json:
        figures = {
            "texts": len(log.texts),
            "tokens": log.num_tokens,
            "target": log.model.name,
            "vocab_size": log.model.vocab_size,
            "temperature": log.rules.temperature,
            "top": log.top,
            "costs": sorted(log.costs),
            "file": str(path),
            "bytes": path.stat().st_size,
        }
        print(json.dumps(figures))


def identity(pair: Pair) -> ModelIdentity:
    """Return the facts about the target that a log holds."""
    name = str(pair.names["target"])
    is_built_in = name == str(built_in("target"))
    return identity_of(pair.target, pair.tokenizer, BUILT_IN if is_built_in else name)


def decoder_of(pair: Pair, configuration: Configuration) -> Decoder:
    """Return a decoder of some components; the given head drafts by default, or where one is named."""
    text = configuration.drafter
    chosen = replace(configuration, drafter=pair.head if text is None else pair.drafter(text))
    target = pair.target_again() if chosen.takes_target else pair.target_model
    plain = pair.decoder
    return Decoder(
        chosen.components(target, pair.draft_model),
        tokenizer=plain.tokenizer,
        eos_ids=plain.eos_ids,
        max_batch_size=1,
        chat=plain.chat_format,
    )


def further_drafters(pair: Pair, drafters: Sequence[str]) -> list[str]:
    """Return the given head, and drafters with that head filled in."""
    heads = [] if pair.head is None else [pair.head]
    return list(dict.fromkeys([*heads, *map(pair.drafter, drafters)]))


def _costs(pair: Pair, drafters: Sequence[str]) -> dict[str, Any]:
    """Measure rounds of the usual drafters and of further ones, or of the parts of a pool."""
    singles = dict.fromkeys(single for text in drafters for single in drafters_in(text))
    more = [Configuration(drafter=single) for single in singles if single not in TIMED]
    pairs = [
        (configuration, pair.target_again() if configuration.takes_target else pair.target_model)
        for configuration in more
    ]
    return measured_costs(pair.target_model, pair.draft_model, pairs)


def load_draft(log: LawLog, draft: str | None, **loading: Any) -> SequenceModel | None:
    """Load the draft model for a log; without a name the built-in one, for the built-in target's.

    Raises:
        ForeignLogError: If its tokenizer or vocabulary is another than the log's.
        OptionError: If it is a head.
    """
    if draft is None and log.model.name != BUILT_IN:
        return None
    source = ModelSource.of(built_in("draft") if draft is None else draft)
    if drafts_of(source, source).head is not None:
        raise OptionError(
            f"--draft: {source.name!r} is a head, which reads hidden states of the target, and a log "
            "holds none; use `monge tune` or `monge bench decode`, where the target runs"
        )
    network = load_network(source, **loading)
    identity = identity_of(network, load_tokenizer(source), source.name)
    log.check_model(replace(identity, network=""), "the draft model")
    return as_draft_model(network, ReplayTarget(log.model.vocab_size))


def recorded(
    pair: Pair,
    prompts: Sequence[Prompt],
    rules: SamplingRules,
    *,
    drafters: Sequence[str] | None,
    **recording: Any,
) -> LawLog:
    """Record texts and laws of prompts, by task, and times.

    Args:
        pair: The target and what drafts for it.
        prompts: The prompts.
        rules: Sampling rules of texts and laws.
        drafters: Timed beside the usual ones; `None` times nothing.
        **recording: As for `record_log`.
    """
    decoder = decoder_of(pair, Configuration())
    grouped: dict[str, list[str | Sequence[int]]] = {}
    for prompt in prompts:
        grouped.setdefault(prompt.task, []).append(written(prompt, decoder.encode_chat))
    say_raw_text(pair.tokenizer, prompts, "a *.jsonl file may hold `messages`")
    with working() as work:
        on_text = work.stage("target writes", len(prompts)).advance
        model = identity(pair)
        log = record_log(decoder, grouped, model=model, rules=rules, on_text=on_text, **recording)
        if drafters is not None:
            with work.waiting("measuring costs"):
                log = replace(log, costs=_costs(pair, further_drafters(pair, drafters)))
    about = provenance(pair.target.device) | {"backend": str(pair.backend)}
    return replace(log, about=about)


def _say_log(log: LawLog, path: Path) -> None:
    laws = "complete laws"
    if log.top is not None:
        top = counted(log.top, "most probable token")
        laws = f"the {top} of each law, the rest as one"
    costs = f"costs of {', '.join(sorted(log.costs))}" if log.costs else "no costs"
    texts, tokens = counted(len(log.texts), "text"), counted(log.num_tokens, "token")
    size = f"{path.stat().st_size / 1e6:.1f} MB"
    show(f"{path}: {texts} of {log.model.name}, {tokens}, {laws}, {costs}, {size}")
    show(f"next: monge replay run {path}", "dim")


@options.command(
    only=("draft", "dtype", "device", *MANY, "draft_temperature", "draft_top_k"),
    one=("draft",),
    many=MANY,
)
def run(
    log: Annotated[Path, typer.Argument(help="A log made by `monge replay record`.")],
    *,
    load: LoadOptions,
    controller: list[str] | None = option(
        None, SPECULATION, "How much to draft; may be repeated.", STEADY
    ),
    check_target: str | None = option(None, MODELS, "Refuse the log if this is not its target."),
    repeats: int = _replay(REPEATS, "Passes over the log; drafting is random."),
    seed: int = _replay(0, "Of all passes."),
    out: Path = option(Path("replay"), OUTPUT, "Folder for JSON."),
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
    options.check_out_folder(out)
    options.check_positive(repeats=repeats)
    laws_log = read_log(log)
    if check_target is not None:
        with working("loading the target"):
            source = prepare(ModelSource.of(check_target), "eager")
            network, tokenizer = load_network(source), load_tokenizer(source)
            laws_log.check_model(identity_of(network, tokenizer, check_target), "the target")
    parts = {name: getattr(load, name) for name in MANY} | {"controller": controller}
    laws = {name: [getattr(load, name)] for name in ("draft_temperature", "draft_top_k")}
    chosen = list(grid(**parts, **laws))
    with working("loading the draft model"):
        model = load_draft(laws_log, load.draft, dtype=load.dtype, device=load.device)
    with working() as work:
        advance = work.stage("replaying", len(chosen) * len(laws_log.texts) * repeats).advance
        document = compare(chosen, laws_log, model, repeats=repeats, seed=seed, on_text=advance)
    file = write_document(document, out, "replay.json")
    show_replay(document, markdown=markdown)
    show(f"written: {file}")
    if as_json:
        print(json.dumps(document))
    if not document["replayed"]:
        raise typer.Exit(2)


def show_replay(document: dict[str, Any], *, markdown: bool = False) -> None:
    """Print the table, and the reasons of what could not be replayed."""
    replayed = document["replayed"]
    print_tables(_tables(replayed) if replayed else [], markdown=markdown)
    if any(figures["stands_in"] for figures in replayed):
        show(
            "compact log: rejected candidates stand in for those that complete laws would give; "
            "acceptance is exact",
            "dim",
        )
    for figures in replayed:
        if figures["untimed"] is not None:
            show(f"{figures['label']}: {figures['untimed']}", "dim")
    for refused in document["refused"]:
        show(f"{refused['label']}: {refused['reason']}", "yellow")


def _tables(replayed: Sequence[dict[str, Any]]) -> list[Table]:
    """Return the main figures of every configuration, and those by kind of text if there are several."""
    columns = ("tokens a round", "tokens/s", "speed-up", "depth")
    whole = plain_table("replayed without the target", "configuration", columns)
    tags = list(dict.fromkeys(tag for figures in replayed for tag in figures["tags"]))
    by_tag = plain_table("tokens a round (and speed-up) by kind of text", "configuration", tags)
    for figures in replayed:
        whole.add_row(
            figures["label"],
            "{mean:.3f} ({low:.2f}..{high:.2f})".format(**figures["block_efficiency"]),
            _mean(figures["tokens_per_s"], ".1f"),
            _mean(figures["speedup"], ".2f", "x"),
            f"{figures['mean_depth']:.1f}",
        )
        cells = (
            f"{_mean(of_tag['block_efficiency'], '.2f')} ({_mean(of_tag['speedup'], '.2f', 'x')})"
            for of_tag in (figures["tags"][tag] for tag in tags)
        )
        by_tag.add_row(figures["label"], *cells)
    return [whole, by_tag] if len(tags) > 1 else [whole]


def _mean(figure: dict[str, float] | None, form: str, unit: str = "") -> str:
    return "-" if figure is None else f"{figure['mean']:{form}}{unit}"
