"""`monge tune`."""

import json
import shlex
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated, Any, Final

import typer

from monge.bench.provenance import busy_note
from monge.cli import options
from monge.cli.console import output, quiet_host, reported
from monge.cli.networks import Networks, load_networks
from monge.cli.out import check_out_folder, write_document
from monge.cli.progress import call_bar
from monge.cli.replay import recorded, show
from monge.core.sampling_rules import SamplingRules
from monge.prompts import Prompt, read_prompts, shipped
from monge.replay.compare import Settings
from monge.replay.configuration import MODEL, Configuration
from monge.replay.file import write_log
from monge.replay.log import LawLog
from monge.replay.tune import TuningResult
from monge.replay.tune import tune as search

OUT: Final = Path("tune")
PER_TASK: Final = 1
REPEATS: Final = 2
CONFIRMING: Final = 3
TUNE: Final = "Tuning"


@reported
def tune(
    *,
    prompts: Annotated[
        Path | None,
        options.option(
            "--prompts",
            help="Your prompts: text lines, or *.jsonl.",
            panel=TUNE,
            default="the shipped ones",
        ),
    ] = None,
    target: options.Target = None,
    draft: options.Draft = None,
    dtype: options.Dtype = None,
    device: options.Device = None,
    attention: options.Attention = None,
    backend: options.Backend = None,
    temperature: options.Temperature = None,
    max_new_tokens: options.MaxNewTokens = None,
    max_prompts: Annotated[
        int, typer.Option("--max-prompts", help="Prompts that are logged.", rich_help_panel=TUNE)
    ] = 6,
    drafter: Annotated[
        list[str] | None,
        options.option(
            "--drafter",
            help="Try this drafter too; may be repeated.",
            panel=TUNE,
            default="none, ngram, --draft",
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
    as_json: options.Json = False,
    markdown: options.Markdown = False,
) -> None:
    """Find the fastest configuration for your prompts on this machine.

    The target writes a continuation of every prompt once, which is logged; rounds of several sizes
    are timed; then drafters, trees, verifiers, windows and controllers are replayed on the log, and
    the one with the largest predicted speed is printed with the command and the call that use it.
    `--confirm` measures the best ones and plain decoding, and then the one that was fastest by the
    clock is printed: a prediction is one.

    **Examples**

        monge tune
        monge tune --prompts mine.jsonl --temperature 0.8 --confirm
        monge tune --target ./my-target --draft ./my-draft --prompts mine.txt --json
        monge tune --draft my-head --drafter suffix --drafter "cascade('ngram', 'head')"
    """
    quiet_host()
    options.check_positive(max_prompts=max_prompts, repeats=repeats)
    check_out_folder(out)
    shown = (read_prompts(prompts) if prompts else shipped(per_task=PER_TASK))[:max_prompts]
    loading = options.given(dtype=dtype, device=device, attention=attention, backend=backend)
    networks = load_networks(target, draft, **loading)
    rules = SamplingRules(temperature=0.0 if temperature is None else temperature)
    with call_bar() as watch:
        found = recorded(
            networks,
            shown,
            rules,
            watch=watch,
            seed=seed,
            **options.given(max_new_tokens=max_new_tokens),
        )
        watch.step("measuring costs")
        further = networks.further(drafter or ())
        found = replace(found, costs=networks.costs(further), about=networks.about())
        settings, own = (
            Settings(repeats=repeats, seed=seed),
            networks.own_target() if further else None,
        )
        tuned = search(
            found,
            networks.draft,
            settings,
            target=own,
            drafters=further,
            on_text=partial(watch.step, "replaying"),
        )
        measured = _confirmed(networks, shown, tuned, found, seed) if confirm else []
    best = _fastest(tuned, measured)
    document = tuned.document | {
        "predicted_best": tuned.best.settings,
        "best": best.settings,
        "measured": measured,
    }
    files = [write_log(found, out / "run.mlog"), write_document(document, out, "tune.json")]
    _say(tuned, measured, markdown=markdown)
    _say_use(best, options.given(target=target, draft=draft) | loading, rules)
    output().print("written: " + ", ".join(map(str, files)), soft_wrap=True)
    if as_json:
        print(json.dumps(document))


def _confirmed(
    networks: Networks, prompts: Sequence[Prompt], tuned: TuningResult, log: LawLog, seed: int
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
    for turn in range(3):
        for decoder, found in zip(decoders, speeds, strict=True):
            tokens, seconds = 0, 0.0
            for number, prompt in enumerate(prompts):
                (result,) = decoder.generate(
                    [prompt.text],
                    max_new_tokens=log.texts[number].max_new_tokens,
                    temperature=log.rules.temperature,
                    seed=seed + number,
                )
                tokens, seconds = tokens + result.stats.num_tokens, seconds + result.stats.decode_s
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
    console, gain, speed = output(), tuned.predicted["speedup"], tuned.predicted["tokens_per_s"]
    console.print(
        f"\nbest by prediction: {tuned.best.label}\npredicted: {speed['mean']:.1f} tokens/s, "
        f"{gain['mean']:.2f} times plain "
        f"decoding (95% over texts {gain['low']:.2f}..{gain['high']:.2f})",
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


def _say_use(best: Configuration, loading: dict[str, str], rules: SamplingRules) -> None:
    """The command and the call that decode so."""
    console = output()
    if best.drafter is not None and MODEL not in best.drafter_names(None):
        loading = {name: value for name, value in loading.items() if name != "draft"}
    chosen = "".join(f" --{name} {shlex.quote(value)}" for name, value in loading.items())
    heat = "" if rules.temperature == 0 else f" --temperature {rules.temperature:g}"
    console.print(
        f"use it:   monge generate PROMPT{chosen}{heat} {best.command}",
        markup=False,
        soft_wrap=True,
    )
    names = "".join(f"{name}={value!r}, " for name, value in loading.items())
    console.print(f"python:   monge.load({names}{best.call})", markup=False, soft_wrap=True)
    if (note := busy_note()) is not None:
        console.print(note, style="yellow", markup=False, soft_wrap=True)
