"""Laws by machine code: the masses, sums, draws and selections of the plain laws, within rounding."""

import pickle
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from lab.acceptance.given_candidates import OptimalGivenCandidates
from monge.backends.cpu.law_masses import load_law_masses
from monge.core.errors import LawError
from monge.core.sampling_rules import SamplingRules
from monge.draft.tree.children import way_of_drawing
from monge.laws import lazy_laws
from monge.laws.draws import TapeDraws
from monge.laws.from_logits import law_from_logits, laws_from_logits, probs_from_logits, rule_rows
from monge.laws.law import DenseLaw, Law, SparseLaw, renamed
from monge.laws.lazy_laws import Excess, LazyLaw
from monge.laws.proposal import Iid
from monge.verify import functional
from monge.verify.base import as_verifier
from monge.verify.block import Block
from monge.verify.functional import (
    DraftLaws,
    Verified,
    block,
    on_host,
    sample_and_match,
    speculative_sampling,
)
from monge.verify.layer import Layer
from monge.verify.problem import NodeProblem
from monge.verify.recursive_rejection import RecursiveRejection
from monge.verify.recursive_rejection_without_replacement import (
    RecursiveRejectionWithoutReplacement,
)
from monge.verify.sample_and_match import SampleAndMatch
from monge.verify.speculative_sampling import SpeculativeSampling
from monge.verify.traversal import Traversal
from tests.verify.whole_trees import Tables, random_tables, text_error

RULES = (
    SamplingRules(),
    SamplingRules(temperature=0.7),
    SamplingRules(temperature=0.01),
    SamplingRules(top_p=0.9),
    SamplingRules(top_k=3),
    SamplingRules(min_p=0.05),
    SamplingRules(top_k=300, top_p=0.9),
    SamplingRules(temperature=0.7, top_k=40, top_p=0.9, min_p=0.01),
)
SIZES = (1, 2, 7, 8, 9, 1023, 1024, 1025, 5000)
ROWS = st.tuples(
    st.sampled_from(("rough", "coarse", "peaked", "masked", "equal")),
    st.sampled_from(SIZES),
    st.integers(0, 2**32 - 1),
)


@pytest.fixture(autouse=True, scope="module")
def machine_code():
    load_law_masses()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lazy_laws, "_LEAST", 1)
        yield


