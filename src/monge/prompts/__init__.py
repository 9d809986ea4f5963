"""Prompts: a few that ship with the package, and anybody's from a file."""

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, compress
from operator import itemgetter
from pathlib import Path
from typing import Any, Final, TypeVar

from monge.core.errors import OptionError, unknown_name
from monge.core.text import token_ids_of
from monge.core.words import unread_part

T = TypeVar("T")
SHIPPED: Final = ("gsm8k", "humaneval", "prose")


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """A prompt and where it comes from.

    Args:
        task: Its task, or the name of its file.
        text: The text; for a conversation, the last message.
        messages: A conversation, which the model's chat template writes; `None` for raw text.
    """

    task: str
    text: str
    messages: tuple[Mapping[str, str], ...] | None = None


def shipped(tasks: Sequence[str] = SHIPPED, *, per_task: int | None = None) -> tuple[Prompt, ...]:
    """The prompts that lie in this folder, the first `per_task` of every task.

    Raises:
        OptionError: If a task is unknown, or `per_task` below 1.
    """
    for task in tasks:
        if task not in SHIPPED:
            raise unknown_name("task", task, SHIPPED)
    folder = Path(__file__).parent
    read = (read_prompts(folder / f"{task}.jsonl", per_task=per_task) for task in tasks)
    return tuple(chain.from_iterable(read))


def encode(tokenizer: Any, text: str) -> tuple[int, ...]:  # noqa: ANN401 (the host's tokenizers share no type)
    """Token ids of a prompt."""
    return token_ids_of(tokenizer, text)


def written(prompt: Prompt, chat: Callable[[Sequence[Mapping[str, str]]], T]) -> str | T:
    """A prompt for a decoder: its text, or its messages in the form that `chat` gives them."""
    return prompt.text if prompt.messages is None else chat(prompt.messages)


def as_message(prompt: Prompt, system: str | None = None) -> Prompt:
    """Return raw text as a user's message, and a conversation as it is, after the system message."""
    before = () if system is None else ({"role": "system", "content": system},)
    messages = prompt.messages or ({"role": "user", "content": prompt.text},)
    return replace(prompt, messages=(*before, *messages))


def interleaved(prompts: Sequence[Prompt]) -> tuple[Prompt, ...]:
    """Return the prompts in turns: a prompt of each task at a time.

    The acceptance of such a stream changes from request to request.
    """
    numbered = zip(_numbers(prompts), prompts, strict=True)
    return tuple(prompt for _, prompt in sorted(numbered, key=itemgetter(0)))


def read_prompts(path: Path, *, per_task: int | None = None) -> tuple[Prompt, ...]:
    """Return the prompts of a file.

    A line is a prompt; a line of `*.jsonl` is an object with `prompt`, `question`, `turns` or
    `messages`. A `question` is written like the shipped questions (`Question: ...`, `Answer:`); of
    `turns` the first is taken. The task is the object's `task` or `category`, else the name of the
    file.

    Args:
        path: The file.
        per_task: Take the first so many of every task; all without.

    Raises:
        OptionError: If the file cannot be read, a line is no such object, there is no prompt in it,
            or `per_task` is below 1.
    """
    _check_count(per_task)
    try:
        # A text may hold what `splitlines` takes for the end of a line: U+2028, a form feed.
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(f"cannot read prompts from {str(path)!r}: {error}") from error
    numbered = [(number, line) for number, line in enumerate(lines, start=1) if line.strip()]
    if path.suffix == ".jsonl":
        prompts = [
            _prompt_of(line, f"{path}, line {number}", path.stem) for number, line in numbered
        ]
    else:
        prompts = [Prompt(task=path.stem, text=line) for _, line in numbered]
    if not prompts:
        raise OptionError(f"{str(path)!r} holds no prompts; write one a line")
    if per_task is not None:
        prompts = compress(prompts, (number <= per_task for number in _numbers(prompts)))
    return tuple(prompts)


def asked_prompts(file: Path | None, *, per_task: int | None, default: int) -> tuple[Prompt, ...]:
    """Return the prompts of a file, or the shipped prompts.

    Args:
        file: As for `read_prompts`; `None` takes the shipped prompts.
        per_task: Take the first `per_task` of every task. `None` takes all of a file, and `default`
            of the shipped prompts.
        default: See `per_task`.
    """
    if file is not None:
        return read_prompts(file, per_task=per_task)
    return shipped(per_task=default if per_task is None else per_task)


def _check_count(per_task: int | None) -> None:
    if per_task is not None and per_task < 1:
        raise OptionError(
            f"prompts per task (--prompts-per-task) must be at least 1; got {per_task}"
        )


def _numbers(prompts: Sequence[Prompt]) -> Iterator[int]:
    """Number the prompts of each task from 1."""
    counts: Counter[str] = Counter()
    for prompt in prompts:
        counts[prompt.task] += 1
        yield counts[prompt.task]


def _prompt_of(line: str, where: str, file: str) -> Prompt:
    try:
        record: Any = json.loads(line)
    except json.JSONDecodeError as error:
        raise OptionError(
            f"{where}: not JSON ({error}); a .jsonl file has one object a line"
        ) from error
    text = _text_of(record) if isinstance(record, dict) else None
    messages = None
    if text is None and isinstance(record, dict) and "messages" in record:
        messages = _messages_of(record["messages"], where)
        text = messages[-1]["content"]
    if text is not None:
        task = str(record.get("task") or record.get("category") or file)
        return Prompt(task=task, text=text, messages=messages)
    raise OptionError(f"{where}: no text under 'prompt', 'question', 'turns' or 'messages'")


def _messages_of(messages: Any, where: str) -> tuple[Mapping[str, str], ...]:  # noqa: ANN401 (JSON)
    are_some = isinstance(messages, list) and messages
    for place, message in enumerate(messages if are_some else [None]):
        content = message.get("content") if isinstance(message, dict) else None
        if (reason := unread_part(content)) is not None:
            raise OptionError(f"{where}: messages[{place}]: {reason}")
        if not isinstance(message, dict) or not all(
            isinstance(message.get(name), str) for name in ("role", "content")
        ):
            raise OptionError(
                f"{where}: messages must be a list of objects with a text 'role' and 'content'; "
                f"got {json.dumps(messages)[:60]}"
            )
    return tuple(messages)


def _text_of(record: Mapping[str, Any]) -> str | None:
    if isinstance(record.get("prompt"), str):
        return record["prompt"]
    if isinstance(record.get("question"), str):
        return f"Question: {record['question']}\nAnswer:"
    turns = record.get("turns")
    return turns[0] if isinstance(turns, list) and turns and isinstance(turns[0], str) else None
