"""Rows of a batch file: from a line to a request, and from a session to a line."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from monge.core.draws import check_seed
from monge.core.errors import OptionError
from monge.core.sampling_rules import SamplingRules
from monge.engine.decoder import Decoder, check_numbers
from monge.engine.penalties import text_processors
from monge.engine.session import Request, Session, catch

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
"""What a row may set for itself, and the types that it may have in JSON."""

_MOST_SHOWN: Final = 40
"""Characters of a value that is wrong."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowRules:
    """Rules for reading rows.

    Args:
        seed: The run's seed. Row i has its stream i, as row i of `Decoder.generate` does; a row
            that brings its own seed has stream 0 of that. Without, seeds are drawn, and controllers
            may plan by the clock.
        options: Options of `Decoder.requests` for rows that say nothing else.
        prompt_field: Where the prompt stands: text, or a list of token ids. A row without it may
            have `messages`, which the model's chat template writes.
    """

    seed: int | None = None
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    prompt_field: str = "prompt"


@dataclass(slots=True)
class BatchRow:
    """One row while it is decoded.

    Args:
        index: Its place in the file, from 0.
        row_id: What the row calls itself; `None` for nothing.
        session: Its decoding; `None` for a row that cannot be decoded.
        error: Why it cannot.
        num_rounds: Target forwards after the prompt.
    """

    index: int
    row_id: Any = None
    session: Session | None = None
    error: str | None = None
    num_rounds: int = 0

    def as_json(self) -> str:
        """The line for the output, the same wherever and beside whomever the row was decoded."""
        session, error = self.session, self.error
        if session is not None and session.error is not None:
            error = said(session.error)
        told: dict[str, Any] = {
            "row": self.index,
            "id": self.row_id,
            "text": None,
            "token_ids": None,
        }
        told |= {
            "finish_reason": "error",
            "seed": None,
            "num_rounds": self.num_rounds,
            "error": error,
        }
        if session is not None:
            told |= {"seed": session.request.told_seed}
        if session is not None and error is None:
            if session.text is not None:
                session.text.finish()
                told["text"] = session.text.text
            told |= {
                "token_ids": list(session.completion_ids),
                "finish_reason": session.finish_reason,
            }
        # An id may hold half a surrogate pair, which no file in UTF-8 can.
        return json.dumps(
            told, ensure_ascii=_has_surrogates(json.dumps(told["id"], ensure_ascii=False))
        )


def check_options(options: Mapping[str, Any], seed: int | None) -> None:
    """Refuse options that cannot be for any prompt, before rows are told so one by one.

    Args:
        options: As in `RowRules`.
        seed: The run's seed, if it has one.

    Raises:
        OptionError: With what is wrong.
    """
    if seed is not None:
        check_seed(seed)
    law = {
        name: options[name]
        for name in ("temperature", "top_k", "top_p", "min_p")
        if name in options
    }
    names = ("repetition_penalty", "presence_penalty", "frequency_penalty")
    penalties = {name: options[name] for name in names if name in options}
    lengths = {name: options[name] for name in ("max_new_tokens", "min_tokens") if name in options}
    check_numbers(**lengths, **penalties)
    text_processors(1, 1, **penalties)
    stop = options.get("stop", ())
    Request(
        prompt_ids=(0,),
        max_new_tokens=options.get("max_new_tokens", 1),
        rules=SamplingRules(**law),
        seed=0,
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
    )


def read_row(line: bytes, index: int, decoder: Decoder, rules: RowRules) -> BatchRow:
    """A row with a session, or with the error that it has."""
    row = BatchRow(index)

    def fill() -> None:
        record = _record(line)
        row.row_id = record.get("id")
        row.session = _session(record, index, decoder, rules)

    error = catch(fill)
    if error is not None:
        row.error = said(error)
    return row


def said(error: Exception) -> str:
    """An error in one line."""
    text = " ".join(str(error).split())
    return text if isinstance(error, OptionError) else f"{type(error).__name__}: {text}"


def _has_surrogates(text: str) -> bool:
    return any("\ud800" <= character <= "\udfff" for character in text)


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
    own = {
        name: _checked(name, record[name]) for name in ROW_OPTIONS if record.get(name) is not None
    }
    row = 0 if rules.seed is None or "seed" in own else index
    (request,) = decoder.requests([prompt], row=row, **{"seed": rules.seed, **rules.options, **own})
    return decoder.session(request, keeps_records=False)


def _prompt(record: Mapping[str, Any], field_name: str) -> str | list[int]:
    prompt = record.get(field_name)
    if isinstance(prompt, str):
        return prompt
    if not isinstance(prompt, list):
        kind = "nothing" if prompt is None else type(prompt).__name__
        raise OptionError(f"{field_name!r} must be text or a list of token ids; got {kind}")
    for place, token in enumerate(prompt):
        if type(token) is not int:
            raise OptionError(
                f"{field_name!r}: token ids must be integers; got "
                f"{json.dumps(token)[:_MOST_SHOWN]} at place {place}"
            )
    return prompt


def _checked(name: str, value: Any) -> Any:  # noqa: ANN401 (what the file holds)
    kinds: Any = ROW_OPTIONS[name]
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        raise OptionError(
            f"{name!r} must be {' or '.join(kind.__name__ for kind in kinds)}; got "
            f"{type(value).__name__}"
        )
    if isinstance(value, list) and not all(isinstance(item, str) for item in value):
        raise OptionError(f"{name!r} must be a text or a list of texts")
    return value
