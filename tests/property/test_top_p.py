"""Top-p without a full sort keeps what a full sort keeps, to the last token among equal scores."""

import math

import torch
from hypothesis import example, given
from hypothesis import strategies as st

from monge.core.sampling_rules import SamplingRules
from monge.laws.from_logits import law_from_logits, probs_from_logits, rule_rows
from monge.laws.top_p import most_probable_ids
from monge.verify import functional

SIZES = (1, 2, 7, 600, 3000)
TOP_PS = (1e-300, 0.1, 0.5, 0.9, 0.999, 1 - 2**-53)


def by_sorting(probs: torch.Tensor, logits: torch.Tensor, top_p: float) -> torch.Tensor:
    order = logits.sort(descending=True, stable=True).indices
    before = probs[order].cumsum(0) - probs[order]
    return order[(before < top_p) | (before == 0)].sort().values


def sorted_law(logits: torch.Tensor, rules: SamplingRules) -> torch.Tensor:
    """The dense law of sampling rules, by full sorts."""
    scores = (logits.double() - logits.double().max()) / rules.temperature
    if rules.top_k is not None:
        least = logits.sort(descending=True).values[min(rules.top_k, len(scores)) - 1]
        scores = torch.where(logits >= least, scores, -math.inf)
    probs = scores.softmax(0)
    if rules.top_p < 1:
        is_kept = torch.zeros_like(probs, dtype=torch.bool)
        is_kept[by_sorting(probs, logits, rules.top_p)] = True
        probs = torch.where(is_kept, probs, 0.0) / probs[is_kept].sum()
    probs = torch.where(probs >= rules.min_p * probs.max(), probs, 0.0)
    return probs / probs.sum()


@st.composite
def rows(draw: st.DrawFn, size: int | None = None) -> torch.Tensor:
    """Logits of one row: peaked, flat, with many ties, a point mass, or partly forbidden."""
    size = draw(st.sampled_from(SIZES)) if size is None else size
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32 - 1)))
    noise = torch.randn(size, generator=generator)
    spread = draw(st.sampled_from([0.0, 1e-7, 1e-3, 1.0, 6.0]))
    kind = draw(
        st.sampled_from(["noise", "two values", "integers", "near", "peaks", "point", "forbidden"])
    )
    logits = spread * noise
    if kind == "two values":
        logits = spread * (noise > 0)
    elif kind == "integers":
        logits = noise.mul(2).round()
    elif kind == "near":  # masses that are equal, though scores are not
        logits = 1e-20 * noise
    elif kind == "peaks":
        logits[: size // 100 + 1] += 8.0
    elif kind == "point":
        logits[size // 2] = 1e4
    elif kind == "forbidden":
        logits[: size // 2] = -math.inf
    return logits.to(draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float64])))


@given(logits=rows(), top_p=st.sampled_from(TOP_PS) | st.floats(1e-6, 1, exclude_max=True))
@example(torch.zeros(1024), 0.5)  # the running sum meets it exactly, and no further token is needed
@example(torch.zeros(1024), 0.5 + 2**-52)
@example(torch.zeros(1000), 0.3)  # a sum in another order is on the other side of it
@example(torch.zeros(3000), 1e-300)
@example(torch.tensor([0.0, -800.0] * 600), 0.5)  # every second mass is 0
def test_selection_keeps_what_a_full_sort_keeps(logits, top_p):
    probs = logits.double().softmax(0)
    expected = by_sorting(probs, logits, top_p)
    assert most_probable_ids(probs, logits, top_p).tolist() == expected.tolist()
    law = law_from_logits(logits, SamplingRules(top_p=top_p)).sparse()
    assert law.token_ids.tolist() == [token for token in expected.tolist() if probs[token] > 0]


@given(logits=rows(), share=st.floats(0, 1), ulps=st.integers(-2, 2))
def test_selection_decides_at_the_very_sums_of_a_full_sort(logits, share, ulps):
    """The hardest `top_p`: sums of masses in their order, and their neighbours."""
    probs = logits.double().softmax(0)
    sums = probs[logits.sort(descending=True, stable=True).indices].cumsum(0)
    top_p = float(sums[int(share * (len(sums) - 1))])
    for _ in range(abs(ulps)):
        top_p = math.nextafter(top_p, math.copysign(math.inf, ulps))
    if top_p < 1:
        kept = most_probable_ids(probs, logits, top_p)
        assert kept.tolist() == by_sorting(probs, logits, top_p).tolist()


@given(
    logits=rows(),
    temperature=st.sampled_from([1.0, 0.7, 1e-300]),
    top_k=st.sampled_from([None, 1, 5, 1000]),
    top_p=st.sampled_from([1.0, *TOP_PS]),
    min_p=st.sampled_from([0.0, 0.05, 1.0]),
)
def test_laws_are_those_of_full_sorts(logits, temperature, top_k, top_p, min_p):
    rules = SamplingRules(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    expected = sorted_law(logits, rules)
    law = law_from_logits(logits, rules)
    together = probs_from_logits(logits[None, None], rule_rows([rules], logits))[0, 0]
    assert law.sparse().token_ids.tolist() == expected.nonzero()[:, 0].tolist()
    for probs in (law.at(torch.arange(len(logits))), together):
        torch.testing.assert_close(probs, expected, rtol=0, atol=1e-14)


@given(data=st.data(), size=st.sampled_from(SIZES[1:]))
def test_rows_of_a_batch_have_rules_of_their_own(data, size):
    """On the host by selection, and by the sort of a device."""
    logits = torch.stack([data.draw(rows(size)).double() for _ in range(4)])
    logits[3, 0] = math.nan
    shares = (0.9, 1.0, 1e-9, 0.5)
    on_host = functional.probs_from_logits(
        logits[:, None], top_p=torch.tensor(shares, dtype=torch.float64)
    )[:, 0]
    rules = [SamplingRules(top_p=share) for share in shares]
    by_device = probs_from_logits(logits[:, None], rule_rows(rules, logits))[:, 0]
    for row, expected in enumerate(map(sorted_law, logits[:3], rules)):
        for probs in (on_host[row], by_device[row]):
            assert probs.nonzero().tolist() == expected.nonzero().tolist()
            torch.testing.assert_close(probs, expected, rtol=0, atol=1e-14)
    for laws in (on_host, by_device):
        assert laws[3].isnan().all()
