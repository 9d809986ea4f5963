"""Outputs of generations, their figures, and the state of a scheduler."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final, Literal

from monge.core.errors import MongeError
from monge.core.verdict import StepRecord
from monge.engine.components import Components
from monge.engine.logprobs import TokenLogprob
from monge.engine.session import FinishReason, Request, Session

GenerationFinish = FinishReason | Literal["cancelled", "deadline", "oversized"]
"""`eos`, `stop`, `length`, `error`, or ended by the client (`cancelled`), by its deadline, or because
its record takes too much memory (`oversized`)."""

Measure = Literal[
    "queue_s",
    "prefill_s",
    "first_token_s",
    "inter_token_s",
    "time_per_output_token_s",
    "decode_s",
    "inference_s",
    "total_s",
    "round_tokens",
    "prompt_tokens",
    "generated_tokens",
]
"""Observed quantities. `inter_token_s` is observed once a round and request, `round_tokens` once a
round (committed tokens of the batch and prompt tokens read before it), the others once a
request."""

Sink = Callable[[Measure, float | int], None]
"""Receives every observation in the decoding thread; it must be quick and must not raise."""

NO_CONTROLLER: Final = "none"
"""The name used if no controller plans: nothing is drafted, or every round has the largest tree."""


def controller_names(components: Components) -> tuple[str, ...]:
    """Return the names of all controllers that may plan for a request, and `none`."""
    return tuple(
        dict.fromkeys((components.controller_name, *components.controllers, NO_CONTROLLER))
    )


def controller_of(request: Request, components: Components) -> str:
    """Return the name of the controller that plans for a request, or `none`."""
    if not (request.speculative and request.adaptive):
        return NO_CONTROLLER
    return components.controller_name if request.controller is None else request.controller


class QueueFullError(MongeError, RuntimeError):
    """The queue is full; retry later."""


class SchedulerClosedError(MongeError, RuntimeError):
    """The scheduler accepts no more generations."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Speculation:
    """Figures of speculation, of one generation or of all.

    A round without candidates is not a draft. Accepted tokens behind a stop string count as
    accepted.

    Args:
        num_rounds: Target forwards after the prompt.
        num_draft_tokens: Nodes verified, roots not counted.
        acceptance_histogram: Number of drafts that accepted 0, 1, ... tokens, up to the depth of
            the drafter.
    """

    num_rounds: int = 0
    num_draft_tokens: int = 0
    acceptance_histogram: tuple[int, ...] = (0,)

    def add(self, record: StepRecord) -> "Speculation":
        """Return the figures with one more round of one request."""
        histogram = list(self.acceptance_histogram)
        if record.num_nodes > 0:
            histogram[record.num_accepted] += 1
        return replace(
            self,
            num_rounds=self.num_rounds + 1,
            num_draft_tokens=self.num_draft_tokens + record.num_nodes,
            acceptance_histogram=tuple(histogram),
        )

    @property
    def num_drafts(self) -> int:
        """Rounds with candidates."""
        return sum(self.acceptance_histogram)

    @property
    def num_accepted_tokens(self) -> int:
        """Draft tokens accepted."""
        return sum(accepted * count for accepted, count in enumerate(self.acceptance_histogram))

    @property
    def max_depth(self) -> int:
        """Largest number of accepted tokens of a draft."""
        return len(self.acceptance_histogram) - 1

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens committed per draft, including the target's own; 1 without drafts."""
        return 1.0 + self.num_accepted_tokens / self.num_drafts if self.num_drafts else 1.0

    @property
    def draft_acceptance_rate(self) -> float:
        """Accepted / verified draft tokens; 0 without drafts."""
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else 0.0

    @property
    def accepted_by_position(self) -> tuple[int, ...]:
        """Number of drafts that accepted more than 0, 1, ... tokens."""
        return tuple(sum(self.acceptance_histogram[depth + 1 :]) for depth in range(self.max_depth))


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Figures in the last output of a generation. A stage that was not reached has 0 seconds.

    Args:
        num_generated_tokens: Tokens generated.
        speculation: Figures of speculation.
        queue_s: From submission to the first prefill chunk.
        prefill_s: From there to the end of the prefill, including rounds of other requests.
        first_token_s: From submission to the first token.
        decode_s: From the first token to the last.
        total_s: From submission to the end.
        cause: The error, if `finish_reason` is `error`; for logs, not for clients.
    """

    num_generated_tokens: int
    speculation: Speculation = Speculation()
    queue_s: float = 0.0
    prefill_s: float = 0.0
    first_token_s: float = 0.0
    decode_s: float = 0.0
    total_s: float = 0.0
    cause: Exception | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """New tokens and text of a generation: those of one round, or all of them.

    Args:
        text: New text; incomplete characters and possible stop strings are held back.
        token_ids: New tokens: accepted ones, then the correction or bonus token.
        logprobs: One entry per token, if requested.
        prompt_logprobs: In the first output, if requested: one entry per prompt token from the
            second on.
        finish_reason: Set in the last output.
        summary: Set in the last output.
        recorded: In the last output, the session with its record, if one is kept.
    """

    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None
    finish_reason: GenerationFinish | None = None
    summary: Summary | None = None
    recorded: Session | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """State of a scheduler.

    Args:
        num_running: Generations that are decoding.
        num_prefilling: Generations whose prompt is being read.
        num_waiting: Generations in the queue.
        kv_used_tokens: Tokens reserved in the caches.
        kv_budget_tokens: Tokens that may be reserved.
        is_open: Whether generations are accepted.
        failure: Why nothing is decoded properly: the decoding thread has ended, hangs in a round, or
            everything fails. `None` if all is well.
        num_prompt_tokens: Prompt tokens read since the start.
        num_generated_tokens: Tokens generated since the start.
        finished: Generations ended since the start, by reason.
        speculation: Of all rounds since the start.
        by_controller: The same by controller; `none` for rounds without one.
    """

    num_running: int
    num_prefilling: int
    num_waiting: int
    kv_used_tokens: int
    kv_budget_tokens: int
    is_open: bool
    failure: str | None
    num_prompt_tokens: int
    num_generated_tokens: int
    finished: Mapping[GenerationFinish, int] = field(default_factory=dict[GenerationFinish, int])
    speculation: Speculation = Speculation()
    by_controller: Mapping[str, Speculation] = field(default_factory=dict[str, Speculation])

    @property
    def num_joined(self) -> int:
        """Generations that are decoding or whose prompt is being read."""
        return self.num_running + self.num_prefilling

    @property
    def kv_share(self) -> float:
        """Share of the tokens that is reserved."""
        return self.kv_used_tokens / max(1, self.kv_budget_tokens)
