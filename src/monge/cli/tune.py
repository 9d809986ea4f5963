"""`monge tune`."""

import json
import shlex
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import compress
from pathlib import Path
from statistics import median
from typing import Any, Final

from monge.bench.pair import Pair, load_pair
from monge.bench.provenance import busy_note
from monge.cli import options
from monge.cli.console import say, show, write_document
from monge.cli.options import option, panel, switch
from monge.cli.progress import working
from monge.cli.replay import LENGTH, decoder_of, further_drafters, recorded, show_replay
from monge.config import write_config
from monge.core.errors import OptionError
from monge.core.sampling_rules import SamplingRules
from monge.engine.chat_format import TemplateFormat
from monge.loading.sources import ModelSource
from monge.options import OUTPUT, LoadOptions, SamplingOptions, changed
from monge.prompts import Prompt, as_message, read_prompts, shipped, written
from monge.replay.configuration import MODEL, Configuration
from monge.replay.file import write_log
from monge.replay.log import LawLog
from monge.replay.tune import tune as search

CONFIRMING: Final = 3
"""Configurations, and passes over the prompts, that `--confirm` measures."""
SHORTEST: Final = 8
"""Fewest tokens of a text from which anything is concluded."""
TUNE: Final = "Tuning"
_tune: Final = panel(TUNE)
FREE: Final = ("suffix",)
"""Drafters that need no model and no head, tried besides none and n-grams."""
PLAIN: Final = Configuration(drafter="none")


