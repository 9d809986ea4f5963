"""The text of shared clocks depends on the seed and the target alone, and has the target's law."""

import math

import numpy as np
import pytest
import torch

from monge.api import make_components
from monge.core.errors import MongeError, OptionError
from monge.engine.decoder import Decoder
from monge.laws.clocks import first_token, num_clocks
from monge.laws.draws import RequestDraws, TapeDraws, keyed_clocks
from monge.laws.law import DenseLaw
from monge.laws.proposal import SharedClocks
from monge.laws.tree import GrowingTree
from monge.oracle.tabular import RandomTable, TabularModel
from monge.transport.closed_forms import match_probability
from monge.verify.gumbel import Gumbel

VOCAB = 5


def law(*masses: float) -> DenseLaw:
    return DenseLaw(torch.tensor(masses, dtype=torch.float64))


def text(seed: int, num_drafts: int = 2, batch: int = 1, **parts: object) -> list[tuple[int, ...]]:
    target, draft = (TabularModel(RandomTable(VOCAB, number), VOCAB) for number in (1, 2))
    with_draft = parts.get("drafter", "model") == "model"
    made = make_components(
        target, draft if with_draft else None, verifier=f"gumbel({num_drafts})", **parts
    )  # type: ignore[arg-type]
    prompts = [[0, 1], [2], [3, 3, 1]][:batch]
    results = Decoder(made).generate(prompts, max_new_tokens=25, temperature=1.0, seed=seed)
    return [result.token_ids for result in results]


def test_the_text_does_not_depend_on_the_drafter() -> None:
    plain = text(4, drafter="none", batch=3)
    assert len({len(set(row)) for row in plain}) >= 1
    assert text(4, drafter="none") == plain[:1]  # nor on the neighbours
    assert text(5, drafter="none") != plain[:1]
    for parts in (
        {"tree": "chain(3, 'shared')"},
        {"tree": "fixed_width((2, 1), 'shared')"},
        {"tree": "fixed_width((3, 2), 'iid')"},
        {"tree": "fixed_width((3, 2), 'shared')"},  # more children than compared drafts
        {"tree": "best_first(6, 3, 3, 2)"},
        {"drafter": "ngram"},
    ):
        assert text(4, batch=3, **parts) == plain, parts


def test_tokens_follow_the_target_law() -> None:
    """Chi-square on 1500 seeds of one text position, two drafts.

    Fixed seeds, so the verdict is fixed too.
    """
    p = law(0.5, 0.25, 0.0, 0.2, 0.05)
    tree = GrowingTree(0).finish()
    counts = np.zeros(VOCAB)
    for seed in range(1500):
        counts[Gumbel(2).verify(tree, (p,), RequestDraws(seed)).next_token] += 1
    assert counts[2] == 0
    expected = 1500 * p.probs.numpy()
    seen = expected > 0
    # 99.9 % of chi-square with 3 degrees
    assert float(((counts - expected)[seen] ** 2 / expected[seen]).sum()) < 16.3


@pytest.mark.parametrize("width", [1, 3])
def test_agreement_is_that_of_the_closed_form(width: int) -> None:
    p, q = law(0.5, 0.3, 0.1, 0.1, 0.0), law(0.2, 0.3, 0.3, 0.0, 0.2)
    hits, accepted, num_seeds = 0, 0, 1000
    for seed in range(num_seeds):
        draws, tree = RequestDraws(seed), GrowingTree(0)
        tree.grow(0, SharedClocks(q, width), draws)
        finished = tree.finish()
        verdict = Gumbel(width).verify(finished, (p,) * finished.num_nodes, draws)
        accepted += verdict.num_accepted > 0
        clocks = torch.stack([draws.clocks(0, draft, VOCAB) for draft in range(width)])
        winner = first_token(clocks.min(dim=0).values, p)
        hits += first_token(clocks[int(clocks[:, winner].argmin())], q) == winner
    expected = match_probability(p.probs.numpy(), q.probs.numpy(), width)
    spread = 4 * math.sqrt(expected * (1 - expected) / num_seeds)
    assert hits / num_seeds == pytest.approx(expected, abs=spread)
    assert accepted >= hits
    if width == 1:
        assert accepted == hits


def test_clocks_are_addressed_by_place() -> None:
    draws = RequestDraws(7)
    draws.move_to(10)
    deep = draws.clocks(2, 0, 6)
    draws.move_to(12)
    assert torch.equal(draws.clocks(0, 0, 6), deep)
    assert torch.equal(draws.clocks(0, 0, 4), deep[:4])
    assert torch.equal(keyed_clocks(7, 0, 12, 0, 6), deep)
    for other in ((7, 0, 12, 1), (7, 0, 13, 0), (8, 0, 12, 0), (7, 1, 12, 0)):
        assert not set(keyed_clocks(*other, 6).tolist()) & set(deep.tolist())
    sample = keyed_clocks(1, 0, 1, 0, 200_000)
    assert float(sample.mean()) == pytest.approx(1.0, abs=0.01)
    assert float((sample > 1).double().mean()) == pytest.approx(math.exp(-1), abs=0.005)
    assert num_clocks(law(0.5, 0.5, 0.0)) == 2


def test_refusals() -> None:
    with pytest.raises(OptionError, match="num_drafts must be at least 1"):
        Gumbel(0)
    with pytest.raises(MongeError, match="TapeDraws has no clocks"):
        Gumbel().verify(GrowingTree(0).finish(), (law(1.0),), TapeDraws([]))
