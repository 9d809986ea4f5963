"""Heads step by step: acceptance and its bound, how errors add up, and other tasks.

In the maths p = target law, q = draft law.
"""

from collections.abc import Iterator
from typing import Any

import torch

from lab.shape.material import Material, Part, Say, spread
from monge.heads.shape.head import ShapeHead
from monge.heads.shape.predictors import RidgePredictor
from monge.training.calibrate import law, measure, predictions
from monge.training.texts import Texts, all_windows


def heads_of(material: Material) -> Iterator[tuple[str, ShapeHead]]:
    """The heads that are compared: direct, recurrent, trained."""
    yield "ridge, direct", material.fresh_ridge(material.together, is_branched=False)
    yield "ridge, recurrent", material.fresh_ridge(material.together, is_branched=True)
    if material.trained is not None:
        yield "trained", material.load_trained()


@torch.inference_mode()
def steps(material: Material, say: Say) -> list[dict[str, Any]]:
    """For every head and step n: acceptance against its bound, survival, errors and what they were made of.

    The bound is `1 - tanh(osc/4)` with osc of W(h'_n - h_n). One step from the true state errs by
    eps_n; a recurrent step is Lipschitz with Lip in the state before, so `|e_n| <= Lip |e_(n-1)| +
    eps_n` position by position.
    """
    found: list[dict[str, Any]] = []
    held_out = material.together.held_out
    for name, head in heads_of(material):
        say(f"steps of {name}")
        quality = measure(head, held_out, material.ends)
        per_step = _errors(material, head, held_out)
        found += [
            {
                "head": name,
                "step": index + 1,
                "acceptance": quality.acceptance[index],
                "survival": quality.survival[index],
                "block_efficiency_to_here": 1.0 + sum(quality.survival[: index + 1]),
                **figures,
            }
            for index, figures in enumerate(per_step)
        ]
    return found


def _errors(material: Material, head: ShapeHead, texts: Texts) -> list[dict[str, Any]]:
    columns: list[dict[str, list[torch.Tensor]]] = [{} for _ in range(head.predictor.num_steps)]
    for windows in all_windows(texts, head.predictor.num_steps, material.ends):
        start = head.predictor.start(windows.states, windows.tokens[:, 0])
        for index, state in enumerate(predictions(head, windows)):
            true = windows.true[:, index]
            before = windows.states if index == 0 else windows.true[:, index - 1]
            single = head.step(index + 1, start, before, windows.tokens[:, index])
            logits = [material.ends.unembed(states).double() for states in (state, true)]
            change = logits[0] - logits[1]
            shared = torch.minimum(law(logits[0]), law(logits[1])).sum(dim=1)
            column = columns[index]
            column.setdefault("cosine", []).append(
                torch.nn.functional.cosine_similarity(state, true, dim=1)
            )
            column.setdefault("error", []).append((state - true).norm(dim=1))
            column.setdefault("single", []).append((single - true).norm(dim=1))
            column.setdefault("bound", []).append(
                1 - torch.tanh((change.amax(dim=1) - change.amin(dim=1)) / 4)
            )
            column.setdefault("acceptance", []).append(shared)
            column.setdefault("true", []).append(true)
    found: list[dict[str, Any]] = []
    for index, column in enumerate(columns):
        error, single, bound, shared, true = (
            torch.cat(column[key]) for key in ("error", "single", "bound", "acceptance", "true")
        )
        lipschitz = _lipschitz(head, index + 1)
        earlier = torch.zeros_like(error) if index == 0 else torch.cat(columns[index - 1]["error"])
        found.append(
            {
                "cosine": float(torch.cat(column["cosine"]).mean()),
                "error": spread(error),
                "one_step_error": spread(single),
                "lipschitz": lipschitz,
                "error_bound": None if lipschitz is None else spread(lipschitz * earlier + single),
                "r_squared": float(
                    1 - error.square().sum() / (true - true.mean(dim=0)).square().sum()
                ),
                "acceptance_bound": spread(bound),
                "bound_violations": int((shared < bound - 1e-6).sum()),
            }
        )
    return found


def _lipschitz(head: ShapeHead, number: int) -> float | None:
    """Norm of a linear step in the state before it.

    0 where it does not look at it, `None` where it is not linear.
    """
    predictor = head.predictor
    if not isinstance(predictor, RidgePredictor):
        return None
    if not predictor.is_branched or number == 1:
        return 0.0
    width = predictor.hidden_size
    previous = predictor.weight[number - 1][:, 2 * width + 1 : 3 * width + 1]
    return float(torch.linalg.matrix_norm(previous.double(), ord=2))


@torch.inference_mode()
def transfer(material: Material, say: Say) -> list[dict[str, Any]]:
    """A ridge head fitted on one task's text, measured on every task's held-out text."""
    found: list[dict[str, Any]] = []
    sources: dict[str, Part] = {**material.parts, "all": material.together}
    for source, part in sources.items():
        say(f"a head for {source}, on every task")
        head = material.fresh_ridge(part, is_branched=False)
        for task, other in material.parts.items():
            quality = measure(head, other.held_out, material.ends)
            found.append(
                {
                    "fitted_on": source,
                    "measured_on": task,
                    "acceptance": list(quality.acceptance),
                    "block_efficiency": quality.block_efficiency,
                }
            )
    own = {
        entry["measured_on"]: entry["block_efficiency"]
        for entry in found
        if entry["fitted_on"] == entry["measured_on"]
    }
    return [
        {**entry, "relative_to_own": entry["block_efficiency"] / own[entry["measured_on"]]}
        for entry in found
    ]
