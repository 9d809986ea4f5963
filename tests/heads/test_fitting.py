"""Calibration and training on a text whose next law is known exactly from its last token."""

import itertools
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from monge.core.errors import ModelLoadError, OptionError
from monge.heads.shape.head import ShapeHead, TargetSizes, make_predictor
from monge.testing.tabular import RandomTable, TabularModel
from monge.training.loop import STATE, Progress, Recipe, Watch, train
from monge.training.losses import Weights, law_losses
from monge.training.shape.calibrate import (
    calibrate_alignments,
    calibrate_ridge,
    calibrate_temperatures,
    principal_directions,
)
from monge.training.shape.measure import measure
from monge.training.shape.trainee import ShapeTrainee, head_loss
from monge.training.texts import Ends, Texts, all_windows, read_texts

VOCAB, STEPS = 5, 2
LAWS = RandomTable(VOCAB, 2)


def markov(text: tuple[int, ...]) -> list[float]:
    return list(LAWS(text[-1:]))


def table() -> TabularModel:
    return TabularModel(markov, VOCAB)


def ends() -> Ends:
    eye = torch.eye(VOCAB)
    return Ends(embed=lambda ids: eye[ids], unembed=lambda states: states)


def texts(rows: int = 40, length: int = 16, seed: int = 0) -> Texts:
    laws = torch.tensor([markov((token,)) for token in range(VOCAB)])
    generator = torch.Generator().manual_seed(seed)
    columns = [torch.randint(VOCAB, (rows,), generator=generator)]
    for _ in range(length - 1):
        columns.append(torch.multinomial(laws[columns[-1]], 1, generator=generator)[:, 0])
    read = read_texts(table(), torch.stack(columns, dim=1))
    return Texts(token_ids=read.token_ids, states=read.states.float())


def head(kind: str, *, is_branched: bool = True, alignment: str = "none") -> ShapeHead:
    sizes = TargetSizes.of(table())
    settings = {"width": 16, "gate_rank": 2} if kind == "gated" else {}
    generator = torch.Generator().manual_seed(4)
    predictor = make_predictor(
        kind, sizes, generator, num_steps=STEPS, is_branched=is_branched, **settings
    )
    return ShapeHead(predictor, sizes, alignment)


def test_ridge_finds_what_is_linear_and_only_branches_tell_it() -> None:
    fitted, held_out = texts().split(0.25)
    knowing, blind = head("ridge"), head("ridge", is_branched=False)
    for one in (knowing, blind):
        calibrate_ridge(one, fitted, held_out, ends())
    reached, without = (measure(one, held_out, ends()) for one in (knowing, blind))
    assert min(reached.acceptance) > 0.97
    assert reached.block_efficiency > 2.9
    assert without.acceptance[0] == pytest.approx(reached.acceptance[0], abs=0.01)
    assert without.acceptance[1] < 0.9


def test_ridge_is_the_least_squares_solution() -> None:
    fitted, held_out = texts().split(0.25)
    one = head("ridge", is_branched=False)
    calibrate_ridge(one, fitted, held_out, ends())
    (windows,) = all_windows(fitted, STEPS, ends())
    inputs = one.predictor.start(windows.states, windows.tokens[:, 0]).double()
    for index in range(STEPS):
        residual = windows.true[:, index].double() - inputs @ one.predictor.weight[index].T.double()
        # Orthogonal to the inputs up to the penalty, and exactly to the constant.
        assert float((inputs.T @ residual)[2 * VOCAB].abs().max()) < 1e-3
        assert float((inputs.T @ residual).abs().max()) < 0.02 * len(inputs)


@pytest.mark.parametrize("alignment", ["gaussian"])
def test_alignment_restores_a_shrunken_scale_and_never_loses_where_it_is_chosen(
    alignment: str,
) -> None:
    fitted, held_out = texts().split(0.25)
    exact, shrunk = head("ridge"), head("ridge", alignment=alignment)
    calibrate_ridge(exact, fitted, held_out, ends())
    calibrate_ridge(shrunk, fitted, held_out, ends())
    with torch.no_grad():
        for weight in shrunk.predictor.weight:
            weight.mul_(0.3)
    before = measure(shrunk, held_out, ends()).acceptance
    calibrate_alignments(shrunk, fitted, held_out, ends())
    after = measure(shrunk, held_out, ends()).acceptance
    assert float(shrunk.alignments[0].strength) > 0
    assert after[0] > before[0] + 0.1


def test_a_temperature_undoes_a_scaled_head() -> None:
    fitted, held_out = texts().split(0.25)
    one = head("ridge", is_branched=False)
    calibrate_ridge(one, fitted, held_out, ends())
    calibrate_temperatures(one, held_out, ends())
    assert float(one.temperatures[0]) == 1.0
    with torch.no_grad():
        one.predictor.weight[0].mul_(2.0**0.5)
    calibrate_temperatures(one, held_out, ends())
    assert float(one.temperatures[0]) == pytest.approx(2.0**0.5)


def test_principal_directions_are_orthonormal_and_ordered() -> None:
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(200, 4, generator=generator, dtype=torch.float64) * torch.tensor(
        [1.0, 5.0, 0.1, 2.0]
    )
    found = principal_directions(states, 3)
    torch.testing.assert_close(
        found @ found.T, torch.eye(3, dtype=torch.float64), atol=1e-9, rtol=0
    )
    assert (states @ found.T).std(dim=0).tolist() == sorted(
        (states @ found.T).std(dim=0).tolist(), reverse=True
    )


