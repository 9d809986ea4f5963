"""`monge batch`: rows of a file in, their completions out, a line for each.

Ray Data runs `worker` in its processes, so that rows are decoded by the same code everywhere.
"""

import fcntl
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any, Final

import typer

from monge.cli import options
from monge.cli.console import say
from monge.cli.options import entry, given, option, panel, switch
from monge.core.errors import OptionError
from monge.core.words import counted
from monge.options import (
    LAW,
    OUTPUT,
    PENALTIES,
    RAY,
    RUNNING,
    LoadOptions,
    SamplingOptions,
    ServeOptions,
    changed,
    options_of,
    sampling_options,
    types_of,
)

if TYPE_CHECKING:  # its import takes seconds, which the help and a wrong option do not need
    from monge.engine.decoder import Decoder
    from monge.engine.session import Session

ROW_OPTIONS: Final = options_of(SamplingOptions)
"""Options that a row may set for itself."""
_BLOCK_ROWS: Final = 128
"""Most rows whose requests are in memory together."""
_BLOCKS_A_WORKER: Final = 4
"""With Ray: so that workers end at about the same time, and a lost worker loses little."""
_PREFILL_CHUNK: Final = 512
_DIGITS: Final = 12
_MOST_SHOWN: Final = 40
"""Characters of a wrong value in an error."""
_UNREAD: Final[Mapping[str, Any]] = {
    "id": None,
    "options": None,
    "text": None,
    "token_ids": None,
    "finish_reason": "error",
    "seed": None,
    "num_rounds": 0,
    "error": None,
}
"""Fields of an output line beside its index, before the row is read."""
_NO_ERROR: Final = '"error": null}'
"""End of the output line of a row that has a text."""
_ray = panel(RAY)


@dataclass(frozen=True, slots=True)
class RowRules:
    """How rows are read.

    Args:
        options: Sampling options of rows that do not set them. Of their seed, row i has stream i,
            as row i of `Decoder.generate` does; a row with a seed of its own has stream 0 of it.
        prompt_field: Field with the prompt: text, or a list of token ids. A row without it may have
            `messages`, which the model's chat template writes.
        fingerprint: Of everything that the command was given and that changes texts; output rows
            have it, so that a command with other options does not continue them.
    """

    options: Mapping[str, Any]
    prompt_field: str
    fingerprint: str = ""


@options.command(without=("chat_template",), one=("controller",))
def batch(
    source: Annotated[
        Path, typer.Argument(metavar="IN", help="Rows: an object a line.", show_default=False)
    ],
    output: Annotated[
        Path, typer.Argument(metavar="OUT", help="Completions: *.jsonl.", show_default=False)
    ],
    *,
    prompt_field: str = option(
        "prompt", RUNNING, "The field of a row that holds its prompt.", "prompt"
    ),
    load: LoadOptions,
    sampling: SamplingOptions,
    overwrite: bool = switch("--overwrite", OUTPUT, "Write OUT anew instead of going on with it."),
    use_ray: bool = switch("--ray/--no-ray", RAY, "Decode with Ray Data, on many machines."),
    workers: int | None = _ray(None, "Processes that decode.", 1),
    address: Annotated[str | None, entry(ServeOptions, "address")] = None,
    cpus_per_worker: float | None = _ray(None, "Cores of a worker.", 1),
    gpus_per_worker: float | None = _ray(None, "GPUs of a worker.", 0),
) -> None:
    """Complete every row of a file.

    A row is an object with `prompt` (text or token ids), perhaps an `id`, and perhaps a `seed`,
    `temperature` or another option of its own. Row i of OUT is that of IN; a row that cannot be
    decoded has an `error`, and the status is 1 if there is any. A command that was interrupted goes
    on after the rows that OUT has, if its options are the same. docs/scaling.md says more.

    **Examples**

        monge batch prompts.jsonl texts.jsonl --temperature 0.8 --seed 1
        monge batch prompts.jsonl texts.jsonl --target ./my-target --draft ./my-draft --batch-size 16
        monge batch questions.jsonl answers.jsonl --prompt-field question --drafter ngram
        monge batch prompts.jsonl texts.jsonl --ray --address auto --workers 8 --gpus-per-worker 1
    """
    ray = given(
        num_workers=workers, address=address, num_cpus=cpus_per_worker, num_gpus=gpus_per_worker
    )
    if ray and not use_ray:
        raise OptionError(
            "--workers, --address, --cpus-per-worker and --gpus-per-worker need --ray"
        )
    from monge.cli.progress import working  # imports torch, which takes seconds

    rules = RowRules(changed(sampling), prompt_field, _fingerprint(load, sampling, prompt_field))
    total = _checked(source, output, rules)
    rows, start = counted(total, "row"), time.perf_counter()
    with working() as work, _opened(output) as file:
        done, num_errors, end = (0, 0, 0) if overwrite else _kept(file, source, rules)
        if done == total:
            say(f"{str(output)!r} has its {rows} already; --overwrite decodes them anew")
        else:
            if done:
                say(f"going on after {done} of {rows}; --overwrite begins anew")
            stage = work.stage("loading the models")
            make = partial(worker, load, rules)
            lines = _decoded(source, done, total, make, ray if use_ray else None)
            stage.restart("rows", total, done)
            file.truncate(end)
            try:
                for line in lines:
                    file.write(f"{line}\n".encode())
                    file.flush()
                    done, num_errors = done + 1, num_errors + (not line.endswith(_NO_ERROR))
                    stage.reach(done)
            except KeyboardInterrupt:
                say(f"{done} of {rows} are in {str(output)!r}; the same command goes on")
                raise
        if num_errors == total:
            file.seek(0)
            error = json.loads(file.readline())["error"]
            file.truncate(0)  # it would stand in the way of the corrected command
            raise OptionError(
                f"none of {rows} could be decoded, so nothing was written; the first one: {error}"
            )
    say(f"{rows} in {str(output)!r} after {time.perf_counter() - start:.1f} s", "cyan")
    if num_errors:
        say(f"{num_errors} of {rows} could not be decoded; see their `error`", "yellow")
        raise typer.Exit(1)


