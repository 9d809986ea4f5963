"""Turns of conversations in bodies: messages, functions and their calls, and the items of responses."""

from collections.abc import Iterable
from typing import Annotated, Any, Final, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag, field_validator

from monge.core.words import TextPartType, unread_part
from monge.serve.api.fields import (
    FEW_MESSAGES,
    MAX_TOOLS,
    Arguments,
    Ignored,
    Info,
    Label,
    Parameters,
    Strict,
    few,
    ignorable,
    neutral,
    optional,
)


def _only_text(content: Any) -> Any:  # noqa: ANN401 (any JSON)
    if (reason := unread_part(content)) is not None:
        raise ValueError(reason)
    return content


class TextPart(Strict):
    """A part of a message."""

    type: TextPartType
    text: str
    cache_control: Any = ignorable("every beginning may be cached")
    annotations: Any = neutral("there are no annotations", [])
    logprobs: Any = neutral("earlier answers are not scored", [])


_Content = Annotated[
    str | Annotated[list[TextPart], Field(fail_fast=True)], BeforeValidator(_only_text)
]
_FunctionName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]


class CalledFunction(Strict):
    """The function of a call and its arguments."""

    name: _FunctionName
    arguments: Arguments = Field(description="The text of a JSON object.")


class ToolCall(Strict):
    """A call in an earlier answer."""

    id: Label
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = optional("Changes nothing.")


