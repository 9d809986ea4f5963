"""`/v1/responses`: a chat with other names for its fields, and its answer as a list of items."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from monge.serve.api.answers import Answers
from monge.serve.api.conversations import NamedFunction
from monge.serve.api.errors import ApiError
from monge.serve.scheduling.generation import Output


@dataclass(slots=True, kw_only=True)
class _Item:
    """A message or a call in a response.

    Args:
        fields: Its fields, without those that change.
        place: Its number.
        status: `in_progress`, `completed` or `incomplete`.
        pieces: Its text, or its arguments, so far.
    """

    fields: dict[str, Any]
    place: int
    status: str = "in_progress"
    pieces: list[str] = field(default_factory=list[str])

    @property
    def is_call(self) -> bool:
        return self.fields["type"] == "function_call"

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    @property
    def part(self) -> dict[str, Any]:
        return {"type": "output_text", "text": self.text, "annotations": [], "logprobs": []}

    @property
    def document(self) -> dict[str, Any]:
        if self.is_call:
            return self.fields | {"status": self.status, "arguments": self.text}
        content = [] if self.status == "in_progress" else [self.part]
        return self.fields | {"status": self.status, "content": content}


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseAnswers(Answers):
    """Writes the answer to `POST /v1/responses`, whole or as events.

    It has a message, unless it is only calls, and an item for each call.
    """

    _items: list[_Item] = field(default_factory=list[_Item], init=False)
    _numbers: Iterator[int] = field(default_factory=count, init=False)

    def whole(self, outputs: Sequence[Output]) -> dict[str, Any]:
        (output,) = outputs
        self.chunks(0, output, is_first=True)
        return self.closing(outputs)[-1]["response"]

    def opening(self) -> list[dict[str, Any]]:
        begun = self._response("in_progress")
        kinds = ("response.created", "response.in_progress")
        events = [self._event(kind, response=begun) for kind in kinds]
        return events if self.request.tools is not None else events + self._message()

    def chunks(self, index: int, output: Output, *, is_first: bool) -> list[dict[str, Any]]:
        text, calls = self._called(index, output.text, self._finish(output))
        events = list[dict[str, Any]]()
        if text:
            events += self._message()
            item = next(item for item in self._items if not item.is_call)
            item.pieces.append(text)
            fields = {"content_index": 0, "delta": text, "logprobs": []}
            events.append(self._of(item, "response.output_text.delta", **fields))
        for call in calls:
            events += self._call(**call)
        return events

    def closing(self, outputs: Sequence[Output]) -> list[dict[str, Any]]:
        (output,) = outputs
        is_cut = self._finish(output) == "length"
        events = [] if self._items else self._message()
        for item in self._items:
            if item.status == "in_progress":
                is_last = item is self._items[-1]
                events += self._done(item, "incomplete" if is_cut and is_last else "completed")
        ended = self._ended(output, "incomplete" if is_cut else "completed")
        return [*events, self._event(f"response.{ended['status']}", response=ended)]

    def failed(self, error: ApiError) -> dict[str, Any]:
        body = error.body()["error"]
        return body | self._event("error", error=body)

    def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
        return {"type": kind, "sequence_number": next(self._numbers), **fields}

    def _of(self, item: _Item, kind: str, **fields: Any) -> dict[str, Any]:
        return self._event(kind, output_index=item.place, item_id=item.fields["id"], **fields)

    def _begun(self, **fields: Any) -> list[dict[str, Any]]:
        """Return the events that begin an item."""
        item = _Item(fields=fields, place=len(self._items))
        self._items.append(item)
        added = self._event(
            "response.output_item.added", output_index=item.place, item=item.document
        )
        if item.is_call:
            return [added]
        part = self._of(item, "response.content_part.added", content_index=0, part=item.part)
        return [added, part]

    def _message(self) -> list[dict[str, Any]]:
        """Return the events that begin the message, unless it has begun."""
        if not all(item.is_call for item in self._items):
            return []
        name = self.request.response_id.replace("resp_", "msg_", 1)
        return self._begun(id=name, type="message", role="assistant")

    def _call(self, function: dict[str, str], **call: Any) -> list[dict[str, Any]]:
        """Return the events of a delta of a call; the first event has the name of the function."""
        events = list[dict[str, Any]]()
        if "name" in function:
            for item in self._items:
                if item.is_call and item.status == "in_progress":
                    events += self._done(item, "completed")
            name = {"call_id": call["id"], "name": function["name"]}
            events += self._begun(id=f"fc_{call['id']}", type="function_call", **name)
        item = next(item for item in reversed(self._items) if item.is_call)
        if delta := function["arguments"]:
            item.pieces.append(delta)
            events.append(self._of(item, "response.function_call_arguments.delta", delta=delta))
        return events

    def _done(self, item: _Item, status: str) -> list[dict[str, Any]]:
        """Return the events that end an item."""
        item.status = status
        if item.is_call:
            fields = {"name": item.fields["name"], "arguments": item.text}
            events = [self._of(item, "response.function_call_arguments.done", **fields)]
        else:
            fields = {"content_index": 0, "text": item.text, "logprobs": []}
            events = [
                self._of(item, "response.output_text.done", **fields),
                self._of(item, "response.content_part.done", content_index=0, part=item.part),
            ]
        done = self._event("response.output_item.done", output_index=item.place, item=item.document)
        return [*events, done]

    def _ended(self, output: Output, status: str) -> dict[str, Any]:
        response = self._response(status)
        if status == "incomplete":
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        now = self.usage(0 if output.summary is None else output.summary.num_generated_tokens)
        response["usage"] = {
            "input_tokens": now["prompt_tokens"],
            "input_tokens_details": self.cached([output]),
            "output_tokens": now["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": now["total_tokens"],
        }
        return response | {"metrics": self._figures([output]).get("metrics")}

    def _response(self, status: str) -> dict[str, Any]:
        body = self.request.original
        assert body is not None, "the request came to /v1/responses"
        choice, form = body.tool_choice, {"type": "text"}
        if body.text is not None and (wanted := body.text.format) is not None:
            form = wanted.model_dump(by_alias=True, exclude_none=True) | {"type": wanted.type}
        repeated = ("instructions", "max_output_tokens", "max_tool_calls", "user")
        return {
            "id": self.request.response_id,
            "object": "response",
            "created_at": self.request.created,
            "status": status,
            "error": None,
            "incomplete_details": None,
            **{name: getattr(body, name) for name in repeated},
            **{"temperature": 1.0, "top_p": 1.0},
            **body.model_dump(include={"temperature", "top_p"}, exclude_none=True),
            "metadata": body.metadata or {},
            "model": self.model_name,
            "output": [item.document for item in self._items],
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "seed": self.request.seed,
            "store": False,
            "system_fingerprint": self.fingerprint,
            "text": {"format": form},
            "tool_choice": choice.model_dump()
            if isinstance(choice, NamedFunction)
            else choice or "auto",
            "tools": [tool.model_dump() for tool in body.tools or ()],
            "truncation": "disabled",
            "usage": None,
        }
