"""Decoding for the command line: text as it comes, and what there is of it when somebody presses Ctrl-C."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from monge.core.verdict import StepRecord
from monge.core.words import counted
from monge.engine.batch import decode
from monge.engine.decoder import Decoder
from monge.engine.result import GenerationStats
from monge.engine.session import Session
from monge.engine.trace import rounds_of

INTERRUPTED = "interrupted"


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """What is shown of a prompt: as `GenerationResult`, or what there was when the run was interrupted."""

    prompt: str
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    seed: int | None
    row: int
    stats: GenerationStats
    error: str | None
    backend: str
    records: tuple[StepRecord, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            "prompt": self.prompt,
            "text": self.text,
            "token_ids": list(self.token_ids),
            "finish_reason": self.finish_reason,
            "seed": self.seed,
            "row": self.row,
            "error": self.error,
            "backend": self.backend,
            "stats": self.stats.as_dict(),
            "rounds": rounds_of(self.records),
        }

    def summary(self) -> str:
        """One line of figures."""
        stats = self.stats
        seconds = stats.prefill_s + stats.decode_s
        parts = [
            f"{counted(stats.num_tokens, 'token')} in {seconds:.2f} s",
            f"{stats.tokens_per_s:.1f} tokens/s",
            f"block efficiency {stats.block_efficiency:.2f}",
        ]
        if stats.acceptance_by_depth:
            parts.append(
                "accepted by depth " + " ".join(f"{rate:.2f}" for rate in stats.acceptance_by_depth)
            )
        if self.seed is not None:
            parts.append(f"seed {self.seed}" + (f", row {self.row}" if self.row else ""))
        return " | ".join([*parts, f"ended by {self.finish_reason}", f"backend {self.backend}"])

    def time_split(self) -> str:
        """One line: where the time went."""
        stats = self.stats
        names = ("prefill", "draft", "score", "verify", "commit", "other")
        times = ", ".join(f"{name} {1e3 * getattr(stats, f'{name}_s'):.0f} ms" for name in names)
        return (
            f"{counted(stats.num_rounds, 'round')}; {times}; engine efficiency {stats.engine_efficiency:.2f}; "
            f"draft utilisation {stats.draft_utilisation:.2f}"
        )

    def plan_split(self) -> str:
        """Return one line: how deep rounds drafted, what they accepted, and who drafted."""
        depths = Counter(record.depth for record in self.records)
        parts = [
            "rounds by drafted depth " + _counts(sorted(depths.items())),
            "by accepted tokens " + _counts(enumerate(self.stats.acceptance_histogram)),
        ]
        drafters = Counter(
            record.drafter for record in self.records if record.depth and record.drafter is not None
        )
        if drafters:
            parts.append("by drafter " + _counts(sorted(drafters.items())))
        return "; ".join(parts)


def _counts(counts: Iterable[tuple[int | str, int]]) -> str:
    return " ".join(f"{value}:{count}" for value, count in counts) or "none"


def decode_until_interrupted(
    decoder: Decoder, sessions: Sequence[Session], on_round: Callable[[Session], None]
) -> bool:
    """Decode all sessions; false if Ctrl-C ended it early.

    What was committed by then stays in the sessions.
    """
    try:
        for session in decode(sessions, decoder.components, max_batch_size=decoder.max_batch_size):
            on_round(session)
    except KeyboardInterrupt:
        return False
    return True


def completion_of(session: Session, prompt: str, backend: str) -> Completion:
    """Return what a session has decoded, finished or not; `backend` is what ran the target."""
    if session.text is not None:
        session.text.finish()
    return Completion(
        prompt=prompt,
        text="" if session.text is None else session.text.text,
        token_ids=session.completion_ids,
        finish_reason=session.finish_reason or INTERRUPTED,
        seed=session.request.told_seed,
        row=session.request.row,
        stats=GenerationStats.of(
            session.records, num_tokens=session.num_generated, prefill_s=session.prefill_s
        ),
        error=None if session.error is None else str(session.error),
        backend=backend,
        records=tuple(session.records),
    )
