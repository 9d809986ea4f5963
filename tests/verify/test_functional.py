"""Tensor programs of the rules: for equal uniforms the verdict of the object, alone, padded and in few tokens."""

import math
import subprocess
import sys
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from monge.core.sampling_rules import SamplingRules
from monge.laws.draws import TapeDraws
from monge.laws.from_logits import law_from_logits
from monge.laws.law import trusted_law
from monge.laws.proposal import Deterministic, Iid, Mixed
from monge.laws.tree import TokenTree
from monge.verify.base import as_verifier
from monge.verify.functional import (
    DraftLaws,
    Verified,
    children_of,
    exact_match,
    num_uniforms,
    probs_from_logits,
    recursive_rejection,
)
from monge.verify.recursive_rejection import RecursiveRejection
from monge.verify.sample_and_match import SampleAndMatch
from tests.engine import cuda_waits
from tests.verify.tensor_problems import (
    BELOW_ONE,
    BUSH,
    CHAIN,
    PROGRAMS,
    REGIMES,
    VOCAB,
    Problem,
    branches,
    masses,
    problem,
    told,
)

PROBLEMS = st.tuples(
    st.sampled_from(REGIMES), st.sampled_from(REGIMES), st.integers(0, 2**32 - 1), st.integers(0, 2)
)


@pytest.mark.parametrize("name", PROGRAMS)
@given(chosen=PROBLEMS)
def test_equal_uniforms_give_the_verdict_of_the_object(name: str, chosen) -> None:
    """On, and one unit beside, every threshold of every branch."""
    program, rule, kind, shapes = PROGRAMS[name]
    *regimes, seed, shape = chosen
    is_plain = kind is not Mixed or not isinstance(
        rule, RecursiveRejection
    )  # which draws once from p there
    if not is_plain and regimes[1] == "equal":
        regimes[1] = "rough"  # rejected by rounding alone, what is left of p may be a candidate
    one = problem(tuple(regimes), shapes[shape % len(shapes)], kind, seed, can_fix_all=is_plain)
    rng, verifier = np.random.default_rng(seed), as_verifier(rule)
    rest = rng.random(num_uniforms(one.children)).tolist()

    def decided(row: Sequence[float]) -> tuple[tuple[int, ...], int, int]:
        draws = TapeDraws([*row, *rest])
        verdict = verifier.verify(one.tree, one.laws, draws)
        return verdict.path, verdict.next_token, draws.num_drawn

    tapes = list[list[float]]()
    for draws, _ in branches(one, rule):
        for place, borders in enumerate(draws.borders):
            before, after = draws.inside[:place], draws.inside[place + 1 :]
            is_position = not borders and len(tapes) < 100
            values = (
                jumps(lambda value: decided([*before, value, *after]), rng)  # noqa: B023
                if is_position
                else borders
            )
            tapes += [[*before, value, *after] for value in values]
    tapes = [[*row, *rest] for row in tapes]
    assert told(one.run(program, tapes)) == list(map(decided, tapes))


def jumps(outcome: Callable[[float], object], rng: np.random.Generator) -> list[float]:
    """Uniforms at both sides of places where the outcome changes, to the last bit."""
    points = [0.0, *sorted(rng.random(3).tolist()), BELOW_ONE]
    found = list(points)
    for ends in zip(points[:-1], points[1:], strict=True):
        low, high = ends
        first = outcome(low)
        if outcome(high) != first:
            while low < (middle := (low + high) / 2) < high:
                low, high = (middle, high) if outcome(middle) == first else (low, middle)
            found += [low, high, math.nextafter(low, 0.0), math.nextafter(high, 1.0)]
    return [value for value in found if value < 1.0]


@given(seed=st.integers(0, 2**32 - 1))
def test_a_token_drawn_twice_is_tested_twice(seed: int) -> None:
    rng = np.random.default_rng(seed)
    p, q = torch.from_numpy(np.stack([masses("rough", rng), masses("rough", rng)]))
    x = int(rng.integers(VOCAB))
    tree = TokenTree(
        token_ids=(0, x),
        parents=(-1, 0),
        proposals=(Iid(trusted_law(q), 2), Deterministic()),
        candidates=((1, 1), ()),
    )
    uniforms = rng.random((20, 3))
    expected = []
    for row in uniforms.tolist():
        verdict = as_verifier(RecursiveRejection()).verify(
            tree, [trusted_law(p)] * 2, TapeDraws(row)
        )
        expected.append((verdict.path, verdict.next_token))
    found = recursive_rejection(
        p.expand(20, 2, -1),
        torch.tensor([0, x]).expand(20, -1),
        ((1, 1), ()),
        DraftLaws(q.expand(20, 2, -1)),
        torch.from_numpy(uniforms),
    )
    assert [(path, token) for path, token, _ in told(found)] == expected


