"""Calls of functions: how templates write them, and how grammars force them."""

import json
import logging
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, Final

from monge.core.errors import OptionError
from monge.core.grammar import Grammar
from monge.requests.chat_format import ChatFormat, Message, TemplateFormat, Tool
from monge.requests.grammar import ANY_WHITESPACE, ON_ONE_LINE
from monge.serve.api.conversations import Function

_PROBE: Final = "probe_function"
_RESULT: Final = "probe_result"
_MARK: Final = "\N{OBJECT REPLACEMENT CHARACTER}"
"""Stands for the user's text, whose place in a template is looked for."""

_MARKS: Final = (
    ("<tool_call>", "</tool_call>"),
    ("<tool_calls>", "</tool_calls>"),
    ("[TOOL_CALLS]", ""),
)
"""Texts around calls that are known to begin nothing else."""

_LOG: Final = logging.getLogger(__name__)
_JSON: Final = json.JSONDecoder()
_INSTRUCTIONS: Final = """You may call functions. Their signatures are within <tools></tools>:
<tools>
{tools}
</tools>

For each call, write a JSON object with the function's name and its arguments within \
<tool_call></tool_call>:
<tool_call>
{{"name": <name>, "arguments": <arguments>}}
</tool_call>"""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallFormat:
    """How calls stand in a text; by default as models of the Hermes family write them.

    Args:
        begin: Text before calls; if empty, a call begins the answer.
        before: Text between it and the JSON of a call, with a bracket if there is a list.
        key: Name of the arguments in the JSON.
        after: Text between the JSON and `end`.
        end: Text after calls.
        has_tools: Whether the template writes functions.
        has_calls: Whether it writes earlier calls and their results.
        has_both: Whether it also writes the text of an answer that has calls.
        added: Number of every added token that does not end an answer, by its text.
        hidden: Added tokens that texts do not show.
    """

    begin: str = "<tool_call>"
    before: str = "\n"
    key: str = "arguments"
    after: str = "\n"
    end: str = "</tool_call>"
    has_tools: bool = False
    has_calls: bool = False
    has_both: bool = False
    added: Mapping[str, int] = field(default_factory=dict[str, int])
    hidden: frozenset[str] = frozenset()

    def around(self, name: str) -> tuple[str, str]:
        """Return the JSON of a call before its arguments, and after them."""
        return f'{{"name": "{name}", "{self.key}": ', "}"

    def turns(self, messages: Sequence[Message], tools: Sequence[Tool]) -> list[Message]:
        """Return a conversation in which whatever the template does not write is plain text."""
        turns = list(messages)
        has_both = any(turn["content"].strip() and turn.get("tool_calls") for turn in turns)
        if not self.has_calls or (has_both and not self.has_both):
            turns.clear()
            for role, group in groupby(messages, key=lambda message: message["role"]):
                if role == "tool":  # in one turn, since many templates want users to take turns
                    texts = [
                        f"<tool_response>\n{one['content']}\n</tool_response>" for one in group
                    ]
                    turns.append({"role": "user", "content": "\n".join(texts)})
                else:
                    turns += map(self._plain, group)
        if tools and not self.has_tools:
            text = _INSTRUCTIONS.format(tools="\n".join(map(_dumped, tools)))
            if turns[0]["role"] == "system":
                text = f"{turns.pop(0)['content']}\n\n{text}"
            turns.insert(0, {"role": "system", "content": text})
        return turns

    def _plain(self, message: Message) -> Message:
        texts = [message["content"]] if message["content"] else []
        for call in message.get("tool_calls", ()):
            head, tail = self.around(call["function"]["name"])
            inner = f"{head}{_dumped(call['function']['arguments'])}{tail}"
            texts.append(f"{self.begin}{self.before}{inner}{self.after}{self.end}")
        kept = {name: value for name, value in message.items() if name != "tool_calls"}
        return kept | {"content": "\n".join(texts)}


def call_format(chat: ChatFormat, end_ids: Collection[int]) -> CallFormat:
    """Return the format of calls in answers, found from a call that the chat template writes.

    Args:
        chat: The format of conversations.
        end_ids: Tokens that end an answer.
    """
    known = getattr(getattr(chat, "tokenizer", None), "added_tokens_decoder", dict[int, Any]())
    form = CallFormat(
        added={str(token): number for number, token in known.items() if number not in end_ids},
        hidden=frozenset(str(token) for token in known.values() if token.special),
        **(_learnt(chat) if isinstance(chat, TemplateFormat) else {}),
    )
    if not form.has_tools:
        _LOG.warning(
            "tools: the chat template has no form of calls that is read here; functions are "
            "described in a system message"
        )
    return form


def _learnt(chat: TemplateFormat) -> dict[str, Any]:
    """Return the fields of `CallFormat` that a template shows when it writes a call."""
    function = {"name": _PROBE, "description": _PROBE, "parameters": {"type": "object"}}
    tool = {"type": "function", "function": function}
    call = {"id": "0" * 9, "type": "function", "function": {"name": _PROBE, "arguments": {}}}
    turns = [
        {"role": "user", "content": _MARK},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": _RESULT, "name": _PROBE, "tool_call_id": "0" * 9},
    ]
    prompted, written = _written(chat, turns[:1], tool), _written(chat, turns, tool)
    if _PROBE not in prompted:
        return {}
    prompt, answer = prompted.rpartition(_MARK)[2], written.rpartition(_MARK)[2]
    objects = ((*json_value(answer, at.start()), at.start()) for at in re.finditer("{", answer))
    calls = (entry for entry in objects if entry[1] >= 0 and entry[0].get("name") == _PROBE)
    value, stop, start = next(calls, ({}, 0, 0))
    key = "parameters" if "parameters" in value else "arguments"
    if key not in value or _RESULT not in answer:  # earlier calls are dropped
        return {"has_tools": _MARKS[0][0] in prompted and '"arguments"' in prompted}
    lead, rest = answer[:start], answer[stop:]
    turns[1] |= {"content": _RESULT}
    shown = {"has_tools": True, "has_calls": True, "key": key}
    shown |= {"has_both": bool(_written(chat, turns, tool))}
    for begin, end in _MARKS:
        before = lead.rpartition(begin)[2]
        if begin in lead and end in rest and re.fullmatch(r"\s*\[?\s*", before):
            after = rest.partition(end)[0] if end else "]" * before.count("[")
            return shown | {"begin": begin, "before": before, "after": after, "end": end}
    bare = {"begin": "", "before": "", "after": "", "end": ""}
    return shown | bare if lead == prompt else {}


