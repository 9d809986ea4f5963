"""Systematic draws: what a design promises, and that earliest deadline first attains the optimum of its joint law."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from monge.core.errors import OptionError
from monge.core.systematic import LAYOUTS, Cells, Systematic, SystematicDesign
from monge.transport.candidates import TransportProblem
from monge.transport.linear_program import solve
from monge.transport.systematic import Schedule, earliest_deadline_first
from tests.kit.strategies import dense_law, weight_pairs
from tests.transport import reference_forms
from tests.transport.reference_forms import subset_optimum

EXACT = 1e-12
DESIGNS = st.builds(
    SystematicDesign,
    exponent=st.sampled_from([1.0, 0.9, 0.5, 3, 40.0]),
    layout=st.sampled_from(LAYOUTS),
    top=st.sampled_from([None, 1, 3, 8]),
)


def masses(weights: list[int]) -> np.ndarray:
    return np.array(weights) / sum(weights)


def problem(p: np.ndarray, cells: Cells) -> TransportProblem:
    return TransportProblem.from_joint_law(
        p, dict(zip(cells.candidates, cells.lengths, strict=True))
    )


def schedule(p: np.ndarray, cells: Cells) -> Schedule:
    return earliest_deadline_first(cells, dict(enumerate(p.tolist())))


@given(pair=weight_pairs(max_vocab=7), width=st.integers(1, 5), design=DESIGNS)
def test_cells_are_what_they_promise(
    pair: tuple[list[int], list[int]], width: int, design: SystematicDesign
) -> None:
    weights = pair[1]
    cells = design.cells(dense_law(weights), width)
    support = [token for token, weight in enumerate(weights) if weight > 0]
    assert min(cells.lengths) > 0.0
    assert sum(cells.lengths) == pytest.approx(1.0, abs=EXACT)
    assert len(set(cells.candidates)) == len(cells.candidates) <= len(weights)
    sizes = {len(candidates) for candidates in cells.candidates}
    assert sizes == {min(width, len(support), design.top or len(support))}
    for token in range(len(weights)):
        on_offer = [
            index for index, candidates in enumerate(cells.candidates) if token in candidates
        ]
        assert on_offer == list(range(min(on_offer, default=0), max(on_offer, default=-1) + 1)), (
            "one run of neighbouring cells"
        )
        assert not on_offer or token in support
    assert all(len(set(candidates)) == len(candidates) for candidates in cells.candidates)


def inclusion(cells: Cells, token: int) -> float:
    return sum(
        length
        for candidates, length in zip(cells.candidates, cells.lengths, strict=True)
        if token in candidates
    )


def test_probable_tokens_are_always_offered_and_bins_fill_the_rest() -> None:
    q = dense_law([60, 10, 10, 10, 10])
    cells = SystematicDesign(exponent=1.0).cells(q, 3)
    assert [inclusion(cells, token) for token in range(5)] == pytest.approx(
        [1.0, 0.5, 0.5, 0.5, 0.5], abs=EXACT
    )
    assert inclusion(SystematicDesign(exponent=40).cells(q, 3), 0) == 1.0


def test_one_draw_is_a_plain_draw() -> None:
    cells = SystematicDesign(exponent=1.0).cells(dense_law([2, 3, 5]), 1)
    assert dict(zip(cells.candidates, cells.lengths, strict=True)) == pytest.approx(
        {(0,): 0.2, (1,): 0.3, (2,): 0.5}, abs=EXACT
    )


def test_only_the_top_tokens_are_offered() -> None:
    for top, offered in ((1, {2}), (2, {1, 2}), (None, {0, 1, 2})):
        cells = SystematicDesign(top=top).cells(dense_law([2, 3, 5]), 2)
        assert {token for candidates in cells.candidates for token in candidates} == offered


@pytest.mark.parametrize(
    ("layout", "bins"),
    [("snake", [{0, 3, 4}, {1, 2, 5}]), ("least_full", [{0, 3, 5}, {1, 2, 4}])],
    ids=LAYOUTS[::-1],
)
def test_layouts(layout: str, bins: list[set[int]]) -> None:
    cells = SystematicDesign(exponent=1.0, layout=layout).cells(dense_law([10, 8, 5, 4, 3, 2]), 2)
    assert [{candidates[row] for candidates in cells.candidates} for row in range(2)] == bins


@settings(max_examples=60)
@given(pair=weight_pairs(max_vocab=6), width=st.integers(1, 4), design=DESIGNS)
def test_earliest_deadline_first_is_optimal(
    pair: tuple[list[int], list[int]], width: int, design: SystematicDesign
) -> None:
    p, cells = masses(pair[0]), design.cells(dense_law(pair[1]), width)
    found = schedule(p, cells)
    assert found.accepted == pytest.approx(solve(problem(p, cells)).acceptance, abs=1e-9)
    assert found.accepted == pytest.approx(subset_optimum(problem(p, cells)).acceptance, abs=EXACT)


@given(
    pair=weight_pairs(max_vocab=7),
    width=st.integers(1, 4),
    design=DESIGNS,
    scale=st.sampled_from([1.0, 0.4]),
)
def test_schedules_are_feasible(
    pair: tuple[list[int], list[int]], width: int, design: SystematicDesign, scale: float
) -> None:
    p, cells = scale * masses(pair[0]), design.cells(dense_law(pair[1]), width)
    found = schedule(p, cells)
    for ran, candidates, length in zip(found.times, cells.candidates, cells.lengths, strict=True):
        assert set(ran) <= set(candidates)
        assert sum(ran.values()) <= length + EXACT
        left = {token for token in candidates if p[token] - found.masses[token] > EXACT}
        assert not left or sum(ran.values()) == pytest.approx(length, abs=EXACT), (
            "idle with a candidate left"
        )
    for token, mass in found.masses.items():
        assert mass <= p[token] + EXACT
        assert mass == pytest.approx(sum(ran.get(token, 0.0) for ran in found.times), abs=EXACT)


def test_the_order_matters() -> None:
    """Token 0 is on offer everywhere: running it first would leave nothing for the second half."""
    cells = Cells(((0, 1), (0, 2)), (0.5, 0.5))
    found = schedule(np.array([0.5, 0.5, 0.0]), cells)
    assert found.times == ({1: 0.5}, {0: 0.5})
    assert found.accepted == 1.0


def test_one_bin_beside_fixed_tokens_is_greedy_drafting() -> None:
    p, weights = masses([4, 3, 2, 1, 2]), [40, 35, 8, 7, 10]
    cells = SystematicDesign(exponent=1.0).cells(dense_law(weights), 3)
    assert all(candidates[:2] == (0, 1) for candidates in cells.candidates)
    assert schedule(p, cells).accepted == pytest.approx(
        reference_forms.greedy_acceptance(p, masses(weights), 3), abs=EXACT
    )


def test_one_draw_is_the_maximal_coupling() -> None:
    p, q = [5, 3, 2], [2, 3, 5]
    cells = SystematicDesign(exponent=1.0).cells(dense_law(q), 1)
    assert schedule(masses(p), cells).accepted == pytest.approx(0.7, abs=EXACT)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"exponent": 0.0}, "exponent must be finite and above 0; got 0.0"),
        ({"exponent": -1}, "exponent must be finite and above 0; got -1"),
        ({"exponent": math.nan}, "exponent must be finite and above 0; got nan"),
        ({"layout": "snail"}, "unknown layout of systematic draws 'snail'; did you mean 'snake'"),
        ({"top": 0}, "top must be at least 1, or None"),
    ],
)
def test_bad_designs(settings: dict[str, object], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        SystematicDesign(**settings)  # type: ignore[arg-type]


def test_no_candidates() -> None:
    with pytest.raises(OptionError, match="Systematic: width must be at least 1"):
        Systematic(dense_law([1, 2]), 0)
