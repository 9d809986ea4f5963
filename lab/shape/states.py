"""Similarity of successive hidden states, its consequences for laws, and the structure of their differences.

In the maths p_t = law after the t-th token, h_t = what the output layer W reads there.
"""

import math
from typing import Any, Final

import torch
from jaxtyping import Float
from torch import Tensor

from lab.shape.material import Material, joined, spread
from monge.heads.shape.alignment import log_plan, mean_cost, squared_distances
from monge.training.calibrate import law, principal_directions
from monge.training.texts import Texts

_SUPPORT: Final = 64
_PLANS: Final = 48
_BLUR: Final = 0.05
_ITERATIONS: Final = 50
_EXACT_ROWS: Final = 8192
"""Up to so many rows of W all distances are computed.

Above, twice the largest distance from their mean bounds them.
"""


@torch.inference_mode()
def similarity(material: Material) -> list[dict[str, Any]]:
    """For every task and lag n: cosine and distance of h_t and h_(t+n), TV and transport distance of p_t and p_(t+n).

    The cosine with the state of another, random row is the control: what alikeness is worth that
    every pair of states has.
    """
    found: list[dict[str, Any]] = []
    for task, part in material.parts.items():
        texts = joined([part.fitted, part.chosen, part.held_out])
        for lag in range(1, material.settings.lags + 1):
            first, second = texts.states[:, :-lag].float(), texts.states[:, lag:].float()
            cosine = torch.nn.functional.cosine_similarity(first, second, dim=-1)
            other = torch.nn.functional.cosine_similarity(first, second.roll(1, dims=0), dim=-1)
            distance = (second - first).norm(dim=-1) / first.norm(dim=-1)
            pairs = _sampled(texts, lag, material.settings.positions)
            p, later = (law(material.ends.unembed(states)) for states in pairs)
            found.append(
                {
                    "task": task,
                    "lag": lag,
                    "cosine": spread(cosine.flatten()),
                    "cosine_of_another_text": spread(other.flatten()),
                    "relative_distance": spread(distance.flatten()),
                    "total_variation": spread(0.5 * (p - later).abs().sum(dim=1)),
                    "transport_distance": spread(
                        _transport_distances(material, p[:_PLANS], later[:_PLANS])
                    ),
                    "cosine_by_position": [float(part.mean()) for part in cosine.chunk(10, dim=1)],
                }
            )
    return found


@torch.inference_mode()
def step_stability(material: Material) -> dict[str, Any]:
    """TV(p_t, p_(t+1)) against tanh(osc/4), osc = max - min of W(h_(t+1) - h_t), and against what the cosine alone promises.

    |h| <= R and a cosine of at least c give osc <= D R sqrt(2(1 - c)), with D the largest distance between rows of W.
    """
    texts = material.together.held_out
    first, second = _sampled(texts, 1, material.settings.positions * len(material.parts))
    before, after = material.ends.unembed(first).double(), material.ends.unembed(second).double()
    variation = 0.5 * (torch.softmax(before, dim=1) - torch.softmax(after, dim=1)).abs().sum(dim=1)
    change = after - before
    oscillation = change.amax(dim=1) - change.amin(dim=1)
    bound = torch.tanh(oscillation / 4)
    radius = float(torch.maximum(first.norm(dim=1), second.norm(dim=1)).max())
    diameter, is_exact = _diameter(material)
    cosine = torch.nn.functional.cosine_similarity(first, second, dim=1).double()
    promised = torch.tanh(diameter * radius * (2 * (1 - cosine)).clamp_min(0.0).sqrt() / 4)
    return {
        "total_variation": spread(variation),
        "bound": spread(bound),
        "oscillation": spread(oscillation),
        "bound_from_cosine": spread(promised),
        "violations": int((variation > bound + 1e-9).sum()),
        "num_positions": len(variation),
        "R": radius,
        "D": diameter,
        "D_is_exact": is_exact,
        "cosine": spread(cosine),
        "points": [[float(x), float(y)] for x, y in zip(bound[:400], variation[:400], strict=True)],
    }


@torch.inference_mode()
def structure(material: Material) -> dict[str, Any]:
    """Return the share of |h_(t+1) - h_t|^2 that lies in the states' main directions, and how many it fills."""
    texts = material.together.fitted
    states = texts.states.float()
    changes = (states[:, 1:] - states[:, :-1]).flatten(0, 1)
    width = states.shape[-1]
    sizes = [size for size in (1, 4, 16, 64, 256, 1024) if size < width]
    directions = principal_directions(states.flatten(0, 1), max(sizes))
    inside = (changes @ directions.T).square().cumsum(dim=1).sum(dim=0) / changes.square().sum()
    values = torch.linalg.eigvalsh(torch.cov(changes.double().T)).clamp_min(0.0)
    shares = values[values > 0] / values.sum()
    return {
        "share_in_main_directions": {str(size): float(inside[size - 1]) for size in sizes},
        "effective_rank": math.exp(float(-(shares * shares.log()).sum())),
        "hidden_size": width,
    }


def _sampled(
    texts: Texts, lag: int, count: int
) -> tuple[Float[Tensor, "nodes hidden"], Float[Tensor, "nodes hidden"]]:
    """Pairs of states at evenly spaced positions of all rows."""
    rows, length = texts.token_ids.shape
    places = (
        torch.linspace(0, rows * (length - lag) - 1, min(count, rows * (length - lag)))
        .long()
        .unique()
    )
    row, column = places // (length - lag), places % (length - lag)
    return texts.states[row, column].float(), texts.states[row, column + lag].float()


def _transport_distances(
    material: Material, left: Float[Tensor, "nodes vocab"], right: Float[Tensor, "nodes vocab"]
) -> list[float]:
    """Entropic cost of carrying the top of one law onto the top of the other, in units of the mean cost of their tokens."""
    found: list[float] = []
    for p, q in zip(left, right, strict=True):
        top_p, top_q = p.topk(min(_SUPPORT, len(p))), q.topk(min(_SUPPORT, len(q)))
        points = [material.ends.embed(top.indices).double() for top in (top_p, top_q)]
        cost = squared_distances(points[0], points[1])
        masses = [top.values / top.values.sum() for top in (top_p, top_q)]
        scale = mean_cost(cost)
        plan = log_plan(cost, masses[0], masses[1], _BLUR * scale, _ITERATIONS).exp()
        found.append(float((plan * cost).sum()) / scale)
    return found


def _diameter(material: Material) -> tuple[float, bool]:
    """Largest distance between rows of the output matrix, or a bound of it."""
    layer: Any = material.network.get_output_embeddings()
    rows = layer.weight.detach().float()
    if len(rows) <= _EXACT_ROWS:
        return max(float(torch.cdist(part, rows).max()) for part in rows.split(1024)), True
    return 2.0 * float((rows - rows.mean(dim=0)).norm(dim=1).max()), False
