"""The machines that a load needs: replicas simulated round by round, on replayed requests and measured costs. No clock in here.

A replica is what `monge serve` is: requests join and leave between rounds, up to a batch size; a
round takes as long as its cost table says for the number of rows and the largest tree; prompts are
read between rounds. Replicas share nothing but the door: of two drawn at random, a request goes to
the one with fewer.
"""

import heapq
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from monge.core.draws import Draws
from monge.core.errors import OptionError
from monge.replay.costs import RoundCosts

WARM_UP: Final = 0.2
"""Share of the requests, the first ones, that are served but not counted.

They meet empty replicas.
"""


@dataclass(frozen=True, slots=True)
class Step:
    """One round of a request.

    Args:
        num_nodes: Drafted nodes.
        depth: Deepest one.
        num_tokens: Tokens that it committed.
    """

    num_nodes: int
    depth: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Work:
    """A request, as a machine sees it."""

    num_prompt_tokens: int
    steps: tuple[Step, ...]

    @property
    def num_tokens(self) -> int:
        """Tokens that it writes."""
        return sum(step.num_tokens for step in self.steps)


@dataclass(frozen=True, slots=True)
class Machine:
    """The machine of one replica.

    Args:
        costs: Seconds of rounds.
        prefill_s: Seconds of reading a prompt: fixed, and per token.
        max_batch_size: Rows of a round.
    """

    costs: RoundCosts
    prefill_s: tuple[float, float]
    max_batch_size: int

    def read_s(self, num_tokens: int) -> float:
        """Seconds of reading a prompt."""
        return self.prefill_s[0] + self.prefill_s[1] * num_tokens

    def round_s(self, steps: Sequence[Step]) -> float:
        """Seconds of a round of several requests: trees are padded to the largest."""
        batch, depth = len(steps), max(step.depth for step in steps)
        rest = self.costs.verify_s(max(step.num_nodes for step in steps), batch)
        return rest + self.costs.draft_s(depth, batch)


@dataclass(slots=True)
class _Request:
    work: Work
    arrived_s: float
    number: int
    next_step: int = 0
    written: int = 0
    first_s: float = 0.0
    end_s: float = 0.0

    @property
    def step(self) -> Step:
        return self.work.steps[self.next_step]


@dataclass(slots=True)
class _Replica:
    waiting: deque[_Request] = field(default_factory=deque[_Request])
    running: list[_Request] = field(default_factory=list[_Request])
    is_busy: bool = False
    busy_s: float = 0.0
    rows: int = 0
    rounds: int = 0

    @property
    def load(self) -> int:
        return len(self.waiting) + len(self.running)

    def begin(self, machine: Machine) -> float | None:
        """Seconds of the coming round; `None` where there is nothing to do."""
        read = 0.0
        while self.waiting and len(self.running) < machine.max_batch_size:
            request = self.waiting.popleft()
            read += machine.read_s(request.work.num_prompt_tokens)
            self.running.append(request)
        self.is_busy = bool(self.running)
        if not self.running:
            return None
        seconds = read + machine.round_s([one.step for one in self.running])
        self.busy_s, self.rows, self.rounds = (
            self.busy_s + seconds,
            self.rows + len(self.running),
            self.rounds + 1,
        )
        return seconds

    def end(self, now: float) -> list[_Request]:
        """Commit the round; the requests that are finished."""
        for request in self.running:
            request.written += request.step.num_tokens
            request.first_s = request.first_s or now
            request.next_step += 1
        finished = [one for one in self.running if one.next_step == len(one.work.steps)]
        self.running = [one for one in self.running if one.next_step < len(one.work.steps)]
        for request in finished:
            request.end_s = now
        return finished


def arrivals(rate_per_s: float, count: int, draws: Draws) -> list[float]:
    """Times of a Poisson process; all at once for an infinite rate."""
    times, now = list[float](), 0.0
    for _ in range(count):
        now += -math.log1p(-draws.uniform()) / rate_per_s
        times.append(now)
    return times


def simulate(
    works: Sequence[Work],
    machine: Machine,
    *,
    rate_per_s: float,
    num_requests: int,
    draws: Draws,
    num_replicas: int = 1,
) -> dict[str, Any]:
    """Serve a load.

    Args:
        works: Requests; each arrival is one of them, drawn evenly.
        machine: What every replica runs on.
        rate_per_s: Arrivals a second at all replicas together; `math.inf` lets all come at once.
        num_requests: Arrivals.
        draws: Of arrivals, requests and replicas.
        num_replicas: Replicas.

    Returns:
        `tokens_per_s` and `requests_per_s` (of all replicas, from the first arrival to the last
        token), `busy` (share of time), `batch_size` (mean of rounds), `first_token_s` and `token_s`
        (seconds per further token): p50, p95, p99.

    Raises:
        OptionError: If there is nothing to serve.
    """
    if not works or num_requests < 1 or num_replicas < 1 or not rate_per_s > 0.0:
        raise OptionError("capacity: need at least one request, one replica and a positive rate")
    times = arrivals(rate_per_s, num_requests, draws)
    requests = [
        _Request(works[int(draws.uniform() * len(works))], at, number)
        for number, at in enumerate(times)
    ]
    replicas = [_Replica() for _ in range(num_replicas)]
    # Arrivals before ends of rounds at one time, by number: the order is a function of the draws
    # alone.
    events = [(request.arrived_s, 0, request.number) for request in requests]
    heapq.heapify(events)
    now = 0.0
    while events:
        now, is_end, number = heapq.heappop(events)
        if is_end:
            place = number
            replicas[place].end(now)
        else:
            place = _door(replicas, draws)
            replicas[place].waiting.append(requests[number])
            if replicas[place].is_busy:
                continue
        seconds = replicas[place].begin(machine)
        if seconds is not None:
            heapq.heappush(events, (now + seconds, 1, place))
    return _figures(requests, replicas, end_s=now)


def _door(replicas: Sequence[_Replica], draws: Draws) -> int:
    """The replica for a request: the less loaded of two."""
    if len(replicas) == 1:
        return 0
    pair = [int(draws.uniform() * len(replicas)) for _ in range(2)]
    return min(pair, key=lambda place: replicas[place].load)


def _figures(
    requests: Sequence[_Request], replicas: Sequence[_Replica], *, end_s: float
) -> dict[str, Any]:
    counted = requests[int(WARM_UP * len(requests)) :] or requests
    tokens = sum(one.work.num_tokens for one in requests)
    later = [
        (one.end_s - one.first_s) / (one.written - one.work.steps[0].num_tokens)
        for one in counted
        if len(one.work.steps) > 1
    ]
    return {
        "tokens_per_s": tokens / end_s,
        "requests_per_s": len(requests) / end_s,
        "busy": sum(one.busy_s for one in replicas) / (end_s * len(replicas)),
        "batch_size": sum(one.rows for one in replicas)
        / max(sum(one.rounds for one in replicas), 1),
        "first_token_s": percentiles([one.first_s - one.arrived_s for one in counted]),
        "token_s": percentiles(later or [0.0]),
    }


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """p50, p95 and p99: the smallest value that so many do not exceed."""
    ordered = sorted(values)
    return {
        f"p{share}": ordered[math.ceil(share * len(ordered) / 100) - 1] for share in (50, 95, 99)
    }