def row(chosen, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    kind, size, seed = chosen
    rng = np.random.default_rng(seed)
    values = rng.normal(size=size)
    if kind == "coarse":
        values = rng.integers(-2, 3, size) / 2
    elif kind == "peaked":
        values = values * 3 + 20 * (rng.random(size) < 0.01)
    elif kind == "masked":
        values[rng.random(size) < 0.8] = -np.inf
        values[rng.integers(size)] = 1.0
    elif kind == "equal":
        values[:] = 0.3
    return torch.from_numpy(values).to(dtype)


def both(scores: torch.Tensor, rules: SamplingRules) -> tuple[Law, Law]:
    """The plain law, which float64 scores have, and that of machine code."""
    (plain,) = laws_from_logits(scores.double()[None], rules)
    (coded,) = laws_from_logits(scores[None], rules)
    assert plain is not None
    assert coded is not None
    return plain, coded


def near(value: float, other: float) -> bool:
    return abs(value - other) <= 1e-12


def assert_equal_draws(plain: Law, coded: Law, rng: np.random.Generator) -> None:
    """Positions that are not within rounding of the end of an interval give one token."""
    part = plain.sparse()
    ends = part.probs.cumsum(0).numpy()
    for position in (0.0, *rng.random(20).tolist(), 1 - 2**-53):
        token = coded.quantile(position)
        assert part.prob(token) > 0 or ends[-1] == 0
        if np.abs(ends / ends[-1] - position).min() > 1e-12:
            assert token == plain.quantile(position)


@given(
    chosen=ROWS,
    rules=st.sampled_from(RULES),
    dtype=st.sampled_from((torch.float32, torch.bfloat16)),
)
def test_masses_and_draws_are_those_of_the_plain_law(chosen, rules, dtype) -> None:
    plain, coded = both(row(chosen, dtype), rules)
    assert isinstance(coded, SparseLaw if rules.truncates else LazyLaw)
    every, some = torch.arange(chosen[1]), torch.arange(0, chosen[1], 7)
    lazy = [coded.prob(token) for token in some.tolist()], coded.at(some)
    assert_equal_draws(plain, coded, np.random.default_rng(chosen[2]))
    expected = plain.at(every)
    for masses in (lazy[1], torch.tensor(lazy[0], dtype=torch.float64)):
        torch.testing.assert_close(masses, expected[some], rtol=1e-12, atol=0)
    torch.testing.assert_close(coded.at(every), expected, rtol=1e-12, atol=0)
    if rules.truncates:
        assert coded.sparse().token_ids.equal(plain.sparse().token_ids)


def edge_row(kind: str, size: int, seed: int, dtype: torch.dtype) -> torch.Tensor:
    """Scores at which an order by masses, or by rounded scores, is another than that of the scores."""
    rng = np.random.default_rng(seed)
    if kind == "equal":
        values = np.full(size, -0.3)
    elif kind == "integers":
        values = rng.integers(-2, 3, size).astype(np.float64)
    elif kind == "near":  # masses that are equal, though scores are not
        values = rng.normal(size=size) * 10.0 ** rng.integers(-30, -7)
        values[rng.integers(size)] = rng.choice([0.0, 1.0, 5.0])
    elif kind == "neighbours":
        values = 3.0 + rng.integers(0, 3, size) * 2.0**-22
    elif kind == "far":  # masses of 0, and below the smallest normal number
        values = -rng.choice([0.0, 1.0, 690.0, 691.0, 700.0, 709.0, 720.0, 740.0, 800.0], size)
    else:
        values = np.where(rng.random(size) < 0.5, -rng.random(size) * 2e3, -np.inf)
    values[rng.integers(size)] = max(0.0, values.max())
    return torch.from_numpy(values).to(dtype)


@given(
    kind=st.sampled_from(("equal", "integers", "near", "neighbours", "far", "farther")),
    size=st.sampled_from((2, 9, 300, 3000)),
    seed=st.integers(0, 2**32 - 1),
    dtype=st.sampled_from((torch.float32, torch.bfloat16)),
    temperature=st.sampled_from((1.0, 0.7, 3.0, 1e-3, 1e6)),
    top_k=st.sampled_from((None, 1, 2, 5, 200)),
    top_p=st.sampled_from((1.0, 0.5, 0.9, 0.3333, 0.999, 1 - 1e-9, 1 - 2**-53, 1e-300)),
    min_p=st.sampled_from((0.0, 0.05, 1.0)),
)
@example("near", 2, 3134603515, torch.bfloat16, 1e-3, 200, 0.5, 0.05)
@example("near", 300, 150792111, torch.float32, 3.0, None, 0.9, 0.05)
@example("near", 300, 2288336450, torch.bfloat16, 1.0, 5, 1 - 1e-9, 0.0)
@example("far", 300, 3466276464, torch.float32, 1.0, 200, 1.0, 0.0)
def test_tokens_are_kept_in_the_order_of_scores_then_of_ids(
    kind, size, seed, dtype, temperature, top_k, top_p, min_p
) -> None:
    """By machine code, by selection on the host, and by the sort of a device."""
    if top_k is None and top_p == 1 and min_p == 0:
        top_p = 0.7
    rules = SamplingRules(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    scores = edge_row(kind, size, seed, dtype)
    (coded,) = laws_from_logits(scores[None], rules)
    kept = coded.sparse().token_ids.tolist()
    order = scores.sort(descending=True, stable=True).indices
    assert kept == order[: len(kept)].sort().values.tolist()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lazy_laws, "_KERNELS", {})
        (plain,) = laws_from_logits(scores[None], rules)
    alone = probs_from_logits(scores[None, None], rule_rows([rules], scores))[0, 0]
    others = [rules, SamplingRules(top_p=0.9), SamplingRules(min_p=0.1)]
    together = probs_from_logits(scores.expand(3, 1, -1), rule_rows(others, scores))[0, 0]
    assert plain.sparse().token_ids.tolist() == kept
    for probs in (alone, together):
        assert probs.nonzero()[:, 0].tolist() == kept


def of_a_few(law: Law, size: int) -> Law:
    """A draft law over every third token, named in the vocabulary."""
    ids = torch.arange(0, size, 3)
    masses = law.at(ids)
    return renamed(DenseLaw(masses / masses.sum()), ids) if float(masses.sum()) > 0 else law


@given(
    chosen=ROWS,
    kind=st.sampled_from(("rough", "coarse", "peaked", "equal")),
    scale=st.sampled_from((1.0, 0.7, 1e-3)),
    way=st.sampled_from(("scores", "masses", "some", "few")),
)
def test_what_a_law_has_above_another_one(chosen, kind, scale, way) -> None:
    size = chosen[1]
    (p, coded), (q, other) = (
        both(row(each), SamplingRules(temperature=0.8))
        for each in (chosen, (kind, size, chosen[2] + 1))
    )
    if way != "scores":
        other = q
    if way in {"some", "few"}:
        other = q = q.sparse() if way == "some" else of_a_few(q, size)
    plain, lazy = Excess(scale, p, q), Excess(scale, coded, other)
    assert near(plain.mass, lazy.mass)
    if plain.mass < 1e-9:
        return
    assert isinstance(lazy.law, LazyLaw)
    every = torch.arange(size)
    assert_equal_draws(plain.law, lazy.law, np.random.default_rng(chosen[2]))
    atol = 1e-12 / plain.mass
    torch.testing.assert_close(lazy.law.at(every), plain.law.at(every), rtol=0, atol=atol)
    # What is left after a second rejection.
    twice, again = Excess(1.0, plain.law, q), Excess(1.0, lazy.law, other)
    assert abs(twice.mass - again.mass) <= 10 * atol


def test_nothing_is_left_of_equal_laws() -> None:
    scores = row(("rough", 3000, 1))
    (p,), (q,) = laws_from_logits(scores[None], RULES[0]), laws_from_logits(scores[None], RULES[0])
    assert p.excess_over(q) is None
    assert Excess(1.0, p, q).law is p
    for other in (q.sparse(), DenseLaw(q.probs)):
        rest = Excess(1.0, p, other)
        assert near(rest.mass, 0.0)
        assert 0 <= rest.law.quantile(0.5) < 3000, "rounding alone brings a caller here"


@pytest.mark.parametrize("rules", RULES)
def test_scores_that_make_no_law(rules) -> None:
    rows = torch.randn(5, 2000)
    rows[0, 3], rows[1, 1999], rows[2], rows[3, :1500] = np.nan, np.inf, -np.inf, -np.inf
    laws = laws_from_logits(rows, rules)
    assert [law is None for law in laws] == [True, True, True, False, False]


def test_laws_of_other_vocabularies_are_refused() -> None:
    (p,), (q,) = (laws_from_logits(torch.zeros(1, size), RULES[0]) for size in (2000, 2001))
    for other in (q, DenseLaw(q.probs), q.sparse(), q.sparse().without(0)):
        with pytest.raises(LawError, match="laws over 2000 and 2001 tokens cannot be compared"):
            _ = Excess(1.0, p, other).mass


def test_a_law_is_the_same_with_more_threads_and_after_pickling() -> None:
    scores, other = torch.randn(2, 300_000, generator=torch.Generator().manual_seed(1))
    known = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        (p,), (q,) = (
            laws_from_logits(scores[None], RULES[1]),
            laws_from_logits(other[None], RULES[0]),
        )
        rest = Excess(0.9, p, q)
        known.append(
            (p.prob(7), p.quantile(0.4), rest.mass, rest.law.quantile(0.6), tuple(p.probs.tolist()))
        )
    torch.set_num_threads(1)
    assert known[0] == known[1]
    copy = pickle.loads(pickle.dumps(rest.law))
    assert copy.quantile(0.6) == known[0][3]


def test_the_plain_laws_stay_without_machine_code(monkeypatch) -> None:
    (coded,) = laws_from_logits(torch.zeros(1, 9), RULES[0])
    monkeypatch.setattr(lazy_laws, "_KERNELS", {})
    (plain,) = laws_from_logits(torch.zeros(1, 9), RULES[0])
    assert type(plain) is DenseLaw
    assert coded.quantile(0.5) == plain.quantile(0.5), "a law goes on as it began"


CHAINS = {
    block: on_host.block,
    speculative_sampling: on_host.speculative_sampling,
    sample_and_match: on_host.sample_and_match,
}
SHAPE = ((1,), (2,), (3,), ())


def verdicts_of(program, p, token_ids, q, uniforms) -> Verified:
    arguments = {"probs": p, "token_ids": token_ids, "uniforms": uniforms}
    is_walk = program in {sample_and_match, on_host.sample_and_match}
    return program(**arguments, **({"children": SHAPE} if is_walk else {"draft": DraftLaws(q)}))


def chains_of(seed: int, dtype: torch.dtype):
    """Chains of up to three tokens of a vocabulary with a last block that is not full."""
    draws = torch.Generator().manual_seed(seed)
    p, q = (torch.randn(9, 4, 2100, generator=draws).softmax(2, dtype=dtype) for _ in range(2))
    q = 0.3 * p + 0.7 * q
    token_ids = q.flatten(0, 1).multinomial(1, generator=draws).view(9, 4).roll(1, 1)
    is_missing = torch.arange(4) > torch.randint(4, (9, 1), generator=draws)
    token_ids = token_ids.masked_fill(is_missing, -1)
    p, q = (part.masked_fill(is_missing[..., None], torch.nan) for part in (p, q))
    return p, token_ids, q, torch.rand(9, 4, generator=draws, dtype=torch.float64)


@pytest.mark.usefixtures("unchecked_types")
@pytest.mark.parametrize("program", CHAINS)
@given(seed=st.integers(0, 2**32 - 1), dtype=st.sampled_from((torch.float32, torch.float64)))
def test_chains_are_decided_on_masses_where_they_lie(program, seed, dtype) -> None:
    """Rows of nodes that a chain does not have are not read."""
    arguments = chains_of(seed, dtype)
    with pytest.MonkeyPatch.context() as patch:
        coded = verdicts_of(CHAINS[program], *arguments)
        assert coded is not None
        patch.setattr(lazy_laws, "_KERNELS", {})
        plain = verdicts_of(program, *arguments)
    assert all(map(torch.equal, coded, plain))


@pytest.mark.parametrize("program", [block, speculative_sampling])
@pytest.mark.parametrize("bad", ["p", "q", "drafted"])
def test_laws_that_are_none_are_left_to_the_program(program, bad) -> None:
    p, token_ids, q, uniforms = chains_of(0, torch.float64)
    row = int((token_ids[:, 1] >= 0).nonzero()[0])
    if bad == "drafted":
        q[row, 0, token_ids[row, 1]] = 0.0
    else:
        (p if bad == "p" else q)[row, 0] = torch.nan
    coded = verdicts_of(program, p, token_ids, q, uniforms)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lazy_laws, "_KERNELS", {})
        plain = verdicts_of(program, p, token_ids, q, uniforms)
    assert all(map(torch.equal, coded, plain))
    assert bad != "p" or plain.next_token[row] == -1


