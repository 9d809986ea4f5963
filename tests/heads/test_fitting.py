"""Calibration and training on a text whose next law is known exactly from its last token."""

import itertools
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from monge.core.errors import ModelLoadError, OptionError
from monge.heads.shape.head import ShapeHead, TargetSizes, make_predictor
from monge.training.calibrate import (
    calibrate_alignments,
    calibrate_ridge,
    calibrate_temperatures,
    drafted_steps,
    measure,
)
from monge.training.chain import Step, Weights, chain_loss
from monge.training.loop import NOBODY, STATE, Recipe, Watch
from monge.training.shape import train_predictor
from monge.training.texts import Texts, all_windows
from tests.heads.toy import markov_ends, markov_table, markov_texts

VOCAB, STEPS = 5, 2
ENDS = markov_ends(VOCAB)


def texts(rows: int = 40, length: int = 16) -> Texts:
    return markov_texts(VOCAB, rows, length)


@pytest.fixture
def split() -> tuple[Texts, Texts]:
    return texts().split(0.25)


def head(kind: str, *, is_branched: bool = True, alignment: str = "none") -> ShapeHead:
    sizes = TargetSizes.of(markov_table(VOCAB))
    settings = {"width": 16, "gate_rank": 2} if kind == "gated" else {}
    predictor = make_predictor(
        kind,
        sizes,
        torch.Generator().manual_seed(4),
        num_steps=STEPS,
        is_branched=is_branched,
        **settings,
    )
    return ShapeHead(predictor, sizes, alignment)


def test_ridge_finds_what_is_linear_and_only_branches_tell_it(split) -> None:
    knowing, blind = head("ridge"), head("ridge", is_branched=False)
    for one in (knowing, blind):
        calibrate_ridge(one, *split, ENDS)
    reached, without = (measure(one, split[1], ENDS) for one in (knowing, blind))
    assert min(reached.acceptance) > 0.97
    assert reached.block_efficiency > 2.9
    assert without.acceptance[0] == pytest.approx(reached.acceptance[0], abs=0.01)
    assert without.acceptance[1] < 0.9


def test_ridge_is_the_least_squares_solution_and_a_temperature_undoes_a_scale(split) -> None:
    one = head("ridge", is_branched=False)
    calibrate_ridge(one, *split, ENDS)
    (windows,) = all_windows(split[0], STEPS, ENDS)
    inputs = one.predictor.start(windows.states, windows.tokens[:, 0]).double()
    for index in range(STEPS):
        residual = windows.true[:, index].double() - inputs @ one.predictor.weight[index].T.double()
        # Orthogonal to the inputs up to the penalty, and exactly to the constant.
        assert float((inputs.T @ residual)[2 * VOCAB].abs().max()) < 1e-3
        assert float((inputs.T @ residual).abs().max()) < 0.02 * len(inputs)
    calibrate_temperatures(one, split[1], ENDS)
    assert float(one.temperatures[0]) == 1.0
    with torch.no_grad():
        one.predictor.weight[0].mul_(2.0**0.5)
    calibrate_temperatures(one, split[1], ENDS)
    assert float(one.temperatures[0]) == pytest.approx(2.0**0.5)


def test_alignment_restores_a_shrunken_scale(split) -> None:
    shrunk = head("ridge", alignment="gaussian")
    calibrate_ridge(shrunk, *split, ENDS)
    with torch.no_grad():
        for weight in shrunk.predictor.weight:
            weight.mul_(0.3)
    before = measure(shrunk, split[1], ENDS).acceptance
    calibrate_alignments(shrunk, *split, ENDS)
    assert float(shrunk.alignments[0].strength) > 0
    assert measure(shrunk, split[1], ENDS).acceptance[0] > before[0] + 0.1


def test_too_little_text_is_refused() -> None:
    parts = texts(rows=2, length=6).split(0.5)
    few = "3 positions of text are too few to fit 2 steps; give 42 or more"
    with pytest.raises(OptionError, match=few):
        calibrate_ridge(head("ridge"), *parts, ENDS)
    with pytest.raises(OptionError, match="too few"):
        calibrate_alignments(head("gated", alignment="gaussian"), *parts, ENDS)
    with pytest.raises(OptionError, match="is trained; only its alignments"):
        calibrate_ridge(head("gated"), *parts, ENDS)


