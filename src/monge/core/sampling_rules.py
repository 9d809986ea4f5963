"""Sampling rules, and the function that turns logits into laws, for target and drafter alike."""

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Final, Protocol, TypeGuard, runtime_checkable

import torch
from jaxtyping import Float, Float64, Int64
from torch import Tensor

from monge.core.errors import NonFiniteLogitsError
from monge.core.law import (
    DenseLaw,
    Law,
    LawSequence,
    SparseLaw,
    every_token,
    one_hot,
    places_of,
    softmax_laws,
    sparse_part,
    trusted_law,
)
from monge.core.lazy_laws import ScoredLaw, can_score, scored_laws
from monge.core.setting_types import check_sampling
from monge.core.top_p import most_probable, most_probable_ids


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingRules:
    """Rules that turn logits into a law; the same rules mean the same law for target and drafter.

    Applied in the order of `transformers`: temperature, top-k, top-p, min-p, each on the
    renormalised law that the rule before it leaves. Rules order tokens by decreasing logit, and
    tokens of equal logits by increasing id. They compare the logits as given, so the order is
    defined even where masses are 0, or equal by rounding. If a rule is in force, tokens of less
    than 1e-300 times the largest mass are left out, too.

    Args:
        temperature: 0 gives the point mass at the largest logit (lowest id first among equals).
        top_k: Keep the `top_k` largest logits, and those equal to the last of them. `None` keeps
            all.
        top_p: Keep the most probable tokens until their mass reaches `top_p`, in (0, 1].
        min_p: Keep tokens of at least `min_p` times the largest mass, in [0, 1].
    """

    temperature: float | int = 1.0
    top_k: int | None = None
    top_p: float | int = 1.0
    min_p: float | int = 0.0

    def __post_init__(self) -> None:
        check_sampling(self.temperature, self.top_k, self.top_p, self.min_p)

    @property
    def truncates(self) -> bool:
        """True if some tokens lose their mass by rule."""
        return self.top_k is not None or self.top_p < 1 or self.min_p > 0

    @property
    def batch_key(self) -> tuple[bool, bool]:
        """Equal for rules whose laws are made together."""
        return self.temperature == 0, self.truncates

    def within_top(self, top_k: int) -> "SamplingRules":
        """The same rules, and no more than the `top_k` most probable tokens."""
        return replace(self, top_k=top_k if self.top_k is None else min(top_k, self.top_k))


SMALLEST_SHARE: Final = 1e-300
"""The `min_p` of rules that keep some tokens only: what is less probable may be 0 on another machine."""
KINDS: Final = ("greedy", "plain", "warm", "truncated")
"""Kinds of sampling rules: the point mass, temperature 1, any temperature, and all rules."""


def kind_of(rules: Sequence[SamplingRules]) -> str:
    """Return the kind of the rules of several requests, which are all greedy or none."""
    if rules[0].temperature == 0:
        return "greedy"
    if any(of_request.truncates for of_request in rules):
        return "truncated"
    return "plain" if all(of_request.temperature == 1 for of_request in rules) else "warm"


@runtime_checkable
class Recordable(Hashable, Protocol):
    """A function of tensors that never waits for a number. Equal functions give equal results."""

    def __call__(self, *inputs: Tensor) -> Tensor: ...

    def constants(self, device: torch.device) -> object:
        """Return what it reads besides its inputs."""
        ...


Recorder = Callable[[Recordable, Sequence[Tensor]], Tensor]
"""Runs a `Recordable` on a device, and may record its launches there."""


def launched(function: Recordable, inputs: Sequence[Tensor]) -> Tensor:
    """Run a function as it is; a `Recorder`."""
    return function(*inputs)


class StackedLaws(LawSequence, Protocol):
    """Laws by node of a request's logits, which may also be read together."""

    @property
    def is_stacked(self) -> bool:
        """True if it pays to read the laws together; otherwise they are computed node by node."""
        ...

    @property
    def scores(self) -> Float[Tensor, "nodes vocab"]:
        """Logits of all nodes."""
        ...

    @property
    def rules(self) -> SamplingRules:
        """How they become laws."""
        ...

    @property
    def record(self) -> Recorder | None:
        """Runs functions of these laws, if their device records them."""
        ...