@pytest.mark.usefixtures("unchecked_types")
def test_other_trees_and_laws_of_a_few_tokens_are_left_to_the_program() -> None:
    p, _, q, uniforms = chains_of(0, torch.float64)
    p, q = (part.nan_to_num(1 / 2100) for part in (p, q))
    token_ids = torch.tensor([[0, 2099, 1, 2]] * 9)
    tree = ((1, 2), (3,), (), ())
    given = {"probs": p, "token_ids": token_ids, "uniforms": uniforms}
    assert on_host.sample_and_match(**given, children=tree) is None
    p = p.scatter(2, torch.tensor([1]).expand(9, 4, 1), 1e6)
    path = sample_and_match(p / p.sum(-1, keepdim=True), token_ids, tree, uniforms).path
    assert path[:, 0].eq(2).all(), "the second child"
    empty = given | {"token_ids": token_ids.new_full((9, 4), -1)}
    assert block(**empty, draft=DraftLaws(q)).num_accepted.tolist() == [0] * 9
    ids = torch.arange(5).expand(9, 4, 5)
    few = DraftLaws(torch.full((9, 4, 5), 0.2, dtype=torch.float64), ids)
    assert on_host.block(**given, draft=few) is None


@given(seed=st.integers(0, 2**32 - 1), size=st.sampled_from((10, 5000)), heat=st.floats(0.05, 20.0))
def test_a_softmax_in_float32_is_near_the_law(seed, size, heat) -> None:
    """The bound of `docs/functional.md`."""
    logits = torch.randn(1, size, generator=torch.Generator().manual_seed(seed)) / heat
    exact = logits.softmax(1, dtype=torch.float64)
    declared = logits.softmax(1).double()
    declared /= declared.sum(1, keepdim=True)
    assert 0.5 * (declared - exact).abs().sum() < 1e-6


