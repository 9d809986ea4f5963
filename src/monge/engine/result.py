"""The result of a request, and its figures."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from monge.core.metrics import (
    acceptance_by_depth,
    acceptance_histogram,
    block_efficiency,
    draft_utilisation,
    engine_efficiency,
)
from monge.core.verdict import StepRecord
from monge.engine.session import FinishReason, Session
from monge.requests.logprobs import TokenLogprob


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationStats:
    """Figures of a request, as `core/metrics.py` defines them.

    Args:
        num_tokens: Generated tokens.
        num_rounds: Target forwards after the prompt.
        block_efficiency: Mean accepted draft tokens a round, plus one.
        acceptance_by_depth: Conditional acceptance at depth 1, 2, ...
        draft_utilisation: Accepted / verified draft nodes.
        prefill_s: Seconds for reading the prompt (shared by the requests that joined together).
        draft_s, score_s, verify_s, commit_s, other_s: Seconds of the rounds by stage.
        decode_s: Seconds of the rounds.
        tokens_per_s: `num_tokens / (prefill_s + decode_s)`; 0 if the clock stood still.
        engine_efficiency: Seconds inside network forwards / seconds of the rounds.
        drafters: Which drafter of a pool every round used (`None`: none of them had anything to
            propose); empty without a pool.
        acceptance_histogram: Rounds that accepted 0, 1, .. draft tokens.
    """

    num_tokens: int
    num_rounds: int
    block_efficiency: float
    acceptance_by_depth: tuple[float, ...]
    draft_utilisation: float
    prefill_s: float
    draft_s: float
    score_s: float
    verify_s: float
    commit_s: float
    other_s: float
    decode_s: float
    tokens_per_s: float
    engine_efficiency: float
    drafters: tuple[str | None, ...] = ()
    acceptance_histogram: tuple[int, ...] = ()

    @classmethod
    def of(
        cls, records: Sequence[StepRecord], *, num_tokens: int, prefill_s: float
    ) -> "GenerationStats":
        """Figures from the records of a request."""
        times = [record.times for record in records]
        names = ("draft_s", "score_s", "verify_s", "commit_s")
        stages = {name: math.fsum(getattr(time, name) for time in times) for name in names}
        decode_s = math.fsum(time.total_s for time in times)
        passed_s = prefill_s + decode_s
        drafters = tuple(record.drafter for record in records)
        return cls(
            num_tokens=num_tokens,
            num_rounds=len(records),
            block_efficiency=block_efficiency(records) if records else 0.0,
            acceptance_by_depth=acceptance_by_depth(records) if records else (),
            draft_utilisation=draft_utilisation(records) if records else 0.0,
            prefill_s=prefill_s,
            **stages,
            other_s=decode_s - sum(stages.values()),
            decode_s=decode_s,
            tokens_per_s=num_tokens / passed_s if records and passed_s else 0.0,
            engine_efficiency=engine_efficiency(records) if records else 0.0,
            drafters=drafters if any(drafters) else (),
            acceptance_histogram=acceptance_histogram(records) if records else (),
        )

    def as_dict(self) -> dict[str, Any]:
        """Plain numbers, for JSON."""
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationResult:
    """The completion of a prompt.

    Args:
        text: Generated text without the prompt; it ends before a stop string. Empty where there is
            no tokenizer.
        token_ids: Generated tokens; an end-of-text token and the tokens of a stop string are
            included.
        finish_reason: `eos`, `stop`, `length`, or `error` (see `error`; what was decoded before it
            is kept).
        stats: Figures of the request.
        records: A record for each round.
        seed: Gives the text again, with `row`; `None` where measured times decide about a sampled
            text, and where a network computes in fewer than 32 bits, see `Decoder.requests`.
        row: Number of the row's stream among those of the seed.
        error: What went wrong, if anything.
        logprobs: An entry for each token, if `logprobs` was given.
        backend: What ran the target, with its rounded weights if it has any: `eager`, `compiled`,
            `compiled, int8 weights`, ...
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stats: GenerationStats
    records: tuple[StepRecord, ...]
    seed: int | None
    row: int = 0
    error: str | None = None
    logprobs: tuple[TokenLogprob, ...] | None = None
    backend: str


def result_of(
    session: Session, backend: str, logprobs: Sequence[TokenLogprob] = ()
) -> GenerationResult:
    """The result of a finished session."""
    assert session.finish_reason is not None, "the session is not finished"
    if session.text is not None:
        session.text.finish()
    return GenerationResult(
        text="" if session.text is None else session.text.text,
        token_ids=session.completion_ids,
        finish_reason=session.finish_reason,
        stats=GenerationStats.of(
            session.records, num_tokens=session.num_generated, prefill_s=session.prefill_s
        ),
        records=tuple(session.records),
        seed=session.request.reported_seed,
        row=session.request.row,
        error=None if session.error is None else str(session.error),
        logprobs=None if session.request.logprobs is None else tuple(logprobs),
        backend=backend,
    )


def rounds_of(records: Sequence[StepRecord]) -> list[dict[str, Any]]:
    """Return an entry for each round.

    Returns:
        Of every round `at` (tokens generated before it), `window` (largest depth that the plan
        allowed), `depth` and `nodes` (what was drafted within it), `accepted`, `tokens`
        (committed), `drafter` of a pool, `batch_size` and `seconds`.
    """
    entries: list[dict[str, Any]] = []
    at = 0
    for record in records:
        entries.append(
            {
                "at": at,
                "window": record.plan.max_depth,
                "depth": record.depth,
                "nodes": record.num_nodes,
                "accepted": record.num_accepted,
                "tokens": len(record.token_ids),
                "drafter": record.drafter,
                "batch_size": record.batch_size,
                "seconds": record.times.total_s,
            }
        )
        at += len(record.token_ids)
    return entries
