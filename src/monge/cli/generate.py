"""`monge generate`."""

import io
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from monge.cli import options
from monge.cli.certify import BUILT_IN, say_certificate
from monge.cli.completion import INTERRUPTED, Completion, completion_of, decode_until_interrupted
from monge.cli.console import (
    notes,
    output,
    quiet_host,
    reported,
    say_error,
    say_raw_text,
    streaming,
)
from monge.cli.loading import loaded
from monge.cli.out import check_out_file
from monge.cli.progress import working
from monge.cli.trace import check_trace, write_trace
from monge.core.errors import OptionError
from monge.engine.decoder import Decoder, piece_of
from monge.engine.session import Request, Session
from monge.options import LoadOptions, SamplingOptions, changed
from monge.prompts import Prompt, read_prompts, written


@reported
@options.command(one=("controller",))
def generate(
    prompt: Annotated[
        str | None,
        typer.Argument(help="The text to continue; without it, --prompts or standard input."),
    ] = None,
    *,
    file: options.File = None,
    is_chat: options.Chat = False,
    system: options.System = None,
    load: LoadOptions,
    tensor_parallel: options.TensorParallel = None,
    sampling: SamplingOptions,
    trace: options.Trace = None,
    certificate: options.Certificate = None,
    as_json: options.Json = False,
    verbose: options.Verbose = False,
) -> None:
    """Continue a prompt, or many at once.

    On a terminal the text appears as it is decoded, with a line of figures at the end; into a pipe
    goes the text alone. Ctrl-C keeps what there is.

    **Examples**

        monge generate "The history of mathematics"
        monge generate "Question: What is 7 times 8?" --temperature 0.8 --seed 1 --stop "Question:"
        monge generate --prompts prompts.jsonl --batch-size 8 --json > completions.jsonl
        monge generate --chat "Why is the sky blue?" --target smollm2
        cat letter.txt | monge generate --drafter ngram --max-new-tokens 40
        monge generate "Once" --controller goodput --trace rounds.json
        monge generate "Once" --temperature 1 --certificate run.json && monge certify run.json
        torchrun --nproc-per-node 2 -m monge generate "Once" --target ./my-target --tensor-parallel
        monge generate "Once" --target ./my-target --draft ./my-draft --tree "chain(6)" --verifier single_draft
    """
    quiet_host()
    asked = _prompts(prompt, file)
    if trace is not None:
        check_trace(trace)
    prompts = [one.text for one in asked]
    if certificate is not None:
        check_out_file(certificate, "--certificate", "run.json")
    if is_chat:
        asked = [_as_chat(one, system) for one in asked]
    elif any(one.messages is not None for one in asked):
        asked = [one if one.messages is None else _as_chat(one, system) for one in asked]
        is_chat = True
    if not is_chat and (system is not None or load.chat_template is not None):
        raise OptionError(
            "--system and --chat-template say how a message is written; give --chat beside them"
        )
    with loaded(load, tensor_parallel=bool(tensor_parallel)) as made:
        recorder = None
        if certificate is not None:
            from monge.audit.recorder import Recorder, loading_of

            name = BUILT_IN if load.target is None else load.target
            recorder = Recorder(made, target=name, loading=loading_of(load.draft, changed(load)))
        decoder = made if recorder is None else recorder.decoder
        given = [written(one, decoder.encode_chat) for one in asked]
        say_raw_text(decoder.tokenizer, asked, "--chat writes them as messages")
        sessions = (recorder or decoder).sessions(given, **changed(sampling))
        say_memory(decoder)
        if verbose:
            say_parts(decoder, sessions[0].request.controller)
        is_new = sampling.seed is None and not as_json
        _say_seed(sessions[0].request, is_new=is_new, always=bool(verbose))
        complete = _show(decoder, sessions, prompts, as_json=as_json, verbose=bool(verbose))
        if trace is not None:
            shown = [
                completion_of(session, prompt, decoder.backend)
                for session, prompt in zip(sessions, prompts, strict=True)
            ]
            write_trace(trace, shown)
        if recorder is not None and certificate is not None:
            say_certificate(recorder.certificate().write(certificate))
    _leave(sessions, complete=complete)


def _as_chat(prompt: Prompt, system: str | None) -> Prompt:
    """A prompt as a user's message, and a conversation as it is, after the system message."""
    before = [] if system is None else [{"role": "system", "content": system}]
    own = prompt.messages or ({"role": "user", "content": prompt.text},)
    return replace(prompt, messages=(*before, *own))


def _say_seed(request: Request, *, is_new: bool, always: bool) -> None:
    """Say which seed was drawn, where no line of figures does, it decides about the text, and gives it again."""
    if (
        is_new
        and request.is_repeatable
        and not sys.stdout.isatty()
        and (always or request.rules.temperature > 0)
    ):
        notes().print(f"seed {request.seed}", style="dim")


def _leave(sessions: Sequence[Session], *, complete: bool) -> None:
    """Say what went wrong, if anything did, and end with its status."""
    for number, session in enumerate(sessions, start=1):
        if session.error is not None:
            say_error(f"prompt {number}: {session.error}")
    if not complete:
        notes().print("interrupted; the text so far is kept")
        raise typer.Exit(130)
    if any(session.error is not None for session in sessions):
        raise typer.Exit(2)