def are_stacked(laws: LawSequence) -> TypeGuard[StackedLaws]:
    """Return whether it pays to read laws together."""
    # Every round asks, and `isinstance` of a protocol takes many times as long.
    return bool(getattr(laws, "is_stacked", False))


def law_from_logits(logits: Float[Tensor, " vocab"], rules: SamplingRules) -> Law:
    """The law of the next token: logits in any float type, law in float64.

    Raises:
        NonFiniteLogitsError: If a logit is NaN or +inf, or all are -inf.
    """
    (law,) = laws_from_logits(logits[None], rules)
    if law is None:
        raise _non_finite(logits)
    return law


def laws_from_logits(
    logits: Float[Tensor, "nodes vocab"], rules: SamplingRules
) -> list[Law | None]:
    """`law_from_logits` for every row at once; `None` where a row's logits make no law."""
    if rules.top_k is not None and rules.top_k >= logits.shape[-1]:
        rules = replace(rules, top_k=None)
    if rules.temperature > 0 and can_score(logits, rules.temperature):
        scored = scored_laws(logits, rules.temperature)
        if not rules.truncates:
            return [*scored]
        rows = zip(logits, scored, strict=True)
        return [law and _kept(row, law, rules) for row, law in rows]
    if rules.temperature == 1 and not rules.truncates:
        return list(softmax_laws(logits))
    laws: list[Law | None] = []
    for (largest, where), row in zip(_largest(logits), logits, strict=True):
        if not math.isfinite(largest):
            laws.append(None)
        elif rules.temperature == 0:
            laws.append(one_hot(where, logits.device))
        else:
            laws.append(
                _truncated(row, rules, largest)
                if rules.truncates
                else trusted_law(torch.softmax(_scores(row, rules.temperature, largest), dim=-1))
            )
    return laws


def probs_from_logits(
    logits: Float[Tensor, "batch nodes vocab"],
    *,
    temperature: float | int | Float[Tensor, " batch"] = 1.0,
    top_k: int | Int64[Tensor, " batch"] | None = None,
    top_p: float | int | Float[Tensor, " batch"] | None = None,
    min_p: float | int | Float[Tensor, " batch"] | None = None,
) -> Float64[Tensor, "batch nodes vocab"]:
    """Return the laws of sampling rules, as `SamplingRules` defines them.

    The rules are applied in the order of the arguments, each to the renormalised law that the rule
    before it leaves. A rule that is `None` is not computed; for single requests without it, give a
    `top_k` of the size of the vocabulary, a `top_p` of 1 and a `min_p` of 0.

    Args:
        logits: Logits in any float type.
        temperature: At least 0, where 0 gives the point mass at the first of the largest logits.
        top_k: At least 1. Tokens equal to the last of them are kept too.
        top_p: In (0, 1].
        min_p: In [0, 1].

    Returns:
        Laws; a row whose logits are not finite, or all -inf, is NaN.
    """
    if can_score(logits, 1.0) and not logits.requires_grad:
        return _rows_of_laws(logits, temperature, top_k, top_p, min_p)
    if isinstance(temperature, float | int) and temperature > 0:
        scores = _scores(logits, temperature)
    else:
        heat = _by_row(temperature, logits)
        place = torch.arange(logits.shape[-1], device=logits.device)
        best = torch.where(place == logits.argmax(-1, keepdim=True), 0.0, -torch.inf)
        scores = torch.where(
            heat == 0,
            # NaN where the largest is not finite.
            best + 0 * logits.amax(-1, keepdim=True),
            _scores(logits, torch.where(heat == 0, 1.0, heat)),
        )
    if top_k is not None:
        if isinstance(top_k, Tensor):
            ordered = logits.sort(-1, descending=True).values
            place = _by_row(top_k, logits).clamp(1, logits.shape[-1]).long() - 1
            least = ordered.gather(-1, place.expand(*logits.shape[:-1], 1))
        else:
            least = logits.topk(min(top_k, logits.shape[-1])).values[..., -1:]
        scores = torch.where(logits < least, -torch.inf, scores)
    probs = scores.softmax(-1)
    if top_p is not None:
        is_kept = most_probable(probs, logits, _by_row(top_p, logits))
        probs = torch.where(is_kept, probs, 0.0)
        probs = probs / probs.sum(-1, keepdim=True)
    if top_k is not None or top_p is not None or min_p is not None:
        share = _by_row(0.0 if min_p is None else min_p, logits).double()
        is_cut = share > 0
        if top_k is not None:
            is_cut = is_cut | (_by_row(top_k, logits) < logits.shape[-1])
        if top_p is not None:
            is_cut = is_cut | (_by_row(top_p, logits) < 1)
        share = share.maximum(is_cut.double() * SMALLEST_SHARE)
        probs = torch.where(probs < share * probs.amax(-1, keepdim=True), 0.0, probs)
        probs = probs / probs.sum(-1, keepdim=True)
    return probs


