"""Rows of a batch file: from a line to a request, and from a session to a line."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from monge.core.errors import OptionError
from monge.core.sampling_rules import SamplingRules
from monge.engine.batch import decode
from monge.engine.decoder import Decoder
from monge.engine.penalties import text_processors
from monge.engine.session import Request, Session
from monge.options import LAW, PENALTIES, SamplingOptions, options_of, sampling_options, types_of

ROW_OPTIONS: Final = options_of(SamplingOptions)
"""Options that a row may set for itself."""

_MOST_SHOWN: Final = 40
"""Characters of a wrong value in an error."""
_PREFILL_CHUNK: Final = 512
_UNREAD: Final[Mapping[str, Any]] = {
    "id": None,
    "text": None,
    "token_ids": None,
    "finish_reason": "error",
    "seed": None,
    "num_rounds": 0,
    "error": None,
}
"""Fields of an output line beside its index, before the row is read."""


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
        options: Options of `Decoder.requests` for rows that do not set them. Of their seed, row i
            has stream i, as row i of `Decoder.generate` does; a row that brings its own seed has
            stream 0 of that. Without, seeds are drawn, and controllers may plan by the clock.
        prompt_field: Field with the prompt: text, or a list of token ids. A row without it may
            have `messages`, which the model's chat template writes.
    """

    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    prompt_field: str = "prompt"

    def check(self) -> None:
        """Refuse values that are invalid for every prompt, before rows fail one by one.

        Raises:
            OptionError: If the seed or an option is invalid.
        """
        options = sampling_options(self.options)
        text_processors(1, 1 << 62, **options.only(*PENALTIES))
        Request(
            prompt_ids=(0,),
            rules=SamplingRules(**options.only(*LAW)),
            seed=0 if options.seed is None else options.seed,
            stop=tuple(options.stop),
            max_new_tokens=options.max_new_tokens,
        )


def decode_shard(decoder: Decoder, shard: Shard, rules: RowRules) -> tuple[str, ...]:
    """Return the output lines of a shard, in order.

    Batches are formed within the shard, so the lines do not depend on the number of workers. The
    line of a row that fails has its error.
    """
    rows = [
        dict[str, Any](row=shard.first_row + place, **_UNREAD) for place in range(len(shard.lines))
    ]
    sessions = dict[int, Session]()
    for place, (row, line) in enumerate(zip(rows, shard.lines, strict=True)):
        try:
            record = _record(line)
            row["id"] = record.get("id")
            sessions[place] = _session(record, row["row"], decoder, rules)
            row["seed"] = sessions[place].request.told_seed
        except Exception as error:  # noqa: BLE001  a row may break a tokenizer or a chat template in any way
            row["error"] = _in_one_line(error)
    options = {"max_batch_size": decoder.max_batch_size, "prefill_chunk": _PREFILL_CHUNK}
    for _ in decode(sessions.values(), decoder.components, **options, isolated=True):
        pass
    for place, session in sessions.items():
        rows[place] |= _result(session)
    return tuple(map(_as_json, rows))


def _result(session: Session) -> dict[str, Any]:
    if session.error is not None:
        return {"error": _in_one_line(session.error), "num_rounds": session.num_rounds}
    if session.text is not None:
        session.text.finish()
    return {
        "text": None if session.text is None else session.text.text,
        "token_ids": list(session.completion_ids),
        "finish_reason": session.finish_reason,
        "num_rounds": session.num_rounds,
    }


def _as_json(row: Mapping[str, Any]) -> str:
    # An id may hold half a surrogate pair, which UTF-8 cannot encode.
    row_id = json.dumps(row["id"], ensure_ascii=False)
    has_surrogates = any("\ud800" <= character <= "\udfff" for character in row_id)
    return json.dumps(row, ensure_ascii=has_surrogates)


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
    options = {key: _value(key, record[key]) for key in ROW_OPTIONS if record.get(key) is not None}
    row = 0 if rules.options.get("seed") is None or "seed" in options else index
    (request,) = decoder.requests([prompt], row=row, **{**rules.options, **options})
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


def _value(name: str, value: Any) -> Any:  # noqa: ANN401 (any JSON)
    kinds = types_of(ROW_OPTIONS[name])
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        expected = " or ".join(kind.__name__ for kind in kinds)
        raise OptionError(f"{name!r} must be {expected}; got {type(value).__name__}")
    forms = ("regex:", "choice:")
    if name == "grammar" and value != "json" and not str(value).startswith(forms):
        # Rows may come from elsewhere: they do not read files of this machine.
        raise OptionError(f"{name!r}: a row may say json, regex:... or choice:...; got {value!r}")
    if not isinstance(value, dict):
        return value
    for key in value:
        if not (key.isascii() and key.isdigit()):
            raise OptionError(f"{name!r}: keys must be token ids; got {key!r}")
    # Parquet gives every row the keys of all.
    return {int(key): item for key, item in value.items() if item is not None}
