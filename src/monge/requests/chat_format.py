"""From a conversation to prompt tokens."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from inspect import signature
from itertools import takewhile
from pathlib import Path
from typing import Any, Final, Protocol, runtime_checkable

from jinja2 import TemplateError

from monge.core.errors import OptionError
from monge.core.text import check_text, token_ids_of
from monge.core.words import unread_part

INSTRUCTION: Final = "instruction"
"""Name of the plain format below."""

_MARK: Final = "\N{OBJECT REPLACEMENT CHARACTER}"
"""Stands for a text whose place in a template is looked for."""

_SEEN: Final = re.compile(f"{_MARK}([0-9.]+){_MARK}")
_CALL_ID: Final = re.compile("[a-zA-Z0-9]{9}")
"""The only ids of calls that templates of Mistral's models take."""

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
        return self._ids(
            self.written(messages, is_continued=is_continued, settings=settings, tools=tools)
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

        It has the text of every message, and every call. What the template has no place for moves:
        `developer` becomes `system`, and a system message becomes a part of the user's turn beside
        it. Ids of calls change if the template accepts only another form. An assistant's text
        counts as written if its end is, since templates leave out earlier reasoning.

        Raises:
            OptionError: If the template refuses it, does not work, or leaves a message out.
        """
        messages = checked_messages(messages, is_continued=is_continued)
        options = {**(settings or {}), "add_generation_prompt": not is_continued}
        options |= {"tools": list(tools)} if tools else {}
        if is_continued:
            options["continue_final_message"] = True
        refusal: OptionError | None = None
        for turns in self._ways(messages):
            try:
                # Templates of some vision-language models read lists of parts, and drop plain text.
                for shaped in (dict[str, Any], _in_parts):
                    conversation = [shaped(turn) for turn in turns]
                    text = self._checked(conversation, options)
                    lost = self._lost(turns, shaped, text, options)
                    is_list = shaped is _in_parts and str(conversation[-1]["content"]) in text
                    if lost is None and not is_list:
                        return text
                    if lost is None or len(turns) < len(messages):  # whose numbers are others
                        continue
                    refusal = refusal or OptionError(
                        f"messages[{lost}]: the chat template leaves out text or calls of this "
                        f"message of role {messages[lost]['role']!r}; send it as a user's text, or "
                        "give another template: --chat-template"
                    )
            except OptionError as error:
                refusal = refusal or error
        assert refusal is not None, "there is at least one way"
        raise refusal

    def _ways(self, messages: Sequence[Message]) -> Iterator[Sequence[Message]]:
        """Give the conversation as it is, then what a template with fewer roles or other ids may take."""
        template = self.template or getattr(self.tokenizer, "chat_template", None)
        renamed = [
            {**turn, "role": "system"} if turn["role"] == "developer" else turn for turn in messages
        ]
        # A template that writes any role would write one that the model has never seen.
        start = messages if "developer" in str(template) else renamed
        ways = [start, renamed, _told(renamed, has_system=True), _told(renamed)]
        if any(turn["role"] == "system" for turn in renamed[1:]):
            # Some templates refuse the role where it comes first, and write any role behind it.
            first: list[Message] = [{"role": role, "content": "a"} for role in ("system", "user")]
            try:
                self._checked(first, {})
            except OptionError:
                ways = [ways.pop(), *ways]
        tried: list[Sequence[Message]] = []
        for change in (list, _with_short_ids):
            for roles in ways:
                turns = change(roles)
                if turns not in tried:
                    tried.append(turns)
                    yield turns

    def _lost(
        self,
        turns: Sequence[Message],
        shaped: Callable[[Message], Message],
        text: str,
        options: Mapping[str, Any],
    ) -> int | None:
        """Return the number of a turn that a template's text does not depend on, or `None`."""

        def attempt(marked: Sequence[Message]) -> str | None:
            try:
                return self._rendered([shaped(turn) for turn in marked], **options)
            except _FAULTS:
                return None

        both = "content", "tool_calls"
        marked = [_marked(turn, place, both) for place, turn in enumerate(turns)]
        seen = set(_SEEN.findall(attempt([turn for turn, _ in marked]) or ""))
        for place, (turn, (_, marks)) in enumerate(zip(turns, marked, strict=True)):
            # A mark may be cut off, or may not be what the template takes there.
            for field in {field for mark, field in marks.items() if mark not in seen}:
                changed, _ = _marked(turn, place, (field,))
                if attempt([*turns[:place], changed, *turns[place + 1 :]]) == text:
                    return place
        return None

    def _checked(self, conversation: Sequence[Message], options: Mapping[str, Any]) -> str:
        try:
            return self._rendered(conversation, **options)
        except _FAULTS as error:
            if type(error) is TemplateError:  # by its `raise_exception`
                raise OptionError(
                    f"the model's chat template refuses this conversation: {error}"
                ) from error
            raise OptionError(
                f"the chat template does not work: {type(error).__name__}: {error}"
            ) from error

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
            template, or `instruction` if the target is the built-in model.
        is_built_in: Whether the target is the built-in model.

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


def _in_parts(turn: Message) -> Message:
    return {**turn, "content": [{"type": "text", "text": turn["content"]}]}


def _marked(
    turn: Message, place: int, fields: Sequence[str]
) -> tuple[dict[str, Any], dict[str, str]]:
    """Return a turn with a mark behind its text and behind the names of its calls; fields by mark."""
    changed, marks = dict(turn), dict[str, str]()
    if "content" in fields and turn["content"].strip():
        changed["content"] = f"{turn['content'].replace(_MARK, '')}{_MARK}{place}{_MARK}"
        marks[f"{place}"] = "content"
    if "tool_calls" in fields and (calls := turn.get("tool_calls")):
        changed["tool_calls"] = []
        for number, call in enumerate(calls):
            function, mark = call.get("function", call), f"{place}.{number}"
            named = {**function, "name": f"{function.get('name')}{_MARK}{mark}{_MARK}"}
            changed["tool_calls"].append(
                {**call, "function": named} if "function" in call else named
            )
            marks[mark] = "tool_calls"
    return changed, marks


def _told(messages: Sequence[Message], *, has_system: bool = False) -> list[Message]:
    """Return a conversation whose system messages are texts of the user's turns beside them.

    With `has_system`, the system messages at its start are joined into a single system message.
    """
    first = list(takewhile(lambda turn: turn["role"] == "system", messages)) if has_system else []
    turns: list[Message] = []
    if first:
        turns.append({**first[0], "content": "\n\n".join(turn["content"] for turn in first)})
    was_moved = False
    for turn in messages[len(first) :]:
        is_moved = turn["role"] == "system"
        moved = {**turn, "role": "user"} if is_moved else turn
        if (is_moved or was_moved) and turns and turns[-1]["role"] == moved["role"] == "user":
            texts = turns.pop()["content"], moved["content"]
            moved = {**moved, "content": "\n\n".join(filter(None, texts))}
        turns.append(moved)
        was_moved = is_moved
    return turns


def _with_short_ids(messages: Sequence[Message]) -> list[Message]:
    """Return a conversation whose calls have ids of nine letters or digits; equal ids stay equal."""

    def short(fields: Mapping[str, Any], name: str) -> dict[str, Any]:
        given = fields.get(name)
        if given is None or _CALL_ID.fullmatch(str(given)):
            return dict(fields)
        return {**fields, name: sha256(repr(given).encode()).hexdigest()[:9]}

    turns = [short(turn, "tool_call_id") for turn in messages]
    for turn in turns:
        if calls := turn.get("tool_calls"):
            turn["tool_calls"] = [short(call, "id") for call in calls]
    return list(turns)


def checked_messages(messages: object, *, is_continued: bool = False) -> list[Message]:
    """Return `messages` if they are a valid conversation.

    Raises:
        OptionError: If they are no list of a `role` and a `content` each, a role is unknown, a
            content is no text, or a continued message is not the assistant's.
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
            reason = (
                unread_part(content) or f"the content must be text; got {type(content).__name__}"
            )
            raise OptionError(f"{where}: {reason}")
        check_text(content, where)
    if is_continued and not (turns[-1]["role"] == "assistant" and turns[-1]["content"]):
        raise OptionError("messages: the last one, to be continued, must be the assistant's text")
    return list(turns)
