"""`monge tune`."""

import json
import shlex
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import compress
from pathlib import Path
from statistics import median
from typing import Annotated, Any, Final

import typer

from monge.bench.provenance import busy_note
from monge.cli import options
from monge.cli.console import notes, output, quiet_host, reported
from monge.cli.networks import Networks, load_networks
from monge.cli.out import check_out_file, check_out_folder, write_document
from monge.cli.progress import bars, working
from monge.cli.replay import LENGTH, by_task, recorded, show
from monge.config import write_config
from monge.core.errors import OptionError
from monge.core.sampling_rules import SamplingRules
from monge.engine.chat_format import TemplateFormat
from monge.loading.sources import NAMED
from monge.options import LoadOptions, SamplingOptions, changed
from monge.prompts import Prompt, read_prompts, shipped, written
from monge.replay.configuration import HEADS, MODEL, Configuration
from monge.replay.file import write_log
from monge.replay.log import LawLog
from monge.replay.tune import TuningResult
from monge.replay.tune import tune as search

OUT: Final = Path("tune")
PER_TASK: Final = 1
REPEATS: Final = 2
CONFIRMING: Final = 3
SHORTEST: Final = 8
"""Fewest tokens of a text from which anything is concluded."""
TUNE: Final = "Tuning"
FREE: Final = ("suffix", "token_recycling")
"""Drafters that need no model and no head, tried besides none and n-grams."""


@reported
@options.command(
    only=(*options.NETWORKS, "temperature", "max_new_tokens"),
    one=("draft",),
    defaults={"max_new_tokens": LENGTH},
)
def tune(
    *,
    prompts: Annotated[
        Path | None,
        options.option(
            "--prompts",
            help="Your prompts: text lines, or *.jsonl with `prompt` or `messages`.",
            panel=TUNE,
            default="the shipped ones",
        ),
    ] = None,
    load: LoadOptions,
    sampling: SamplingOptions,
    max_prompts: Annotated[
        int, typer.Option("--max-prompts", help="Prompts that are logged.", rich_help_panel=TUNE)
    ] = 6,
    drafter: Annotated[
        list[str] | None,
        options.option(
            "--drafter",
            help="Try this drafter too; may be repeated.",
            panel=TUNE,
            default=f"none, ngram, {', '.join(FREE)}, and --draft",
        ),
    ] = None,
    confirm: Annotated[
        bool,
        options.option(
            "--confirm",
            help="Run the three best, and plain decoding, against the clock.",
            panel=TUNE,
        ),
    ] = False,
    repeats: Annotated[
        int, typer.Option("--repeats", help="Passes over the log.", rich_help_panel=TUNE)
    ] = REPEATS,
    seed: Annotated[
        int, typer.Option("--seed", help="Of texts and passes.", rich_help_panel=TUNE)
    ] = 0,
    out: Annotated[
        Path,
        options.option("--out", help="Folder for log and JSON.", panel=options.OUTPUT, default=OUT),
    ] = OUT,
    save: Annotated[
        Path | None,
        options.option(
            "--save",
            help="Write the recommended options to this TOML file, which --config takes.",
            panel=options.OUTPUT,
            default="nothing",
        ),
    ] = None,
    as_json: options.Json = False,
    markdown: options.Markdown = False,
) -> None:
    """Find the fastest configuration for your prompts on this machine.

    The target writes a continuation of every prompt once, which is logged; rounds of several sizes
    are timed; then drafters, trees, verifiers, depths and controllers are replayed on the log.
    A chat model is asked your prompts as messages, and texts that end at once are left out.
    Drafters that need nothing are tried, the draft model or head of `--draft`, and the head that
    ships for the target. The last lines are the recommended command, the same call in Python, and the expected speed-up.
    `--confirm` measures the best ones and plain decoding, and recommends the fastest one by the
    clock. `--save` writes the recommended options to a file for `--config` and `monge.load`.

    **Examples**

        monge tune
        monge tune --prompts mine.jsonl --temperature 0.8 --confirm
        monge tune --prompts mine.jsonl --save monge.toml && monge serve --config monge.toml
        monge tune --target ./my-target --draft ./my-draft --prompts mine.txt --json
        monge tune --draft my-head --drafter suffix --drafter "pool('ngram', 'head')"
    """
    quiet_host()
    options.check_positive(max_prompts=max_prompts, repeats=repeats)
    check_out_folder(out)
    if save is not None:
        check_out_file(save, "--save", "monge.toml")
    shown = (read_prompts(prompts) if prompts else shipped(per_task=PER_TASK))[:max_prompts]
    if load.draft is None and load.target in NAMED:
        load = replace(load, draft=NAMED[load.target].head)
    networks = load_networks(**changed(load))
    shown = _as_asked(networks, shown)
    rules = SamplingRules(temperature=sampling.temperature)
    with working() as work:
        stage = work.stage("target writes", len(shown))
        found = recorded(
            networks,
            shown,
            rules,
            on_text=stage.advance,
            seed=seed,
            max_new_tokens=sampling.max_new_tokens,
        )
        found, shown = _without_short(found, shown)
        further = networks.further([*FREE, *(drafter or ())])
        stage.restart("measuring costs")
        found = replace(found, costs=networks.costs(further), about=networks.about())
        tuned = search(
            found,
            networks.draft,
            repeats=repeats,
            seed=seed,
            target=networks.own_target() if further else None,
            drafters=further,
            on_text=stage.advance,
            on_grid=partial(stage.restart, "replaying"),
        )
        work.end(stage)
        measured = _confirmed(networks, shown, tuned, found, seed=seed) if confirm else []
    best = _fastest(tuned, measured)
    document = tuned.document | {
        "predicted_best": tuned.best.settings,
        "best": best.settings,
        "measured": measured,
    }
    files = [write_log(found, out / "run.mlog"), write_document(document, out, "tune.json")]
    settings = _settings(best, changed(load))
    _say(tuned, measured, markdown=markdown)
    if save is not None:
        write_config(save, settings, _notes(best, tuned, measured))
        files.append(save)
    output().print("written: " + ", ".join(map(str, files)), soft_wrap=True)
    if networks.head is None:
        _say_training(prompts, options.given(target=load.target, device=load.device))
    asking = "" if rules.temperature == 0 else f" --temperature {rules.temperature:g}"
    if any(one.messages is not None for one in shown):
        asking += " --chat"
    _say_use(settings, save, asking, tuned, measured)
    if as_json:
        print(json.dumps(document))


