"""SHAPE heads without gradients: their acceptance on text, ridge regression, alignments and temperatures.

Steps are fitted in order: each is fitted on the predictions of the fitted steps before it.
"""

from collections.abc import Iterator
from typing import Final

import torch
from jaxtyping import Float
from torch import Tensor

from monge.core.errors import OptionError
from monge.heads.shape.alignment import NoMap
from monge.heads.shape.head import ShapeHead
from monge.heads.shape.predictors import RidgePredictor
from monge.training.chain import ChainQuality, Step, chain_quality
from monge.training.texts import Ends, Texts, Windows, all_windows, num_windows, wide

STRENGTHS: Final = (0.0, 0.25, 0.5, 0.75, 1.0)
"""Tried for every alignment; 0 is no alignment, so on held-out text an alignment never loses."""
TEMPERATURES: Final = tuple(2.0 ** (step / 8) for step in range(-8, 9))
"""Tried for every step, from 1/2 to 2."""
RIDGE: Final = 1e-3
"""Weight of the ridge penalty, in units of the inputs' mean variance."""
_HELD_OUT: Final = 8192
"""Most held-out windows that a choice looks at."""


def predictions(head: ShapeHead, windows: Windows) -> Iterator[Float[Tensor, "nodes hidden"]]:
    """Yield the aligned states of every step along the text; each feeds the next."""
    start = head.predictor.start(windows.states, windows.tokens[:, 0])
    state = windows.states
    for index in range(head.predictor.num_steps):
        state = head.step(index + 1, start, state, windows.tokens[:, index])
        yield state


def drafted_steps(
    head: ShapeHead, windows: Windows, ends: Ends, *, temperature: float | int = 1.0
) -> Iterator[Step]:
    """Yield the head's steps along the text beside the target's own; gradients pass through the head's."""
    for index, state in enumerate(predictions(head, windows)):
        with torch.no_grad():
            true = ends.unembed(windows.true[:, index]) / temperature
        drafted = head.cooled(index + 1, ends.unembed(state)) / temperature
        states = (state, windows.true[:, index])
        yield Step(drafted, true, windows.token_ids[:, index], states=states)


@torch.inference_mode()
def measure(
    head: ShapeHead, texts: Texts, ends: Ends, *, temperature: float | int = 1.0
) -> ChainQuality:
    """Measure the head's chains along text; unbiased if the target wrote it at this temperature."""
    return chain_quality(
        drafted_steps(head, windows, ends, temperature=temperature)
        for windows in all_windows(texts, head.predictor.num_steps, ends)
    )


def law(
    logits: Float[Tensor, "nodes vocab"], temperature: float | int = 1.0
) -> Float[Tensor, "nodes vocab"]:
    """Masses in float32 or better, which is enough to measure with."""
    return torch.softmax(wide(logits) / temperature, dim=1).double()


def calibrate_ridge(head: ShapeHead, fitted: Texts, held_out: Texts, ends: Ends) -> None:
    """Fit a ridge predictor and its alignments, step by step.

    Raises:
        OptionError: If there is too little text.
    """
    predictor = head.predictor
    if not isinstance(predictor, RidgePredictor):
        raise OptionError(
            f"calibrate: {type(predictor).__name__} is trained; only its alignments "
            "are fitted in closed form"
        )
    needed = 2 * predictor.num_inputs(predictor.num_steps)
    _check_enough(fitted, predictor.num_steps, needed)
    for number in range(1, predictor.num_steps + 1):
        predictor.weight[number - 1].data.copy_(_ridge(head, number, fitted, ends))
        _align_step(head, number, fitted, held_out, ends)


def calibrate_alignments(head: ShapeHead, fitted: Texts, held_out: Texts, ends: Ends) -> None:
    """Fit the alignments of an existing predictor.

    Raises:
        OptionError: If there is too little text.
    """
    _check_enough(fitted, head.predictor.num_steps, 2 * len(head.alignment(1).subspace))
    for number in range(1, head.predictor.num_steps + 1):
        _align_step(head, number, fitted, held_out, ends)


