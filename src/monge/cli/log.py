"""`monge log`."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from monge.bench.tasks import Prompt, asked_prompts
from monge.cli import options
from monge.cli.bench import call_bar
from monge.cli.console import notes, output, quiet_host, reported
from monge.cli.networks import Networks, load_networks
from monge.cli.out import check_out_file
from monge.core.errors import OptionError
from monge.core.sampling_rules import SamplingRules
from monge.replay.configuration import Configuration
from monge.replay.file import write_log
from monge.replay.log import LawLog
from monge.replay.record import record_log

OUT: Final = Path("run.mlog")
PER_TASK: Final = 2
LOG: Final = "Log"
Top = Annotated[
    int | None,
    options.option("--top", help="Keep so many tokens of every law, and the mass of the others.", panel=LOG, default="all"),
]
Out = Annotated[Path, options.option("--out", help="The log.", panel=options.OUTPUT, default=OUT)]


@reported
def log(
    *,
    prompts: options.File = None,
    target: options.Target = None,
    draft: options.Draft = None,
    dtype: options.Dtype = None,
    device: options.Device = None,
    attention: options.Attention = None,
    backend: options.Backend = None,
    max_new_tokens: options.MaxNewTokens = None,
    temperature: options.Temperature = None,
    top_k: options.TopK = None,
    top_p: options.TopP = None,
    min_p: options.MinP = None,
    seed: Annotated[int, typer.Option("--seed", help="Of the first text.", rich_help_panel=options.SAMPLING)] = 0,
    ignore_eos: options.IgnoreEos = False,
    per_task: Annotated[
        int | None,
        options.option("--prompts-per-task", help="Prompts of each task; of a file all.", panel=LOG, default=PER_TASK),
    ] = None,
    top: Top = None,
    drafter: Annotated[
        list[str] | None,
        options.option("--drafter", help="Time this drafter too; may be repeated.", panel=LOG, default="none, ngram, --draft"),
    ] = None,
    no_costs: Annotated[bool, options.option("--no-costs", help="Do not time rounds.", panel=LOG)] = False,
    out: Out = OUT,
    as_json: options.Json = False,
) -> None:
    """Let the target write once, and keep its laws: `monge replay` then tries drafters, trees, verifiers and controllers.

    The texts are those of the target (speculation is lossless, so a draft model or a head only makes the log sooner). Beside
    the laws the log keeps who the target is and, unless told otherwise, how long its rounds and the drafters take on this
    machine. A complete law has 8 bytes per token of the vocabulary; `--top` makes small logs for large vocabularies, from which
    rules that test several draws a node cannot be replayed.

    **Examples**

        monge log --out run.mlog
        monge log --file prompts.jsonl --temperature 0.8 --out mine.mlog
        monge log --target ./my-target --draft ./my-draft --file prompts.txt --top 64 --out mine.mlog
    """
    quiet_host()
    check_out_file(out)
    shown = asked_prompts(prompts, per_task=per_task, default=PER_TASK)
    if drafter and no_costs:
        raise OptionError("--drafter says whose rounds are timed, and --no-costs that none are; leave one out")
    loading = options.given(dtype=dtype, device=device, attention=attention, backend=backend)
    networks = load_networks(target, draft, **loading)
    rules = SamplingRules(temperature=0.0 if temperature is None else temperature, top_k=top_k)
    rules = replace(rules, **options.given(top_p=top_p, min_p=min_p))
    recording = options.given(max_new_tokens=max_new_tokens)
    with call_bar(notes()) as watch:
        watch.total(len(shown) + (0 if no_costs else 1))
        found = record(networks, shown, rules, watch=watch, seed=seed, ignore_eos=ignore_eos, top=top, **recording)
        if not no_costs:
            watch.step("measuring costs")
            found = replace(found, costs=networks.costs(networks.further(drafter or ())))
    path = write_log(replace(found, about=networks.about()), out)
    say_log(found, path)
    if as_json:
        print(json.dumps(described(found) | {"file": str(path), "bytes": path.stat().st_size}))


def record(networks: Networks, prompts: Sequence[Prompt], rules: SamplingRules, *, watch: Any, **recording: Any) -> LawLog:  # noqa: ANN401
    """Texts and laws of prompts, by task."""
    by_task: dict[str, list[str]] = {}
    for prompt in prompts:
        by_task.setdefault(prompt.task, []).append(prompt.text)
    decoder = networks.decoder(Configuration())
    step = lambda: watch.step("target writes")  # noqa: E731
    return record_log(decoder, by_task, model=networks.identity, rules=rules, on_text=step, **recording)


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
    laws = "complete laws" if found.top is None else f"the {found.top} most probable tokens of each law, the rest as one"
    costs = f"costs of {', '.join(sorted(found.costs))}" if found.costs else "no costs"
    size = path.stat().st_size / 1e6
    output().print(
        f"{path}: {len(found.texts)} texts of {found.model.name}, {found.num_tokens} tokens, {laws}, {costs}, {size:.1f} MB",
        markup=False,
        soft_wrap=True,
    )
    output().print(f"next: monge replay {path}", style="dim", markup=False, soft_wrap=True)