def test_losses_are_their_definitions() -> None:
    generator = torch.Generator().manual_seed(0)
    target, logits = torch.randn(2, 7, 9, generator=generator)
    target[0, :4] = float("-inf")
    p, q = target.softmax(dim=1), logits.softmax(dim=1)
    kl = torch.where(p > 0, p * (p / q).log(), 0.0).sum(dim=1).mean()
    distance = 0.5 * (p - q).abs().sum(dim=1).mean()
    step = Step(logits, target, torch.zeros(7, dtype=torch.long))
    torch.testing.assert_close(chain_loss([step], Weights(tv=3.0)), kl + 3 * distance)


def test_the_loss_is_the_weighted_sum_of_its_parts() -> None:
    (windows,) = all_windows(texts(rows=3), STEPS, ENDS)
    steps, subspace = list(drafted_steps(head("gated"), windows, ENDS)), torch.eye(2, VOCAB)

    def loss(**weights: float) -> float:
        parts = Weights(**{"tv": 0.0, "cosine": 0.0, "sinkhorn": 0.0} | weights)
        return chain_loss(steps, parts, subspace=subspace).item()

    plain = loss()
    assert loss(tv=1.0) > plain
    for term in ("tv", "cosine", "sinkhorn"):
        added = loss(**{term: 1.0}) - plain
        assert loss(**{term: 2.0}) - plain == pytest.approx(2 * added, rel=1e-4)
    assert loss(decay=0.0) < loss(decay=0.5) < plain
    with pytest.raises(OptionError, match="weights must be at least 0"):
        Weights(tv=-1.0)


RECIPE = Recipe(steps=12, batch_size=64, learning_rate=0.02, evaluate_every=4)


def fit(split, folder: Path, recipe: Recipe, watch: Watch = NOBODY, target: str = "mine"):
    """Train a new head; return it and the progress."""
    one, identity = head("gated"), {"target": target}
    options = {"recipe": recipe, "folder": folder, "identity": identity, "watch": watch}
    return one, train_predictor(one, *split, ENDS, **options)


def test_training_learns_keeps_the_best_look_and_is_not_done_again(split, tmp_path: Path) -> None:
    before, recipe = (
        measure(head("gated"), split[1], ENDS).block_efficiency,
        replace(RECIPE, steps=60, evaluate_every=20),
    )
    one, progress = fit(split, tmp_path, recipe)
    assert [step for step, _ in progress.history] == [20, 40, 60]
    assert progress.best == max(value for _, value in progress.history)
    assert progress.best > before + 0.2
    watch = Watch(on_step=lambda _: pytest.fail("a step was made"))
    for made in (one, fit(split, tmp_path, recipe, watch)[0]):
        assert measure(made, split[1], ENDS).block_efficiency == pytest.approx(progress.best)


@pytest.mark.parametrize("cut", [3, 8])
def test_an_interrupted_training_loses_nothing(split, tmp_path: Path, cut: int) -> None:
    whole, straight = fit(split, tmp_path / "whole", RECIPE)
    steps = itertools.count(1)
    watch = Watch(should_stop=lambda: next(steps) == cut)
    assert fit(split, tmp_path / "parts", RECIPE, watch)[1].step == cut
    resumed, progress = fit(split, tmp_path / "parts", RECIPE)
    assert replace(progress, seconds=0) == replace(straight, seconds=0)
    for name, tensor in whole.state_dict().items():
        assert torch.equal(tensor, resumed.state_dict()[name]), name


def test_it_ends_where_held_out_text_stops_improving(split, tmp_path: Path) -> None:
    slow = Recipe(steps=1000, batch_size=64, learning_rate=1e-12, evaluate_every=1, patience=3)
    _, progress = fit(split, tmp_path, slow)
    assert progress.step < 20
    assert progress.looks_since_best == 3


def test_states_that_do_not_fit_are_refused(split, tmp_path: Path) -> None:
    fit(split, tmp_path, RECIPE)
    with pytest.raises(OptionError, match=r"other values of \['learning_rate'\]"):
        fit(split, tmp_path, replace(RECIPE, learning_rate=0.1))
    with pytest.raises(OptionError, match=r"other values of \['target'\]; restore them"):
        fit(split, tmp_path, RECIPE, target="another")
    (tmp_path / STATE).write_bytes(b"no state")
    with pytest.raises(ModelLoadError, match="cannot go on from"):
        fit(split, tmp_path, RECIPE)
    with pytest.raises(OptionError, match="sizes must be at least 1"):
        Recipe(steps=0)


def test_the_rate_rises_and_falls() -> None:
    recipe = Recipe(steps=100, warm_up=0.1, learning_rate=1.0)
    rates = [recipe.rate(step) for step in range(100)]
    assert rates[:10] == pytest.approx([(step + 1) / 10 for step in range(10)])
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert rates[-1] < 0.01
