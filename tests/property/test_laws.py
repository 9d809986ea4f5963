"""Laws: what they refuse, what they preserve, and that they are the laws `transformers` samples from."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from monge.core.errors import LawError, NonFiniteLogitsError, OptionError
from monge.core.sampling_rules import SamplingRules
from monge.laws.from_logits import law_from_logits, laws_from_logits
from monge.laws.law import MASS_TOLERANCE, DenseLaw, SparseLaw, one_hot, residual
from tests.kit.laws import total_variation
from tests.kit.strategies import dense_law, weight_pairs

LOGITS = st.lists(st.integers(-12, 12), min_size=3, max_size=12)


def vector(law: SparseLaw | DenseLaw, size: int) -> torch.Tensor:
    return law.at(torch.arange(size))


@given(
    values=LOGITS,
    temperature=st.sampled_from([0.3, 0.7, 1.0, 2.0]),
    top_k=st.sampled_from([None, 1, 2, 5]),
    top_p=st.sampled_from([1.0, 0.95, 0.6]),
    min_p=st.sampled_from([0.0, 0.1, 0.5]),
)
def test_the_law_is_that_of_transformers(values, temperature, top_k, top_p, min_p):
    """Distinct logits: among equal ones `transformers`' top-p keeps whichever its sort puts first."""
    logits = torch.tensor(sorted(set(values)), dtype=torch.float64) / 4
    warpers = LogitsProcessorList([TemperatureLogitsWarper(temperature)])
    if top_k is not None:
        warpers.append(TopKLogitsWarper(top_k))
    if top_p < 1:
        warpers.append(TopPLogitsWarper(top_p))
    if min_p > 0:
        warpers.append(MinPLogitsWarper(min_p))
    theirs = torch.softmax(
        warpers(torch.zeros(1, 1, dtype=torch.long), logits[None].clone())[0], dim=-1
    )
    rules = SamplingRules(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    ours = vector(law_from_logits(logits, rules), logits.numel())
    torch.testing.assert_close(ours, theirs, atol=1e-12, rtol=0)


@given(values=LOGITS)
def test_temperature_zero_is_the_limit(values):
    logits = torch.tensor(values, dtype=torch.float32)
    law = law_from_logits(logits, SamplingRules(temperature=0))
    assert law.top(1) == (int(logits.argmax()),)
    assert law.prob(int(logits.argmax())) == 1.0
    if values.count(max(values)) == 1:
        assert (
            total_variation(law, law_from_logits(logits, SamplingRules(temperature=1e-300))) == 0.0
        )


def test_top_p_and_min_p_at_their_boundary() -> None:
    """Masses that are exact in binary: the boundary is met, and not missed by rounding."""
    logits = torch.zeros(4, dtype=torch.float64)

    def kept(**settings: float) -> list[int]:
        return law_from_logits(logits, SamplingRules(**settings)).sparse().token_ids.tolist()

    assert kept(top_p=0.5) == [0, 1]  # two tokens reach it, and no third one is needed
    assert kept(top_p=0.5 + 2**-52) == [0, 1, 2]
    assert kept(top_p=0.25) == [0]
    assert kept(min_p=1.0) == [0, 1, 2, 3]  # as likely as the most probable one is enough


def test_ties_at_the_last_of_top_k_all_stay():
    law = law_from_logits(torch.tensor([1.0, 3.0, 1.0, 0.0]), SamplingRules(top_k=2)).sparse()
    assert law.token_ids.tolist() == [0, 1, 2]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("size", [2, 50_000])
def test_every_float_type_gives_a_law_in_float64(dtype, size):
    logits = torch.linspace(-20, 20, size).to(dtype)
    law = law_from_logits(logits, SamplingRules(temperature=0.9))
    assert law.sparse().probs.dtype == torch.float64


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_non_finite_logits_are_an_error(bad):
    with pytest.raises(NonFiniteLogitsError, match="1 of 3 are not finite"):
        law_from_logits(torch.tensor([0.0, bad, 1.0]), SamplingRules())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_greedy_laws_take_the_first_of_the_largest_in_every_type(dtype):
    rows = torch.tensor(
        [
            [1.0, 2.0, 2.0],
            [-math.inf, 0.0, -1.0],
            [0.0, math.nan, 1.0],
            [0.0, 1.0, math.inf],
            [-math.inf] * 3,
        ],
        dtype=dtype,
    )
    laws = laws_from_logits(rows, SamplingRules(temperature=0))
    assert [law and law.top(1) for law in laws] == [(1,), (1,), None, None, None]
    for row, law in zip(rows, laws, strict=True):
        if law is None:
            with pytest.raises(NonFiniteLogitsError):
                law_from_logits(row, SamplingRules(temperature=0))
        else:
            assert law_from_logits(row, SamplingRules(temperature=0)) is law


@pytest.mark.parametrize(
    "rules", [SamplingRules(), SamplingRules(temperature=0.7), SamplingRules(top_k=5)]
)
@pytest.mark.parametrize("size", [3, 1000, 50_000])
def test_a_row_has_the_same_law_alone_and_among_others(rules, size):
    rows = 4.0 * torch.randn(3, size, generator=torch.Generator().manual_seed(size))
    for row, law in zip(rows, laws_from_logits(rows, rules), strict=True):
        assert law is not None
        alone = law_from_logits(row, rules)
        assert torch.equal(vector(alone, size), vector(law, size))


def test_logits_that_forbid_everything_are_an_error():
    with pytest.raises(NonFiniteLogitsError, match="largest value is -inf"):
        law_from_logits(torch.full((3,), -math.inf), SamplingRules(temperature=0))


def test_forbidden_tokens_have_no_mass():
    law = law_from_logits(torch.tensor([0.0, -math.inf, 1.0]), SamplingRules())
    assert law.prob(1) == 0.0
    assert law.sparse().token_ids.tolist() == [0, 2]


@given(pair=weight_pairs())
def test_residual_and_total_variation(pair):
    p, q = map(dense_law, pair)
    excess = (p.probs - q.probs).clamp_min(0)
    distance = float(excess.sum())
    for left in (p, p.sparse()):
        for right in (q, q.sparse()):
            assert total_variation(left, right) == pytest.approx(distance, abs=1e-15)
            rest = left.excess_over(right)
            assert (rest is None) == (distance == 0.0)
            expected = p.probs if rest is None else excess / distance
            torch.testing.assert_close(
                vector(residual(left, right), len(p.probs)), expected, atol=1e-15, rtol=0
            )


@given(pair=weight_pairs(), position=st.floats(0, 1, exclude_max=True))
def test_quantiles_never_fall_on_mass_zero(pair, position):
    p, _ = map(dense_law, pair)
    token = p.quantile(position)
    assert p.prob(token) > 0
    assert token == p.sparse().quantile(position)
    below = float(p.probs[:token].sum())
    assert below <= position + 1e-15
    assert position < below + p.prob(token) + 1e-15


@pytest.mark.parametrize("rules", [SamplingRules(), SamplingRules(temperature=0)])
def test_logits_of_a_network_that_is_being_trained_are_drawn_from_too(rules):
    law = law_from_logits(torch.tensor([0.0, 1.0, 5.0], requires_grad=True), rules)
    assert law.quantile(0.5) == 2


def test_the_last_position_below_one_is_covered():
    law = dense_law([1] * 49)  # forty-nine times 1/49 does not sum to one in floating point
    assert law.quantile(math.nextafter(1.0, 0.0)) == 48


@pytest.mark.parametrize(
    ("masses", "message"),
    [
        ([0.5, 0.6], "sum 1.1"),
        ([0.5, 0.4], "sum 0.9"),
        ([1.5, -0.5], "smallest -0.5"),
        ([math.nan, 1.0], "nan"),
    ],
)
def test_what_is_no_law_is_refused(masses, message):
    with pytest.raises(LawError, match=message):
        DenseLaw(torch.tensor(masses, dtype=torch.float64))


def test_sparse_laws_hold_increasing_tokens_with_mass():
    half = torch.tensor([0.5, 0.5], dtype=torch.float64)
    with pytest.raises(LawError, match="strictly increasing"):
        SparseLaw(torch.tensor([3, 3]), half)
    with pytest.raises(LawError, match="must be positive"):
        SparseLaw(torch.tensor([1, 2]), torch.tensor([0.0, 1.0], dtype=torch.float64))
    with pytest.raises(LawError, match="two vectors"):
        SparseLaw(torch.tensor([], dtype=torch.int64), torch.tensor([], dtype=torch.float64))
    assert one_hot(7).prob(7) == 1.0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": -0.1}, "temperature must be finite and >= 0.*got -0.1"),
        ({"temperature": math.nan}, "temperature must be finite"),
        ({"top_k": 0}, "top_k must be at least 1.*got 0"),
        ({"top_p": 0.0}, r"top_p must lie in \(0, 1\]; got 0.0"),
        ({"top_p": 1.5}, r"top_p must lie in \(0, 1\]; got 1.5"),
        ({"min_p": -0.5}, r"min_p must lie in \[0, 1\]; got -0.5"),
    ],
)
def test_impossible_sampling_rules_are_refused(settings, message):
    with pytest.raises(OptionError, match=message):
        SamplingRules(**settings)


def test_laws_over_two_vocabularies_are_not_compared():
    p = DenseLaw(torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64))
    with pytest.raises(
        LawError, match="law over 3 tokens, asked about token 5: compare laws over one vocabulary"
    ):
        p.at(torch.tensor([1, 5]))


def test_the_tolerance_of_the_total_mass_hides_no_more_than_it_says():
    half = torch.tensor([0.5, 0.5], dtype=torch.float64)
    DenseLaw(half + torch.tensor([0.0, 0.5 * MASS_TOLERANCE], dtype=torch.float64))
    with pytest.raises(LawError, match="sum to 1"):
        DenseLaw(half + torch.tensor([0.0, 2 * MASS_TOLERANCE], dtype=torch.float64))
    largest = torch.linspace(-30, 30, 262_144, dtype=torch.float32)
    rounding = abs(float(law_from_logits(largest, SamplingRules()).sparse().probs.sum()) - 1)
    assert rounding < 1e-3 * MASS_TOLERANCE
