"""`python -m lab.against COMMIT`: how fast this checkout is beside another commit, in turns."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median, quantiles
from tempfile import TemporaryDirectory
from typing import Any, Final

import typer
from rich.table import Table

from lab.command import run
from monge.backends.cpu.program_cache import cache_folder
from monge.bench.statistics import paired_ratios
from monge.cli import options
from monge.cli.console import plain_table, print_tables, reported, show
from monge.core.errors import OptionError

_TEMPERATURES: Final = (0.0, 1.0, 0.7)
_STAGES: Final = ("draft_s", "score_s", "verify_s", "commit_s")
_PROMPT: Final = "The history of mathematics in Europe"
# Of functions that every commit has, as each side runs it with its own package.
_WORKER: Final = """
import json, sys, time
from statistics import median
import monge
stages, prompt, load = json.loads(sys.stdin.readline())
begin = time.perf_counter()
decoder = monge.load(**load)
print(json.dumps({"load_s": time.perf_counter() - begin}), flush=True)
for line in sys.stdin:
    begin = time.perf_counter()
    (result,) = decoder.generate([prompt], **json.loads(line))
    seconds = time.perf_counter() - begin
    rounds = [record.times for record in result.records]
    times = {stage: median(getattr(one, stage) for one in rounds) for stage in stages}
    resident = int(open("/proc/self/statm").read().split()[1]) * 4096 / 2**20
    numbers = {"tokens_per_s": len(result.token_ids) / seconds, "resident_mib": resident, **times}
    print(json.dumps(numbers), flush=True)
"""


@reported
def main(
    commit: str = typer.Argument(help="The commit to compare with, as git names it."),
    *,
    setting: list[str] | None = options.measuring(
        None, "Argument of `monge.load`, as NAME=JSON or NAME=WORD; may be repeated.", "none"
    ),
    temperature: list[float] | None = options.measuring(None, "May be repeated.", _TEMPERATURES),
    top_p: float = options.measuring(1.0, "Top-p above temperature 0.", None),
    turns: int = options.measuring(20, "Texts of each temperature on each side.", None),
    max_new_tokens: int = options.measuring(64, "Length of every text.", None),
) -> None:
    """Compare the speed of this checkout with that of another commit.

    Each side is a process with its own package and cache. They decode the same texts in turns. Prints
    medians of both sides, and median and quartiles of the ratios of this checkout to the commit.
    """
    if turns < 2:
        raise OptionError(f"--turns must be at least 2, for quartiles; got {turns}")
    load = dict(map(_read_setting, setting or ()))
    with TemporaryDirectory() as folder, ExitStack() as stack:
        tree = Path(folder) / "tree"
        _git("worktree", "add", "--detach", str(tree), commit)
        stack.callback(_git, "worktree", "remove", "--force", str(tree))
        caches = cache_folder() / "against"
        sides = [
            stack.enter_context(_side(root, caches / name, load))
            for root, name in ((tree, commit), (Path(), "here"))
        ]
        starts = [_answer(side) for side in sides]
        show(f"load: {starts[0]['load_s']:.1f} s there, {starts[1]['load_s']:.1f} s here")
        for heat in temperature or _TEMPERATURES:
            rules = {"temperature": heat} | ({"top_p": top_p} if heat > 0 and top_p < 1 else {})
            rows: list[list[dict[str, float]]] = [[], []]
            # The first text of each side warms it up.
            for turn in range(turns + 1):
                # Whoever goes first changes, since the second finds other caches.
                for place in (0, 1) if turn % 2 else (1, 0):
                    call = {"max_new_tokens": max_new_tokens, "ignore_eos": True, "seed": turn}
                    rows[place].append(_answer(sides[place], rules | call))
            print_tables([_table(f"T = {heat:g}", rows[0][1:], rows[1][1:])])


def _table(
    title: str, there: Sequence[dict[str, float]], here: Sequence[dict[str, float]]
) -> Table:
    table = plain_table(title, "", ("there", "here", "here / there", "quartiles"))
    for name in here[0]:
        values = [[row[name] for row in rows] for rows in (there, here)]
        ratios = paired_ratios(values[1], values[0])
        middle = [f"{median(column):.4g}" for column in values]
        low, centre, high = quantiles(ratios, n=4)
        table.add_row(name, *middle, f"{centre:.3f}", f"{low:.3f} to {high:.3f}")
    return table


@contextmanager
def _side(root: Path, cache: Path, load: dict[str, Any]) -> Iterator[subprocess.Popen[str]]:
    path = str((root / "src").resolve())
    process = subprocess.Popen(
        [sys.executable, "-c", _WORKER],
        env=os.environ | {"PYTHONPATH": path, "MONGE_CACHE": str(cache)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        _tell(process, [_STAGES, _PROMPT, load])
        yield process
    finally:
        process.kill()
        process.wait()


def _tell(process: subprocess.Popen[str], what: object) -> None:
    assert process.stdin is not None
    process.stdin.write(json.dumps(what) + "\n")
    process.stdin.flush()


def _answer(process: subprocess.Popen[str], call: dict[str, Any] | None = None) -> dict[str, float]:
    if call is not None:
        _tell(process, call)
    assert process.stdout is not None
    if not (line := process.stdout.readline()):
        raise OptionError("against: a side ended; its error stands above")
    numbers: dict[str, float] = json.loads(line)
    return numbers


def _read_setting(text: str) -> tuple[str, Any]:
    name, is_there, value = text.partition("=")
    if not is_there:
        raise OptionError(
            f"--setting is NAME=VALUE; got {text!r}; write, for example, tree=chain(3)"
        )
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value  # a word needs no quotes


def _git(*arguments: str) -> None:
    done = subprocess.run(("git", *arguments), capture_output=True, text=True, check=False)
    if done.returncode:
        raise OptionError(f"against: git {' '.join(arguments)}: {done.stderr.strip()}")


if __name__ == "__main__":
    run(main)
