"""What `monge chat` does."""

import json
import sys
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from monge.api import compile_decoder
from monge.cli.chat_input import messages
from monge.cli.console import say, streaming
from monge.cli.generation import loaded, say_parts
from monge.core.errors import MongeError, OptionError
from monge.core.words import counted
from monge.engine.conversation import Conversation
from monge.engine.decoder import Decoder
from monge.engine.result import GenerationStats
from monge.loading.named_models import why_no_model
from monge.loading.sampling_defaults import sampling_defaults
from monge.networks.background_compiler import BackgroundCompiler, compiled_by
from monge.options import LoadOptions, SamplingOptions, changed
from monge.requests.chat_format import Message

_HELP: Final = """\
/file PATH  puts the text of a file before your next message; without PATH, takes all files back
/save PATH  writes the conversation to a new file: *.json or *.jsonl as messages, others as text
/reset      forgets the conversation
/stats      shows figures
/help       shows this
/exit       ends, as Ctrl-D does
A line that ends in \\ goes on in the next one. A message of several lines stands between \"\"\".
Ctrl-C cuts an answer off."""
_DEFAULT: Final = "smollm2"


def talk(
    load: LoadOptions,
    sampling: SamplingOptions,
    system: str | None,
    *,
    reads_defaults: bool,
    verbose: bool,
) -> None:
    """Talk with a model on standard input and output.

    Args:
        load: Options of loading.
        sampling: Options of the answers; `None` for those that the checkpoint may set.
        system: System message.
        reads_defaults: Whether the checkpoint's sampling settings hold where none are given.
        verbose: Whether the parts are listed.
    """
    if load.target is None and load.draft is None:
        if (reason := why_no_model(_DEFAULT)) is None:
            load = replace(load, target=_DEFAULT)
        else:
            say(f"talking with the built-in target, which knows little: {reason}", "yellow")
    load = replace(load, max_batch_size=1)
    sampling = _settled(sampling, sampling_defaults(load.target) if reads_defaults else {})
    is_plain = load.device in {None, "cpu"} and not load.batch_invariant
    # On a terminal nobody waits for the text that a compiled network writes.
    starts_at_once = is_plain and sys.stdin.isatty()
    compiler = BackgroundCompiler(compile_decoder, changed(load))
    meanwhile = compiled_by(compiler) if starts_at_once else nullcontext()
    with meanwhile:
        decoder = loaded(load)
        conversation = Talk(
            conversation=Conversation(decoder, system=system, **asdict(sampling)),
            decoder=decoder,
            max_new_tokens=sampling.max_new_tokens,
        )
        # A model without a template is refused before it is asked.
        decoder.encode_chat([{"role": "user", "content": "Hello"}])
        if verbose:
            say_parts(decoder)
        if sys.stdin.isatty():
            say("/help lists the commands, /exit or Ctrl-D ends", "dim")
        for text in messages():
            if not text.startswith("/") or "\n" in text:
                conversation.answer(text)
            elif not conversation.obey(text):
                break


def _settled(sampling: SamplingOptions, defaults: dict[str, Any]) -> SamplingOptions:
    """Return options where those that are not given are the checkpoint's, and a line says so."""
    usual = SamplingOptions()
    given = changed(sampling)
    used = {name: value for name, value in defaults.items() if given.get(name) is None}
    used.pop("max_new_tokens", None)  # this command has its own
    if used:
        told = ", ".join(f"{name} {value}" for name, value in used.items())
        say(f"the checkpoint's settings: {told}; --generation-config none ignores them", "dim")
    unset = ("temperature", "top_p", "min_p")
    filled = {name: getattr(usual, name) for name in unset if getattr(sampling, name) is None}
    return replace(sampling, **filled | used)


