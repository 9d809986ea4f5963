"""`monge tune`."""

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from itertools import compress
from pathlib import Path
from typing import Any, Final

from rich.table import Table

from monge.bench.arms import arms_of, named_arm
from monge.bench.pair import Pair, load_pair
from monge.bench.provenance import busy_note, provenance
from monge.bench.runner import Measurement, Workload
from monge.bench.tune import FREE, grid, lengths, search
from monge.cli import options
from monge.cli.console import plain_table, print_tables, say, show, write_document
from monge.cli.options import option, panel
from monge.cli.progress import call_bar, working
from monge.config import write_config
from monge.core.errors import OptionError
from monge.core.words import counted
from monge.draft.by_name import settings_of
from monge.loading.sources import ModelSource
from monge.options import LAW, OUTPUT, LoadOptions, SamplingOptions, changed
from monge.prompts import as_message, interleaved, read_prompts, shipped
from monge.requests.chat_format import TemplateFormat

LENGTH: Final = 64
"""Most tokens of a text."""
SHORTEST: Final = 8
"""Fewest tokens of a text from which anything is concluded."""
_SHOWN: Final = 8
"""Rows of the table."""
PLAIN: Final = "drafter=none"
_EXPECTED: Final = (
    "{mean:.2f} times plain decoding, 95% interval over prompts {low:.2f} to {high:.2f}"
)
_tune: Final = panel("Tuning")


@options.command(
    only=(*options.NETWORKS, *LAW, "max_new_tokens"),
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
    max_prompts: int = _tune(6, "Prompts that are decoded."),
    drafter: list[str] | None = _tune(
        None,
        "Try this drafter too; may be repeated.",
        f"none, {', '.join(FREE)}, and --draft",
    ),
    repeats: int = _tune(3, "Passes over the prompts in the last round."),
    seed: int = _tune(0, "Of all texts."),
    out: Path = option(Path("tune"), OUTPUT, "Folder for JSON."),
    save: Path | None = option(
        None,
        OUTPUT,
        "Write the recommended options to this TOML file, which --config takes.",
        "nothing",
    ),
    as_json: options.Json = False,
    markdown: options.Markdown = False,
) -> None:
    """Find the fastest settings for your prompts on this machine, by the clock.

    Drafters, trees, verifiers and controllers decode your prompts side by side, and after every
    round the faster half stays. The last round compares three settings with plain decoding. Tried
    are drafters that need nothing, the draft model or head of `--draft`, and the head that ships
    for the target. A chat model is asked your prompts as messages. Texts that end at once are left
    out. The last lines are the recommended command, the same call in Python, and its speed-up.

    **Examples**

        monge tune
        monge tune --prompts mine.jsonl --temperature 0.8
        monge tune --prompts mine.jsonl --save monge.toml && monge serve --config monge.toml
        monge tune --target ./my-target --draft ./my-draft --prompts mine.txt --json
        monge tune --draft my-head --drafter "pool(ngram, head)"
    """
    options.check_positive(max_prompts=max_prompts, repeats=repeats)
    options.check_out_folder(out)
    options.check_out_file(save, "--save")
    shown = (read_prompts(prompts) if prompts else shipped(per_task=2))[:max_prompts]
    if load.draft is None:
        load = replace(load, draft=ModelSource.of(load.target).head)
    with working("loading the models"):
        pair = load_pair(**changed(load))
    if isinstance(pair.decoder.chat_format, TemplateFormat):
        if any(prompt.messages is None for prompt in shown):
            say("this model has a chat template: prompts are written as messages", "dim")
        shown = tuple(map(as_message, shown))
    law = {name: getattr(sampling, name) for name in LAW if name in changed(sampling)}
    work = Workload(
        prompts=tuple(map(pair.encode, interleaved(shown))),
        max_new_tokens=sampling.max_new_tokens,
        temperature=sampling.temperature,
        truncation={name: value for name, value in law.items() if name != "temperature"},
        eos_ids=pair.decoder.eos_ids,
        seed=seed,
        repeats=repeats,
    )
    plain = named_arm(PLAIN)
    arms = arms_of(
        grid(drafter=_own_drafter(pair), is_greedy=work.temperature == 0, further=drafter or ())
    )
    with working() as now:
        stage = now.stage("decoding without drafts", len(work.prompts))
        work = _without_short(work, lengths(pair, plain, work, on_text=stage.advance))
    with call_bar() as on_call:
        candidates = search(pair, plain, arms, work, on_call=on_call)
    document = _document(candidates, work, pair)
    print_tables([_table(document["measured"], work)], markdown=markdown)
    for refused in document["refused"]:
        show(f"{refused['label']}: {refused['reason']}", "yellow")
    files = [write_document(document, out, "tune.json")]
    best = document["measured"][0]
    expected = _EXPECTED.format(**best["speedup"])
    chosen = _recommended(best["settings"], changed(load))
    if save is not None:
        about = [
            f"monge tune chose {best['label']}",
            f"measured: {expected}",
            "for monge.load(config=FILE) and --config FILE; options that are given win",
        ]
        write_config(save, chosen, about)
        files.append(save)
        chosen = {"config": str(save)}
    show("written: " + ", ".join(map(str, files)))
    if pair.head is None:
        show(_advice(load, prompts), "dim")
    show(busy_note(), "yellow")
    asking = _flags(law)
    asking += " --chat" if any(prompt.messages is not None for prompt in shown) else ""
    call = ", ".join(f"{name}={value!r}" for name, value in chosen.items())
    show(f"fastest:  {best['label']}", "bold")
    show(f"use it:   monge generate PROMPT{_flags(chosen)}{asking}", "bold")
    show(f"python:   monge.load({call})", "bold")
    show(f"measured: {expected}", "bold")
    if as_json:
        print(json.dumps(document))


