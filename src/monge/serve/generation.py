"""What is asked of the scheduler and what it answers: generations in, events out."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from monge.core.context import DraftPlan
from monge.core.errors import MongeError, OptionError
from monge.core.sampling_rules import SamplingRules
from monge.engine.logprobs import LogprobSource, TokenLogprob
from monge.engine.sampling import Processor
from monge.engine.session import FinishReason

GenerationFinish = FinishReason | Literal["cancelled", "deadline"]
"""`eos`, `stop`, `length`, `error`, or ended from outside: by the client, or by its deadline."""

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
"""What is observed: `inter_token_s` once a round and request, `round_tokens` once a round (tokens committed in the batch and
prompt tokens read before it), the others once a request."""

Sink = Callable[[Measure, float | int], None]
"""Told every single observation, in the decoding thread: it must be quick and must not raise."""


class QueueFullError(MongeError, RuntimeError):
    """As many generations wait as may wait; try again later."""


class SchedulerClosedError(MongeError, RuntimeError):
    """The scheduler takes no more generations."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One completion of one prompt.

    Args:
        prompt_ids: The prompt, at least one token.
        max_new_tokens: Most tokens to generate.
        rules: Sampling rules.
        seed: Names, with `row`, the generation's own stream of random numbers; zero is a seed.
        row: Number of its stream among those of the seed.
        stop: Stop strings.
        eos_ids: Tokens that end the text.
        processors: Prefix-dependent logits processors; they run in the decoding thread.
        logprobs: With every generated token, its log-probability and those of so many most probable tokens; `None` for none.
        prompt_logprobs: Likewise for the prompt's tokens from the second on, raw; they come with the first event.
        logprobs_of: `processed`, the law that the token was drawn from (processors, temperature and truncation applied), or
            `raw`, the target's own at temperature 1.
        speculative: Whether anything is drafted for it, whatever the controller plans.
        adaptive: Whether the controller plans for it; if not, every round has the largest tree within its limits.
        limits: No plan of it goes beyond their depth and nodes.
        controller: Name of the controller that plans for it; `None` for the one of generations that name none.
        deadline_s: Seconds after submission at which it is ended, with what it has; `None` for no limit.
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

    def __post_init__(self) -> None:
        if self.deadline_s is not None and not self.deadline_s > 0:
            raise OptionError(f"deadline_s must be positive, or None for no limit; got {self.deadline_s}")

    @property
    def num_reserved_tokens(self) -> int:
        """Tokens for which it needs room in the caches."""
        return len(self.prompt_ids) + self.max_new_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Speculation:
    """What drafting was worth: of one generation, or of all.

    A round whose tree had no candidates is no draft. Accepted tokens that a stop cut off count as accepted.

    Args:
        num_rounds: Target forwards after the prompt.
        num_drafts: Rounds with candidates.
        num_draft_tokens: Nodes verified, roots not counted.
        num_accepted_tokens: Draft tokens accepted.
        acceptance_histogram: Drafts that accepted 0, 1, .. tokens, up to the drafter's depth; sums to `num_drafts`.
    """

    num_rounds: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    acceptance_histogram: tuple[int, ...] = (0,)

    @property
    def max_depth(self) -> int:
        """Most tokens that a draft can have accepted."""
        return len(self.acceptance_histogram) - 1

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens committed per draft, the target's own included; 1 where nothing was drafted."""
        return 1.0 + self.num_accepted_tokens / self.num_drafts if self.num_drafts else 1.0

    @property
    def draft_acceptance_rate(self) -> float:
        """Accepted / verified draft tokens; 0 where nothing was drafted."""
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else 0.0

    @property
    def accepted_by_position(self) -> tuple[int, ...]:
        """Drafts that accepted more than 0, 1, .. tokens."""
        return tuple(sum(self.acceptance_histogram[depth + 1 :]) for depth in range(self.max_depth))


@dataclass(frozen=True, slots=True, kw_only=True)
class Timings:
    """Seconds of one generation; a stage that was not reached has 0.

    Args:
        queue_s: From submission to the first piece of the prompt being read.
        prefill_s: From there until the prompt is read, rounds of others in between included.
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
    """What a generation's last event adds.

    Args:
        num_prompt_tokens: Tokens of the prompt.
        num_generated_tokens: Tokens generated.
        speculation: What drafting was worth.
        timings: Seconds by stage.
        error: What went wrong, where `finish_reason` is `error`; for logs, not for clients.
    """

    num_prompt_tokens: int
    num_generated_tokens: int
    speculation: Speculation
    timings: Timings
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """What one round added to a generation.

    Args:
        text: New text; empty while a character or a possible stop string is incomplete.
        token_ids: New tokens: accepted ones, then the correction or bonus token.
        num_accepted: How many of them were drafted.
        logprobs: One entry per token, if asked for.
        prompt_logprobs: On the first event, if asked for: one entry per prompt token from the second on.
        finish_reason: Set on the last event.
        summary: Set on the last event.
    """

    text: str = ""
    token_ids: tuple[int, ...] = ()
    num_accepted: int = 0
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None
    finish_reason: GenerationFinish | None = None
    summary: Summary | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """All events of a generation in one.

    Args:
        text: Generated text, ended before a stop string.
        token_ids: Generated tokens.
        logprobs: One entry per token, if asked for.
        prompt_logprobs: One entry per prompt token from the second on, if asked for.
        finish_reason: Why it ended.
        summary: Figures.
    """

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    prompt_logprobs: tuple[TokenLogprob, ...] | None
    finish_reason: GenerationFinish
    summary: Summary


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """State of a scheduler.

    Args:
        num_running: Jobs being decoded.
        num_prefilling: Jobs whose prompt is being read.
        num_waiting: Jobs in the queue.
        kv_used_tokens: Tokens reserved in the caches.
        kv_budget_tokens: Tokens that may be.
        is_open: Whether generations are taken.
        failure: What ended the decoding thread, if anything did: the scheduler is of no use any more.
        num_prompt_tokens: Prompt tokens read since the start.
        num_generated_tokens: Tokens generated since the start.
        finished: Jobs ended since the start, by reason.
        num_preemptions: Always 0: what is admitted has its room reserved.
        speculation: Of all rounds since the start.
        by_controller: The same by the controller that planned them; `none` where none did.
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