def _fingerprint(load: LoadOptions, sampling: SamplingOptions, prompt_field: str) -> str:
    """Return a short digest of the options that change texts; memory may ask for another batch size."""
    given = {**changed(load), "sampling": changed(sampling), "prompt_field": prompt_field}
    given.pop("max_batch_size", None)
    text = json.dumps(given, sort_keys=True, default=repr)
    return hashlib.sha256(text.encode()).hexdigest()[:_DIGITS]


def _checked(source: Path, output: Path, rules: RowRules) -> int:
    """Return the number of rows, if the command can be right.

    Raises:
        OptionError: If an option is wrong for every row, the input cannot be read or has no rows,
            or the files are no two JSONL files.
    """
    from monge.core.sampling_rules import SamplingRules
    from monge.engine.session import Request
    from monge.requests.penalties import text_processors

    for path, what in ((source, "input"), (output, "output")):
        if path.suffix != ".jsonl":
            raise OptionError(f"the {what} must be a .jsonl file; got {path.name!r}")
    if not source.is_file():
        raise OptionError(f"no file {str(source)!r}")
    if output.exists() and output.samefile(source):
        raise OptionError("input and output are the same file; give the output another name")
    sampling = sampling_options(rules.options)
    text_processors(1, 1 << 62, **sampling.only(*PENALTIES))
    Request(
        prompt_ids=(0,),
        rules=SamplingRules(**sampling.only(*LAW)),
        seed=0 if sampling.seed is None else sampling.seed,
        stop=tuple(sampling.stop),
        max_new_tokens=sampling.max_new_tokens,
    )
    if (total := sum(1 for _ in _rows(source))) == 0:
        raise OptionError(f"{str(source)!r} holds no rows")
    return total


def _rows(source: Path) -> Iterator[bytes]:
    with source.open("rb") as file:
        yield from (line.strip() for line in file if line.strip())


@contextmanager
def _opened(output: Path) -> Iterator[IO[bytes]]:
    """Open an output to append to it, locked for other processes; without a row there is no file.

    Raises:
        OptionError: If it cannot be written to, or another process does.
    """
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        file = output.open("a+b")
    except OSError as error:
        raise OptionError(f"cannot write {str(output)!r}: {error}") from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise OptionError(f"another process is writing {str(output)!r}") from error
        try:
            yield file
        finally:
            if os.fstat(file.fileno()).st_size == 0:
                output.unlink(missing_ok=True)


