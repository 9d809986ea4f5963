"""From a conversation to prompt tokens."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from typing import Any, Final, Protocol, runtime_checkable

from jinja2 import TemplateError

from monge.core.errors import OptionError
from monge.core.text import check_text, token_ids_of

INSTRUCTION: Final = "instruction"
"""Name of the plain format below."""

_MARK: Final = "\N{OBJECT REPLACEMENT CHARACTER}"
"""Stands for a text whose place in a template is looked for."""

_FAULTS: Final = (
    TemplateError,
    TypeError,
    ValueError,
    ArithmeticError,
    LookupError,
    RecursionError,
)
"""Errors of templates, which are code of their own."""

ROLES: Final = ("system", "developer", "user", "assistant", "tool")

Message = Mapping[str, Any]
"""A turn: its `role`, one of `ROLES`, and its `content`, a text; templates may read more fields."""

Tool = Mapping[str, Any]
"""A function that may be called, in the form of the OpenAI API."""


@runtime_checkable
class ChatFormat(Protocol):
    """A way of writing conversations down."""

    def encode(
        self,
        messages: Sequence[Message],
        *,
        is_continued: bool = False,
        settings: Mapping[str, Any] | None = None,
    ) -> tuple[int, ...]:
        """Tokens of a conversation, up to where the assistant's answer starts.

        Args:
            messages: The turns.
            is_continued: Whether the last turn, the assistant's, is the start of the answer.
            settings: Variables of a template.

        Raises:
            OptionError: If it cannot be written in this format.
        """
        ...


@dataclass(frozen=True, slots=True)
class InstructionFormat:
    r"""`Instruction: ...\nResponse: ...`, the form in which the built-in target saw instructions.

    System messages come first, as they are. An empty line separates turns, and the text ends with
    `Response:`.
    """

    tokenizer: Any

    def encode(
        self,
        messages: Sequence[Message],
        *,
        is_continued: bool = False,
        settings: Mapping[str, Any] | None = None,
    ) -> tuple[int, ...]:
        if settings:
            raise OptionError("chat_template_kwargs: this model has no template that takes any")
        written: list[str] = []
        for message in checked_messages(messages, is_continued=is_continued):
            role, text = message["role"], message["content"]
            if role == "user":
                written.append(f"Instruction: {text}\n")
            elif role == "assistant":
                written.append(f"Response: {text}\n\n")
            else:
                written.append(f"{text}\n\n")
        text = "".join(written)
        end = text.removesuffix("\n\n") if is_continued else f"{text}Response:"
        return token_ids_of(self.tokenizer, end)


@dataclass(frozen=True, slots=True)
class TemplateFormat:
    """A Jinja template, run in the sandbox of `transformers`."""

    tokenizer: Any
    template: str | None = None

    def encode(
        self,
        messages: Sequence[Message],
        *,
        is_continued: bool = False,
        settings: Mapping[str, Any] | None = None,
        tools: Sequence[Tool] = (),
    ) -> tuple[int, ...]:
        parameters = {*signature(self.tokenizer.apply_chat_template).parameters, "messages"}
        for name in parameters.intersection(settings or ()):
            raise OptionError(f"chat_template_kwargs: {name!r} is not the template's; leave it out")
        turns = checked_messages(messages, is_continued=is_continued)
        return self._ids(
            self.written(turns, is_continued=is_continued, settings=settings, tools=tools)
        )

    def opening(self, before: Sequence[Message] = ()) -> tuple[int, ...]:
        """Tokens of a conversation up to where the user's turn after `before` starts.

        Raises:
            OptionError: If the template does not write the turn down as it is.
        """
        text = self.written([*before, {"role": "user", "content": _MARK}])
        start, mark, _ = text.partition(_MARK)
        if not mark:
            raise OptionError("the chat template does not show where a user's turn starts")
        # Most tokenizers join a space to the word that follows.
        return self._ids(start.rstrip(" "))

    def end_ids(self) -> frozenset[int]:
        """Return the added token with which the template closes an answer, if it does."""
        answer = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": _MARK}]
        try:
            text = self._rendered(answer, add_generation_prompt=False)
        except Exception:  # noqa: BLE001  a template is code of its own; the first conversation says what is wrong
            return frozenset()
        _, mark, after = text.rpartition(_MARK)
        ids = self._ids(after.strip()) if mark else ()
        return frozenset(ids[:1]) & frozenset(getattr(self.tokenizer, "added_tokens_decoder", ()))

    def written(
        self,
        messages: Sequence[Message],
        *,
        is_continued: bool = False,
        settings: Mapping[str, Any] | None = None,
        tools: Sequence[Tool] = (),
    ) -> str:
        """Return the text of a conversation, as `ChatFormat.encode` says; `tools` may be called.

        Raises:
            OptionError: If the template refuses it, or does not work.
        """
        options = {**(settings or {}), "add_generation_prompt": not is_continued}
        options |= {"tools": list(tools)} if tools else {}
        if is_continued:
            options["continue_final_message"] = True
        try:
            text = self._rendered([dict(message) for message in messages], **options)
        except _FAULTS as error:
            if type(error) is TemplateError:  # by its `raise_exception`
                raise OptionError(
                    f"the model's chat template refuses this conversation: {error}"
                ) from error
            raise OptionError(
                f"the chat template does not work: {type(error).__name__}: {error}"
            ) from error
        last = messages[-1]["content"].strip()
        if last in text:
            return text
        # Templates of some vision-language models read lists of parts, and drop plain text.
        try:
            in_parts = self._rendered(
                [
                    {**message, "content": [{"type": "text", "text": message["content"]}]}
                    for message in messages
                ],
                **options,
            )
        except (TemplateError, TypeError):
            return text
        return in_parts if last in in_parts else text

    def _rendered(self, conversation: Sequence[Mapping[str, Any]], **options: Any) -> str:
        return self.tokenizer.apply_chat_template(
            conversation,
            chat_template=self.template,
            tokenize=False,
            **options,
        )

    def _ids(self, text: str) -> tuple[int, ...]:
        # The template writes special tokens itself.
        return token_ids_of(self.tokenizer, text, "chat template", add_special_tokens=False)


@dataclass(frozen=True, slots=True)
class NoFormat:
    """A model without a template: conversations are refused."""

    def encode(
        self,
        messages: Sequence[Message],
        *,
        is_continued: bool = False,
        settings: Mapping[str, Any] | None = None,
    ) -> tuple[int, ...]:
        raise OptionError(
            "this model has no chat template; complete a plain prompt instead, or give a "
            "template: --chat-template"
        )


def chat_format(
    tokenizer: Any, wanted: str | None = None, *, is_built_in: bool = False
) -> ChatFormat:
    """The format for a model.

    Args:
        tokenizer: Its tokenizer.
        wanted: `instruction`, or a file with a Jinja template; `None` for the tokenizer's own
            template, or `instruction` if the target is the built-in one.
        is_built_in: Whether the target is the built-in one.

    Raises:
        OptionError: If the file cannot be read, or the template does not work.
    """
    if wanted == INSTRUCTION or (wanted is None and is_built_in):
        return InstructionFormat(tokenizer)
    if wanted is None:
        return (
            TemplateFormat(tokenizer) if getattr(tokenizer, "chat_template", None) else NoFormat()
        )
    try:
        template = Path(wanted).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(
            f"--chat-template: {wanted!r} is neither {INSTRUCTION!r} nor a readable file: {error}"
        ) from error
    form = TemplateFormat(tokenizer, template)
    form.encode([{"role": "user", "content": "Hello"}])
    return form


def checked_messages(messages: object, *, is_continued: bool = False) -> list[Message]:
    """Messages, if they are some.

    Raises:
        OptionError: If they are no list of a `role` and a `content` each, a role is unknown, a
            content is no text, or a continued one is not the assistant's.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise OptionError(
            f"messages must be a list of {{'role': ..., 'content': ...}}; got "
            f"{type(messages).__name__}"
        )
    turns: Sequence[Any] = messages
    for place, message in enumerate(turns):
        where = f"messages[{place}]"
        if not isinstance(message, Mapping) or {"role", "content"} - set(message):
            raise OptionError(f"{where} must have a 'role' and a 'content'; got {message!r}")
        role, content = message["role"], message["content"]
        if role not in ROLES:
            raise OptionError(f"{where}: the role must be one of {', '.join(ROLES)}; got {role!r}")
        if not isinstance(content, str):
            raise OptionError(f"{where}: the content must be text; got {type(content).__name__}")
        check_text(content, where)
    if is_continued and not (turns[-1]["role"] == "assistant" and turns[-1]["content"]):
        raise OptionError("messages: the last one, to be continued, must be the assistant's text")
    return list(turns)