@pytest.mark.parametrize("name", [name for name in PROGRAMS if name != "sample_and_match"])
def test_laws_of_a_few_tokens_give_the_verdicts_of_whole_laws(name: str) -> None:
    program, _, kind, shapes = PROGRAMS[name]
    rng = np.random.default_rng(5)
    for seed in range(40):
        one = problem(("rough", "zeros"), shapes[seed % len(shapes)], kind, seed)
        uniforms = torch.from_numpy(rng.random((30, 3 * len(one.parents))))
        size = len(uniforms)
        q = one.q.scatter(1, one.q.argmin(1, keepdim=True), 0.0)
        q = q / q.sum(1, keepdim=True)
        ids = q.argsort(-1, descending=True)[:, : VOCAB - 1]
        tokens = torch.tensor(one.token_ids)
        drafted = [
            q[parent, token] for parent, token in zip(one.parents[1:], tokens[1:], strict=True)
        ]
        if any(float(mass) == 0.0 for mass in drafted):
            continue
        whole, few = (
            program(
                one.p.expand(size, -1, -1),
                tokens.expand(size, -1),
                children_of(one.parents),
                draft,
                uniforms,
            )
            for draft in (
                DraftLaws(q.expand(size, -1, -1)),
                DraftLaws(q.gather(1, ids).expand(size, -1, -1), ids.expand(size, -1, -1)),
            )
        )
        assert told(whole) == told(few)


@given(seed=st.integers(0, 2**32 - 1))
def test_exact_match_samples_and_matches_point_masses(seed: int) -> None:
    rng = np.random.default_rng(seed)
    one = problem(("rough", "rough"), BUSH, Deterministic, seed)
    logits = torch.from_numpy(rng.integers(0, 3, (1, len(BUSH), VOCAB))).float()  # with ties
    laws = [law_from_logits(row, SamplingRules(temperature=0)) for row in logits[0]]
    verdict = as_verifier(SampleAndMatch()).verify(one.tree, laws, TapeDraws([0.5] * 9))
    ((path, token, used),) = told(
        exact_match(logits, torch.tensor([one.token_ids]), children_of(BUSH))
    )
    assert (path, token, used) == (verdict.path, verdict.next_token, 0)


def _padded(one: Problem, num_nodes: int, token_id: int = -1) -> tuple[Tensor, Tensor, Tensor]:
    """Laws and tokens of a chain, with nodes behind it that it does not have."""
    missing = num_nodes - len(one.parents)
    rows = torch.full((missing, VOCAB), 1 / VOCAB, dtype=torch.float64)
    token_ids = torch.tensor([*one.token_ids, *[token_id] * missing])
    return torch.cat([one.p, rows]), torch.cat([one.q, rows]), token_ids


def _together(name: str, chains: Sequence[Problem], rows: Tensor, padding: int = -1) -> Verified:
    size = 1 + max(len(one.parents) for one in chains)
    p, q, token_ids = map(
        torch.stack, zip(*(_padded(one, size, padding) for one in chains), strict=True)
    )
    children = children_of(range(-1, size - 1))
    return PROGRAMS[name][0](p, token_ids, children, DraftLaws(q), rows)


@pytest.mark.parametrize("name", ["block", "speculative_sampling", "sample_and_match"])
@given(seed=st.integers(0, 2**32 - 1), regimes=st.tuples(*[st.sampled_from(REGIMES)] * 2))
def test_chains_of_several_lengths_are_verified_together(name, seed, regimes) -> None:
    kind = PROGRAMS[name][2]
    chains = [
        problem(regimes, tuple(range(-1, length)), kind, seed + length)
        for length in (3, 0, 1, 2) * 5
    ]
    rows = torch.from_numpy(np.random.default_rng(seed).random((len(chains), 12)))
    found = told(_together(name, chains, rows))
    alone = [
        told(one.run(PROGRAMS[name][0], [row.tolist()]))[0]
        for one, row in zip(chains, rows, strict=True)
    ]
    assert found == alone


