"""`monge demo`."""

import sys
import time
from typing import Any, Final

from rich.text import Text

from monge.api import load
from monge.bench.arms import HostArm, MongeArm
from monge.bench.pair import load_pair
from monge.bench.provenance import busy_note
from monge.bench.report import arm_record, find, speedup, table
from monge.bench.runner import Measurement, Settings, measure, num_calls
from monge.bench.usual_arms import DEFAULT, PLAIN
from monge.cli.completion import completion_of
from monge.cli.console import output, quiet_host, reported
from monge.cli.generate import decode_with_bar, say_summary, stream_live
from monge.cli.progress import call_bar
from monge.core.errors import MongeError
from monge.engine.backends.compiled import compiler_obstacle
from monge.prompts import encode, shipped

EXAMPLES: Final[tuple[tuple[str, int, dict[str, Any]], ...]] = (
    ("gsm8k", 4, {"temperature": 0.0, "stop": ["\nQuestion:"]}),
    ("gsm8k", 1, {"temperature": 1.0, "stop": ["\nQuestion:"]}),
    ("humaneval", 0, {"temperature": 0.0}),
    ("prose", 1, {"temperature": 1.0}),
)
"""Task, number of the prompt, options: a question greedily, another sampled, code, prose."""
NEW_TOKENS: Final = 64
SETTINGS: Final = Settings(max_new_tokens=48, repeats=5, batch_sizes=(1,), time_limit_s=25.0)
ARMS: Final = (
    HostArm(name=PLAIN, family="plain"),
    HostArm(name="transformers assisted", family="assisted", assistant={}, max_batch_size=1),
    MongeArm(name="monge none", settings={"drafter": "none"}),
    MongeArm(name=DEFAULT),
)


@reported
def demo() -> None:
    """Decode a few prompts with the built-in pair, and time it beside transformers.

    Takes a minute or two on two cores, the first time one more to make machine code, and needs no network.
    """
    quiet_host()
    start = time.perf_counter()
    console = output()
    console.rule("[bold]Lossless text from a target and a draft model", align="left")
    _completions()
    console.rule("[bold]The same networks, prompts and lengths, decoded in turns", align="left")
    measurements = _race("eager")
    console.print()
    _verdict(measurements)
    if (reason := compiler_obstacle()) is None:
        console.rule("[bold]The same with this library's forwards as machine code: --backend compiled", align="left")
        measurements = _race("compiled")
        console.print()
        _verdict(measurements)
    else:
        console.print(f"The backend 'compiled' is several times faster; {reason}", markup=False)
    if (note := busy_note()) is not None:
        console.print(note, style="yellow", markup=False)
    console.print(f"The whole demo took {time.perf_counter() - start:.0f} s. To go on:\n")
    for command, purpose in (
        ('monge generate "The history of" --temperature 0.8', "your own prompt"),
        ('monge generate "The history of" --backend compiled', "the same, faster"),
        ("monge list", "parts and their partners"),
        ("monge bench decode --quick", "more arms, JSON and plots"),
        ("monge generate --help", "all options"),
    ):
        console.print(f"  [bold cyan]{command:<52}[/] {purpose}")


def _completions() -> None:
    console, decoder = output(), load()
    for number, (task, index, options) in enumerate(EXAMPLES):
        prompt = shipped([task])[index].text
        mode = "greedy" if options["temperature"] == 0 else f"sampled at temperature {options['temperature']:g}"
        console.print(f"\n[bold]{task}[/], {mode}")
        console.print(Text(prompt, style="dim"))
        (session,) = decoder.sessions([prompt], max_new_tokens=NEW_TOKENS, seed=number, **options)
        complete = stream_live(decoder, session) if sys.stdout.isatty() else decode_with_bar(decoder, [session])
        if not complete:
            raise KeyboardInterrupt
        completion = completion_of(session, prompt)
        if completion.error is not None:
            raise MongeError(completion.error)
        if not sys.stdout.isatty():
            console.print(Text(completion.text))
        say_summary(completion)
    console.print()


def _race(backend: str) -> list[Measurement]:
    pair = load_pair(backend=backend)
    prompts = tuple(encode(pair.tokenizer, prompt.text) for prompt in shipped(per_task=1))
    with call_bar() as watch:
        watch.total(num_calls(ARMS, prompts, SETTINGS))
        measurements = measure(pair, ARMS, prompts, SETTINGS, on_call=watch.step)
    for temperature in SETTINGS.temperatures:
        cell = [measurement for measurement in measurements if measurement.temperature == temperature]
        records = [arm_record(measurement, measurements) for measurement in cell]
        mode = "greedy" if temperature == 0 else f"temperature {temperature:g}"
        repeats = max(len(measurement.seconds) for measurement in cell)
        title = f"{mode}: {len(prompts)} prompts, {SETTINGS.max_new_tokens} new tokens each, {repeats} interleaved repeats"
        output().print()
        output().print(table(records, title))
    return measurements


def _verdict(measurements: list[Measurement]) -> None:
    for temperature in SETTINGS.temperatures:
        ours, assisted = (find(measurements, name, temperature, 1) for name in (DEFAULT, "transformers assisted"))
        over_plain, over_assisted = speedup(ours, find(measurements, PLAIN, temperature, 1)), speedup(ours, assisted)
        if over_plain is not None and over_assisted is not None:
            mode = "greedy" if temperature == 0 else f"T = {temperature:g}"
            output().print(
                f"{mode}: monge decodes [bold]{over_plain.median:.2f}x[/] as fast as transformers.generate and "
                f"[bold]{over_assisted.median:.2f}x[/] as fast as its assisted generation (median of paired repeats)."
            )