@options.command(
    only=(*options.NETWORKS, "temperature", "max_new_tokens"),
    one=("draft",),
    defaults={"max_new_tokens": LENGTH},
)
def tune(
    *,
    prompts: Path | None = _tune(
        None,
        "Your prompts: text lines, or *.jsonl with `prompt` or `messages`.",
        "the shipped ones",
    ),
    load: LoadOptions,
    sampling: SamplingOptions,
    max_prompts: int = _tune(6, "Prompts that are logged."),
    drafter: list[str] | None = _tune(
        None,
        "Try this drafter too; may be repeated.",
        f"none, ngram, {', '.join(FREE)}, and --draft",
    ),
    confirm: bool = switch(
        "--confirm", TUNE, "Run the three best, and plain decoding, against the clock."
    ),
    repeats: int = _tune(2, "Passes over the log."),
    seed: int = _tune(0, "Of texts and passes."),
    out: Path = option(Path("tune"), OUTPUT, "Folder for log and JSON."),
    save: Path | None = option(
        None,
        OUTPUT,
        "Write the recommended options to this TOML file, which --config takes.",
        "nothing",
    ),
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
    options.check_positive(max_prompts=max_prompts, repeats=repeats)
    options.check_out_folder(out)
    options.check_out_file(save, "--save")
    shown = (read_prompts(prompts) if prompts else shipped(per_task=1))[:max_prompts]
    if load.draft is None:
        load = replace(load, draft=ModelSource.of(load.target).head)
    with working("loading the models"):
        pair = load_pair(**changed(load))
    if isinstance(pair.decoder.chat_format, TemplateFormat):
        if any(prompt.messages is None for prompt in shown):
            say("this model has a chat template: prompts are written as messages", "dim")
        shown = tuple(map(as_message, shown))
    rules = SamplingRules(temperature=sampling.temperature)
    further = further_drafters(pair, [*FREE, *(drafter or ())])
    recording = {"seed": seed, "max_new_tokens": sampling.max_new_tokens}
    log = recorded(pair, shown, rules, drafters=further, **recording)
    log, shown = _without_short(log, shown)
    with working() as work:
        stage = work.stage("replaying")
        document = search(
            log,
            pair.draft_model,
            repeats=repeats,
            seed=seed,
            target=pair.target_again() if further else None,
            drafters=further,
            on_text=stage.advance,
            on_grid=partial(stage.restart, "replaying"),
        )
        replayed = document["replayed"]
        measured = _confirmed(pair, shown, replayed, log, seed=seed) if confirm else []
    fastest = max(measured, key=lambda entry: entry["tokens_per_s"]) if measured else replayed[0]
    best, predicted = Configuration(**fastest["configuration"]), replayed[0]
    document |= {
        "predicted_best": predicted["configuration"],
        "best": best.settings,
        "measured": measured,
    }
    files = [write_log(log, out / "run.mlog"), write_document(document, out, "tune.json")]
    show_replay(document | {"replayed": replayed[:8]}, markdown=markdown)
    expected = _show_expected(document, best)
    settings = _settings(best, changed(load))
    if save is not None:
        about = [
            f"monge tune chose {best.label}",
            f"expected: {expected}",
            "for monge.load(config=FILE) and --config FILE; options that are given win",
        ]
        write_config(save, settings, about)
        files.append(save)
    show("written: " + ", ".join(map(str, files)))
    if pair.head is None:
        loading = _written(options.given(target=load.target, device=load.device))
        data = "questions.jsonl" if prompts is None else shlex.quote(str(prompts))
        show(
            "a head that is trained for this target may be faster: monge train eagle3"
            f"{loading} --data {data} --out my-head; then monge tune --draft my-head tries it",
            "dim",
        )
    show(busy_note(), "yellow")
    asking = f" --temperature {sampling.temperature:g}" if sampling.temperature else ""
    asking += " --chat" if any(prompt.messages is not None for prompt in shown) else ""
    chosen = settings if save is None else {"config": str(save)}
    call = ", ".join(f"{name}={value!r}" for name, value in chosen.items())
    show(f"use it:   monge generate PROMPT{_written(chosen)}{asking}", "bold")
    show(f"python:   monge.load({call})", "bold")
    show(f"expected: {expected}", "bold")
    if as_json:
        print(json.dumps(document))


def _show_expected(document: dict[str, Any], best: Configuration) -> str:
    """Print what was predicted and what the clock said of it; return the expected speed-up."""
    replayed, measured = document["replayed"], document["measured"]
    speed = f"{replayed[0]['tokens_per_s']['mean']:.1f} tokens/s"
    show(f"\nbest by prediction: {replayed[0]['label']}, {speed}", "bold")
    speeds = {json.dumps(entry["configuration"]): entry["tokens_per_s"] for entry in measured}
    plain = speeds.get(json.dumps(PLAIN.settings))
    for entry in measured:
        times = (
            "" if plain is None else f", {entry['tokens_per_s'] / plain:.2f} times plain decoding"
        )
        show(f"measured: {entry['label']}: {entry['tokens_per_s']:.1f} tokens/s{times}")
    if measured:
        show(f"best by the clock: {best.label}", "bold")
    gain = next(entry["speedup"] for entry in replayed if entry["configuration"] == best.settings)
    interval = f"95% interval over texts {gain['low']:.2f} to {gain['high']:.2f}"
    expected = f"{gain['mean']:.2f} times plain decoding, {interval}"
    if plain is None:
        return expected
    return f"{expected}; by the clock {speeds[json.dumps(best.settings)] / plain:.2f} times"


def _without_short(log: LawLog, prompts: Sequence[Prompt]) -> tuple[LawLog, Sequence[Prompt]]:
    """Return the log and its prompts without texts that ended before they could show anything."""
    order = list(dict.fromkeys(prompt.task for prompt in prompts))
    placed = sorted(prompts, key=lambda prompt: order.index(prompt.task))  # as in the log
    long = [len(text.token_ids) >= min(SHORTEST, text.max_new_tokens) for text in log.texts]
    if all(long):
        return log, placed
    reason = f"{long.count(False)} of {len(long)} texts ended within {SHORTEST} tokens"
    if not any(long):
        raise OptionError(
            f"{reason}, which shows nothing about drafters; give prompts that the target answers at "
            "length: --prompts"
        )
    say(f"{reason} and are left out", "yellow")
    return replace(log, texts=tuple(compress(log.texts, long))), tuple(compress(placed, long))


def _confirmed(
    pair: Pair,
    prompts: Sequence[Prompt],
    replayed: Sequence[dict[str, Any]],
    log: LawLog,
    *,
    seed: int,
) -> list[dict[str, Any]]:
    """Measure the best configurations and plain decoding, in turns, so that a slow minute slows all."""
    best = [Configuration(**entry["configuration"]) for entry in replayed[:CONFIRMING]]
    chosen = best if PLAIN in best else [*best, PLAIN]
    decoders = [decoder_of(pair, configuration) for configuration in chosen]
    speeds: list[list[float]] = [[] for _ in chosen]
    with working() as work:
        advance = work.stage("measuring", CONFIRMING * len(chosen) * len(prompts)).advance
        for turn in range(CONFIRMING):
            for decoder, speeds_of in zip(decoders, speeds, strict=True):
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
                    advance()
                if turn > 0:  # the first turn warms up
                    speeds_of.append(tokens / seconds)
    return [
        {
            "label": configuration.label,
            "configuration": configuration.settings,
            "tokens_per_s": median(speeds_of),
        }
        for configuration, speeds_of in zip(chosen, speeds, strict=True)
    ]


def _settings(best: Configuration, loading: dict[str, Any]) -> dict[str, Any]:
    """Return arguments of `monge.load` for a configuration; without the draft if it is not used, or is named by the drafter."""
    if best.drafter is not None and MODEL not in best.drafter_names(None):
        loading = {name: value for name, value in loading.items() if name != "draft"}
    return {**loading, **best.load_arguments}


def _written(settings: dict[str, Any]) -> str:
    return "".join(
        f" --{name.replace('_', '-')} {shlex.quote(str(value))}" for name, value in settings.items()
    )