@dataclass(frozen=True, slots=True, kw_only=True)
class Talk:
    """A conversation on a terminal.

    Args:
        conversation: The turns so far.
        decoder: Decodes the answers.
        max_new_tokens: Most tokens of an answer.
        files: Texts that stand before the next message.
        saved: Files that hold this conversation, and may be written again.
    """

    conversation: Conversation
    decoder: Decoder
    max_new_tokens: int
    files: list[str] = field(default_factory=list)
    saved: set[Path] = field(default_factory=set)

    def answer(self, text: str) -> None:
        """Stream an answer; Ctrl-C keeps its text so far."""
        num_messages = len(self.conversation.messages)
        pieces = self.conversation.reply("\n\n".join([*self.files, text]))
        with streaming() as write:
            try:
                for piece in pieces:
                    write(piece.text)
            except KeyboardInterrupt:
                pieces.close()
                say("interrupted; the answer so far is kept", "dim")
            except MongeError as error:  # the conversation goes on
                say(error, "red")
        if len(self.conversation.messages) > num_messages:  # a refused message leaves them waiting
            self.files.clear()
        if num_dropped := self.conversation.num_dropped:
            oldest = counted(num_dropped, "oldest one")
            say(f"the context is full: the model saw this message without the {oldest}", "yellow")

    def obey(self, text: str) -> bool:
        """Carry out a command; false if the conversation ends."""
        name, *rest = text.split(maxsplit=1)
        if name in {"/exit", "/quit"}:
            return False
        try:
            say(*self._done(name, "".join(rest).strip()))
        except UnicodeDecodeError as error:
            say(
                f"{text}: not UTF-8 at byte {error.start}; convert it first, e.g. with iconv", "red"
            )
        except (MongeError, OSError, ValueError, RuntimeError) as error:  # of paths, too
            say(f"{text}: {error}", "red")
        except KeyboardInterrupt:
            say("interrupted", "dim")
        return True

    def _done(self, name: str, argument: str) -> tuple[str, str]:
        """Carry out a command that leaves the conversation open; return what is said, and its style."""
        match name:
            case "/file":
                return self._attach(argument), "dim"
            case "/save":
                return self._save(argument), "dim"
            case "/reset":
                self.conversation.reset()
                self.files.clear()
                self.saved.clear()
                return "the conversation is forgotten", "dim"
            case "/stats":
                return stats_line(self.conversation, self.decoder), "cyan"
            case "/help":
                return _HELP, "dim"
            case _:
                raise OptionError("unknown command; /help lists those that there are")

    def _attach(self, argument: str) -> str:
        """Put a file's text before the next message."""
        if not argument:
            number = len(self.files)
            self.files.clear()
            return f"{counted(number, 'file')} taken back; /file PATH puts one before a message"
        path = _path(argument)
        text = path.read_text(encoding="utf-8-sig").strip("\n")
        if not text.strip():
            raise OptionError("this file holds no text")
        content = "\n\n".join([*self.files, text])
        prompt = self.decoder.encode_chat(self._turns({"role": "user", "content": content}))
        self.decoder.sessions(prompt, max_new_tokens=self.max_new_tokens)  # must fit the context
        self.files.append(text)
        size = counted(len(prompt), "token")
        return f"{path.name} stands before your next message, which has {size} so far"

    def _save(self, argument: str) -> str:
        """Write the conversation to a file that is new, or that holds this conversation."""
        path, turns = _path(argument).absolute(), self._turns(*self.conversation.messages)
        if not argument:
            raise OptionError("name a file, e.g. /save talk.txt")
        if not self.conversation.messages:
            raise OptionError("nothing was said yet")
        if path not in self.saved and path.exists():
            raise OptionError("the file is there already; name a new one")
        if path.suffix in {".json", ".jsonl"}:
            text = json.dumps({"messages": turns}, ensure_ascii=False)
        else:
            text = "\n\n".join(f"{turn['role']}:\n{turn['content']}" for turn in turns)
        unfinished = path.with_name(f"{path.name}.unfinished")
        try:
            unfinished.write_text(f"{text}\n", encoding="utf-8")
            unfinished.replace(path)
        finally:
            unfinished.unlink(missing_ok=True)
        self.saved.add(path)
        return f"{counted(len(turns), 'message')} written to {path}"

    def _turns(self, *turns: Message) -> list[Message]:
        """Return turns behind the system message."""
        system = self.conversation.system
        return [*([] if system is None else [{"role": "system", "content": system}]), *turns]


def _path(argument: str) -> Path:
    """Return the path that is named, with quotes around it or without."""
    return Path(argument.strip("'\"")).expanduser()


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
        figures.append(f"{gain:.2f} times the speed without drafts")
    return " | ".join([*figures, f"{prefill_s:.2f} s of reading prompts"])