@pytest.mark.usefixtures("unchecked_types")
@given(chosen=ROWS, dtype=st.sampled_from((torch.float32, torch.bfloat16)))
def test_rows_of_laws_are_written_request_by_request(chosen, dtype) -> None:
    """Each under its own rules; logits that make no law give NaN."""
    logits = row(chosen, dtype).expand(len(RULES) + 2, 1, -1).clone()
    logits[-1] = torch.nan
    own = [*RULES, SamplingRules(temperature=0), SamplingRules()]
    rules = {
        "temperature": torch.tensor([float(rule.temperature) for rule in own]),
        "top_k": torch.tensor([rule.top_k or logits.shape[2] for rule in own]),
        "top_p": torch.tensor([float(rule.top_p) for rule in own]),
        "min_p": torch.tensor([float(rule.min_p) for rule in own]),
    }
    coded = functional.probs_from_logits(logits, **rules)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lazy_laws, "_KERNELS", {})
        plain = functional.probs_from_logits(logits, **rules)
    torch.testing.assert_close(coded, plain, rtol=0, atol=1e-12, equal_nan=True)
    for of_request, *pair in zip(own, coded, plain, strict=True):
        # Without rules that leave tokens out, subnormal masses are 0 in machine code only.
        least = 0.0 if of_request.truncates else 1e-300
        assert torch.equal(*(masses > least for masses in pair))


