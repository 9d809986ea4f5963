"""A request while it is decoded."""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import index
from typing import Any, Final, Literal

from monge.core.context import Context, DraftPlan, depth_plan
from monge.core.errors import ContextLengthError, OptionError, ProcessorError
from monge.core.prompt import PromptProfile
from monge.core.sampling_rules import SamplingRules
from monge.core.setting_types import is_of
from monge.core.text import check_text
from monge.core.verdict import StepRecord, Verdict
from monge.core.words import counted
from monge.laws.draws import ClockDraws, Draws, RequestDraws, check_seed
from monge.laws.tree import TokenTree
from monge.requests.grammar import GrammarState
from monge.requests.logprobs import LogprobOptions, TokenLogprob, along
from monge.requests.processors import OnePath, Processor, copy_error, fork, name_of
from monge.requests.sampling import NodeLaws
from monge.requests.text import TextStream, Tokenizer

FinishReason = Literal["eos", "stop", "length", "error"]
StoppingCriteria = Callable[[tuple[int, ...]], bool]
"""`token_ids` (prompt and completion) -> whether decoding stops after the last of them."""

_UNBOUNDED: Final = 1 << 62


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A prompt and the options of its completion.

    Args:
        prompt_ids: The prompt, at least one token.
        max_new_tokens: Most tokens to generate.
        rules: Sampling rules.
        seed: Names, with `row`, the request's own stream of random numbers; zero is a seed.
        row: Number of its stream among those of the seed.
        eos_ids: Tokens that end the text (kept as its last token).
        stop: Stop strings. The text ends before the first of them, and the tokens end with the
            token that completes it. A stop string that is the text of a special token also stops at
            that token.
        processors: Prefix-dependent logits processors. The request decodes with copies of them. If
            a processor cannot be copied, the request decodes without speculation, and a warning
            says so.
        grammar: State of the grammar before the first token, if the completion has a grammar.
        stopping_criteria: Called after every token, in order.
        draws: Source of randomness; made of seed and row where absent.
        profile: What is known of the prompt already, for controllers that look at it.
        speculative: Whether anything is drafted for it; if not, the drafter is not even shown the
            prompt.
        adaptive: Whether the controller plans for it; if not, every round has the largest tree
            within its limits.
        limits: No plan of it goes beyond their depth and nodes.
        controller: Name of the controller that plans for it; `None` for the default controller.
        is_repeatable: Whether its seed is said to give its text again.
        num_truncating: Number of the last processors that only take tokens out.
        logprobs: Log-probabilities wanted with every generated token.
        prompt_logprobs: Log-probabilities wanted with every prompt token from the second on; always
            those of `raw`.
        return_trees: Whether the records of its rounds have their trees.
        cache_salt: It shares a prefix cache with requests of this salt only; `None`: with nobody.
    """

    prompt_ids: tuple[int, ...]
    max_new_tokens: int
    rules: SamplingRules
    seed: int
    row: int = 0
    eos_ids: frozenset[int] = frozenset()
    stop: tuple[str, ...] = ()
    processors: tuple[Processor, ...] = ()
    num_truncating: int = 0
    grammar: GrammarState | None = None
    stopping_criteria: StoppingCriteria | None = None
    draws: Draws | None = None
    profile: PromptProfile | None = None
    speculative: bool = True
    adaptive: bool = True
    limits: DraftPlan = DraftPlan()
    controller: str | None = None
    is_repeatable: bool = True
    logprobs: LogprobOptions | None = None
    prompt_logprobs: LogprobOptions | None = None
    return_trees: bool = False
    cache_salt: str | None = ""

    @property
    def reported_seed(self) -> int | None:
        """Its seed, where that gives its text again: what results show."""
        return self.seed if self.is_repeatable else None

    def __post_init__(self) -> None:
        if not self.prompt_ids:
            raise OptionError(
                "the prompt is empty: give at least one token (for example the "
                "tokenizer's bos token)"
            )
        if not is_of(self.max_new_tokens, int):
            raise OptionError(f"max_new_tokens must be a whole number; got {self.max_new_tokens!r}")
        if self.max_new_tokens < 1:
            raise OptionError(f"max_new_tokens must be at least 1; got {self.max_new_tokens}")
        check_seed(self.seed, self.row)
        # A whole number of numpy's goes into no generator, and no JSON.
        for name in ("max_new_tokens", "seed", "row"):
            object.__setattr__(self, name, index(getattr(self, name)))
        for place, text in enumerate(self.stop):
            if not text:
                raise OptionError("a stop string is empty; remove it")
            check_text(text, f"stop[{place}]")


class Session:
    """A request, its committed text and the states of the parts that serve it.

    Args:
        request: The request.
        request_id: Names the request towards the models' caches.
        tokenizer: Needed for stop strings and for text.
        keeps_records: Whether all records are kept, or only the last record.
    """

    def __init__(
        self,
        request: Request,
        request_id: int,
        tokenizer: Tokenizer | None = None,
        *,
        keeps_records: bool = True,
    ) -> None:
        if request.stop and tokenizer is None:
            raise OptionError("stop strings need a tokenizer; give one, or use eos_ids")
        self.request, self._tokenizer = request, tokenizer
        self.draws = request.draws or RequestDraws(request.seed, request.row)
        self._keeps_records = keeps_records
        self.context = Context(
            request_id=request_id,
            token_ids=request.prompt_ids,
            num_prompt_tokens=len(request.prompt_ids),
            rules=request.rules,
        )
        self.text = (
            None if tokenizer is None else TextStream(tokenizer, request.prompt_ids, request.stop)
        )
        self.controller_state: Any = None
        self.drafter_state: Any = None
        self.drafts = request.speculative
        """True while the request is drafted for; false once the drafter has failed."""
        self.processors = self._own_processors()
        self.grammar = None if request.grammar is None else request.grammar.of_request()
        """After the committed text."""
        self.records: list[StepRecord] = []
        self.num_rounds = 0
        self.finish_reason: FinishReason | None = None
        self.num_cached = 0
        """Prompt tokens that the target did not read, since a `PrefixCache` had them."""
        self.num_written = 0
        """Prompt tokens that the `PrefixCache` of the target keeps since this request."""
        self.error: Exception | None = None
        self.new_ids: tuple[int, ...] = ()
        """Tokens of the last round."""
        self.logprobs: tuple[TokenLogprob, ...] = ()
        """Of these tokens, if they are wanted."""
        self.prompt_logprobs: tuple[TokenLogprob, ...] = ()
        self.prefill_s = 0.0
        self.is_open = False
        """True while the target's cache holds its text."""
        self.drafter_is_open = False

    def _own_processors(self) -> tuple[Processor, ...]:
        """Copies of the request's processors, which no other text moves on."""
        given = list(self.request.processors)
        for place, processor in enumerate(given):
            if (error := copy_error(processor)) is not None:
                given[place], self.drafts = OnePath(processor), False
                warnings.warn(
                    f"request {self.context.request_id}: the processor {name_of(processor)} cannot "
                    f"be copied ({type(error).__name__}: {error}), so the request is decoded "
                    "without speculation; a __deepcopy__ of its class would allow it",
                    stacklevel=2,
                )
        return fork(tuple(given))

    @property
    def request_id(self) -> int:
        """Names the request towards the models' caches."""
        return self.context.request_id

    @property
    def prompt(self) -> PromptProfile:
        """The prompt, decoded."""
        if self.request.profile is not None:
            return self.request.profile
        ids, tokenizer = self.request.prompt_ids, self._tokenizer
        text = None if tokenizer is None else tokenizer.decode(ids, skip_special_tokens=True)
        return PromptProfile(token_ids=ids, text=text)

    @property
    def completion_ids(self) -> tuple[int, ...]:
        """Generated tokens."""
        return self.context.token_ids[self.context.num_prompt_tokens :]

    @property
    def num_truncating(self) -> int | None:
        """As in the request; `None` unless the request wants the mass that truncation kept."""
        wanted = self.request.logprobs
        return None if wanted is None or not wanted.drawn else self.request.num_truncating

    @property
    def num_generated(self) -> int:
        """Number of generated tokens."""
        return len(self.context.token_ids) - self.context.num_prompt_tokens

    def begin_round(self) -> None:
        """Tell the noise that is addressed by place where the text ends."""
        if isinstance(self.draws, ClockDraws):
            self.draws.move_to(len(self.context.token_ids))

    @property
    def plan_draws(self) -> Draws:
        """The draws of the controller in this round."""
        return self.draws.for_plans() if isinstance(self.draws, ClockDraws) else self.draws

    def note(self, record: StepRecord) -> None:
        """Keep the record of a round."""
        if not self._keeps_records:
            self.records.clear()
        self.num_rounds += 1
        self.records.append(record)

    def limit(self, plan: DraftPlan, draft_length: int | None = None) -> DraftPlan:
        """Return the plan within the request's limits and the number of tokens still needed.

        A round commits one token more than it accepts.

        Args:
            plan: The plan.
            draft_length: Longest text that the drafter drafts for; see `DraftPlan.reaching`.
        """
        room = self.request.max_new_tokens - self.num_generated - 1
        limited = plan.within(self.request.limits).within(depth_plan(room))
        return limited.reaching(len(self.context.token_ids), draft_length)

    def commit(self, tree: TokenTree, laws: NodeLaws, verdict: Verdict) -> bool:
        """Append the accepted tokens and the token after them, up to the first stop.

        Returns:
            False if code of the request raised, which fails it.
        """
        path = verdict.path
        tokens = (*(tree.token_ids[node] for node in path), verdict.next_token)
        try:
            self.processors = laws.processors_after(path[-1] if path else 0)
            wanted = self.request.logprobs
            logprobs = () if wanted is None else along(wanted, laws, (0, *path), tokens)
            self._append(tokens)
            if self.grammar is not None and self.finish_reason is None:
                self.grammar = self.grammar.after_all(self.new_ids)
        except Exception as error:  # noqa: BLE001  processors and stop checks may raise anything
            self.fail(error)
            return False
        self.logprobs = logprobs[: len(self.new_ids)]
        return True

    def _append(self, token_ids: Sequence[int]) -> None:
        kept: list[int] = []
        for token in token_ids:
            kept.append(token)
            self.finish_reason = self._reason_to_stop(kept)
            if self.finish_reason is not None:
                break
        self.new_ids = tuple(kept)
        self.context = self.context.append(self.new_ids)

    def fail(self, error: Exception) -> None:
        """End the request with an error; an error of a processor is kept as it was raised."""
        if isinstance(error, ProcessorError) and isinstance(error.__cause__, Exception):
            error = error.__cause__
        self.error, self.finish_reason = error, "error"

    def _reason_to_stop(self, new_ids: Sequence[int]) -> FinishReason | None:
        request, text = self.request, self.text
        is_named = text is not None and text.stops_at(new_ids[-1])
        if new_ids[-1] in request.eos_ids and not is_named:
            return "eos"
        if text is not None and text.push(new_ids[-1]):
            return "stop"
        if request.stopping_criteria is not None and request.stopping_criteria(
            self.context.token_ids + tuple(new_ids)
        ):
            return "stop"
        return "length" if self.num_generated + len(new_ids) >= request.max_new_tokens else None


def check_length(request: Request, max_length: int | None, whose: str) -> None:
    """Refuse a request that does not fit a model's context.

    Raises:
        ContextLengthError: With all numbers.
    """
    total = len(request.prompt_ids) + request.max_new_tokens
    if total > (max_length or _UNBOUNDED):
        raise ContextLengthError(
            f"prompt of {counted(len(request.prompt_ids), 'token')} + "
            f"max_new_tokens={request.max_new_tokens} = {total} exceeds the "
            f"{whose}'s context length of {max_length} tokens; "
            "shorten the prompt or ask for fewer tokens"
        )


def catch(work: Callable[[], object]) -> Exception | None:
    """Run some work and return the exception that it raises, if any; the caller handles it."""
    try:
        work()
    except Exception as error:  # noqa: BLE001  requests and drafters bring code of their own, which may raise anything
        return error
    return None
