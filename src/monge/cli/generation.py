"""What `monge generate` does, and other commands that decode."""

import io
import json
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import typer
from rich.text import Text

from monge.api import load as monge_load
from monge.cli.console import (
    output,
    say,
    say_error,
    say_raw_text,
    streaming,
    write_document,
)
from monge.cli.lazy import NO_PROMPT
from monge.cli.progress import working
from monge.core.errors import OptionError
from monge.core.files import write_text
from monge.core.words import counted
from monge.engine.batch import decode
from monge.engine.decoder import Decoder, chunk_of
from monge.engine.result import GenerationStats, rounds_of
from monge.engine.session import Session
from monge.options import LoadOptions, SamplingOptions, changed
from monge.prompts import Prompt, as_message, read_prompts, written

INTERRUPTED = "interrupted"
STAGES = ("prefill", "draft", "score", "verify", "commit", "other")


def run(
    prompt: str | None,
    file: Path | None,
    load: LoadOptions,
    sampling: SamplingOptions,
    *,
    is_chat: bool,
    system: str | None,
    trace: Path | None,
    html: Path | None,
    as_json: bool,
    verbose: bool,
) -> None:
    """Continue the prompts, and write what is asked for; the arguments are the options of the command."""
    shown = _prompts(prompt, file)
    prompts = [entry.text for entry in shown]
    shown = [as_message(entry, system) if is_chat or entry.messages else entry for entry in shown]
    is_chat = is_chat or any(entry.messages for entry in shown)
    if not is_chat and (system is not None or load.chat_template is not None):
        raise OptionError(
            "--system and --chat-template say how a message is written; give --chat beside them"
        )
    decoder = loaded(load)
    encoded = [written(entry, decoder.encode_chat) for entry in shown]
    say_raw_text(decoder.tokenizer, shown, "--chat writes them as messages")
    keeps: dict[str, Any] = {} if html is None else {"return_trees": True}
    sessions = decoder.sessions(encoded, **changed(sampling), **keeps)
    say_memory(decoder)
    if verbose:
        say_parts(decoder, sessions[0].request.controller)
    request, is_piped = sessions[0].request, not (as_json or sys.stdout.isatty())
    matters = verbose or request.rules.temperature > 0
    if is_piped and matters and sampling.seed is None and request.is_repeatable:
        say(f"seed {request.seed}", "dim")  # no line of figures shows it
    is_alone = len(sessions) == 1 and not as_json
    if is_alone and not is_piped:
        output().print(Text(prompts[0], style="dim"))
    is_complete = (stream if is_alone else decode_with_bar)(decoder, sessions)
    pairs = zip(sessions, prompts, strict=True)
    completions = [completion_of(*pair, decoder.backend) for pair in pairs]
    _show(completions, as_json=as_json, verbose=verbose)
    if trace is not None:
        write_document({"completions": completions}, trace.parent, trace.name)
    if html is not None:
        _write_page(html, decoder, sessions, completions)
    _leave([completion["error"] for completion in completions], is_complete=is_complete)


def _write_page(
    path: Path, decoder: Decoder, sessions: Sequence[Session], completions: list[dict[str, Any]]
) -> None:
    from monge.page.files import page_of
    from monge.page.trace import document, rounds_of

    runs = [
        {**completion, "rounds": rounds_of(session.records, session.request.prompt_ids, decoder)}
        for session, completion in zip(sessions, completions, strict=True)
    ]
    write_text(path, page_of(document(runs, decoder, sessions[0].request.controller)), "the page")
    say(f"the run as a page: {path}", "dim")


def loaded(load: LoadOptions) -> Decoder:
    """Load a decoder, and say so while it takes time."""
    with working("loading the models"):
        return monge_load(**changed(load))


def say_parts(decoder: Decoder, controller: str | None = None) -> None:
    """Print the components; `controller` names the controller, `None` takes the default."""
    parts = decoder.components
    planner = parts.controller_for(controller)
    drafter = repr(parts.drafter).replace("\n", " ")
    say(f"drafter {drafter}\nverifier {parts.rule!r}\ncontroller {planner!r}")
    if len(parts.controllers) > 1:
        say(f"controllers that a request may name: {', '.join(parts.controllers)}")
    if parts.seeded is not None:
        say(f"sampled requests with a seed that name none have: {parts.seeded}")


def say_memory(decoder: Decoder) -> None:
    """Print the memory that drafting takes beside the networks, if any."""
    can = decoder.components.drafter.capabilities
    if can.num_parameters > 0:
        text = f"drafter: {can.num_parameters / 1e6:.2f}M parameters, {can.num_bytes / 1e6:.1f} MB beside the target"
        kept = can.bytes_per_token
        if kept > 0:
            text += f", and {f'{kept} bytes' if kept < 1000 else f'{kept / 1e3:.1f} kB'} per token of text"
        say(text)


def _prompts(prompt: str | None, file: Path | None) -> Sequence[Prompt]:
    if prompt is not None and file is not None:
        raise OptionError("give a prompt or --prompts, not both")
    if file is not None:
        return read_prompts(file)
    if prompt is not None:
        return [Prompt(task="", text=prompt)]
    if sys.stdin.isatty():
        raise OptionError(NO_PROMPT)
    if isinstance(sys.stdin, io.TextIOWrapper):  # UTF-8 whatever the locale says
        sys.stdin.reconfigure(encoding="utf-8-sig", errors="strict")
    try:
        return [Prompt(task="", text=sys.stdin.read().rstrip("\n"))]
    except UnicodeDecodeError as error:
        raise OptionError(
            f"standard input is not UTF-8: {error}; convert it first, e.g. with iconv"
        ) from error


