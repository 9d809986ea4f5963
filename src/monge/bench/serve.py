"""Load on `monge serve`: throughput and latency against concurrency, speculation on, off and adaptive, beside other engines.

Every arm is a server process of its own, but arms that are started alike share one: what they
differ in is then their requests, and not where a process has its memory, which makes several per
cent. All servers are up during the whole run and take turns, so that a machine that slows down
slows all of them, and each repeat begins with another one, so that none gains by its place. A
closed loop of `concurrency` clients sends requests with fixed prompts and seeds and equal lengths:
each client sends its next request when its last one is answered.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

import numpy as np
import torch

from monge.bench.processor_time import tree_seconds
from monge.bench.provenance import provenance
from monge.bench.serve_client import Reply, complete
from monge.bench.servers import Beside, Server, running, running_beside
from monge.bench.statistics import Summary, ratio_of_all
from monge.core.errors import MongeError, OptionError
from monge.core.words import counted
from monge.defaults import ADAPTIVE, STEADY

ARMS: Final[Mapping[str, tuple[str, ...]]] = {
    "off": ("--drafter", "none"),
    "on": ("--controller", STEADY),
    "adaptive": ("--controller", ADAPTIVE),
}
"""What the server of an arm is started with; the first one is what the others are compared with."""

_PERCENTILES: Final = (50, 95, 99)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadSettings:
    """What is sent.

    Args:
        concurrency: Numbers of clients, one after the other.
        per_client: Requests of every client at each of them.
        max_tokens: Length of every completion; end-of-text tokens do not end it.
        temperature: Temperature of every request.
        repeats: How often everything is measured.
        server: Further arguments of every server.
    """

    concurrency: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    per_client: int = 3
    max_tokens: int = 64
    temperature: float | int = 1.0
    repeats: int = 3
    server: tuple[str, ...] = ("--max-batch-size", "16")

    def __post_init__(self) -> None:
        if (
            not self.concurrency
            or min(*self.concurrency, self.per_client, self.max_tokens, self.repeats, 1) < 1
        ):
            raise OptionError("concurrency, requests, tokens and repeats must be at least 1")


QUICK: Final = LoadSettings(concurrency=(1, 4), per_client=2, max_tokens=24, repeats=1)


def num_steps(
    arms: Mapping[str, Sequence[str]], settings: LoadSettings, besides: Mapping[str, Beside]
) -> int:
    """How often `measure` says what it does."""
    started = len(set(map(tuple, arms.values()))) + len(besides)
    loads = 1 + settings.repeats * len(settings.concurrency)
    return started + loads * (len(arms) + len(besides))


def measure(
    arms: Mapping[str, Sequence[str]],
    prompts: Sequence[str],
    settings: LoadSettings,
    *,
    fields: Mapping[str, Mapping[str, Any]] | None = None,
    besides: Mapping[str, Beside] | None = None,
    watch: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Load every arm at every concurrency.

    Args:
        arms: Arguments of every arm's server, by name; the first is the baseline. Arms with the
            same arguments have one server.
        prompts: Prompts, taken in turns.
        settings: What is sent.
        fields: Fields of an arm's requests in place of ours, by its name; `None` leaves a field
            out.
        besides: Servers of other engines, by name.
        watch: Told what is measured next.

    Returns:
        A document of plain values: settings, provenance, and one cell per arm and concurrency.
    """
    before = provenance(torch.device("cpu"))
    runs: dict[tuple[int, str], list[dict[str, Any]]] = {}
    others, own_fields = besides or {}, fields or {}
    with ExitStack() as stack:
        servers, started = dict[str, Server](), dict[tuple[str, ...], Server]()
        for name, arguments in arms.items():
            if (key := tuple(arguments)) not in started:
                watch(f"starting {name}")
                started[key] = stack.enter_context(running([*settings.server, *arguments]))
            servers[name] = replace(started[key], fields=own_fields.get(name, {}))
        for name, other in others.items():
            watch(f"starting {name}")
            servers[name] = stack.enter_context(running_beside(other, settings.server))
        for name, server in servers.items():
            watch(f"warming up {name}")
            _load(server, prompts, settings, min(4, max(settings.concurrency)))
        for repeat in range(settings.repeats):
            for clients in settings.concurrency:
                for name in _turned(tuple(servers), repeat):
                    watch(
                        f"{name}, {counted(clients, 'client')}, {repeat + 1} of {settings.repeats}"
                    )
                    runs.setdefault((clients, name), []).append(
                        _load(servers[name], prompts, settings, clients)
                    )
    return {
        "settings": asdict(settings),
        "arms": {name: list(arguments) for name, arguments in arms.items()},
        "fields": {name: dict(some) for name, some in own_fields.items()},
        "besides": {
            name: asdict(other) | {"version": servers[name].version}
            for name, other in others.items()
        },
        "provenance": before
        | {"load_average_after": provenance(torch.device("cpu"))["load_average"]},
        "cells": [
            _cell(clients, name, some, runs[clients, next(iter(arms))])
            for (clients, name), some in runs.items()
        ],
    }


