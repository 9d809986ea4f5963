"""Calibration of a head's confidence, and the gates of a trained head."""

from typing import Any, Final

import torch

from lab.shape.heads import heads_of
from lab.shape.material import Material, Say, spread
from lab.shape.reliability import expected_error, reliability
from monge.heads.shape.predictors import GatedPredictor
from monge.training.texts import Windows, all_windows

SHUT: Final = 0.1
OPEN: Final = 0.9
"""A gate below the one passes next to nothing, above the other nearly all."""


def calibration(material: Material, say: Say) -> list[dict[str, Any]]:
    """Compare, by head and step on held-out text, the mass of a head's most probable token with the target's.

    Returns:
        `bins` (mean said, mean was, positions) and `ece`, the mean distance of the two weighted by
        positions: the expected calibration error, with the target's mass in place of a drawn token.
    """
    found: list[dict[str, Any]] = []
    for name, head in heads_of(material):
        say(f"calibration of {name}")
        for number, bins in enumerate(
            reliability(head, material.together.held_out, material.ends), start=1
        ):
            found.append({"head": name, "step": number, "ece": expected_error(bins), "bins": bins})
    return found


def gates(material: Material) -> list[dict[str, Any]]:
    """Gates of the trained head on held-out text, by step; nothing where it has none."""
    predictor = None if material.trained is None else material.load_trained().predictor
    if not isinstance(predictor, GatedPredictor):
        return []
    return gates_of(
        predictor, next(all_windows(material.together.held_out, predictor.num_steps, material.ends))
    )


@torch.inference_mode()
def gates_of(predictor: GatedPredictor, windows: Windows) -> list[dict[str, Any]]:
    """Spread of a predictor's gates over positions and coordinates, by step."""
    found: list[dict[str, Any]] = []
    start = predictor.start(windows.states, windows.tokens[:, 0])
    for number in range(1, predictor.num_steps + 1):
        gate = predictor.gate(number, start)
        found.append(
            {
                "step": number,
                "gate": spread(gate.flatten()),
                "share_shut": float((gate < SHUT).double().mean()),
                "share_open": float((gate > OPEN).double().mean()),
                "deviation_over_positions": float(gate.std(dim=0).mean()),
                "deviation_over_coordinates": float(gate.mean(dim=0).std()),
            }
        )
    return found