class Message(Strict):
    """A turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    tool_calls: Annotated[list[ToolCall], *few(MAX_TOOLS)] | None = optional(
        "Calls of an earlier answer."
    )
    tool_call_id: Label | None = Field(default=None, validate_default=True)
    content: _Content | None = Field(
        default=None, description="May be null beside tool_calls.", validate_default=True
    )
    name: Label | None = optional("Of a participant, if the template writes it.")
    reasoning_content: str | None = optional("Earlier reasoning, if the template writes it.")
    reasoning: Any = ignorable("send reasoning_content")
    reasoning_details: Any = ignorable("send reasoning_content")
    phase: Any = ignorable("there are no phases")
    function_call: Any = neutral("send tool_calls")
    refusal: Any = neutral("there are no refusals")
    annotations: Any = neutral("there are no annotations", [])
    audio: Any = neutral("messages are text")
    type: Any = neutral("messages are text", "text", "message")
    id: Ignored = None
    status: Ignored = None

    @property
    def text(self) -> str:
        """Return the whole text; parts are lines."""
        content = self.content or ""
        return content if isinstance(content, str) else "\n".join(part.text for part in content)

    @property
    def turn(self) -> dict[str, Any]:
        """Return the turn as templates take it."""
        fields: Any = dict.fromkeys(("role", "name", "tool_call_id", "reasoning_content"), True)
        fields["tool_calls"] = {"__all__": {"id", "type", "function"}}
        return self.model_dump(include=fields, exclude_none=True) | {"content": self.text}

    @field_validator("tool_calls", "tool_call_id", "content")
    @classmethod
    def _fits_the_role(cls, value: Any, info: Info) -> Any:  # noqa: ANN401 (as it is)
        name, role = info.field_name, info.data.get("role")
        if name == "tool_calls" and value and role != "assistant":
            raise ValueError("only of role assistant")
        if name == "tool_call_id" and role and (role == "tool") != (value is not None):
            raise ValueError("belongs to role tool, which needs it")
        if name == "content" and value is None and not info.data.get("tool_calls"):
            raise ValueError("required, unless there are tool_calls")
        return None if value == [] else value


Messages = Annotated[list[Message], *FEW_MESSAGES]


class Function(Strict):
    """A function that may be called."""

    name: _FunctionName
    description: str | None = None
    parameters: Parameters = Field(
        default=None, description="Absent means none.", validate_default=True
    )
    strict: bool | None = optional("Whether arguments always follow the schema.")


class Tool(Strict):
    """A function that may be called."""

    type: Literal["function"]
    function: Function

    @property
    def told(self) -> dict[str, Any]:
        """Return the function as templates take it."""
        return self.model_dump(exclude={"function": {"strict"}}, exclude_none=True)


Tools = Annotated[list[Tool], *few(MAX_TOOLS)]


class FunctionName(Strict):
    """The name of a function."""

    name: Label


class NamedTool(Strict):
    """The function that is to be called."""

    type: Literal["function"]
    function: FunctionName


_Word = Literal["none", "auto", "required"]
_WORD_OR_NAMED: Final = Discriminator(lambda value: "word" if isinstance(value, str) else "named")
ToolChoice = Annotated[
    Annotated[_Word, Tag("word")] | Annotated[NamedTool, Tag("named")], _WORD_OR_NAMED
]


class FunctionCallItem(CalledFunction):
    """A call in an earlier response."""

    type: Literal["function_call"]
    call_id: Label
    id: Ignored = None
    status: Ignored = None


class FunctionResultItem(Strict):
    """The result of a call."""

    type: Literal["function_call_output"]
    call_id: Label
    output: _Content
    name: Ignored = None
    id: Ignored = None
    status: Ignored = None


class ReasoningItem(Strict):
    """The reasoning of an earlier response of another server, which is ignored."""

    type: Literal["reasoning"]
    content: Any = None
    summary: Any = None
    encrypted_content: Any = None
    id: Ignored = None
    status: Ignored = None

    @field_validator("type")
    @classmethod
    def _is_ignored(cls, kind: str, info: Info) -> str:
        if info.context is None:
            raise ValueError("earlier reasoning is not read")
        info.context.add(kind)
        return kind


_TAGS: Final = {"function_call": "call", "function_call_output": "result", "reasoning": "thought"}


def _tag(item: Any) -> str:  # noqa: ANN401 (any JSON)
    kind = item.get("type") if isinstance(item, dict) else getattr(item, "type", None)
    return _TAGS.get(kind, "turn") if isinstance(kind, str) else "turn"


Item = Annotated[
    Annotated[Message, Tag("turn")]
    | Annotated[FunctionCallItem, Tag("call")]
    | Annotated[FunctionResultItem, Tag("result")]
    | Annotated[ReasoningItem, Tag("thought")],
    Discriminator(_tag),
]

Items = Annotated[list[Item], *FEW_MESSAGES]


def conversation(items: Iterable[Item]) -> list[Message]:
    """Return the turns of a chat; calls belong to the turn of the text before them."""
    turns = list[Message]()
    for item in items:
        if isinstance(item, Message):
            turns.append(item)
        elif isinstance(item, FunctionResultItem):
            fields = {"content": item.output, "tool_call_id": item.call_id}
            turns.append(Message.model_construct(role="tool", **fields))
        elif isinstance(item, FunctionCallItem):
            is_same = bool(turns) and turns[-1].role == "assistant"
            turn = turns.pop() if is_same else Message.model_construct(role="assistant")
            call = ToolCall.model_construct(id=item.call_id, function=item)
            update = {"tool_calls": [*(turn.tool_calls or ()), call]}
            turns.append(turn.model_copy(update=update))
    return turns


class ResponseTool(Function):
    """A function that may be called, as responses name it."""

    type: Literal["function"]

    @property
    def of_chat(self) -> Tool:
        """The same for a chat."""
        return Tool.model_construct(type="function", function=self)


class NamedFunction(FunctionName):
    """The function that is to be called, as responses name it."""

    type: Literal["function"]

    @property
    def of_chat(self) -> NamedTool:
        """The same for a chat."""
        return NamedTool.model_construct(type="function", function=self)


ResponseTools = Annotated[list[ResponseTool], *few(MAX_TOOLS)]
FunctionChoice = Annotated[
    Annotated[_Word, Tag("word")] | Annotated[NamedFunction, Tag("named")], _WORD_OR_NAMED
]
