"""`monge chat`."""

import sys
from dataclasses import asdict, replace
from typing import Any, Final

from monge.cli import options
from monge.cli.console import notes, quiet_host, reported, streaming
from monge.cli.loading import loaded
from monge.cli.messages import messages
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


@reported
@options.command(
    without=("max_batch_size", "stop", "stop_token_ids", "ignore_eos"),
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
        load = replace(load, target=_default_target())
    with loaded(replace(load, max_batch_size=1)) as decoder:
        conversation = Conversation(decoder, system=system, **asdict(sampling))
        # A model without a template is refused before it is asked.
        decoder.encode_chat([{"role": "user", "content": "Hello"}])
        if verbose:
            made = decoder.components
            notes().print(
                f"drafter {made.drafter!r}, verifier {made.rule!r}", style="dim", markup=False
            )
        if sys.stdin.isatty():
            notes().print(_HELP, style="dim", markup=False)
        for text in messages():
            if text.startswith("/") and "\n" not in text:
                if not _command(text, conversation, decoder):
                    break
            else:
                _answer(conversation, text)


def _default_target() -> str | None:
    """SmolLM2 if it is there; else the built-in target, with a line that says how to get it."""
    if (reason := obstacle(_DEFAULT)) is None:
        return _DEFAULT
    notes().print(
        f"talking with the built-in target, which knows little: {reason}",
        style="yellow",
        markup=False,
    )
    return None


def _answer(conversation: Conversation, text: str) -> None:
    """Stream one answer; Ctrl-C keeps what there is of it."""
    pieces = conversation.reply(text)
    with streaming() as write:
        try:
            for piece in pieces:
                write(piece.text)
        except KeyboardInterrupt:
            pieces.close()
            notes().print("interrupted; the answer so far is kept", style="dim")
        except MongeError as error:  # the conversation goes on
            notes().print(str(error), style="red", markup=False, soft_wrap=True)
    if conversation.num_dropped:
        notes().print(
            "the context is full: the model saw this message without the "
            f"{counted(conversation.num_dropped, 'oldest one')}",
            style="yellow",
        )


def _command(text: str, conversation: Conversation, decoder: Decoder) -> bool:
    """Carry out a command; false if the conversation ends."""
    name = text.split(maxsplit=1)[0]
    if name in {"/exit", "/quit"}:
        return False
    if name == "/reset":
        conversation.reset()
        notes().print("the conversation is forgotten", style="dim")
    elif name == "/stats":
        notes().print(stats_line(conversation, decoder), style="cyan", markup=False, soft_wrap=True)
    else:
        if name != "/help":
            notes().print(f"unknown command {name}", style="red", markup=False)
        notes().print(_HELP, style="dim", markup=False)
    return True


def stats_line(conversation: Conversation, decoder: Decoder) -> str:
    """Figures of the conversation so far.

    Tokens, speed, tokens a forward, and speed against plain decoding.
    """
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
        figures.append(
            f"{num_tokens / stats.decode_s * latency.round_s(0):.2f}x plain decoding, "
            "as its round was measured"
        )
    figures.append(f"{prefill_s:.2f} s of reading prompts")
    return " | ".join(figures)