def _turned(names: tuple[str, ...], by: int) -> tuple[str, ...]:
    first = by % len(names)
    return names[first:] + names[:first]


def _load(
    server: Server, prompts: Sequence[str], settings: LoadSettings, clients: int
) -> dict[str, Any]:
    before = _processor_s(server)
    run = figures(*asyncio.run(_replies(server, prompts, settings, clients)))
    after = _processor_s(server)
    used = None if before is None or after is None or after <= before else after - before
    run |= {
        "processor_s": used,
        "tokens_per_processor_s": None
        if used is None
        else run["tokens_per_s"] * run["wall_s"] / used,
    }
    if not run["num_requests"]:
        raise MongeError(
            f"no request of {counted(clients, 'client')} succeeded: {'; '.join(run['failures'])}"
        )
    return run


def _processor_s(server: Server) -> float | None:
    return None if server.pid is None else tree_seconds(server.pid)


async def _replies(
    server: Server, prompts: Sequence[str], settings: LoadSettings, clients: int
) -> tuple[list[Reply], float]:
    left = deque(range(clients * settings.per_client))
    replies = list[Reply]()

    async def client() -> None:
        while left:
            number = left.popleft()
            body = {
                "prompt": prompts[number % len(prompts)],
                "max_tokens": settings.max_tokens,
                "temperature": settings.temperature,
                "seed": number,
                "ignore_eos": True,
            }
            replies.append(
                _of_length(
                    await complete(server.host, server.port, server.body(body)), settings.max_tokens
                )
            )

    start = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(clients)))
    return replies, time.perf_counter() - start


def _of_length(reply: Reply, num_tokens: int) -> Reply:
    """The reply, if it has the length that was asked for: otherwise it says nothing about speed."""
    if reply.failure is not None or reply.num_tokens == num_tokens:
        return reply
    return Reply(
        failure=f"{counted(reply.num_tokens, 'token')} came where {num_tokens} were asked for"
    )


def figures(replies: Sequence[Reply], wall_s: float) -> dict[str, Any]:
    """Figures of one run; requests that failed have no part in them but their number.

    Args:
        replies: What came back.
        wall_s: Seconds from the first request to the last answer.
    """
    good = [reply for reply in replies if reply.failure is None]
    gaps = [
        later - earlier
        for reply in good
        for earlier, later in zip(reply.chunk_s, reply.chunk_s[1:], strict=False)
    ]
    drafting = [reply.metrics["speculative_decoding"] for reply in good if reply.metrics]
    steps = [one for one in drafting if one is not None and one["num_spec_steps"]]
    num_tokens = sum(reply.num_tokens for reply in good)
    rounds = sum(one["num_spec_steps"] for one in steps)
    return {
        "num_requests": len(good),
        "failures": sorted({reply.failure for reply in replies if reply.failure is not None}),
        "num_failed": len(replies) - len(good),
        "wall_s": wall_s,
        "tokens_per_s": num_tokens / wall_s,
        "requests_per_s": len(good) / wall_s,
        "first_token_s": percentiles([reply.chunk_s[0] for reply in good if reply.chunk_s]),
        "between_chunks_s": percentiles(gaps),
        "per_token_s": percentiles(
            [reply.per_token_s for reply in good if reply.per_token_s is not None]
        ),
        "request_s": percentiles([reply.total_s for reply in good]),
        "mean_acceptance_length": 1
        + sum(one["num_accepted_draft_tokens"] for one in steps) / rounds
        if rounds
        else None,
    }


def percentiles(values: Sequence[float]) -> dict[str, float] | None:
    """p50, p95 and p99, interpolated between neighbours; `None` of nothing."""
    if not values:
        return None
    return {f"p{level}": float(np.percentile(values, level)) for level in _PERCENTILES}


def _cell(
    clients: int, arm: str, runs: Sequence[dict[str, Any]], baseline: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    """One arm at one concurrency; ratios compare runs of one repeat, which lie next to each other in time."""
    wall, processor = "tokens_per_s", "tokens_per_processor_s"
    return {
        "concurrency": clients,
        "arm": arm,
        wall: _summary([run[wall] for run in runs]),
        "ratio": _summary(
            [run[wall] / other[wall] for run, other in zip(runs, baseline, strict=True)]
        ),
        "ratio_of_all": _of_all([run[wall] for run in runs], [run[wall] for run in baseline]),
        processor: _summary([run[processor] for run in runs]),
        "processor_ratio": _summary(
            [
                _share(run[processor], other[processor])
                for run, other in zip(runs, baseline, strict=True)
            ]
        ),
        "runs": list(runs),
    }


def _of_all(speeds: Sequence[float], others: Sequence[float]) -> dict[str, Any] | None:
    ratio = ratio_of_all(speeds, others)
    return None if ratio is None else asdict(ratio)


def _summary(values: Sequence[float | None]) -> dict[str, Any] | None:
    known = [value for value in values if value is not None]
    return asdict(Summary.of(known)) if known else None


def _share(one: float | None, other: float | None) -> float | None:
    return None if one is None or other is None else one / other