def _rows_of_laws(
    logits: Float[Tensor, "batch nodes vocab"], *rules: float | int | Tensor | None
) -> Float64[Tensor, "batch nodes vocab"]:
    """`probs_from_logits` where machine code selects the tokens, request by request."""
    probs = torch.full(logits.shape, math.nan, dtype=torch.float64)
    columns = [
        rule.tolist() if isinstance(rule, Tensor) else [rule] * len(logits) for rule in rules
    ]
    for rows, scores, (temperature, top_k, top_p, min_p) in zip(
        probs, logits, zip(*columns, strict=True), strict=True
    ):
        of_request = SamplingRules(
            temperature=temperature,
            top_k=top_k,
            top_p=1.0 if top_p is None else top_p,
            min_p=min_p or 0.0,
        )
        for row, law in zip(rows, laws_from_logits(scores, of_request), strict=True):
            if isinstance(law, SparseLaw):
                row.zero_()[law.token_ids] = law.probs
            elif isinstance(law, DenseLaw):
                row.copy_(law.probs)
    return probs


def probs_under(
    rules: Sequence[SamplingRules], logits: Float[Tensor, "batch nodes vocab"]
) -> Float64[Tensor, "batch nodes vocab"]:
    """`probs_from_logits` for requests with these rules, which are all greedy or none."""
    if (same := same_rules(rules)) is not None:
        return probs_of_all(same, logits)
    numbers = numbers_of(rules, logits.shape[-1]).to(logits.device, non_blocking=True)
    return probs_by_numbers(kind_of(rules), numbers, logits)


def same_rules(rules: Sequence[SamplingRules]) -> SamplingRules | None:
    """Return the rules of all requests, or `None` if they differ."""
    first, *others = rules
    return first if all(of_request == first for of_request in others) else None


def probs_of_all(
    rules: SamplingRules, logits: Float[Tensor, "batch nodes vocab"]
) -> Float64[Tensor, "batch nodes vocab"]:
    """`probs_from_logits` for requests of the same rules."""
    return probs_from_logits(
        logits,
        temperature=rules.temperature,
        top_k=rules.top_k,
        top_p=rules.top_p if rules.top_p < 1 else None,
        min_p=rules.min_p or None,
    )


def numbers_of(rules: Sequence[SamplingRules], vocab: int) -> Float64[Tensor, "four requests"]:
    """Return temperature, top-k, top-p and min-p of each request, on the host."""
    table = [
        (request.temperature, request.top_k or vocab, request.top_p, request.min_p)
        for request in rules
    ]
    return torch.tensor(table, dtype=torch.float64).t()


def probs_by_numbers(
    kind: str,
    numbers: Float64[Tensor, "four batch"],
    logits: Float[Tensor, "batch nodes vocab"],
) -> Float64[Tensor, "batch nodes vocab"]:
    """`probs_from_logits` for requests of a kind, each with its column of `numbers_of`."""
    heat, top_k, top_p, min_p = numbers
    if kind == "plain":
        return probs_from_logits(logits)
    if kind == "warm":
        return probs_from_logits(logits, temperature=heat)
    rules = {"top_k": top_k.long(), "top_p": top_p, "min_p": min_p}
    return probs_from_logits(logits, temperature=heat, **rules)


