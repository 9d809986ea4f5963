"""Ways of drafting beyond plain draws, in the real loop.

The written text keeps the target's law.
"""

import pytest
import torch

from monge.api import make_components
from monge.core.draws import TapeDraws
from monge.core.errors import OptionError
from monge.core.law import tempered
from monge.core.proposal import Independent, Mixed
from monge.draft.tree.children import way_of_drawing
from monge.testing.decoding import Case, output_law, target_law
from monge.testing.oracle import law_error
from monge.testing.tabular import RandomTable, TabularModel
from tests.kit.strategies import dense_law

VOCAB = 4
ONE_TOKEN = Case(horizon=1, max_new_tokens=2)


def models(style: str = "positive") -> tuple[TabularModel, TabularModel]:
    target = RandomTable(VOCAB, 5, style)  # type: ignore[arg-type]
    return TabularModel(target, VOCAB), TabularModel(RandomTable(VOCAB, 17, style), VOCAB)  # type: ignore[arg-type]


def error(case: Case, style: str = "positive", **parts: object) -> float:
    output = output_law(lambda: make_components(*models(style), **parts), case)  # type: ignore[arg-type]
    return law_error(output, target_law(models(style)[0], case))


@pytest.mark.parametrize("verifier", ["rrs", "greedy", "traversal", "target_walk"])
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
        assert error(ONE_TOKEN, style, tree=tree, verifier=verifier) < 1e-12


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
    assert (
        law_error(
            dict(enumerate(plain.at(torch.arange(4)).tolist())), dict(enumerate(q.probs.tolist()))
        )
        < 1e-15
    )
    squares = {0: 1 / 46, 1: 36 / 46, 3: 9 / 46}
    assert (
        law_error(dict(zip(sharp.token_ids.tolist(), sharp.probs.tolist(), strict=True)), squares)
        < 1e-15
    )
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
        (
            "fixed_width((2, 1), 'mixed(2)')",
            r"fixed_width: children 'mixed\(2\)' .* must have 3 "
            r"or more; the widest has 2",
        ),
        ("chain(3, 'mixed')", "chain: children 'mixed' .* must have 2 or more; the widest has 1"),
        (
            "fixed_width((2,), 'temperatures(())')",
            r"temperatures: give one or more finite numbers "
            r"above 0; got \(\)",
        ),
        ("fixed_width((2,), 'temperatures((1, 0))')", r"temperatures: .* got \(1, 0\)"),
        (
            "fixed_width((2,), 'temperatures((1, 1.5, 2))')",
            "come in groups of 3 at least.* the widest has 2",
        ),
        ("fixed_width((3,), 'mixed(fixed=1)')", "'mixed': 'fixed'; did you mean 'num_fixed'"),
        ("fixed_width((3,), 'iid(2)')", "'iid' takes at most 0 settings; got 1"),
        (
            "fixed_width((3,), 'mixd')",
            "unknown way of drawing children 'mixd'; did you mean 'mixed'",
        ),
    ],
)
def test_bad_settings(tree: str, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        make_components(*models(), tree=tree)
