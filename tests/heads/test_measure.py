"""The estimate of block efficiency is, in expectation, what the real loop does."""

import itertools
from dataclasses import replace

import pytest
import torch

from monge.core.context import Context, DraftPlan
from monge.core.errors import OptionError
from monge.core.sampling_rules import SamplingRules
from monge.draft.shape import Shape
from monge.draft.tree.fixed_width import Chain
from monge.laws.draws import Draws
from monge.laws.from_logits import law_from_logits
from monge.networks.base import FeatureModel, NodeBlock
from monge.oracle.exact_law import exact_law
from monge.oracle.tabular import RandomTable, TabularModel
from monge.training.calibrate import measure
from monge.training.texts import Ends, all_windows, num_windows
from monge.verify.base import as_verifier
from monge.verify.speculative_sampling import SpeculativeSampling
from tests.heads.toy import random_head, read_rows

VOCAB, STEPS, SEED = 3, 2, 8
TEXT = (0, 2, 1)


def table() -> TabularModel:
    return TabularModel(RandomTable(VOCAB, SEED), VOCAB)


def ends_of(target: FeatureModel) -> Ends:
    def embed(token_ids: torch.Tensor) -> torch.Tensor:
        return target.embed(token_ids.flatten().tolist()).unflatten(0, token_ids.shape).clone()

    kind = target.embed((0,)).dtype
    return Ends(embed=embed, unembed=lambda states: target.unembed(states.to(kind)))


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_estimate_is_the_loop_s_expectation(temperature: float) -> None:
    """Texts weighted by their probability after TEXT on one side, every draw of drafter and verifier on the other."""
    rules = SamplingRules(temperature=temperature)
    head = random_head(table(), num_steps=STEPS).double()

    def accepted(draws: Draws) -> int:
        target = table()
        drafter = Shape(target=target, head=head, tree=Chain(depth=STEPS))
        target.open({0: TEXT[:-1]})
        context = Context(request_id=0, token_ids=TEXT, num_prompt_tokens=1, rules=rules)
        (draft,) = drafter.draft([context], drafter.open([context]), [DraftPlan()], [draws])
        logits = target.extend({0: NodeBlock(draft.tree.token_ids, draft.tree.parents)})[0]
        laws = [law_from_logits(row, rules) for row in logits]
        return as_verifier(SpeculativeSampling()).verify(draft.tree, laws, draws).num_accepted

    expected = sum(count * mass for count, mass in exact_law(accepted).items())
    estimate, acceptance = 0.0, 0.0
    for continuation in itertools.product(range(VOCAB), repeat=STEPS):
        row = TEXT + continuation
        read = read_rows(table(), [list(row)])
        # One window is wanted, the one whose h_t is that of TEXT's last token but one.
        texts = replace(read, starts=(len(TEXT) - 2, len(row)))
        quality = measure(head, texts, ends_of(table()), temperature=temperature)
        weight = 1.0
        for length in range(len(TEXT), len(row)):
            logits = torch.tensor(list(table().table(row[:length])), dtype=torch.float64).log()
            weight *= law_from_logits(logits, rules).prob(row[length])
        assert num_windows(texts, STEPS) == 1
        estimate += weight * (quality.block_efficiency - 1.0)
        acceptance += weight * quality.acceptance[1]
    assert estimate == pytest.approx(expected, abs=1e-7)
    assert 0.0 < acceptance < 1.0


def test_windows_are_teacher_forced() -> None:
    rows = [[2, 1, 0], [0, 1, 2, 0, 1], [2, 2, 1, 0, 0]]  # the first is too short for a window
    texts = read_rows(table(), rows, batch_size=2)
    (windows,) = all_windows(texts, 2, ends_of(table()))
    assert num_windows(texts, 2) == 4
    assert windows.token_ids.tolist() == [[2, 0], [0, 1], [1, 0], [0, 0]]
    assert windows.tokens.argmax(dim=-1).tolist() == [[1, 2], [2, 0], [2, 1], [1, 0]]
    assert torch.equal(windows.states, texts.states[[3, 4, 8, 9]])
    assert torch.equal(windows.true[:, 1], texts.states[[5, 6, 10, 11]])
    plain = table()
    logits = torch.stack(
        [
            torch.tensor(list(plain.table(tuple(row[: n + 1])))).log()
            for row in rows
            for n in range(len(row))
        ]
    )
    torch.testing.assert_close(texts.states.float(), logits, atol=1e-6, rtol=0)


def test_bad_texts_are_refused() -> None:
    texts = read_rows(table(), [[0, 1, 2], [1]])
    short = "texts of at most 3 tokens are too short for 2 steps; give 4 or more"
    with pytest.raises(OptionError, match=short):
        num_windows(texts, 2)
    broken = texts.states.clone()
    broken[1] = float("nan")
    with pytest.raises(OptionError, match="not finite at 1 of 4 tokens"):
        replace(texts, states=broken)