def _as_asked(networks: Networks, prompts: Sequence[Prompt]) -> Sequence[Prompt]:
    """The prompts as a chat model is asked them: raw text becomes a message of the user."""
    chat = networks.decoder(Configuration(drafter="none")).chat_format
    raw = [one for one in prompts if one.messages is None]
    if not raw or not isinstance(chat, TemplateFormat):
        return prompts
    notes().print(
        "this model has a chat template: prompts are written as messages", style="dim", markup=False
    )
    return [
        replace(one, messages=one.messages or ({"role": "user", "content": one.text},))
        for one in prompts
    ]


def _without_short(log: LawLog, prompts: Sequence[Prompt]) -> tuple[LawLog, Sequence[Prompt]]:
    """The log and its prompts without texts that ended before they could show anything.

    Raises:
        OptionError: If none is long enough.
    """
    placed = by_task(prompts)
    long = [len(text.token_ids) >= min(SHORTEST, text.max_new_tokens) for text in log.texts]
    if all(long):
        return log, placed
    told = f"{long.count(False)} of {len(long)} texts ended within {SHORTEST} tokens"
    if not any(long):
        raise OptionError(
            f"{told}, which shows nothing about drafters; give prompts that the target answers at "
            "length: --prompts"
        )
    notes().print(f"{told} and are left out", style="yellow", markup=False)
    texts = tuple(compress(log.texts, long))
    return replace(log, texts=texts), tuple(compress(placed, long))


def _confirmed(
    networks: Networks,
    prompts: Sequence[Prompt],
    tuned: TuningResult,
    log: LawLog,
    *,
    seed: int,
) -> list[dict[str, Any]]:
    """Tokens per second by the clock: the best configurations and plain decoding, in turns, so that a slow minute slows all."""
    best = [
        Configuration(**one["configuration"]) for one in tuned.document["replayed"][:CONFIRMING]
    ]
    chosen = [
        *best,
        *([] if Configuration(drafter="none") in best else [Configuration(drafter="none")]),
    ]
    decoders = [networks.decoder(configuration) for configuration in chosen]
    speeds: list[list[float]] = [[] for _ in chosen]
    with bars() as bar:
        advance = bar("measuring", 3 * len(chosen) * len(prompts))
        for turn in range(3):
            for decoder, found in zip(decoders, speeds, strict=True):
                tokens, seconds = 0, 0.0
                for number, prompt in enumerate(prompts):
                    (result,) = decoder.generate(
                        [written(prompt, decoder.encode_chat)],
                        max_new_tokens=log.texts[number].max_new_tokens,
                        temperature=log.rules.temperature,
                        seed=seed + number,
                    )
                    tokens += result.stats.num_tokens
                    seconds += result.stats.decode_s
                    advance(1)
                if turn > 0:  # the first turn warms up
                    found.append(tokens / seconds)
    return [
        {
            "label": configuration.label,
            "configuration": configuration.settings,
            "tokens_per_s": median(found),
        }
        for configuration, found in zip(chosen, speeds, strict=True)
    ]