def test_padding_that_is_taken_for_a_token_is_noticed() -> None:
    """The control: candidates that nobody drew are accepted."""
    chains = [problem(("rough", "equal"), (-1, 0), Iid, seed) for seed in range(9)]
    rows = torch.from_numpy(np.random.default_rng(0).random((9, 12)))
    right, wrong = (told(_together("block", chains, rows, padding)) for padding in (-1, 0))
    assert max(len(path) for path, _, _ in right) == 1 < max(len(path) for path, _, _ in wrong)


@pytest.mark.parametrize(
    "name", ["block", "speculative_sampling", "sample_and_match", "exact_match"]
)
def test_no_token_follows_bad_logits_into_padding(name: str) -> None:
    one = problem(("rough", "rough"), (-1, 0), Deterministic, 1)
    broken = Problem(one.parents, one.token_ids, one.p.clone(), one.q, Deterministic)
    broken.p[1] = math.nan
    p, q, token_ids = (part[None] for part in _padded(broken, 4))
    children, uniforms = children_of(range(-1, 3)), torch.zeros(1, 12, dtype=torch.float64)
    p[0, 0] = q[0, 0] = torch.eye(VOCAB)[one.token_ids[1]].double()
    found = (
        exact_match(p.log(), token_ids, children)
        if name == "exact_match"
        else PROGRAMS[name][0](p, token_ids, children, DraftLaws(q), uniforms)
    )
    assert found.next_token.tolist() == [-1]


RULES = [
    SamplingRules(),
    SamplingRules(temperature=0),
    SamplingRules(temperature=0.7),
    SamplingRules(temperature=1e-300),
    SamplingRules(top_k=2),
    SamplingRules(temperature=1.5, top_p=0.8),
    SamplingRules(min_p=0.3),
    SamplingRules(temperature=0.5, top_k=4, top_p=0.9, min_p=0.05),
]


@given(seed=st.integers(0, 2**32 - 1), is_coarse=st.booleans())
def test_laws_of_logits_are_those_of_the_sampling_rules(seed: int, is_coarse: bool) -> None:
    """One rule at a time with plain numbers, and all of them in one batch."""
    rng = np.random.default_rng(seed)
    values = rng.integers(-2, 3, (1, 2, 7)) if is_coarse else 3 * rng.normal(size=(1, 2, 7))
    on_host = torch.from_numpy(values).float()

    def expected(rules: SamplingRules) -> Tensor:
        parts = [law_from_logits(row, rules).sparse() for row in on_host[0]]
        return torch.stack(
            [torch.zeros(7).double().scatter(0, part.token_ids, part.probs) for part in parts]
        )

    # With a gradient, the host computes what a device does.
    for logits in (on_host, on_host.clone().requires_grad_()):
        for rules in RULES:
            found = probs_from_logits(
                logits,
                temperature=rules.temperature,
                top_k=rules.top_k,
                top_p=rules.top_p if rules.top_p < 1 else None,
                min_p=rules.min_p or None,
            ).detach()
            torch.testing.assert_close(found[0], expected(rules), rtol=0, atol=1e-15)
        together = probs_from_logits(
            logits.expand(len(RULES), -1, -1),
            temperature=torch.tensor(
                [float(rules.temperature) for rules in RULES], dtype=torch.float64
            ),
            top_k=torch.tensor([rules.top_k or 7 for rules in RULES]),
            top_p=torch.tensor([float(rules.top_p) for rules in RULES], dtype=torch.float64),
            min_p=torch.tensor([float(rules.min_p) for rules in RULES], dtype=torch.float64),
        ).detach()
        for found, rules in zip(together, RULES, strict=True):
            torch.testing.assert_close(found, expected(rules), rtol=0, atol=1e-15)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("name", PROGRAMS)
def test_logits_that_are_not_finite_give_no_token(name: str, bad: float) -> None:
    program, rule, kind, (shape, *_) = PROGRAMS[name]
    one = problem(("rough", "rough"), shape, kind, 1)
    logits = one.p.log()
    logits[0, 2] = bad
    broken = Problem(one.parents, one.token_ids, probs_from_logits(logits[None])[0], one.q, kind)
    uniforms = np.random.default_rng(0).random((50, 3 * len(shape))).tolist()
    assert set(broken.run(program, uniforms).next_token.tolist()) == {-1}
    greedy = exact_match(logits[None], torch.tensor([one.token_ids]), children_of(shape))
    assert greedy.next_token.tolist() == [-1]