def say_parts(decoder: Decoder, controller: str | None = None) -> None:
    """Say which parts decode; the controller is that of requests which name this one, or the usual one."""
    parts = decoder.components
    planner = parts.planner(controller).controller
    drafter = repr(parts.drafter).replace("\n", " ")
    notes().print(
        f"drafter {drafter}\nverifier {parts.rule!r}\ncontroller {planner!r}", markup=False
    )
    if len(parts.controllers) > 1:
        notes().print(
            f"controllers that a request may name: {', '.join(parts.controllers)}", markup=False
        )
    if parts.seeded is not None:
        notes().print(
            f"sampled requests with a seed that name none have: {parts.seeded}", markup=False
        )


def say_memory(decoder: Decoder) -> None:
    """Say what drafting takes beside the networks, where it takes anything."""
    can = decoder.components.drafter.capabilities
    if can.num_parameters > 0:
        text = f"drafter: {can.num_parameters / 1e6:.2f}M parameters, {can.num_bytes / 1e6:.1f} MB beside the target"
        kept = can.bytes_per_token
        if kept > 0:
            text += f", and {f'{kept} bytes' if kept < 1000 else f'{kept / 1e3:.1f} kB'} per token of text"
        notes().print(text, markup=False, soft_wrap=True)


def _prompts(prompt: str | None, file: Path | None) -> list[Prompt]:
    if prompt is not None and file is not None:
        raise OptionError("give a prompt or --prompts, not both")
    if file is not None:
        return list(read_prompts(file))
    if prompt is not None:
        return [Prompt(task="", text=prompt)]
    if sys.stdin.isatty():
        raise OptionError(
            'no prompt; write one, e.g. monge generate "The history of", or use --prompts or a pipe'
        )
    return [Prompt(task="", text=_standard_input().rstrip("\n"))]


def _standard_input() -> str:
    """All of it, read as UTF-8 whatever the locale says.

    Under some a wrong byte becomes a character that is no text.
    """
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(encoding="utf-8-sig", errors="strict")
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise OptionError(
            f"standard input is not UTF-8: {error}; convert it first, e.g. with iconv"
        ) from error


def _show(
    decoder: Decoder,
    sessions: Sequence[Session],
    prompts: Sequence[str],
    *,
    as_json: bool,
    verbose: bool,
) -> bool:
    """Decode and show; false if it was interrupted."""
    is_terminal = sys.stdout.isatty() and not as_json
    if len(sessions) > 1 or as_json:
        complete = decode_with_bar(decoder, sessions)
        for session, prompt in zip(sessions, prompts, strict=True):
            show_completion(
                completion_of(session, prompt, decoder.backend),
                as_json=as_json,
                is_terminal=is_terminal,
            )
    elif is_terminal:
        output().print(Text(prompts[0], style="dim"))
        complete = stream(decoder, sessions[0])
        say_summary(completion_of(sessions[0], prompts[0], decoder.backend))
    else:
        complete = stream(decoder, sessions[0])
    if verbose:
        for session, prompt in zip(sessions, prompts, strict=True):
            completion = completion_of(session, prompt, decoder.backend)
            notes().print(
                f"{completion.time_split()}\n{completion.plan_split()}", style="dim", soft_wrap=True
            )
    return complete


def stream(decoder: Decoder, session: Session) -> bool:
    """Write text as it is decoded; false if it was interrupted."""
    with streaming() as write:
        complete = decode_until_interrupted(
            decoder, [session], lambda session: write(piece_of(session).text)
        )
        if session.text is not None:
            session.text.finish()
            write(session.text.take(last=True))
    return complete


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def decode_with_bar(decoder: Decoder, sessions: Sequence[Session]) -> bool:
    """Decode a batch with progress on standard error; false if it was interrupted."""
    total = sum(session.request.max_new_tokens for session in sessions)
    with working() as work:
        stage = work.stage("decoding tokens", total)

        def on_round(session: Session) -> None:
            done = session.finish_reason is not None
            left = session.request.max_new_tokens - session.num_generated if done else 0
            new = len(session.records[-1].token_ids) if session.error is None else 0
            stage.advance(new + left)

        return decode_until_interrupted(decoder, sessions, on_round)


def show_completion(completion: Completion, *, as_json: bool, is_terminal: bool) -> None:
    """One completion of several."""
    if as_json:
        _write(json.dumps(completion.as_dict(), ensure_ascii=False) + "\n")
    elif is_terminal:
        console = output()
        console.print(Text(completion.prompt, style="dim"))
        console.print(Text(completion.text))
        say_summary(completion)
        console.print()
    else:
        _write(completion.text + "\n")


def say_summary(completion: Completion) -> None:
    """The line of figures."""
    style = "yellow" if completion.finish_reason in {INTERRUPTED, "error"} else "cyan"
    notes().print(completion.summary(), style=style, markup=False, soft_wrap=True)
