"""Requests to the scheduler and its answers: generation requests and events."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from monge.core.context import DraftPlan
from monge.core.errors import MongeError, OptionError
from monge.core.sampling_rules import SamplingRules
from monge.engine.logprobs import LogprobSource, TokenLogprob
from monge.engine.sampling import Processor
from monge.engine.session import FinishReason, Session
from monge.serve.records import Recording

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


class QueueFullError(MongeError, RuntimeError):
    """The queue is full; try again later."""


class SchedulerClosedError(MongeError, RuntimeError):
    """The scheduler accepts no more generations."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One completion of one prompt.

    Args:
        prompt_ids: The prompt, at least one token.
        max_new_tokens: Most tokens to generate.
        rules: Sampling rules.
        seed: Names, with `row`, the random stream of the generation; zero is a seed.
        row: Number of the random stream of the seed.
        stop: Stop strings.
        eos_ids: Tokens that end the text.
        processors: Prefix-dependent logits processors; they run in the decoding thread.
        logprobs: Number of most probable tokens whose log-probabilities come with each generated
            token, beside its own; `None` for no log-probabilities.
        prompt_logprobs: The same for the tokens of the prompt from the second on, always raw; they
            come with the first event.
        logprobs_of: `processed` for the law that the token was drawn from (with processors,
            temperature and truncation), or `raw` for the target at temperature 1.
        speculative: Whether the drafter may draft for it.
        adaptive: Whether the controller plans for it. If not, each round drafts the largest tree
            within the limits.
        limits: Upper bounds for depth and nodes of its plans.
        controller: Name of the controller that plans for it; `None` for the default one.
        deadline_s: Seconds after submission at which it ends with the text it has; `None` for no
            limit.
        recording: How its rounds are recorded; `None` records nothing.
    """

    prompt_ids: tuple[int, ...]
    max_new_tokens: int
    rules: SamplingRules
    seed: int
    row: int = 0
    stop: tuple[str, ...] = ()
    eos_ids: frozenset[int] = frozenset()
    processors: tuple[Processor, ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprobs_of: LogprobSource = "processed"
    speculative: bool = True
    adaptive: bool = True
    limits: DraftPlan = DraftPlan()
    controller: str | None = None
    deadline_s: float | int | None = None
    recording: Recording | None = None

    def __post_init__(self) -> None:
        if self.deadline_s is not None and not self.deadline_s > 0:
            raise OptionError(
                f"deadline_s must be positive, or None for no limit; got {self.deadline_s}"
            )

    @property
    def num_reserved_tokens(self) -> int:
        """Tokens that it reserves in the caches."""
        return len(self.prompt_ids) + self.max_new_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Speculation:
    """Figures of speculation, of one generation or of all.

    A round without candidates is not a draft. Accepted tokens behind a stop string count as
    accepted.

    Args:
        num_rounds: Target forwards after the prompt.
        num_drafts: Rounds with candidates.
        num_draft_tokens: Nodes verified, roots not counted.
        num_accepted_tokens: Draft tokens accepted.
        acceptance_histogram: Number of drafts that accepted 0, 1, ... tokens, up to the depth of
            the drafter; its sum is `num_drafts`.
    """

    num_rounds: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    acceptance_histogram: tuple[int, ...] = (0,)

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
class Timings:
    """Seconds of one generation, by stage; a stage that was not reached has 0.

    Args:
        queue_s: From submission to the first prefill chunk.
        prefill_s: From there to the end of the prefill, including rounds of other requests.
        first_token_s: From submission to the first token.
        decode_s: From the first token to the last.
        total_s: From submission to the end.
    """

    queue_s: float = 0.0
    prefill_s: float = 0.0
    first_token_s: float = 0.0
    decode_s: float = 0.0
    total_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Figures in the last event of a generation.

    Args:
        num_prompt_tokens: Tokens of the prompt.
        num_generated_tokens: Tokens generated.
        speculation: Figures of speculation.
        timings: Seconds by stage.
        cause: The error, if `finish_reason` is `error`; for logs, not for clients.
    """

    num_prompt_tokens: int
    num_generated_tokens: int
    speculation: Speculation
    timings: Timings
    cause: Exception | None = None

    @property
    def error(self) -> str | None:
        """The error in words."""
        return None if self.cause is None else f"{type(self.cause).__name__}: {self.cause}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """The new tokens and text of one round.

    Args:
        text: New text; incomplete characters and possible stop strings are held back.
        token_ids: New tokens: accepted ones, then the correction or bonus token.
        num_accepted: How many of them are accepted draft tokens.
        logprobs: One entry per token, if requested.
        prompt_logprobs: On the first event, if requested: one entry per prompt token from the
            second on.
        finish_reason: Set on the last event.
        summary: Set on the last event.
        recorded: On the last event, the session with its record, if one is kept.
    """

    text: str = ""
    token_ids: tuple[int, ...] = ()
    num_accepted: int = 0
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None
    finish_reason: GenerationFinish | None = None
    summary: Summary | None = None
    recorded: Session | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """All events of a generation, merged.

    Args:
        text: Generated text, ended before a stop string.
        token_ids: Generated tokens.
        logprobs: One entry per token, if asked for.
        prompt_logprobs: One entry per prompt token from the second on, if asked for.
        finish_reason: Why it ended.
        summary: Figures.
        recorded: The session with its record, if one is kept.
    """

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    prompt_logprobs: tuple[TokenLogprob, ...] | None
    finish_reason: GenerationFinish
    summary: Summary
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
        num_preemptions: Always 0: admitted generations have their tokens reserved.
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
    num_preemptions: int = 0
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
