"""`/v1/responses` for text: a chat with other names for its fields, and its answer as one message."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from monge.serve.api.answers import Answers
from monge.serve.api.errors import ApiError
from monge.serve.api.schemas import ResponsesRequest
from monge.serve.scheduling.generation import Output


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseAnswers(Answers):
    """Writes the answer to `POST /v1/responses`, whole or as events.

    Args:
        asked: The request, for the fields that the answer repeats.
    """

    asked: ResponsesRequest
    _written: list[str] = field(default_factory=list[str], init=False)
    _numbers: Iterator[int] = field(default_factory=count, init=False)

    def whole(self, outputs: Sequence[Output]) -> dict[str, Any]:
        (output,) = outputs
        self._written.append(output.text)
        return self._ended(output)

    def opening(self) -> list[dict[str, Any]]:
        begun = self._response("in_progress")
        return [
            self._event("response.created", response=begun),
            self._event("response.in_progress", response=begun),
            self._event(
                "response.output_item.added", output_index=0, item=self._item("in_progress")
            ),
            self._of_text("response.content_part.added", part=self._part()),
        ]

    def chunk(self, index: int, output: Output, *, is_first: bool) -> dict[str, Any] | None:
        self._finish(output)
        self._written.append(output.text)
        text = output.text
        if not text:
            return None
        return self._of_text("response.output_text.delta", delta=text, logprobs=[])

    def closing(self, outputs: Sequence[Output]) -> list[dict[str, Any]]:
        (output,) = outputs
        ended = self._ended(output)
        (item,), text = ended["output"], "".join(self._written)
        return [
            self._of_text("response.output_text.done", text=text, logprobs=[]),
            self._of_text("response.content_part.done", part=self._part()),
            self._event("response.output_item.done", output_index=0, item=item),
            self._event(f"response.{ended['status']}", response=ended),
        ]

    def failed(self, error: ApiError) -> dict[str, Any]:
        body = error.body()["error"]
        return body | self._event("error", error=body)

    def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
        return {"type": kind, "sequence_number": next(self._numbers), **fields}

    def _of_text(self, kind: str, **fields: Any) -> dict[str, Any]:
        place = {"output_index": 0, "content_index": 0, "item_id": self._item("")["id"]}
        return self._event(kind, **place, **fields)

    def _part(self) -> dict[str, Any]:
        text = "".join(self._written)
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}

    def _item(self, status: str) -> dict[str, Any]:
        name = self.request.response_id.replace("resp_", "msg_", 1)
        content = [self._part()] if self._written else []
        item = {"type": "message", "role": "assistant", "status": status}
        return {"id": name, **item, "content": content}

    def _ended(self, output: Output) -> dict[str, Any]:
        is_cut = self._finish(output) == "length"
        status = "incomplete" if is_cut else "completed"
        response = self._response(status, [self._item(status)])
        if is_cut:
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        now = self.usage(0 if output.summary is None else output.summary.num_generated_tokens)
        response["usage"] = {
            "input_tokens": now["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": self.num_cached([output])},
            "output_tokens": now["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": now["total_tokens"],
        }
        return response | {"metrics": self._figures([output]).get("metrics")}

    def _response(self, status: str, output: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
        asked = self.asked
        repeated = ("instructions", "max_output_tokens", "user")
        return {
            "id": self.request.response_id,
            "object": "response",
            "created_at": self.request.created,
            "status": status,
            "error": None,
            "incomplete_details": None,
            **{name: getattr(asked, name) for name in repeated},
            "metadata": asked.metadata or {},
            "model": self.model_name,
            "output": list(output),
            "parallel_tool_calls": True,
            "previous_response_id": None,
            "seed": self.request.seed,
            "store": False,
            "system_fingerprint": self.fingerprint,
            "temperature": 1.0 if asked.temperature is None else asked.temperature,
            "text": {"format": _form(asked)},
            "tool_choice": "auto",
            "tools": [],
            "top_p": 1.0 if asked.top_p is None else asked.top_p,
            "truncation": "disabled",
            "usage": None,
        }


def _form(asked: ResponsesRequest) -> dict[str, Any]:
    """Return the form of the text as the request named it."""
    form = None if asked.text is None else asked.text.format
    if form is None:
        return {"type": "text"}
    return form.model_dump(by_alias=True, exclude_none=True) | {"type": form.type}
