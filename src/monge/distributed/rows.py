"""Rows of a batch file: from a line to a request, and from a session to a line."""

import json
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from monge.core.draws import check_seed
from monge.core.errors import OptionError
from monge.core.sampling_rules import SamplingRules
from monge.engine.batch import Batch
from monge.engine.decoder import Decoder, check_numbers
from monge.engine.penalties import text_processors
from monge.engine.session import Request, Session

ROW_OPTIONS: Final[Mapping[str, tuple[type, ...]]] = {
    "max_new_tokens": (int,),
    "temperature": (int, float),
    "top_k": (int,),
    "top_p": (int, float),
    "min_p": (int, float),
    "seed": (int,),
    "stop": (str, list),
    "ignore_eos": (bool,),
}
"""Options that a row may set for itself, with their types in JSON."""

_MOST_SHOWN: Final = 40
"""Characters of a wrong value in an error."""
_PREFILL_CHUNK: Final = 512


class Shard(NamedTuple):
    """Consecutive rows, which one worker decodes together and which are stored together.

    Args:
        number: Number of the shard in its file, from 0.
        first_row: Index of the first row.
        lines: The rows, as JSON.
    """

    number: int
    first_row: int
    lines: Sequence[bytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class RowRules:
    """Rules for reading rows.

    Args:
        seed: The run's seed. Row i has its stream i, as row i of `Decoder.generate` does; a row
            that brings its own seed has stream 0 of that. Without, seeds are drawn, and controllers
            may plan by the clock.
        options: Options of `Decoder.requests` for rows that do not set them.
        prompt_field: Field with the prompt: text, or a list of token ids. A row without it may
            have `messages`, which the model's chat template writes.
    """

    seed: int | None = None
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    prompt_field: str = "prompt"

    def check(self) -> None:
        """Refuse values that are invalid for every prompt, before rows fail one by one.

        Raises:
            OptionError: If the seed or an option is invalid.
        """

        def some(*names: str) -> dict[str, Any]:
            return {name: self.options[name] for name in names if name in self.options}

        if self.seed is not None:
            check_seed(self.seed)
        penalties = some("repetition_penalty", "presence_penalty", "frequency_penalty")
        check_numbers(**some("max_new_tokens", "min_tokens"), **penalties)
        text_processors(1, 1, **penalties)
        stop = self.options.get("stop", ())
        Request(
            prompt_ids=(0,),
            rules=SamplingRules(**some("temperature", "top_k", "top_p", "min_p")),
            seed=0,
            stop=(stop,) if isinstance(stop, str) else tuple(stop),
            max_new_tokens=self.options.get("max_new_tokens", 1),
        )


@dataclass(slots=True)
class BatchRow:
    """One row while it is decoded.

    Args:
        index: Its index in the file.
        row_id: The row's `id`; `None` without one.
        session: Its session; `None` for a row that cannot be decoded.
        error: The reason why it cannot.
        num_rounds: Target forwards after the prompt.
    """

    index: int
    row_id: Any = None
    session: Session | None = None
    error: str | None = None
    num_rounds: int = 0

    def as_json(self) -> str:
        """Return the output line, which does not depend on the worker or the other rows."""
        session, error = self.session, self.error
        if session is not None and session.error is not None:
            error = _in_one_line(session.error)
        record = {
            "row": self.index,
            "id": self.row_id,
            "text": None,
            "token_ids": None,
            "finish_reason": "error",
            "seed": None if session is None else session.request.told_seed,
            "num_rounds": self.num_rounds,
            "error": error,
        }
        if session is not None and error is None:
            if session.text is not None:
                session.text.finish()
                record["text"] = session.text.text
            record["token_ids"] = list(session.completion_ids)
            record["finish_reason"] = session.finish_reason
        # An id may hold half a surrogate pair, which UTF-8 cannot encode.
        row_id = json.dumps(self.row_id, ensure_ascii=False)
        has_surrogates = any("\ud800" <= character <= "\udfff" for character in row_id)
        return json.dumps(record, ensure_ascii=has_surrogates)


def read_row(line: bytes, index: int, decoder: Decoder, rules: RowRules) -> BatchRow:
    """Return a row with its session, or with its error."""
    row = BatchRow(index)
    try:
        record = _record(line)
        row.row_id = record.get("id")
        row.session = _session(record, index, decoder, rules)
    except Exception as error:  # noqa: BLE001  a row may break a tokenizer or a chat template in any way
        row.error = _in_one_line(error)
    return row


def decode_shard(decoder: Decoder, shard: Shard, rules: RowRules) -> tuple[str, ...]:
    """Return the output lines of a shard, in order.

    Batches are formed within the shard, so the lines do not depend on the number of workers. The
    line of a row that fails has its error.
    """
    rows = [
        read_row(line, index, decoder, rules)
        for index, line in enumerate(shard.lines, start=shard.first_row)
    ]
    row_of = {row.session.context.request_id: row for row in rows if row.session is not None}
    waiting = deque(row.session for row in rows if row.session is not None)
    batch = Batch(decoder.components, prefill_chunk=_PREFILL_CHUNK, isolated=True)
    try:
        while waiting or len(batch):
            free = decoder.max_batch_size - len(batch)
            batch.join([waiting.popleft() for _ in range(min(len(waiting), free))])
            for session in batch.step():
                if session.error is None:
                    row_of[session.context.request_id].num_rounds += 1
    finally:
        batch.close()
    return tuple(row.as_json() for row in rows)


def _in_one_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text if isinstance(error, OptionError) else f"{type(error).__name__}: {text}"


def _record(line: bytes) -> dict[str, Any]:
    try:
        record: Any = json.loads(line)
    except ValueError as error:  # malformed JSON or UTF-8
        raise OptionError(f"not JSON ({error}); a row is one object a line") from error
    if not isinstance(record, dict):
        raise OptionError(f"a row must be an object; got {type(record).__name__}")
    return record


def _session(record: Mapping[str, Any], index: int, decoder: Decoder, rules: RowRules) -> Session:
    is_chat = record.get(rules.prompt_field) is None and record.get("messages") is not None
    prompt = (
        decoder.encode_chat(record["messages"]) if is_chat else _prompt(record, rules.prompt_field)
    )
    own = {name: record[name] for name in ROW_OPTIONS if record.get(name) is not None}
    for name, value in own.items():
        _check_type(name, value)
    row = 0 if rules.seed is None or "seed" in own else index
    (request,) = decoder.requests([prompt], row=row, **{"seed": rules.seed, **rules.options, **own})
    return decoder.session(request, keeps_records=False)


def _prompt(record: Mapping[str, Any], name: str) -> str | list[int]:
    prompt = record.get(name)
    if isinstance(prompt, str):
        return prompt
    if not isinstance(prompt, list):
        kind = "nothing" if prompt is None else type(prompt).__name__
        raise OptionError(f"{name!r} must be text or a list of token ids; got {kind}")
    for place, token in enumerate(prompt):
        if type(token) is not int:
            shown = json.dumps(token)[:_MOST_SHOWN]
            raise OptionError(f"{name!r}: token ids must be integers; got {shown} at place {place}")
    return prompt


def _check_type(name: str, value: object) -> None:
    kinds = ROW_OPTIONS[name]
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        expected = " or ".join(kind.__name__ for kind in kinds)
        raise OptionError(f"{name!r} must be {expected}; got {type(value).__name__}")
    if isinstance(value, list) and not all(isinstance(item, str) for item in value):
        raise OptionError(f"{name!r} must be a text or a list of texts")