def _written(chat: TemplateFormat, turns: Sequence[Message], tool: Tool) -> str:
    """Return the text that a template writes, or "" if a turn has no place in it."""
    try:
        return chat.written(turns, tools=[tool])
    except OptionError:
        return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolUse:
    """The functions that an answer may call, and how it calls them.

    Args:
        form: How calls stand in the text.
        functions: The functions.
        is_required: Whether the answer is only calls.
        is_single: Whether there is at most one call.
        answer: Grammar of an answer that is no call, a JSON schema.
    """

    form: CallFormat
    functions: Sequence[Function]
    is_required: bool = False
    is_single: bool = False
    answer: Grammar | None = None

    @property
    def is_forced(self) -> bool:
        """True if a grammar makes calls well-formed."""
        is_strict = any(function.strict for function in self.functions)
        return self.is_required or self.is_single or is_strict or self.answer is not None

    @property
    def grammar(self) -> Grammar | None:
        """The grammar of the answer, in the notation of Lark."""
        if not self.is_forced:
            return None
        form, rules = self.form, list[str]()
        for place, function in enumerate(self.functions):
            head, tail = map(_dumped, form.around(function.name))
            rules += [f"call_{place}: {head} arguments_{place} {tail}"]
            rules += [f"arguments_{place}: %json {self._schema(function)}"]
        is_list = "[" in form.before
        more = '(", " call)*' if is_list and not self.is_single else ""
        begin, end = (self._mark(text) for text in (form.begin, form.end))
        before, after = (_dumped(text) if text else "" for text in (form.before, form.after))
        rules += [f"call: {' | '.join(f'call_{place}' for place in range(len(self.functions)))}"]
        rules += [f"body: {before} call {more} {after} {end}"]
        is_many = form.begin and not (is_list or self.is_single)
        start = f"{begin} body" + (f' ("\\n" {begin} body)*' if is_many else "")
        if self.answer is not None and not self.is_required:
            start += " | answer"
            style = ANY_WHITESPACE if self.answer.any_whitespace else ON_ONE_LINE
            schema = json.loads(self.answer.text) | {"x-guidance": style}
            rules += [f"answer: %json {_dumped(schema)}"]
        elif not self.is_required:
            start, *further = self._among_text(start, begin)
            rules += further
        return Grammar.ebnf("\n".join([f"start: {start}", *rules]))

    def _among_text(self, called: str, begin: str) -> list[str]:
        """Return the rules of free text that may hold calls, the start rule first."""
        form, text = self.form, r"TEXT: /(.|\n)+/"
        # No text has added tokens, so they are named: all but the one that begins calls.
        numbers = sorted(number for name, number in form.added.items() if name != form.begin)
        runs = [
            [n for _, n in run] for _, run in groupby(enumerate(numbers), lambda p: p[1] - p[0])
        ]
        others = f"<[{','.join(f'{run[0]}-{run[-1]}' for run in runs)}]>" if runs else ""
        after, before = (f"({others} TEXT?)*", f"(TEXT? {others})*") if runs else ("", "")
        if not form.begin or form.begin in form.hidden:  # a call is read at the start only
            first = r'FIRST: /(.|\n)+/ & ~/\s*\[?\s*\{\s*"name"(.|\n)*/'
            return [f"{called} | FIRST? {after}", first, text]
        if form.begin in form.added:
            mixed = f"mixed: TEXT? {after}"
            text += rf" & ~/(.|\n)*{re.escape(form.begin)}(.|\n)*/"
            opened, last = f"mixed {begin}", "mixed"
        else:  # only a lazy lexeme ends where the text of the mark does
            mixed = f"mixed: {before}\nbegin[lazy]: /(.|\\n)*/ {begin}"
            opened, last = "mixed begin", "mixed TEXT?"
        start = f"{last} | {opened} body" if self.is_single else f"({opened} body)* {last}"
        return [start, mixed, text]

    def _mark(self, text: str) -> str:
        """Return a mark in the notation of grammars, where an added token is no text."""
        number = self.form.added.get(text)
        return f"<[{number}]>" if number is not None else _dumped(text) if text else ""

    def _schema(self, function: Function) -> str:
        schema = {"type": "object"}
        if self.is_required or function.strict:
            # Other arguments are none of the function's.
            closed = {"additionalProperties": False} if "properties" in function.parameters else {}
            schema = closed | function.parameters
        return _dumped(schema | {"x-guidance": ON_ONE_LINE})


def _dumped(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def json_value(text: str, start: int) -> tuple[Any, int]:
    """Return the JSON value at a place and where it ends; -1 if there is no complete value."""
    try:
        return _JSON.raw_decode(text, start)
    except (ValueError, RecursionError):
        return None, -1