@given(
    st.lists(
        st.floats(0.0, allow_nan=False) | st.sampled_from((0.0, 5e-324, 0.5, np.inf)), max_size=40
    )
)
def test_the_order_of_numbers_is_that_of_a_stable_sort(values) -> None:
    numbers = np.array(values * 3)
    assert lazy_laws.stable_order(numbers).tolist() == np.argsort(numbers, kind="stable").tolist()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lazy_laws, "_KERNELS", {})
        plain = lazy_laws.stable_order(numbers)
    assert plain.tolist() == lazy_laws.stable_order(numbers).tolist()


@pytest.mark.usefixtures("unchecked_types")
@given(chosen=ROWS, scale=st.sampled_from((1.0, 0.4)))
def test_the_flow_to_a_single_draw_writes_no_masses(chosen, scale) -> None:
    p, q = (laws_from_logits(row(chosen)[None] * heat, RULES[0])[0] for heat in (1.0, 0.5))
    assert isinstance(p, LazyLaw)
    x = q.quantile(0.3)
    lazy, plain = (
        SpeculativeSampling().flow(
            NodeProblem(
                target_law=law,
                scale=scale,
                proposal=Iid(q),
                candidates=(x,),
                draws=TapeDraws([]),
            )
        )
        for law in (p, DenseLaw(p.probs))
    )
    assert lazy.accept_probs == pytest.approx(plain.accept_probs, abs=1e-12)
    assert lazy.total == pytest.approx(plain.total, abs=1e-12)
    assert torch.equal(lazy.token_ids, plain.token_ids)
    torch.testing.assert_close(lazy.masses, plain.masses, rtol=0, atol=1e-12)
    laws = [flow.left(law, scale) for flow, law in ((lazy, p), (plain, DenseLaw(p.probs)))]
    if 1.0 - plain.total > 1e-6:
        torch.testing.assert_close(laws[0].probs, laws[1].probs, rtol=0, atol=1e-9)


@pytest.mark.parametrize("top_p", [0.8957, 0.8962, 0.8968])
def test_top_p_keeps_tokens_of_small_masses_where_those_of_large_ones_nearly_reach_it(
    top_p: float,
) -> None:
    """449 tokens have 0.8959 together, each of the others 1e-5; a sum near `top_p` does not reach it."""
    logits = torch.tensor([[5.0] * 449 + [0.0] * 7743])
    masses = logits[0].double().softmax(0)
    count = int(
        (masses.cumsum(0) - masses < top_p).sum()
    )  # equal masses stay in order of their ids
    (law,) = laws_from_logits(logits, SamplingRules())
    kept = law.truncated(None, top_p, 0.0)
    assert kept is not None
    assert kept.token_ids.tolist() == list(range(count))


def test_masses_at_the_boundary_of_a_rule_are_decided_by_the_plain_law() -> None:
    """They are exact in binary, so rounding would decide in the machine code."""
    (law,) = laws_from_logits(torch.zeros(1, 4096), RULES[0])
    for rules, count in (
        (SamplingRules(top_p=0.5), 2048),
        (SamplingRules(min_p=1.0), 4096),
        (SamplingRules(top_k=1), 4096),
    ):
        assert law.truncated(rules.top_k, rules.top_p, rules.min_p) is None or rules.top_k
        (kept,) = laws_from_logits(torch.zeros(1, 4096), rules)
        assert kept.sparse().token_ids.tolist() == list(range(count))