def _leave(errors: Sequence[str | None], *, is_complete: bool) -> None:
    for number, error in enumerate(errors, start=1):
        if error is not None:
            say_error(f"prompt {number}: {error}")
    if not is_complete:
        say("interrupted; the text so far is kept")
        raise typer.Exit(130)
    if any(errors):
        raise typer.Exit(2)


def _show(completions: list[dict[str, Any]], *, as_json: bool, verbose: bool) -> None:
    """Print completions and figures; the text of a single completion was streamed already."""
    is_terminal = sys.stdout.isatty() and not as_json
    for completion in completions:
        if as_json:
            print(json.dumps(completion, ensure_ascii=False), flush=True)
        elif len(completions) > 1:
            if is_terminal:
                output().print(Text(f"\n{completion['prompt']}", style="dim"))
            print(completion["text"], flush=True)
        if is_terminal:
            say_summary(completion)
        if verbose:
            say_splits(completion)


def stream(decoder: Decoder, sessions: Sequence[Session]) -> bool:
    """Write the text of a session as it is decoded; return false if it was interrupted."""
    (session,), is_complete = sessions, False
    with streaming() as write:
        with suppress(KeyboardInterrupt):  # what was committed by then stays in the session
            for _ in decode([session], decoder.components, max_batch_size=1):
                write(chunk_of(session).text)
            is_complete = True
        if session.text is not None:
            write(session.text.take(last=True))
    return is_complete


def decode_with_bar(decoder: Decoder, sessions: Sequence[Session]) -> bool:
    """Decode a batch with progress on standard error; false if it was interrupted."""
    total = sum(session.request.max_new_tokens for session in sessions)
    with working() as work:
        stage = work.stage("decoding tokens", total)
        try:
            for session in decode(
                sessions, decoder.components, max_batch_size=decoder.max_batch_size
            ):
                done = session.finish_reason is not None
                left = session.request.max_new_tokens - session.num_generated if done else 0
                stage.advance(
                    left + (len(session.records[-1].token_ids) if session.error is None else 0)
                )
        except KeyboardInterrupt:
            return False
    return True


def completion_of(session: Session, prompt: str, backend: str) -> dict[str, Any]:
    """Return what a session has decoded, finished or not, as plain values for JSON."""
    if session.text is not None:
        session.text.finish()
    stats = GenerationStats.of(
        session.records, num_tokens=session.num_generated, prefill_s=session.prefill_s
    )
    return {
        "prompt": prompt,
        "text": "" if session.text is None else session.text.text,
        "token_ids": list(session.completion_ids),
        "finish_reason": session.finish_reason or INTERRUPTED,
        "seed": session.request.reported_seed,
        "row": session.request.row,
        "error": None if session.error is None else str(session.error),
        "backend": backend,
        "stats": stats.as_dict(),
        "rounds": rounds_of(session.records),
    }


def say_summary(completion: dict[str, Any]) -> None:
    """Print a line of figures."""
    stats, reason, row = completion["stats"], completion["finish_reason"], completion["row"]
    parts = [
        f"{counted(stats['num_tokens'], 'token')} in {stats['prefill_s'] + stats['decode_s']:.2f} s",
        f"{stats['tokens_per_s']:.1f} tokens/s",
        f"block efficiency {stats['block_efficiency']:.2f}",
    ]
    if rates := stats["acceptance_by_depth"]:
        parts.append("accepted by depth " + " ".join(f"{rate:.2f}" for rate in rates))
    if completion["seed"] is not None:
        parts.append(f"seed {completion['seed']}" + (f", row {row}" if row else ""))
    parts += [f"ended by {reason}", f"backend {completion['backend']}"]
    say(" | ".join(parts), "yellow" if reason in {INTERRUPTED, "error"} else "cyan")


def say_splits(completion: dict[str, Any]) -> None:
    """Print where the time went, how deep rounds drafted, what they accepted, and who drafted."""
    stats, rounds = completion["stats"], completion["rounds"]
    times = ", ".join(f"{name} {1e3 * stats[f'{name}_s']:.0f} ms" for name in STAGES)
    used = f"engine efficiency {stats['engine_efficiency']:.2f}; draft utilisation {stats['draft_utilisation']:.2f}"
    depths = Counter(entry["depth"] for entry in rounds)
    drafters = Counter(entry["drafter"] for entry in rounds if entry["depth"] and entry["drafter"])
    parts = [
        "rounds by drafted depth " + _counts(sorted(depths.items())),
        "by accepted tokens " + _counts(enumerate(stats["acceptance_histogram"])),
        *(["by drafter " + _counts(sorted(drafters.items()))] if drafters else []),
    ]
    text = f"{counted(len(rounds), 'round')}; {times}; {used}\n{'; '.join(parts)}"
    say(text, "dim")


def _counts(counts: Iterable[tuple[int | str, int]]) -> str:
    return " ".join(f"{value}:{count}" for value, count in counts) or "none"
