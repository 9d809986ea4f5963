"""Rotary position embeddings, with the scaling methods of published heads."""

import math
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any, Final

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from monge.core.errors import ModelLoadError

_KNOWN: Final = ("default", "linear", "llama3", "yarn")


class Rotary(nn.Module):
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

    frequencies: Tensor

    def __init__(
        self, config: Mapping[str, Any], head_dim: int, where: str, *, interleaved: bool = False
    ) -> None:
        super().__init__()
        rope = _parameters(config)
        kind = str(rope.get("rope_type", "default"))
        if kind not in _KNOWN:
            raise ModelLoadError(
                f"{where!r}: rotary positions of type {kind!r} are not known "
                f"here; known: {', '.join(_KNOWN)}"
            )
        share = float(rope.get("partial_rotary_factor", config.get("partial_rotary_factor")) or 1.0)
        self.dim, self.interleaved = int(head_dim * share), interleaved
        frequencies, self.scale = _frequencies(kind, self.dim, {**config, **rope})
        self.register_buffer("frequencies", frequencies, persistent=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Rotary":
        frequencies = self.frequencies
        super()._apply(fn, recurse)
        # They move with the head, and stay float32.
        self.frequencies = frequencies.to(self.frequencies.device)
        return self

    def angles(self, positions: Int64[Tensor, " nodes"], like: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosines and sines of positions, `[nodes, 1, dim / 2]`, in the type and on the device of a tensor."""
        turned = positions.to(like.device)[:, None].float() * self.frequencies.to(like.device)
        cos, sin = turned.cos() * self.scale, turned.sin() * self.scale
        return cos.to(like.dtype)[:, None], sin.to(like.dtype)[:, None]

    def turn(
        self, heads: Float[Tensor, "nodes heads dim"], angles: tuple[Tensor, Tensor]
    ) -> Float[Tensor, "nodes heads dim"]:
        """Return queries or keys after the rotation."""
        (cos, sin), half = angles, self.dim // 2
        turning, still = heads[..., : self.dim], heads[..., self.dim :]
        first, second = turning[..., :half], turning[..., half:]
        if self.interleaved:
            first, second = turning[..., 0::2], turning[..., 1::2]
        return torch.cat([first * cos - second * sin, second * cos + first * sin, still], dim=-1)


def yarn_stretch(config: Mapping[str, Any]) -> float:
    """Return the factor of queries and keys under DeepSeek's yarn; 1 without `mscale_all_dim`."""
    rope = _parameters(config)
    weight, is_scaled = rope.get("mscale_all_dim"), rope.get("rope_type", "default") != "default"
    if not is_scaled or not weight or float(rope["factor"]) <= 1:
        return 1.0
    return 0.1 * float(weight) * math.log(float(rope["factor"])) + 1.0


def _parameters(config: Mapping[str, Any]) -> dict[str, Any]:
    """Rotary settings in the current form, from a configuration of either form."""
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    if "type" in rope:
        rope.setdefault("rope_type", rope["type"])
    if config.get("rope_theta") is not None:
        rope.setdefault("rope_theta", config["rope_theta"])
    return rope


def _frequencies(kind: str, dim: int, rope: Mapping[str, Any]) -> tuple[Tensor, float]:
    """The frequencies and the scale of cosines and sines, as `transformers` computes them."""
    base = float(rope.get("rope_theta") or 10000.0)
    if kind == "default":
        return 1.0 / base ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim), 1.0
    config = SimpleNamespace(
        head_dim=dim,
        hidden_size=dim,
        num_attention_heads=1,
        max_position_embeddings=rope.get("max_position_embeddings"),
        rope_parameters={"factor": None, **rope, "rope_theta": base, "partial_rotary_factor": 1.0},
        standardize_rope_params=lambda: None,
    )
    compute: Any = ROPE_INIT_FUNCTIONS[kind]
    frequencies, scale = compute(config, torch.device("cpu"))
    return frequencies, float(scale)
