"""The outcome of `monge certify`."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Final, Literal

from monge.audit.redraft import DraftFindings
from monge.core.words import counted

Answer = Literal["exact", "not exact", "could not tell"]
EXIT: Final[Mapping[Answer, int]] = {"exact": 0, "not exact": 1, "could not tell": 2}
_FEW_SEEDS: Final = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A part of a record that is wrong, or that could not be judged.

    Args:
        request: Number of the request, from 1; 0 for the whole certificate.
        round: Number of its round, from 1; 0 for the whole request.
        field: The field of the certificate.
        reason: What is wrong with it.
        is_wrong: It shows that the run is not exact.
    """

    request: int
    round: int
    field: str
    reason: str
    is_wrong: bool = True

    def __str__(self) -> str:
        places = [
            f"{name} {number}"
            for name, number in (("request", self.request), ("round", self.round))
            if number
        ]
        return f"{', '.join([*places, self.field])}: {self.reason}"


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
        seeds: Seeds of the requests.
        dtype: Type in which the target computed.
        tolerance: Largest difference of a logit that counts as rounding.
        told: Facts that the verdict takes from the record, with the number of requests.
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

    @property
    def basis(self) -> str:
        """Seeds, plans, ends and tolerance of an exact run, as far as they were checked."""
        few = len(self.seeds) <= _FEW_SEEDS
        seeds = ", ".join(map(str, self.seeds)) if few else f"{len(self.seeds)} of the record"
        whole = self.num_requests
        told = [
            fact if count == whole else f"{fact} in {count} of {whole} requests"
            for fact, count in self.told.items()
        ]
        limit = f"{self.dtype} logits within {self.tolerance:g}"
        return "; ".join([f"seed {seeds}", *self.drafts.plan_facts(), *told, limit])

    def summary(self) -> str:
        """Return one line."""
        basis = f" ({self.basis})" if self.answer == "exact" else ""
        return (
            f"{counted(self.num_rounds, 'round')}, {counted(self.num_tokens, 'token')}, "
            f"worst law error {self.law_error:.0e}, "
            f"worst logit difference {self.logit_difference:.0e}: {self.answer}{basis}"
        )

    def as_json(self) -> dict[str, Any]:
        """Return plain values."""
        own = asdict(self)
        own["drafts"] = self.drafts.as_json()
        return {"verdict": self.answer, "summary": self.summary(), **own}
