"""Settings of an audit, which are options of `monge audit`."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Literal

from monge.audit.situations import Situation, usual_situations
from monge.core.errors import OptionError
from monge.options import OUTPUT, option

AUDIT: Final = "Audit"
BUDGET: Final = 20_000
QUICK_BUDGET: Final = 2_000
_UNBOUNDED: Final = 10**9
"""Budget of an audit that a clock ends."""

Naming = Literal["ids", "names", "text"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditSettings:
    """Settings of an audit; `monge.audit.assert_lossless` documents those that are options.

    Args:
        seed: Of the numbers that break ties, and of requests with seeds.
        naming: How the audited server names tokens, as `probe` says. Of servers that return no
            tokens, only the first token of each text is judged.
        neutral: Fields of every request that switch sampling rules off, as `neutral_fields` says.
        structured: Fields of a structured request, as `structured_fields` says; without any, no
            structured situation is played.
        log: File for the texts.

    Raises:
        OptionError: If a number is out of its range.
    """

    budget: int | None = option(
        None, AUDIT, "Sampled tokens to judge at most.", BUDGET, kind=int, least=1
    )
    greedy_budget: int = option(
        0, AUDIT, "Greedy tokens to compare at least.", "one text for each prompt", least=0
    )
    minutes: float | int | None = option(
        None, AUDIT, "Longest time for the sampled texts.", "no limit", kind=float
    )
    quick: bool = option(False, AUDIT, f"Four situations and {QUICK_BUDGET:,} tokens.")
    alpha: float = option(0.001, AUDIT, "Largest probability of a false alarm.")
    tolerance: float | int | None = option(
        None,
        AUDIT,
        "Smallest difference of log-probabilities that counts in greedy texts.",
        "0.05 nats, and 0.25 with --url and --target",
        kind=float,
    )
    log: Path | None = option(
        None,
        OUTPUT,
        "JSONL file of all texts; an existing one is continued.",
        "nothing",
        kind=Path,
    )
    situations: tuple[Situation, ...] | None = None
    seed: int = 0
    naming: Naming = "names"
    neutral: Mapping[str, object] = field(default_factory=dict)
    structured: Mapping[str, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not 0 < self.alpha < 1:
            raise OptionError(f"alpha must lie between 0 and 1; got {self.alpha}")
        if self.num_tokens < 1 or self.greedy_budget < 0:
            raise OptionError(
                f"budgets must be positive; got {self.budget} sampled and {self.greedy_budget} greedy tokens"
            )
        if self.minutes is not None and self.minutes <= 0:
            raise OptionError(f"minutes must be positive; got {self.minutes:g}")

    @property
    def num_tokens(self) -> int:
        """Sampled tokens to judge at most: the budget, no limit beside a clock, or the usual number."""
        usual = QUICK_BUDGET if self.quick else BUDGET
        usual = usual if self.minutes is None else _UNBOUNDED
        return usual if self.budget is None else self.budget

    @property
    def planned(self) -> tuple[Situation, ...]:
        """The situations, whatever the server takes."""
        return self.situations or usual_situations(is_quick=self.quick)

    @property
    def played(self) -> tuple[Situation, ...]:
        """The situations that the server takes; if it returns no tokens, with single tokens."""
        situations = tuple(
            situation
            for situation in self.planned
            if self.structured or not situation.is_structured
        )
        if self.naming != "text":
            return situations
        return tuple(replace(situation, max_tokens=1) for situation in situations)

    def fields(self, max_tokens: int) -> dict[str, Any]:
        """Return the fields of a request of this many tokens."""
        fields: dict[str, Any] = {**self.neutral, "max_tokens": max_tokens}
        if self.naming != "text":
            fields["logprobs"] = 1
        if self.naming == "ids":
            fields["return_tokens_as_token_ids"] = True
        return fields
