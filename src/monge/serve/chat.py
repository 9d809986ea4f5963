"""From a conversation to prompt tokens."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from jinja2 import TemplateError

from monge.core.errors import OptionError
from monge.serve.errors import refused
from monge.serve.schemas import Message

INSTRUCTION = "instruction"
"""Name of the plain format below."""


@runtime_checkable
class ChatFormat(Protocol):
    """A way of writing conversations down."""

    def encode(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """Tokens of a conversation, up to where the assistant's answer starts.

        Raises:
            ApiError: If it cannot be written in this format.
        """
        ...


@dataclass(frozen=True, slots=True)
class InstructionFormat:
    r"""`Instruction: ...\nResponse: ...`, the form in which the built-in target saw instructions.

    What the system says comes first, as it is. Turns are separated by an empty line, and the text ends with `Response:`.

    Args:
        tokenizer: Turns the text into ids.
    """

    tokenizer: Any

    def encode(self, messages: Sequence[Message]) -> tuple[int, ...]:
        written: list[str] = []
        for message in messages:
            if message.role == "user":
                written.append(f"Instruction: {message.text}\n")
            elif message.role == "assistant":
                written.append(f"Response: {message.text}\n\n")
            else:
                written.append(f"{message.text}\n\n")
        return tuple(self.tokenizer("".join(written) + "Response:")["input_ids"])


@dataclass(frozen=True, slots=True)
class TemplateFormat:
    """A Jinja template, run in the sandbox of `transformers`.

    Args:
        tokenizer: The tokenizer, whose own template is used where none is given.
        template: Another template.

    Raises:
        OptionError: If the template cannot write the plainest conversation.
    """

    tokenizer: Any
    template: str | None = None

    def __post_init__(self) -> None:
        try:
            self._written([Message(role="user", content="Hello")])
        except TemplateError as error:
            raise OptionError(f"the chat template does not work: {type(error).__name__}: {error}") from error

    def encode(self, messages: Sequence[Message]) -> tuple[int, ...]:
        try:
            text = self._written(messages)
        except TemplateError as error:
            raise refused(f"the model's chat template refuses this conversation: {error}", "messages") from error
        # The template writes special tokens itself.
        return tuple(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def _written(self, messages: Sequence[Message]) -> str:
        conversation = [{"role": message.role, "content": message.text} for message in messages]
        return self.tokenizer.apply_chat_template(
            conversation, chat_template=self.template, tokenize=False, add_generation_prompt=True
        )


@dataclass(frozen=True, slots=True)
class NoFormat:
    """A model without a template: conversations are refused."""

    def encode(self, messages: Sequence[Message]) -> tuple[int, ...]:
        raise refused(
            "this model has no chat template; use /v1/completions, or start the server with --chat-template", "messages"
        )


def chat_format(tokenizer: Any, wanted: str | None, *, is_built_in: bool) -> ChatFormat:  # noqa: ANN401 (the host's)
    """The format for a model.

    Args:
        tokenizer: Its tokenizer.
        wanted: `instruction`, or a file with a Jinja template; `None` for the tokenizer's own template, or `instruction` if the
            target is the built-in one.
        is_built_in: Whether the target is the built-in one.

    Raises:
        OptionError: If the file cannot be read, or the template does not work.
    """
    if wanted == INSTRUCTION or (wanted is None and is_built_in):
        return InstructionFormat(tokenizer)
    if wanted is None:
        return TemplateFormat(tokenizer) if getattr(tokenizer, "chat_template", None) else NoFormat()
    try:
        return TemplateFormat(tokenizer, Path(wanted).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(f"--chat-template: {wanted!r} is neither {INSTRUCTION!r} nor a readable file: {error}") from error
