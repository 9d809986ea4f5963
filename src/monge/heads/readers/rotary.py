"""Rotary position embeddings, with the scaling methods of published heads."""

import math
from collections.abc import Mapping
from typing import Any, Final

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from monge.core.errors import ModelLoadError

_KNOWN: Final = ("default", "linear", "llama3", "yarn")


class Rotary:
    """Rotates the leading dimensions of queries and keys by their positions.

    Args:
        config: A network's configuration: `rope_parameters`, or `rope_theta` and `rope_scaling`.
        head_dim: Width of a head; `partial_rotary_factor` rotates only a share of it.
        where: The folder, for messages.
        interleaved: Whether neighbouring dimensions form pairs, as in DeepSeek, instead of
            dimensions half a width apart.

    Raises:
        ModelLoadError: If the scaling method is unknown.

    Reference:
        Su et al., arXiv 2104.09864; yarn: Peng et al., arXiv 2309.00071.
    """

    def __init__(
        self, config: Mapping[str, Any], head_dim: int, where: str, *, interleaved: bool = False
    ) -> None:
        rope = parameters_of(config)
        kind = str(rope.get("rope_type", "default"))
        if kind not in _KNOWN:
            raise ModelLoadError(
                f"{where!r}: rotary positions of type {kind!r} are not known "
                f"here; known: {', '.join(_KNOWN)}"
            )
        share = float(rope.get("partial_rotary_factor", config.get("partial_rotary_factor")) or 1.0)
        self.dim, self.interleaved, self.scale = int(head_dim * share), interleaved, 1.0
        base = float(rope.get("rope_theta", 10000.0))
        self.frequencies = 1.0 / base ** (
            torch.arange(0, self.dim, 2, dtype=torch.float32) / self.dim
        )
        if kind == "linear":
            self.frequencies = self.frequencies / float(rope["factor"])
        elif kind == "llama3":
            self.frequencies = _llama3(self.frequencies, rope)
        elif kind == "yarn":
            self.frequencies, self.scale = _yarn(self.frequencies, base, {**config, **rope})

    def angles(self, positions: Int64[Tensor, " nodes"], like: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines of positions, `[nodes, 1, dim / 2]`, in the type and on the device of a tensor."""
        self.frequencies = self.frequencies.to(like.device)
        turned = positions.to(like.device)[:, None].float() * self.frequencies
        cos, sin = turned.cos() * self.scale, turned.sin() * self.scale
        return cos.to(like.dtype)[:, None], sin.to(like.dtype)[:, None]

    def turn(
        self, heads: Float[Tensor, "nodes heads dim"], angles: tuple[Tensor, Tensor]
    ) -> Float[Tensor, "nodes heads dim"]:
        """Queries or keys after the rotation."""
        (cos, sin), half = angles, self.dim // 2
        turning, still = heads[..., : self.dim], heads[..., self.dim :]
        first, second = (
            (turning[..., 0::2], turning[..., 1::2])
            if self.interleaved
            else (turning[..., :half], turning[..., half:])
        )
        return torch.cat([first * cos - second * sin, second * cos + first * sin, still], dim=-1)


def parameters_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Rotary settings in the current form, from a configuration of either form."""
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    if "type" in rope:
        rope.setdefault("rope_type", rope["type"])
    if config.get("rope_theta") is not None:
        rope.setdefault("rope_theta", config["rope_theta"])
    return rope


def yarn_scale(factor: float, weight: float) -> float:
    """Scale of attention scores under yarn."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def _llama3(frequencies: Tensor, rope: Mapping[str, Any]) -> Tensor:
    factor, length = float(rope["factor"]), float(rope["original_max_position_embeddings"])
    low, high = float(rope["low_freq_factor"]), float(rope["high_freq_factor"])
    waves = 2 * math.pi / frequencies
    blend = ((length / waves - low) / (high - low)).clamp(0.0, 1.0)
    return frequencies * (blend + (1.0 - blend) / factor)


def _yarn(frequencies: Tensor, base: float, rope: Mapping[str, Any]) -> tuple[Tensor, float]:
    length = float(rope["original_max_position_embeddings"])
    factor = float(rope.get("factor") or float(rope["max_position_embeddings"]) / length)
    dim = 2 * len(frequencies)

    def place(turns: float) -> float:
        return dim * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(base))

    low, high = place(float(rope.get("beta_fast") or 32)), place(float(rope.get("beta_slow") or 1))
    if rope.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / max(high - low, 0.001)).clamp(
        0.0, 1.0
    )
    scale = rope.get("attention_factor")
    if scale is None:
        weight, whole = rope.get("mscale"), rope.get("mscale_all_dim")
        scale = (
            yarn_scale(factor, weight) / yarn_scale(factor, whole)
            if weight and whole
            else yarn_scale(factor, 1.0)
        )
    return frequencies * (1.0 - ramp) + frequencies / factor * ramp, float(scale)