def _largest(logits: Float[Tensor, "nodes vocab"]) -> list[tuple[float, int]]:
    """The largest logit of every row (NaN if the row has a NaN), and its first index."""
    # Numpy takes a tenth of the time, and greedy rounds ask at every node.
    if logits.is_cpu and logits.dtype == torch.float32:
        rows = logits.detach().numpy()
        return [
            (float(row[where]), int(where))
            for row, where in zip(rows, rows.argmax(axis=-1), strict=True)
        ]
    values, places = logits.max(dim=-1)
    # Together, since the host waits for every transfer; places are exact as float64.
    return [
        (value, int(place))
        for value, place in torch.stack([values.double(), places.double()], dim=-1).tolist()
    ]


def _non_finite(logits: Tensor) -> NonFiniteLogitsError:
    bad = int((~torch.isfinite(logits)).sum())
    return NonFiniteLogitsError(
        f"logits: largest value is {float(logits.max())}; {bad} of {logits.numel()} are not finite"
    )


def _scores(
    logits: Float[Tensor, "... vocab"],
    temperature: float | int | Tensor,
    largest: float | None = None,
) -> Float64[Tensor, "... vocab"]:
    """Return logits at a temperature above 0; `largest` is the row's largest logit, if it is known."""
    if isinstance(temperature, float | int) and temperature == 1:
        return logits.double()
    # Shifted first: a temperature of 1e-300 must give the point mass, not inf - inf.
    most = logits.amax(-1, keepdim=True) if largest is None else largest
    return (logits.double() - most).div_(temperature)


def _kept(logits: Float[Tensor, " vocab"], law: ScoredLaw, rules: SamplingRules) -> SparseLaw:
    part = law.truncated(rules.top_k, rules.top_p, max(rules.min_p, SMALLEST_SHARE))
    return _truncated(logits, rules) if part is None else part


def _truncated(
    logits: Float[Tensor, " vocab"], rules: SamplingRules, largest: float | None = None
) -> SparseLaw:
    """Return the law on its support; every rule reads only what the rule before it leaves."""
    token_ids, vocab = None, logits.numel()
    if rules.top_k is not None:
        is_kept = logits >= logits.topk(rules.top_k).values[-1]
        token_ids, logits = _left(token_ids, logits, places_of(is_kept))
    probs = torch.softmax(_scores(logits, rules.temperature, largest), dim=-1)
    if rules.top_p < 1:
        token_ids, probs = _left(token_ids, probs, most_probable_ids(probs, logits, rules.top_p))
        probs = probs / probs.sum()
    least = max(rules.min_p, SMALLEST_SHARE) * float(probs.max())
    token_ids, probs = _left(token_ids, probs, places_of(probs >= least))
    probs = probs / probs.sum()
    return sparse_part(every_token(vocab, probs.device) if token_ids is None else token_ids, probs)


def _left(
    token_ids: Int64[Tensor, " some"] | None,
    numbers: Float[Tensor, " some"],
    places: Int64[Tensor, " fewer"],
) -> tuple[Int64[Tensor, " fewer"] | None, Float[Tensor, " fewer"]]:
    """Return tokens and numbers at increasing places; `None` stands for all tokens."""
    if places.numel() == numbers.numel():
        return token_ids, numbers
    token_ids = places if token_ids is None else token_ids.index_select(0, places)
    return token_ids, numbers.index_select(0, places)


def _by_row(value: float | int | Tensor, logits: Tensor) -> Tensor:
    """One number a request, beside logits; made on the device, since a copy cannot be captured."""
    if isinstance(value, Tensor):
        return value.reshape(-1, 1, 1)
    return torch.full((1, 1, 1), value, device=logits.device, dtype=torch.float64)
