"""`monge chat`."""

import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from typing import Any, Final

from monge.cli import options
from monge.cli.console import quiet_host, say, streaming
from monge.cli.generate import loaded
from monge.core.errors import MongeError
from monge.core.words import counted
from monge.engine.conversation import Conversation
from monge.engine.decoder import Decoder
from monge.engine.result import GenerationStats
from monge.loading.sources import obstacle
from monge.options import LoadOptions, SamplingOptions

_HELP: Final = (
    "/reset forgets the conversation, /stats shows figures, /help shows this, /exit or Ctrl-D "
    'ends; Ctrl-C cuts an answer off; """ before and after a message lets it have several lines'
)
_DEFAULT: Final = "smollm2"
_QUOTES: Final = '"""'


@options.command(
    without=("max_batch_size", "stop", "stop_token_ids", "ignore_eos", "grammar"),
    one=("controller",),
    defaults={"max_new_tokens": 512},
)
def chat(
    *,
    load: LoadOptions,
    system: options.System = None,
    sampling: SamplingOptions,
    verbose: options.Verbose = False,
) -> None:
    """Talk with a model, turn by turn.

    Answers appear as they are decoded. Earlier turns stay in the target's cache, so only the new
    message is read. Without `--target`, the model is SmolLM2-135M-Instruct where its package is
    installed, and the built-in target otherwise. When the context is full, the oldest turns are
    left out, and a line says so.

    **Examples**

        monge chat
        monge chat --target ./model.gguf --system "You are a poet." --temperature 0.7 --top-p 0.9
        echo "What is the capital of France?" | monge chat --target smollm2
    """
    quiet_host()
    if load.target is None and load.draft is None:
        if (reason := obstacle(_DEFAULT)) is None:
            load = replace(load, target=_DEFAULT)
        else:
            say(f"talking with the built-in target, which knows little: {reason}", "yellow")
    with loaded(replace(load, max_batch_size=1)) as decoder:
        conversation = Conversation(decoder, system=system, **asdict(sampling))
        # A model without a template is refused before it is asked.
        decoder.encode_chat([{"role": "user", "content": "Hello"}])
        if verbose:
            made = decoder.components
            say(f"drafter {made.drafter!r}, verifier {made.rule!r}", "dim")
        if sys.stdin.isatty():
            say(_HELP, "dim")
        for text in messages():
            if not text.startswith("/") or "\n" in text:
                _answer(conversation, text)
            elif not _command(text, conversation, decoder):
                break


def _answer(conversation: Conversation, text: str) -> None:
    """Stream one answer; Ctrl-C keeps what there is of it."""
    pieces = conversation.reply(text)
    with streaming() as write:
        try:
            for piece in pieces:
                write(piece.text)
        except KeyboardInterrupt:
            pieces.close()
            say("interrupted; the answer so far is kept", "dim")
        except MongeError as error:  # the conversation goes on
            say(error, "red")
    if conversation.num_dropped:
        oldest = counted(conversation.num_dropped, "oldest one")
        say(f"the context is full: the model saw this message without the {oldest}", "yellow")


def _command(text: str, conversation: Conversation, decoder: Decoder) -> bool:
    """Carry out a command; false if the conversation ends."""
    match text.split(maxsplit=1)[0]:
        case "/exit" | "/quit":
            return False
        case "/reset":
            conversation.reset()
            say("the conversation is forgotten", "dim")
        case "/stats":
            say(stats_line(conversation, decoder), "cyan")
        case name:
            if name != "/help":
                say(f"unknown command {name}", "red")
            say(_HELP, "dim")
    return True


def stats_line(conversation: Conversation, decoder: Decoder) -> str:
    """Return figures of the conversation so far: tokens, speed, and speed against plain decoding."""
    if not conversation.sessions:
        return "nothing was answered yet"
    records = [record for session in conversation.sessions for record in session.records]
    num_tokens = sum(session.num_generated for session in conversation.sessions)
    prefill_s = sum(session.prefill_s for session in conversation.sessions)
    stats = GenerationStats.of(records, num_tokens=num_tokens, prefill_s=prefill_s)
    figures: list[Any] = [
        f"{counted(len(conversation.sessions), 'answer')}, {counted(num_tokens, 'token')}",
        f"{stats.tokens_per_s:.1f} tokens/s",
        f"{stats.block_efficiency:.2f} tokens a forward",
    ]
    latency = decoder.components.shared.latency
    if latency is not None and stats.decode_s > 0:
        gain = num_tokens / stats.decode_s * latency.round_s(0)
        figures.append(f"{gain:.2f}x plain decoding, as its round was measured")
    return " | ".join([*figures, f"{prefill_s:.2f} s of reading prompts"])


def messages() -> Iterator[str]:
    """Yield messages of the user: lines, pasted texts, and what stands between triple quotes.

    Lines of a terminal can be edited. Ctrl-C drops what is being written.
    """
    if not sys.stdin.isatty():
        piped = (line.removesuffix("\n") for line in sys.stdin)
        while (text := _message(lambda prompt: next(piped, None))) is not None:
            if text:
                yield text
        return
    import readline

    # A pasted text is read as a whole; Python turns this off. Where libedit stands in for GNU
    # readline there is no such setting, and each pasted line is a message.
    readline.parse_and_bind("set enable-bracketed-paste on")
    while True:
        try:
            text = _message(_typed)
        except KeyboardInterrupt:
            sys.stderr.write("\n")
            continue
        if text is None:
            sys.stderr.write("\n")
            return
        if text:
            yield text


def _typed(prompt: str) -> str | None:
    try:
        return input(prompt)
    except EOFError:
        return None


def _message(line: Callable[[str], str | None]) -> str | None:
    """Read a message by a function that shows a prompt and reads a line; `None` at the end of input."""
    first = line("\n> ")
    if first is None or "\n" in first or not first.lstrip().startswith(_QUOTES):
        return first if first is None else first.strip()
    lines = [first.lstrip().removeprefix(_QUOTES)]
    while not lines[-1].rstrip().endswith(_QUOTES) and (more := line("... ")) is not None:
        lines.append(more)
    return "\n".join(lines).rstrip().removesuffix(_QUOTES).strip()