@pytest.mark.usefixtures("unchecked_types")
def test_tokens_and_rows_beyond_the_vocabulary_are_refused() -> None:
    (law,) = laws_from_logits(torch.zeros(1, 2000), RULES[0])
    with pytest.raises(LawError, match="law over 2000 tokens, asked about token 2000"):
        law.at(torch.tensor([3, 2000]))
    (row,) = lazy_laws.laws_of_masses(torch.ones(1, 2, 2000), [1])
    assert [law.prob(token) for law in row for token in (-1, 1999, 2000)] == [0.0, 1 / 2000, 0.0]
    masses = torch.ones(1, 2, 2000)
    assert lazy_laws.can_read(masses)
    for wrong in (masses.half(), masses.mT, masses[:, :, ::2]):
        assert not lazy_laws.can_read(wrong)


def test_a_masked_token_is_never_drawn() -> None:
    """Not even at the last position below one."""
    scores = torch.full((1, 4096), -torch.inf)
    scores[0, 1500:2600] = 0.0
    (law,) = laws_from_logits(scores, RULES[0])
    assert law.quantile(0.0) == 1500
    assert law.quantile(1 - 2**-53) == 2599
    assert law.prob(0) == 0.0
    assert law.probs.count_nonzero() == 1100


class ScoredTables(Tables):
    """Laws by machine code, which meet the law of a plain softmax of the same scores."""

    def scores(self, path) -> torch.Tensor:
        return torch.tensor(self.targets[path]).log().float()

    def draft(self, path) -> Law:
        return law_from_logits(torch.tensor(self.drafts[path]).log().float(), RULES[0])

    def laws(self, tree) -> list[Law]:
        paths = map(tree.path_tokens, range(tree.num_nodes))
        return [law_from_logits(self.scores(path), RULES[1]) for path in paths]

    def target_masses(self, path) -> np.ndarray:
        return law_from_logits(self.scores(path).double(), RULES[1]).probs.numpy()


CASES = [
    (Block(), "iid", (1, 1)),
    (SpeculativeSampling(), "iid", (1, 1)),
    (RecursiveRejection(), "iid", (2, 1)),
    (RecursiveRejectionWithoutReplacement(), "without_replacement", (2, 1)),
    (Traversal(), "without_replacement", (2, 1)),
    (Layer(RecursiveRejection()), "iid", (2, 1)),
    (OptimalGivenCandidates(), "iid", (2, 1)),
    (SampleAndMatch(), "top", (2, 1)),
]


def law_error_of(rule, kind, widths) -> float:
    known = random_tables(vocab=3, depth=2, seed=1)
    tables = ScoredTables(known.targets, known.drafts)

    def children(path):
        width = widths[len(path)] if len(path) < 2 else 0
        return way_of_drawing(kind).propose(tables.draft(path), width) if width else None

    return text_error(as_verifier(rule), tables, children, 3)


@pytest.mark.parametrize(("rule", "kind", "widths"), CASES, ids=str)
def test_the_law_of_texts_is_the_target_s(rule, kind, widths) -> None:
    assert law_error_of(rule, kind, widths) < 1e-12


@pytest.mark.parametrize(("rule", "kind", "widths"), CASES[:5], ids=str)
def test_a_wrong_excess_is_noticed(rule, kind, widths, monkeypatch) -> None:
    """Of half the draft law, normalised."""

    def halved(right, p, q, *rest):
        if q is not None:
            q = type(q).from_buffer_copy(q)
            q.weight /= 2
        return right(p, q, *rest)

    for name in ("masses", "excess"):
        monkeypatch.setitem(lazy_laws._KERNELS, name, partial(halved, lazy_laws._KERNELS[name]))
    assert law_error_of(rule, kind, widths) > 1e-4


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_tokens_of_almost_no_mass_are_left_out_where_a_rule_is_in_force(dtype):
    logits = torch.tensor([0.0, -690.0, -692.0], dtype=dtype)  # 2e-300 and 3e-301 times the largest
    law = law_from_logits(logits, SamplingRules(min_p=5e-324)).sparse()
    assert law.token_ids.tolist() == [0, 1]
    probs = functional.probs_from_logits(logits[None, None], min_p=5e-324)
    assert probs.nonzero()[:, 2].tolist() == [0, 1]