def _kept(file: IO[bytes], source: Path, rules: RowRules) -> tuple[int, int, int]:
    """Return how many rows an output has, how many of them have an error, and where they end.

    A row that was being written when the command ended does not count.

    Raises:
        OptionError: If a line is not that of the input's row, or was made with other options.
    """
    done = num_errors = end = 0
    rows = _rows(source)
    file.seek(0)
    for line in file:
        row = next(rows, None)
        row_begin = b"" if row is None else _begin(done, row)
        begin = row_begin + b'"options": "%s", ' % rules.fingerprint.encode()
        is_whole = line.endswith(b"}\n")
        if row is None or not (
            line.startswith(begin) or (begin.startswith(line) and not line.endswith(b"\n"))
        ):
            reason = f"does not belong to row {done} of {str(source)!r}; give"
            if row is not None and line.startswith(row_begin):
                reason = "was made with other options; give the same ones,"
            raise OptionError(
                f"line {done + 1} of {file.name!r} {reason} another name, or write it anew with "
                "--overwrite"
            )
        if not is_whole:
            break
        done, end = done + 1, end + len(line)
        num_errors += not line.endswith(f"{_NO_ERROR}\n".encode())
    return done, num_errors, end


def _begin(number: int, line: bytes) -> bytes:
    """Return what the output line of a row begins with: its number and its id."""
    try:
        row_id = _record(line).get("id")
    except OptionError:
        row_id = None
    return _as_json({"row": number, "id": row_id})[:-1].encode() + b", "


def _decoded(
    source: Path,
    done: int,
    total: int,
    make: Callable[[], Callable[[int, Sequence[bytes]], Iterator[str]]],
    ray: Mapping[str, Any] | None,
) -> Iterator[str]:
    """Return the output lines of the rows that are left, in order; `ray` has options of `decode_blocks`."""
    size, rows = _BLOCK_ROWS, islice(_rows(source), done, None)
    if ray is not None:
        share = (total - done) // (_BLOCKS_A_WORKER * max(ray.get("num_workers", 1), 1))
        size = max(1, min(size, share))
    parts = iter(lambda: tuple(islice(rows, size)), ())
    blocks = ((done + place * size, part) for place, part in enumerate(parts))
    if ray is not None:
        from monge.distributed.ray_data import decode_blocks

        return decode_blocks(make, blocks, **ray)
    decode = make()
    return (line for block in blocks for line in decode(*block))


def worker(load: LoadOptions, rules: RowRules) -> Callable[[int, Sequence[bytes]], Iterator[str]]:
    """Load a decoder, and return `decode_rows` with it."""
    from monge.api import load as monge_load

    return partial(decode_rows, monge_load(**changed(load)), rules)


def decode_rows(
    decoder: "Decoder", rules: RowRules, first: int, lines: Sequence[bytes]
) -> Iterator[str]:
    """Yield the output line of every row, in order, each when it and those before it are decoded.

    A row that fails has an error in place of a text.

    Args:
        decoder: Decodes the rows together.
        rules: How rows are read.
        first: Number of the first row.
        lines: The rows, as JSON.
    """
    from monge.engine.batch import decode

    unread = {**_UNREAD, "options": rules.fingerprint}
    rows = [dict[str, Any](row=first + place, **unread) for place in range(len(lines))]
    sessions: dict[int, Session] = {}
    for place, (row, line) in enumerate(zip(rows, lines, strict=True)):
        try:
            record = _record(line)
            row["id"] = record.get("id")
            sessions[place] = _session(record, row["row"], decoder, rules)
            row["seed"] = sessions[place].request.reported_seed
        except Exception as error:  # noqa: BLE001  a row may break a tokenizer or a chat template in any way
            row["error"] = _in_one_line(error)
    settings = {"max_batch_size": decoder.max_batch_size, "prefill_chunk": _PREFILL_CHUNK}
    rounds = decode(sessions.values(), decoder.components, **settings, isolated=True)
    for place, row in enumerate(rows):
        if (session := sessions.get(place)) is not None:
            while session.finish_reason is None:
                next(rounds)
            row.update(_result(session))
        yield _as_json(row)


def _result(session: "Session") -> dict[str, Any]:
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


def _session(
    record: Mapping[str, Any], index: int, decoder: "Decoder", rules: RowRules
) -> "Session":
    is_chat = record.get(rules.prompt_field) is None and record.get("messages") is not None
    prompt = (
        decoder.encode_chat(record["messages"]) if is_chat else _prompt(record, rules.prompt_field)
    )
    chosen = {key: _value(key, record[key]) for key in ROW_OPTIONS if record.get(key) is not None}
    row = 0 if rules.options.get("seed") is None or "seed" in chosen else index
    (request,) = decoder.requests([prompt], row=row, **{**rules.options, **chosen})
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
    return {int(key): item for key, item in value.items()}
