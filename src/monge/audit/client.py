"""An asynchronous client of `/v1/completions`, with retries."""

import asyncio
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, ParamSpec, Protocol, Self, TypeVar, runtime_checkable

import httpx

from monge.core.errors import MongeError
from monge.requests.text import TOKEN_ID

ATTEMPTS: Final = 6
TIMEOUT_S: Final = 120.0
_FIRST_WAIT_S: Final = 0.5
_LONGEST_WAIT_S: Final = 30.0
_RETRIED: Final = (429, 500, 502, 503, 504)

P = ParamSpec("P")
T = TypeVar("T")


class ServerError(MongeError, RuntimeError):
    """A server that is down, answers with an error, or does not return what an audit needs."""


class RefusedError(ServerError):
    """A request that the server refuses, whatever the number of attempts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """A choice of an answer.

    Args:
        text: The text.
        finish: `stop` or `length`.
        tokens: Names of the tokens; `None` where the server does not return them.
        logprobs: The server's log-probabilities of these tokens.
        top: The server's largest log-probabilities at each token.
        speculates: Whether the server reports speculation.
    """

    text: str
    finish: str | None
    tokens: tuple[str, ...] | None = None
    logprobs: tuple[float | None, ...] = ()
    top: tuple[Mapping[str, float] | None, ...] = ()
    speculates: bool = False


@runtime_checkable
class Server(Protocol):
    """A client of a server, or an engine in this process."""

    url: str
    """Its address, or a name for reports."""
    model: str | None

    async def complete(self, prompt: str | Sequence[int], **fields: Any) -> Completion:
        """Return a completion; see `Client.complete`."""
        ...


class Client:
    """Sends requests to a server.

    Args:
        url: Its address, with or without `/v1`. Another version, such as `/v3`, must be given.
        model: Name of the model; `None` takes the server's first model.
        api_key: The key of the server, if any.
        attempts: Attempts of a request before the audit gives up.
        timeout_s: Longest wait for an answer.
        transport: Replaces the network, for tests.
    """

    def __init__(
        self,
        url: str,
        *,
        model: str | None = None,
        api_key: str | None = None,
        attempts: int = ATTEMPTS,
        timeout_s: float = TIMEOUT_S,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        base = url.rstrip("/")
        self.url = base if re.search(r"/v\d+$", base) else f"{base}/v1"
        self.model, self._attempts = model, attempts
        headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
        self._http = httpx.AsyncClient(
            headers=headers, timeout=timeout_s, limits=limits, transport=transport
        )

    async def __aenter__(self) -> Self:
        if self.model is None:
            models = await self._send("GET", "/models")
            try:
                self.model = str(models["data"][0]["id"])
            except (KeyError, IndexError, TypeError) as error:
                message = f"{self.url}/models names no model; name one with --model"
                raise ServerError(message) from error
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._http.aclose()

    async def complete(self, prompt: str | Sequence[int | str], **fields: Any) -> Completion:
        """Return one completion.

        Args:
            prompt: Text or token ids; for llama.cpp also text followed by token ids.
            **fields: Further fields of the request; those that are `None` are left out.

        Raises:
            ServerError: If the server cannot be reached, or still fails after the last attempt.
            RefusedError: If the server refuses the request.
        """
        body = {name: value for name, value in fields.items() if value is not None}
        answer = await self._send(
            "POST", "/completions", {"model": self.model, "prompt": prompt, **body}
        )
        try:
            return _completion(answer, by_id=bool(body.get("return_tokens_as_token_ids")))
        except (KeyError, IndexError, TypeError) as error:
            raise ServerError(
                f"{self.url}: the answer has no completion: {str(answer)[:200]}"
            ) from error

    async def _send(
        self, method: str, path: str, body: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        failures = dict[str, None]()  # in order: the first one may tell why a server died
        for attempt in range(self._attempts):
            wait_s = min(_FIRST_WAIT_S * 2.0**attempt, _LONGEST_WAIT_S)
            try:
                answer = await self._http.request(method, self.url + path, json=body)
            except (httpx.UnsupportedProtocol, httpx.InvalidURL) as error:
                raise RefusedError(
                    f"{self.url!r} is no address of a server ({error}); give one such as "
                    "http://localhost:8000/v1"
                ) from error
            except httpx.TransportError as error:
                failures[f"{type(error).__name__}: {error}"] = None
            else:
                if answer.is_success:
                    with suppress(ValueError):
                        if isinstance(document := answer.json(), dict):
                            return document
                    text = f"{answer.url} does not answer in JSON: {answer.text[:200]!r}"
                    raise RefusedError(text)
                failure = f"status {answer.status_code}: {answer.text[:300]}"
                failures[failure] = None
                if answer.status_code not in _RETRIED:
                    raise RefusedError(f"{self.url}{path} refuses the request: {failure}")
                retry_after = answer.headers.get("retry-after", "")
                if retry_after.replace(".", "", 1).isdigit():
                    wait_s = float(retry_after)
            if attempt + 1 < self._attempts:
                await asyncio.sleep(wait_s)
        raise ServerError(
            f"{self.url}{path} fails after {self._attempts} attempts: {', then '.join(failures)}"
        )


async def one_at_a_time(
    lock: asyncio.Lock, function: Callable[P, T], /, *arguments: P.args, **options: P.kwargs
) -> T:
    """Run a function in a thread, while no other caller with this lock runs a function.

    A thread cannot be cancelled. A cancelled caller keeps the lock until its function returns, so
    that no other function runs beside it.
    """
    async with lock:
        work = asyncio.ensure_future(asyncio.to_thread(function, *arguments, **options))
        try:
            return await asyncio.shield(work)
        finally:
            await asyncio.wait([work])


def _completion(answer: Mapping[str, Any], *, by_id: bool) -> Completion:
    choice, metrics = answer["choices"][0], answer.get("metrics") or {}
    columns = choice.get("logprobs") or {}
    tokens, logprobs, top = map(columns.get, ("tokens", "token_logprobs", "top_logprobs"))
    if (rows := columns.get("content")) is not None:  # as in chats: llama.cpp has it here as well

        def name(row: Mapping[str, Any]) -> str:
            return f"{TOKEN_ID}{row['id']}" if by_id and "id" in row else row["token"]

        tokens, logprobs = list(map(name, rows)), [row["logprob"] for row in rows]
        top = [
            {name(entry): entry["logprob"] for entry in row.get("top_logprobs") or ()}
            for row in rows
        ]
    return Completion(
        text=choice["text"],
        finish=choice.get("finish_reason"),
        tokens=None if tokens is None else tuple(tokens),
        logprobs=tuple(logprobs or ()),
        top=tuple(top or ()),
        speculates=metrics.get("speculative_decoding") is not None
        or "draft_n" in (answer.get("timings") or {}),  # llama.cpp
    )