def _advice(load: LoadOptions, prompts: Path | None) -> str:
    loading = _flags(options.given(target=load.target, device=load.device))
    data = "questions.jsonl" if prompts is None else shlex.quote(str(prompts))
    return (
        "a head that is trained for this target may be faster: monge train eagle3"
        f"{loading} --data {data} --out my-head; then monge tune --draft my-head tries it"
    )


def _own_drafter(pair: Pair) -> str | None:
    """Return the name of the drafter of the head or of the draft model, or `None`."""
    if pair.head is not None:
        return pair.head.partition("(")[0]
    return None if pair.draft is None else "model"


def _without_short(work: Workload, lengths: Sequence[int]) -> Workload:
    """Return the prompts without those whose texts end before they can show anything."""
    least = min(SHORTEST, work.max_new_tokens)
    long = [length >= least for length in lengths]
    if all(long):
        return work
    reason = f"{long.count(False)} of {counted(len(long), 'text')} ended within {SHORTEST} tokens"
    if not any(long):
        raise OptionError(
            f"{reason}, which shows nothing about drafters; give prompts that the target answers at "
            "length: --prompts"
        )
    say(f"{reason} and are left out", "yellow")
    return replace(work, prompts=tuple(compress(work.prompts, long)))


def _document(candidates: Sequence[Measurement], work: Workload, pair: Pair) -> dict[str, Any]:
    """Return what was measured as plain values for JSON, the best first, and what failed."""
    plain = next(candidate for candidate in candidates if candidate.arm.name == "none")
    measured = [
        {
            "label": candidate.arm.name,
            "settings": dict(candidate.arm.settings),
            "tokens_per_s": candidate.speed,
            "speedup": asdict(candidate.speedup(plain, len(work.prompts))),
            "tokens_a_round": sum(candidate.num_tokens) / max(1, len(candidate.records)),
            "num_texts": len(candidate.seconds),
        }
        for candidate in candidates
        if candidate.failure is None
    ]
    return {
        "best": measured[0]["settings"],
        "measured": measured,
        "refused": [
            {"label": candidate.arm.name, "reason": candidate.failure}
            for candidate in candidates
            if candidate.failure
        ],
        "about": provenance(pair.target.device) | {"backend": str(pair.backend)},
    }


def _table(rows: Sequence[Mapping[str, Any]], work: Workload) -> Table:
    law = "greedy" if work.temperature == 0 else f"temperature {work.temperature:g}"
    title = f"{counted(len(rows), 'setting')}, {counted(len(work.prompts), 'prompt')}, {law}"
    table = plain_table(title, "setting", ("tokens/s", "x plain", "tokens a round", "texts"))
    for row in rows[:_SHOWN]:  # plain decoding has as many texts as the first of them
        table.add_row(
            row["label"],
            f"{row['tokens_per_s']:.1f}",
            "{mean:.2f} {low:.2f}-{high:.2f}".format(**row["speedup"]),
            f"{row['tokens_a_round']:.2f}",
            str(row["num_texts"]),
        )
    if len(rows) > table.row_count:
        table.caption = f"{len(rows) - table.row_count} slower settings are in the JSON file"
        table.caption_justify = "left"
    return table


def _recommended(settings: Mapping[str, str], loading: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments of `monge.load` for settings; without the draft where no drafter takes it."""
    drafter = settings.get("drafter")
    is_used = drafter is None or bool(settings_of(drafter) & {"head", "model", "models"})
    kept = {name: value for name, value in loading.items() if is_used or name != "draft"}
    return {**kept, **settings}


def _flags(settings: Mapping[str, Any]) -> str:
    return "".join(
        f" --{name.replace('_', '-')} {_quoted(str(value))}" for name, value in settings.items()
    )


def _quoted(text: str) -> str:
    """A word for a shell, in double quotes where it has single ones."""
    is_plain = "'" in text and not set(text) & set('"$`\\!')
    return f'"{text}"' if is_plain else shlex.quote(text)