def test_too_little_text_is_refused() -> None:
    few = texts(rows=2, length=6)
    fitted, held_out = few.split(0.5)
    with pytest.raises(
        OptionError, match="3 positions of text are too few to fit 2 steps; give 42 or more"
    ):
        calibrate_ridge(head("ridge"), fitted, held_out, ends())
    with pytest.raises(OptionError, match="too few"):
        calibrate_alignments(head("gated", alignment="gaussian"), fitted, held_out, ends())
    with pytest.raises(OptionError, match="is trained; only its alignments"):
        calibrate_ridge(head("gated"), fitted, held_out, ends())


def test_losses_are_their_definitions() -> None:
    generator = torch.Generator().manual_seed(0)
    target, logits = torch.randn(7, 9, generator=generator), torch.randn(7, 9, generator=generator)
    target[0, :4] = float("-inf")
    p, q = target.softmax(dim=1), logits.softmax(dim=1)
    kl, tv = law_losses(target, logits)
    expected = [
        sum(a * (a / b).log() for a, b in zip(*rows, strict=True) if a > 0)
        for rows in zip(p, q, strict=True)
    ]
    torch.testing.assert_close(kl, torch.stack([Tensor(value) for value in expected]).mean())
    torch.testing.assert_close(tv, 0.5 * (p - q).abs().sum(dim=1).mean())


def test_the_loss_is_the_weighted_sum_of_its_parts() -> None:
    (windows,) = all_windows(texts(rows=3), STEPS, ends())
    one, subspace = head("gated"), torch.eye(2, VOCAB)

    def loss(**weights: float) -> float:
        parts = Weights(**{"tv": 0.0, "cosine": 0.0, "sinkhorn": 0.0} | weights)
        return head_loss(one, windows, ends(), parts, subspace).item()

    plain = loss()
    assert loss(tv=1.0) > plain
    assert loss(tv=2.0) - plain == pytest.approx(2 * (loss(tv=1.0) - plain), rel=1e-4)
    assert loss(cosine=2.0) - plain == pytest.approx(2 * (loss(cosine=1.0) - plain), rel=1e-4)
    assert loss(sinkhorn=2.0) - plain == pytest.approx(2 * (loss(sinkhorn=1.0) - plain), rel=1e-4)
    assert loss(decay=0.0) < loss(decay=0.5) < plain
    with pytest.raises(OptionError, match="weights must be at least 0"):
        Weights(tv=-1.0)


RECIPE = Recipe(steps=12, batch_size=64, learning_rate=0.02, evaluate_every=4)


def trainee() -> ShapeTrainee:
    fitted, held_out = texts().split(0.25)
    return ShapeTrainee(
        head=head("gated"), fitted=fitted, held_out=held_out, ends=ends(), parts=Weights()
    )


def test_training_learns_and_keeps_the_best_look(tmp_path: Path) -> None:
    one = trainee()
    before = one.look()
    progress = train(one, replace(RECIPE, steps=60, evaluate_every=20), tmp_path)
    assert [step for step, _ in progress.history] == [20, 40, 60]
    assert progress.best == max(value for _, value in progress.history)
    assert one.look() == pytest.approx(progress.best)
    assert progress.best > before + 0.2


@pytest.mark.parametrize("cut", [3, 8])
def test_an_interrupted_training_loses_nothing(tmp_path: Path, cut: int) -> None:
    whole, resumed = trainee(), trainee()
    straight = train(whole, RECIPE, tmp_path / "whole")
    steps = itertools.count(1)
    watch = Watch(should_stop=lambda: next(steps) == cut)
    assert train(trainee(), RECIPE, tmp_path / "parts", watch).step == cut
    progress = train(resumed, RECIPE, tmp_path / "parts")
    assert replace(progress, seconds=0) == replace(straight, seconds=0)
    for name, tensor in whole.head.state_dict().items():
        assert torch.equal(tensor, resumed.head.state_dict()[name]), name


def test_a_finished_training_is_not_done_again(tmp_path: Path) -> None:
    train(trainee(), RECIPE, tmp_path)
    again = trainee()
    watch = Watch(on_step=lambda _: pytest.fail("a step was made"))
    progress = train(again, RECIPE, tmp_path, watch)
    assert again.look() == pytest.approx(progress.best)


def test_it_ends_where_held_out_text_stops_improving(tmp_path: Path) -> None:
    slow = Recipe(steps=1000, batch_size=64, learning_rate=1e-12, evaluate_every=1, patience=3)
    progress = train(trainee(), slow, tmp_path)
    assert progress.step < 20
    assert progress.looks_since_best == 3


def test_states_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    train(trainee(), RECIPE, tmp_path)
    with pytest.raises(OptionError, match=r"other values of \['learning_rate'\]"):
        train(trainee(), replace(RECIPE, learning_rate=0.1), tmp_path)
    (tmp_path / STATE).write_bytes(b"no state")
    with pytest.raises(ModelLoadError, match="cannot go on from"):
        train(trainee(), RECIPE, tmp_path)
    with pytest.raises(OptionError, match="sizes must be at least 1"):
        Recipe(steps=0)


def test_the_rate_rises_and_falls() -> None:
    recipe = Recipe(steps=100, warm_up=0.1, learning_rate=1.0)
    rates = [recipe.rate(step) for step in range(100)]
    assert rates[:10] == pytest.approx([(step + 1) / 10 for step in range(10)])
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert Progress().looks_since_best == 0
    assert rates[-1] < 0.01