@pytest.mark.parametrize("name", ["block", "traversal"])
def test_no_token_follows_a_bad_node_further_down(name: str) -> None:
    program, _, kind, _ = PROGRAMS[name]
    one = problem(("rough", "equal"), CHAIN, kind, 1)
    p = one.p.clone()
    p[1] = math.nan
    broken = Problem(CHAIN, one.token_ids, p, one.q, kind)
    uniforms = np.random.default_rng(0).random((50, len(CHAIN))).tolist()
    assert set(broken.run(program, uniforms).next_token.tolist()) == {-1}


@pytest.mark.parametrize("name", PROGRAMS)
def test_nothing_waits_and_no_shape_depends_on_data(name: str) -> None:
    """Tensors without data: a program that asks for a number would raise."""
    program, _, _, (shape, *_) = PROGRAMS[name]
    num_nodes = len(shape)
    program(  # the tables of a shape are made once
        torch.full((1, num_nodes, VOCAB), 1 / VOCAB, dtype=torch.float64),
        torch.zeros(1, num_nodes, dtype=torch.int64),
        children_of(shape),
        DraftLaws(torch.full((1, num_nodes, VOCAB), 1 / VOCAB, dtype=torch.float64)),
        torch.zeros(1, 3 * num_nodes, dtype=torch.float64),
    )
    with FakeTensorMode(allow_non_fake_inputs=True):
        logits = torch.empty(3, num_nodes, VOCAB)
        found = program(
            probs_from_logits(logits, temperature=0.7, top_k=3, top_p=0.9, min_p=0.1),
            torch.empty(3, num_nodes, dtype=torch.int64),
            children_of(shape),
            DraftLaws(torch.empty(3, num_nodes, VOCAB, dtype=torch.float64)),
            torch.empty(3, 3 * num_nodes, dtype=torch.float64),
        )
    assert found.next_token.shape == (3,)


COMPILED = """
import torch
from monge.verify import functional as f

def decide(logits, heat, token_ids, q, uniforms):
    probs, shape = f.probs_from_logits(logits, temperature=heat, top_p=0.9), f.children_of((-1, 0, 1))
    laws = f.DraftLaws(q)
    yield f.exact_match(logits, token_ids, shape)
    yield f.sample_and_match(probs, token_ids, shape, uniforms)
    for program in (f.block, f.speculative_sampling):
        yield program(probs, token_ids, laws, uniforms)
    for program in (f.recursive_rejection, f.traversal, f.optimal, f.layer):
        yield program(probs, token_ids, shape, laws, uniforms)

def decide_all(*inputs):
    return list(decide(*inputs))

logits, q = torch.randn(4, 3, 9), torch.randn(4, 3, 9).double().softmax(-1)
token_ids, uniforms = torch.randint(9, (4, 3)), torch.rand(4, 9, dtype=torch.float64)
inputs = logits, torch.full((4,), 0.7), token_ids, q, uniforms
expected = decide_all(*inputs)  # the tables of a shape are made once
found = torch.compile(decide_all, backend="eager", fullgraph=True)(*inputs)
for one, other in zip(found, expected, strict=True):
    assert all(map(torch.equal, one, other))
"""


@pytest.mark.slow
def test_programs_are_compiled_whole() -> None:
    """Apart from this process, whose type checks are in the way."""
    subprocess.run([sys.executable, "-c", COMPILED], check=True)


@pytest.mark.gpu
@pytest.mark.parametrize("regimes", [("rough", "rough"), ("zeros", "tiny masses")])
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_cuda_device_gives_the_verdicts_of_the_cpu(name: str, regimes: tuple[str, str]) -> None:
    """Without a wait, and from a captured graph as well."""
    program, _, kind, shapes = PROGRAMS[name]
    for shape in shapes:
        one = problem(regimes, shape, kind, 1)
        uniforms = np.random.default_rng(0).random((200, 2 * len(shape))).tolist()
        call = one.call(program, uniforms, "cuda")
        call()  # the tables of a shape are made once
        with cuda_waits.counted() as waits:
            found = call()
            assert waits() == 0
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = call()
        graph.replay()
        assert told(found) == told(captured) == told(one.run(program, uniforms))
