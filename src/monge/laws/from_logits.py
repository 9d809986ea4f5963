"""The functions that turn logits into distributions, for target and drafter alike."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Final, NamedTuple

import torch
from jaxtyping import Float, Float64, Int64
from torch import Tensor

from monge.core.errors import NonFiniteLogitsError
from monge.core.sampling_rules import SamplingRules
from monge.laws.law import (
    Law,
    SparseLaw,
    every_token,
    one_hot,
    places_of,
    sparse_part,
    trusted_law,
)
from monge.laws.lazy_laws import can_score, scored_laws
from monge.laws.top_p import most_probable_ids

SMALLEST_SHARE: Final = 1e-300
"""The `min_p` of rules that keep some tokens only: what is less probable may be 0 on another machine."""
KINDS: Final = ("greedy", "sampled", "truncated")
"""Kinds of sampling rules: the point mass, a temperature, and rules that leave tokens out."""


class RuleRows(NamedTuple):
    """The sampling rules of several requests, as numbers.

    Attributes:
        numbers: Temperature, top-k, top-p and min-p of each request.
        num_sorted: How many of the largest logits the rules compare; `None` if none leaves tokens
            out.
    """

    numbers: Float64[Tensor, "four batch"]
    num_sorted: int | None


def rule_rows(rules: Sequence[SamplingRules], logits: Float[Tensor, "*rows vocab"]) -> RuleRows:
    """Return the rules of requests, which are all greedy or none, on the device of their logits."""
    vocab, num_sorted = logits.shape[-1], None
    table = [(each.temperature, each.top_k or vocab, each.top_p, each.min_p) for each in rules]
    if any(each.truncates for each in rules):
        largest = max(each.top_k or 0 for each in rules)
        # A power of two, for fewer programs to record.
        power = 1 << (largest - 1).bit_length() if largest else 0
        num_sorted = vocab if any(each.top_p < 1 for each in rules) else min(power, vocab)
    numbers = torch.tensor(table, dtype=torch.float64).t()
    return RuleRows(numbers.to(logits.device, non_blocking=True), num_sorted)


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
    heat = rules.temperature
    if rules.top_k is not None and rules.top_k >= logits.shape[-1]:
        rules = replace(rules, top_k=None)
    if heat == 0:
        return [
            one_hot(place, logits.device) if math.isfinite(largest) else None
            for largest, place in _largest(logits)
        ]
    if can_score(logits, heat):
        scored = scored_laws(logits, heat)
        if not rules.truncates:
            return [*scored]
        kept = rules.top_k, rules.top_p, max(rules.min_p, SMALLEST_SHARE)
        return [
            # Where rounding could decide, the plain law does.
            law and (law.truncated(*kept) or _truncated(row, rules))
            for row, law in zip(logits, scored, strict=True)
        ]
    if rules.truncates and logits.is_cpu:
        return [
            _truncated(row, rules, largest) if math.isfinite(largest) else None
            for row, (largest, _) in zip(logits, _largest(logits), strict=True)
        ]
    if rules.truncates:
        probs = probs_from_logits(logits[None], rule_rows([rules], logits))[0]
    elif heat == 1:
        probs = torch.softmax(logits, dim=-1, dtype=torch.float64)
    else:
        probs = torch.softmax(_scores(logits, heat), dim=-1)
    firsts = probs[:, 0].tolist()  # a bad logit makes every mass of its row NaN
    # The masses are not summed again, which would take as long as a decision.
    laws = [trusted_law(row) for row in probs]
    return [
        None if math.isnan(first) else law.sparse() if rules.truncates else law
        for first, law in zip(firsts, laws, strict=True)
    ]


def probs_from_logits(
    logits: Float[Tensor, "batch nodes vocab"], rules: RuleRows
) -> Float64[Tensor, "batch nodes vocab"]:
    """Return the laws of several requests, none of them greedy; nothing waits for a device.

    A row whose logits are not finite, or all -inf, is NaN.
    """
    numbers, num_sorted = rules
    heat, top_k, top_p, min_p = numbers[..., None, None]
    scores = _scores(logits, heat)
    if num_sorted is None:
        return scores.softmax(-1)
    vocab, order = logits.shape[-1], None
    if num_sorted:
        if num_sorted < vocab:
            ordered = logits.topk(num_sorted).values
        else:
            ordered, order = logits.sort(dim=-1, descending=True, stable=True)
        place = top_k.long().clamp(1, num_sorted) - 1
        least = ordered.gather(-1, place.expand(*logits.shape[:-1], 1))
        scores = torch.where((logits < least) & (top_k < vocab), -torch.inf, scores)
    probs = scores.softmax(-1)
    if order is not None:
        masses = probs.gather(-1, order)
        before = masses.cumsum(-1) - masses
        # The most probable token always stays, whatever the rounding of the running sum.
        is_kept = (before < top_p).index_fill(-1, torch.zeros_like(order.view(-1)[:1]), True)
        is_kept = torch.empty_like(is_kept).scatter(-1, order, is_kept) | (top_p >= 1)
        probs = torch.where(is_kept, probs, 0.0)
        probs = probs / probs.sum(-1, keepdim=True)
    is_cut = (min_p > 0) | (top_k < vocab) | (top_p < 1)
    share = min_p.maximum(is_cut.double() * SMALLEST_SHARE)
    probs = torch.where(probs < share * probs.amax(-1, keepdim=True), 0.0, probs)
    return probs / probs.sum(-1, keepdim=True)


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