@torch.inference_mode()
def calibrate_temperatures(head: ShapeHead, held_out: Texts, ends: Ends) -> None:
    """Choose a temperature for each step, to maximise the mean acceptance."""
    for number in range(1, head.predictor.num_steps + 1):
        totals = torch.zeros(len(TEMPERATURES), dtype=torch.float64)
        for state, true in _pairs(head, number, held_out, ends, limit=_HELD_OUT):
            p, logits = law(ends.unembed(true)), ends.unembed(head.aligned(number, state))
            totals += torch.stack([_agreed(p, law(logits, heat)) for heat in TEMPERATURES])
        head.temperatures[number - 1] = TEMPERATURES[int(totals.argmax())]


@torch.inference_mode()
def _ridge(head: ShapeHead, number: int, texts: Texts, ends: Ends) -> Tensor:
    """Minimiser of |Y - X M^T|^2 + penalty |M|^2 over all windows, without a penalty on the constant."""
    predictor, device = head.predictor, texts.states.device
    assert isinstance(predictor, RidgePredictor)
    size, width = predictor.num_inputs(number), predictor.hidden_size
    gram = torch.zeros(size, size, dtype=torch.float64, device=device)
    moment = torch.zeros(size, width, dtype=torch.float64, device=device)
    for windows in all_windows(texts, predictor.num_steps, ends):
        inputs = predictor.inputs(number, *_inputs(head, number, windows)).double()
        gram += inputs.T @ inputs
        moment += inputs.T @ windows.true[:, number - 1].double()
    penalty = torch.full_like(gram[0], RIDGE * float(gram.diagonal().mean()))
    penalty[2 * width] = 0.0  # the column of ones, see `RidgePredictor.start`
    return torch.linalg.solve(gram + torch.diag(penalty), moment).T


@torch.inference_mode()
def _align_step(head: ShapeHead, number: int, fitted: Texts, held_out: Texts, ends: Ends) -> None:
    step = head.alignment(number)
    if isinstance(step.alignment, NoMap):
        return
    pairs = zip(*_pairs(head, number, fitted, ends), strict=True)
    predicted, true = (torch.cat(states) for states in pairs)
    step.subspace.copy_(principal_directions(true, len(step.subspace)))
    step.alignment.fit(predicted @ step.subspace.T, true @ step.subspace.T)
    totals = torch.zeros(len(STRENGTHS), dtype=torch.float64)
    for state, goal in _pairs(head, number, held_out, ends, limit=_HELD_OUT):
        p = law(ends.unembed(goal))
        for index, strength in enumerate(STRENGTHS):
            step.strength.fill_(strength)
            totals[index] += _agreed(p, law(ends.unembed(step.map(state))))
    step.strength.fill_(STRENGTHS[int(totals.argmax())])


def _agreed(p: Tensor, q: Tensor) -> Tensor:
    return torch.minimum(p, q).sum().cpu()


def _inputs(head: ShapeHead, number: int, windows: Windows) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs of step `number`: the shared start, the previous state, and the last token's embedding."""
    start = head.predictor.start(windows.states, windows.tokens[:, 0])
    state = windows.states
    for earlier in range(1, number):
        state = head.step(earlier, start, state, windows.tokens[:, earlier - 1])
    return start, state, windows.tokens[:, number - 1]


def _pairs(
    head: ShapeHead, number: int, texts: Texts, ends: Ends, limit: int | None = None
) -> Iterator[tuple[Float[Tensor, "nodes hidden"], Float[Tensor, "nodes hidden"]]]:
    """Predicted states of a step before its alignment, and the true states."""
    seen = 0
    for windows in all_windows(texts, head.predictor.num_steps, ends):
        predicted = head.predictor.step(number, *_inputs(head, number, windows))
        yield predicted, windows.true[:, number - 1]
        seen += len(windows.states)
        if limit is not None and seen >= limit:
            return


def principal_directions(
    states: Float[Tensor, "nodes hidden"], count: int
) -> Float[Tensor, "count hidden"]:
    """Orthonormal directions of largest variance."""
    centred = states.double() - states.double().mean(dim=0)
    _, vectors = torch.linalg.eigh(centred.T @ centred)
    return vectors.flip(1)[:, :count].T.to(states.dtype)


def _check_enough(texts: Texts, num_steps: int, needed: int) -> None:
    available = num_windows(texts, num_steps)
    if available < needed:
        raise OptionError(
            f"calibrate: {available} positions of text are too few to fit {num_steps} "
            f"steps; give {needed} or more"
        )
