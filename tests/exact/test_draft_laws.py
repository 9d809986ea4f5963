"""Ways of drafting beyond plain draws, in the real loop.

The written text keeps the target's law.
"""

from functools import partial

import pytest
import torch

from monge.api import make_components
from monge.core.errors import OptionError
from monge.draft.tree.children import way_of_drawing
from monge.laws.draws import TapeDraws
from monge.laws.law import tempered
from monge.laws.proposal import Independent, Mixed
from monge.oracle.decoding import Case
from monge.oracle.tabular import Style, TabularModel
from tests.kit.strategies import dense_law
from tests.kit.tables import loop_error, table

VOCAB = 4
ONE_TOKEN = Case(horizon=1, max_new_tokens=2)


def models(style: Style = "positive") -> list[TabularModel]:
    return [table(seed, VOCAB, style=style) for seed in (5, 17)]


@pytest.mark.parametrize(
    "verifier", ["recursive_rejection", "greedy", "traversal", "sample_and_match"]
)
@pytest.mark.parametrize(
    "tree",
    [
        "fixed_width((3,), 'mixed(1)')",
        "fixed_width((3, 2), 'mixed')",
        "fixed_width((3,), 'mixed(2)')",
    ],
)
def test_top_tokens_and_draws(tree: str, verifier: str) -> None:
    for style in ("positive", "sparse"):
        make = partial(models, style)
        assert loop_error(make, ONE_TOKEN, tree=tree, verifier=verifier) < 1e-12


def test_the_number_of_fixed_candidates_is_a_setting() -> None:
    q = dense_law([1, 6, 3, 2])
    for kind, width, fixed, drawn in [
        ("mixed(1)", 3, (1,), 2),
        ("mixed(num_fixed=2)", 3, (1, 2), 1),
        ("mixed", 3, (1,), 2),
        ("mixed(3)", 2, (1,), 1),  # a narrow level of a wider tree: one draw stays
        ("mixed(2)", 1, (), 1),
    ]:
        proposal = way_of_drawing(kind).propose(q, width)
        assert isinstance(proposal, Mixed)
        assert (proposal.fixed, proposal.width) == (fixed, drawn)
        assert all(proposal.law.prob(token) == 0.0 for token in fixed)


@pytest.mark.parametrize("width", [2, 3, 5])
def test_a_law_without_more_tokens_than_candidates_is_offered_whole(width: int) -> None:
    proposal = way_of_drawing("mixed(1)").propose(dense_law([0, 2, 0, 1]), width)
    assert set(proposal.draw(TapeDraws([0.5] * width))) == {1, 3}
    assert way_of_drawing("mixed(1)").propose(dense_law([0, 2, 0, 0]), width).draw(
        TapeDraws([0.5])
    ) == (1,)


def test_one_draw_at_each_temperature() -> None:
    q = dense_law([1, 6, 0, 3])
    proposal = way_of_drawing("temperatures((1, 0.5))").propose(q, 3)
    assert isinstance(proposal, Independent)
    plain, sharp = proposal.laws
    assert plain.at(torch.arange(4)).tolist() == pytest.approx(q.probs.tolist(), abs=1e-15)
    assert sharp.token_ids.tolist() == [0, 1, 3]
    assert sharp.probs.tolist() == pytest.approx([1 / 46, 36 / 46, 9 / 46], abs=1e-15)
    narrow = way_of_drawing("temperatures((1, 0.5))").propose(q, 1)
    assert isinstance(narrow, Independent)
    assert len(narrow.laws) == 1
    coldest = tempered(q, 1e-4)
    assert coldest.token_ids.tolist() == [1]
    assert tempered(q, 1e-310).token_ids.tolist() == [1]


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ("fixed_width((3,), 'mixed(-1)')", "mixed: num_fixed must be at least 0; got -1"),
        ("fixed_width((2, 1), 'mixed(2)')", r"'mixed\(2\)' .* have 3 or more; the widest has 2"),
        ("chain(3, 'mixed')", "chain: children 'mixed' .* must have 2 or more; the widest has 1"),
        ("fixed_width((2,), 'temperatures(())')", r"one or more finite .* above 0; got \(\)"),
        ("fixed_width((2,), 'temperatures((1, 0))')", r"temperatures: .* got \(1, 0\)"),
        ("fixed_width((2,), 'temperatures((1, 1.5, 2))')", "groups of 3 .* the widest has 2"),
        ("fixed_width((3,), 'mixed(fixed=1)')", "'mixed': 'fixed'; did you mean 'num_fixed'"),
        ("fixed_width((3,), 'iid(2)')", "'iid' takes at most 0 settings; got 1"),
        ("fixed_width((3,), 'mixd')", "drawing children 'mixd'; did you mean 'mixed'"),
    ],
)
def test_bad_ways_of_drawing_are_refused(tree: str, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        make_components(*models(), tree=tree)
