"""The outcome of `monge certify`, and the error of a record that does not hold."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final, Literal

from monge.core.errors import MongeError
from monge.core.words import counted

Answer = Literal["exact", "not exact", "could not tell"]
EXIT: Final[Mapping[Answer, int]] = {"exact": 0, "not exact": 1, "could not tell": 2}
_FEW_NUMBERS: Final = 3
_LONGEST: Final = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A part of a record that is wrong, or that could not be judged.

    Args:
        request: Number of the request, from 1; 0 for the whole certificate.
        round: Number of its round, from 1; 0 for the whole request.
        field: The field of the certificate.
        reason: The first thing that is wrong with it.
        is_wrong: It shows that the run is not exact.
    """

    request: int = 0
    round: int = 0
    field: str
    reason: str
    is_wrong: bool = True

    def __str__(self) -> str:
        places = (("request", self.request), ("round", self.round))
        named = [f"{name} {number}" for name, number in places if number]
        return f"{', '.join([*named, self.field])}: {self.reason}"


class MismatchError(MongeError):
    """A part of a record does not hold; arguments as of its `finding`.

    `place` is the round, if the caller does not know it.
    """

    def __init__(
        self, field_name: str, reason: str, *, is_wrong: bool = True, place: int = 0
    ) -> None:
        super().__init__(reason)
        self.finding = Finding(field=field_name, reason=reason, is_wrong=is_wrong, round=place)


def check_equal(name: str, stated: object, right: object, whose: str) -> None:
    """Raise `MismatchError` for a field that is not what was computed again."""
    if stated != right:
        raise MismatchError(name, f"got {_short(stated)}; {whose} {_short(right)}")


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _LONGEST else text[:_LONGEST] + "..."


def _listed(numbers: list[int]) -> str:
    few = len(numbers) <= _FEW_NUMBERS
    return ", ".join(map(str, numbers)) if few else f"{len(numbers)} of the record"


@dataclass(slots=True, kw_only=True)
class DraftFindings:
    """Figures of drafting again.

    Attributes:
        num_rounds: Rounds that were drafted again.
        num_laws: Declared draft laws that were recomputed.
        distance: Largest total variation between a declared and a recomputed one.
        plans: By controller, why its plans were taken as recorded; empty where they were made again.
        choice_bits: Binary logarithm of the number of ways in which the plans that were taken as
            recorded could have limited chains; infinite for trees.
    """

    num_rounds: int = 0
    num_laws: int = 0
    distance: float = 0.0
    plans: dict[str, str] = field(default_factory=dict[str, str])
    choice_bits: float = 0.0

    def plan_facts(self) -> list[str]:
        """Return the controllers that planned, and why their plans were not checked."""
        facts = [
            f"plans of {name} as recorded, since it {reason}" if reason else f"planned by {name}"
            for name, reason in self.plans.items()
        ]
        if any(self.plans.values()) and math.isfinite(self.choice_bits):
            facts.append(f"at most {math.ceil(self.choice_bits)} bits of choice in plans")
        return facts or ["nothing drafted"]


@dataclass(slots=True, kw_only=True)
class CertifyReport:
    """The outcome of a certification.

    Attributes:
        num_requests: Requests.
        num_rounds: Rounds that were replayed.
        num_tokens: Tokens that they committed.
        num_nodes: Nodes with candidates that the verifiers stood on.
        num_enumerated: Nodes whose coupling was enumerated.
        num_whole: Those for which the draft laws kept all of their tokens.
        law_error: Largest law error of a coupling, given the stated logits.
        logit_difference: Largest difference of a stated logit to the float64 forward.
        law_distance: Largest total variation between a stated law and the float64 one.
        drafts: Figures of the drafter that was made again.
        seeds: Seed of each request.
        rows: Row of each request.
        dtype: Type in which the target computed.
        tolerance: Largest difference of a logit that counts as rounding.
        loading: Settings of the models that the header states, without those told of requests.
        told: Settings of requests, and what else the verdict takes from them, with the number of
            requests.
        findings: Empty for an exact run.
        notes: Limits of the checks.
    """

    num_requests: int = 0
    num_rounds: int = 0
    num_tokens: int = 0
    num_nodes: int = 0
    num_enumerated: int = 0
    num_whole: int = 0
    law_error: float = 0.0
    logit_difference: float = 0.0
    law_distance: float = 0.0
    drafts: DraftFindings = field(default_factory=DraftFindings)
    seeds: list[int] = field(default_factory=list[int])
    rows: list[int] = field(default_factory=list[int])
    loading: dict[str, Any] = field(default_factory=dict[str, Any])
    dtype: str = ""
    tolerance: float = 0.0
    told: dict[str, int] = field(default_factory=dict[str, int])
    findings: list[Finding] = field(default_factory=list[Finding])
    notes: list[str] = field(default_factory=list[str])

    @property
    def answer(self) -> Answer:
        """Return the verdict."""
        if any(finding.is_wrong for finding in self.findings):
            return "not exact"
        return "could not tell" if self.findings else "exact"

    def tell(self, fact: str) -> None:
        """Note a fact that the verdict takes from a request."""
        self.told[fact] = self.told.get(fact, 0) + 1

    def add(self, error: MismatchError, request: int = 0, place: int = 0) -> None:
        """Add the finding of an error in round `place` of a request; 0 for the whole."""
        place = error.finding.round or place
        self.findings.append(replace(error.finding, request=request, round=place))

    @property
    def basis(self) -> str:
        """All settings that decide an exact text, but for its prompt and the weights of the models.

        Whoever makes a record chooses them, so that one that is left out gives a choice of texts.
        """
        whole = self.num_requests
        facts = [
            fact if count == whole else f"{fact} in {count} of {whole} requests"
            for fact, count in self.told.items()
        ]
        loading = ", ".join(f"{name} {value!r}" for name, value in self.loading.items())
        limit = f"{self.dtype} logits within {self.tolerance:g}"
        drafted = [f"loaded with {loading}"] if loading else []
        return "; ".join([self._streams(), *facts, *drafted, *self.drafts.plan_facts(), limit])

    def _streams(self) -> str:
        """Seeds and rows of the requests, in order."""
        seeds, rows = _listed([*dict.fromkeys(self.seeds)]), self.rows
        is_run = len(rows) > 1 and rows == [*range(rows[0], rows[0] + len(rows))]
        numbers = f"{rows[0]} to {rows[-1]}" if is_run else _listed(rows)
        return f"seed {seeds}, row{'s' * (len(rows) > 1)} {numbers}"

    def summary(self) -> str:
        """Return one line."""
        basis = f" ({self.basis})" if self.answer == "exact" else ""
        return (
            f"{counted(self.num_rounds, 'round')}, {counted(self.num_tokens, 'token')}, "
            f"worst law error {self.law_error:.0e}, "
            f"worst logit difference {self.logit_difference:.0e}: {self.answer}{basis}"
        )

    def as_json(self) -> dict[str, Any]:
        """Return plain values; infinite `choice_bits` become `None`."""
        drafts = {key.removeprefix("num_"): value for key, value in asdict(self.drafts).items()}
        if math.isinf(self.drafts.choice_bits):
            drafts["choice_bits"] = None
        return {
            "verdict": self.answer,
            "summary": self.summary(),
            **asdict(self),
            "drafts": drafts,
        }