def _fastest(tuned: TuningResult, measured: Sequence[dict[str, Any]]) -> Configuration:
    """The configuration that was fastest by the clock, if any was measured, or else by prediction."""
    by_clock = [
        Configuration(**one["configuration"])
        for one in sorted(measured, key=lambda one: -one["tokens_per_s"])
    ]
    return by_clock[0] if by_clock else tuned.best


def _say(tuned: TuningResult, measured: Sequence[dict[str, Any]], *, markdown: bool) -> None:
    """What was predicted, and what the clock said of it."""
    show({**tuned.document, "replayed": tuned.document["replayed"][:8]}, markdown=markdown)
    console, speed = output(), tuned.predicted["tokens_per_s"]
    console.print(
        f"\nbest by prediction: {tuned.best.label}, {speed['mean']:.1f} tokens/s",
        style="bold",
        markup=False,
        soft_wrap=True,
    )
    plain = next(
        (one["tokens_per_s"] for one in measured if one["configuration"] == {"drafter": "none"}),
        None,
    )
    for one in measured:
        times = "" if plain is None else f", {one['tokens_per_s'] / plain:.2f} times plain decoding"
        console.print(
            f"measured: {one['label']}: {one['tokens_per_s']:.1f} tokens/s{times}",
            markup=False,
            soft_wrap=True,
        )
    if measured:
        console.print(
            f"best by the clock: {_fastest(tuned, measured).label}",
            style="bold",
            markup=False,
            soft_wrap=True,
        )


def _settings(best: Configuration, loading: dict[str, str]) -> dict[str, Any]:
    """Arguments of `monge.load` for a configuration; without the draft model if none is used."""
    if best.drafter is not None and MODEL not in best.drafter_names(None):
        names = best.drafter_names(None)
        if not set(names) & set(HEADS):
            loading = {name: value for name, value in loading.items() if name != "draft"}
    return {**loading, **best.load_arguments}


def _speedup(tuned: TuningResult, measured: Sequence[dict[str, Any]]) -> str:
    """The expected speed-up over plain decoding, with its interval."""
    best = _fastest(tuned, measured).settings
    gain = next(
        one["speedup"] for one in tuned.document["replayed"] if one["configuration"] == best
    )
    text = (
        f"{gain['mean']:.2f} times plain decoding, 95% interval over texts {gain['low']:.2f} to "
        f"{gain['high']:.2f}"
    )
    clock = _clock_ratio(measured, best)
    return text if clock is None else f"{text}; by the clock {clock:.2f} times"


def _clock_ratio(measured: Sequence[dict[str, Any]], configuration: dict[str, Any]) -> float | None:
    """Measured speed over that of plain decoding; `None` if they were not measured."""
    speeds = {json.dumps(one["configuration"]): one["tokens_per_s"] for one in measured}
    plain, ours = (speeds.get(json.dumps(one)) for one in ({"drafter": "none"}, configuration))
    return None if plain is None or ours is None else ours / plain


def _notes(
    best: Configuration, tuned: TuningResult, measured: Sequence[dict[str, Any]]
) -> list[str]:
    return [
        f"monge tune chose {best.label}",
        f"expected: {_speedup(tuned, measured)}",
        "for monge.load(config=FILE) and --config FILE; options that are given win",
    ]


def _say_training(prompts: Path | None, loading: dict[str, str]) -> None:
    """How a head would be trained."""
    data = "questions.jsonl" if prompts is None else shlex.quote(str(prompts))
    output().print(
        "a head that is trained for this target may be faster: monge train eagle3"
        f"{_written(loading)} --data {data} --out my-head; then monge tune --draft my-head "
        "tries it",
        style="dim",
        markup=False,
        soft_wrap=True,
    )


def _written(settings: dict[str, Any]) -> str:
    return "".join(
        f" --{name.replace('_', '-')} {shlex.quote(str(value))}" for name, value in settings.items()
    )


def _say_use(
    settings: dict[str, Any],
    save: Path | None,
    asking: str,
    tuned: TuningResult,
    measured: Sequence[dict[str, Any]],
) -> None:
    """The command and the call that decode so, and how much faster they are."""
    console = output()
    chosen = _written(settings if save is None else {"config": save})
    names = ", ".join(f"{name}={value!r}" for name, value in settings.items())
    names = names if save is None else f"config={str(save)!r}"
    if (note := busy_note()) is not None:
        console.print(note, style="yellow", markup=False, soft_wrap=True)
    for what, text in (
        ("use it:", f"monge generate PROMPT{chosen}{asking}"),
        ("python:", f"monge.load({names})"),
        ("expected:", _speedup(tuned, measured)),
    ):
        console.print(f"{what:<10}{text}", style="bold", markup=False, soft_wrap=True)
