"""Options of `monge bench decode` and its neighbours: what is measured, and how."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Final

from monge.bench.decode import PROMPTS_PER_TASK
from monge.bench.runner import Settings
from monge.cli import options

MEASURING: Final = "Measuring"


def _measuring(name: str, help: str, default: object = None) -> Any:  # noqa: ANN401 (typer's own type is private)
    return options.option(name, help=help, panel=MEASURING, default=default)


def numbers(name: str, help: str, values: Sequence[int]) -> Any:  # noqa: ANN401 (typer's own type is private)
    """An option that may be repeated, with the numbers that hold otherwise."""
    return _measuring(name, f"{help}; may be repeated.", _each(values))


def _each(values: Sequence[int | float]) -> str:
    return ", ".join(f"{value:g}" for value in values)


Prompts = Annotated[
    Path | None,
    _measuring("--prompts", "Text lines, or *.jsonl with `prompt`, `question` or `turns`.", "the shipped prompts"),
]
Mixed = Annotated[bool, _measuring("--mixed", "Take prompts of all tasks in turns.")]
Quick = Annotated[bool, _measuring("--quick", "A few arms, batch 1: within a minute.")]
Controllers = Annotated[
    bool, _measuring("--controllers", "Fixed windows and all controllers, in place of drafters, trees and verifiers.")
]
NamedArms = Annotated[
    list[str] | None,
    _measuring("--arm", "A further arm: `name: tree=chain(8), controller=goodput, verifier=block`; may be repeated."),
]
NamedOnly = Annotated[bool, _measuring("--named-only", "No arms but those of --arm, and monge without speculation.")]
UselessDraft = Annotated[bool, _measuring("--useless-draft", "Spoil the draft model: nothing that it guesses is right.")]
Grow = Annotated[
    str | None,
    _measuring("--grow", "Let the target say the same at the cost of so many parameters: 0.1B, 0.5B, ...", "as it is"),
]
MaxNewTokens = Annotated[int | None, _measuring("--max-new-tokens", "Length of every completion.", Settings().max_new_tokens)]
Repeats = Annotated[int | None, _measuring("--repeats", "Measured passes over the prompts.", Settings().repeats)]
Batch = Annotated[list[int] | None, _measuring("--batch", "Batch size; may be repeated.", _each(Settings().batch_sizes))]
Temperature = Annotated[
    list[float] | None, _measuring("--temperature", "0 is greedy; may be repeated.", _each(Settings().temperatures))
]
PerTask = Annotated[int | None, _measuring("--prompts-per-task", "Prompts of each task; of a file all.", PROMPTS_PER_TASK)]
Seed = Annotated[int | None, _measuring("--seed", "Seed of the sampled arms.", Settings().seed)]
TimeLimit = Annotated[float | None, _measuring("--time-limit", "Start no further repeat after so many seconds.", "none")]
Clock = Annotated[
    str | None,
    _measuring("--clock", "`wall`, or `cpu`: processor time of this process, for a busy machine.", Settings().clock),
]
