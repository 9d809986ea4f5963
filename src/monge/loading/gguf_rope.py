"""The rotary embedding that a GGUF file describes, as parameters of `transformers`."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

FREQS: Final = "rope_freqs.weight"
SHORT, LONG = "rope_factors_short.weight", "rope_factors_long.weight"
FACTORS: Final = (FREQS, SHORT, LONG)
"""Tensors by which frequencies are divided: for all texts, for short and for long texts."""
ROPE_KEYS: Final = {"rope.freq_base", "rope.scale_linear"} | {
    f"rope.scaling.{name}"
    for name in (
        *("type", "factor", "original_context_length", "attn_factor", "finetuned"),
        *("yarn_attn_factor", "yarn_beta_fast", "yarn_beta_slow", "yarn_ext_factor"),
    )
}
"""Keys that `RopeReader` understands."""


class RopeReader:
    """Reads keys and tensors of a header into a configuration.

    Args:
        keys: Keys of the architecture.
        factors: Those of `FACTORS` that the file has.
        config: The configuration, whose parameters are changed.

    Raises:
        ValueError: If they describe what no network of transformers computes.
    """

    def __init__(
        self, keys: Mapping[str, Any], factors: Mapping[str, Sequence[float]], config: Any
    ) -> None:
        self._keys, self._factors, self._config = keys, factors, config
        nested = "full_attention" in config.rope_parameters
        self._layers = {"layer_type": "full_attention"} if nested else {}
        self._rope: dict[str, Any] = config.rope_parameters
        if nested:
            self._rope = config.rope_parameters["full_attention"]
            if base := keys.get("rope.freq_base_swa"):
                config.rope_parameters["sliding_attention"]["rope_theta"] = base

    def set(self) -> None:
        """Write the parameters, as llama.cpp reads the keys."""
        keys, rope, factors = self._keys, self._rope, self._factors
        if base := keys.get("rope.freq_base"):
            rope["rope_theta"] = base
        head_dim = getattr(self._config, "head_dim", None)
        head_dim = head_dim or self._config.hidden_size // self._config.num_attention_heads
        size = keys.get("rope.dimension_count", head_dim)
        if size != head_dim or "partial_rotary_factor" in rope:
            rope["partial_rotary_factor"] = size / head_dim
        kind = keys.get("rope.scaling.type", "linear")
        if kind not in {"none", "linear", "yarn", "longrope"}:
            raise ValueError(f"rope.scaling.type = {kind}")
        if keys.get("rope.scaling.yarn_ext_factor", -1) not in {-1, int(kind == "yarn")}:
            raise ValueError("rope.scaling.yarn_ext_factor")
        longest = self._config.max_position_embeddings
        original = int(keys.get("rope.scaling.original_context_length", longest))
        factor = keys.get("rope.scaling.factor", keys.get("rope.scale_linear", 0)) or 1.0
        scale = float(keys.get("rope.scaling.attn_factor", 1))
        if kind == "longrope" or not factors.keys().isdisjoint({SHORT, LONG}):
            if factors.keys() != {SHORT, LONG} or factor != 1:
                raise ValueError(f"longrope has {SHORT} and {LONG}, and no factor beside them")
            self._divide(factors[SHORT], factors[LONG], original, scale)
            return
        usual = float(keys.get("rope.scaling.yarn_attn_factor", 0))
        if kind == "yarn":
            usual = usual or (0.1 * math.log(factor) + 1 if factor > 1 else 1.0)
            rope |= {"rope_type": "yarn", "factor": factor, "attention_factor": scale * usual}
            self._set_original(original)
            rope |= {
                name: keys[key]
                for name in ("beta_fast", "beta_slow")
                if (key := f"rope.scaling.yarn_{name}") in keys
            }
            scale = 1.0
        else:
            scale *= usual or 1.0
            if kind == "linear" and factor != 1:
                rope |= {"rope_type": "linear", "factor": factor}
        # Phi-3 has no other type than this last one.
        is_phi = self._config.model_type == "phi3" and rope["rope_type"] != "default"
        if FREQS in factors or scale != 1 or is_phi:
            self._fix(factors.get(FREQS), scale)

    def _fix(self, factors: Sequence[float] | None, scale: float) -> None:
        """Set frequencies that are the same in texts of all lengths.

        `longrope` is the only type of transformers that takes any frequencies.
        """
        rope = dict(self._rope)
        kind = "linear" if rope["rope_type"] == "default" else rope["rope_type"]
        self._rope.setdefault("factor", 1.0)
        frequencies, usual = ROPE_INIT_FUNCTIONS[kind](self._config, **self._layers)
        self._rope["factor"] = 1.0
        plain, _ = ROPE_INIT_FUNCTIONS["linear"](self._config, **self._layers)
        if factors is not None and len(factors) != len(plain):
            raise ValueError(f"{FREQS} has {len(factors)} numbers; expected {len(plain)}")
        ratios = plain.double() / frequencies.double()
        if factors is not None:
            ratios *= torch.tensor(factors, dtype=torch.float64)
        longest = self._config.max_position_embeddings
        self._divide(ratios.tolist(), ratios.tolist(), longest, usual * scale)

    def _divide(
        self, short: Sequence[float], long: Sequence[float], original: int, scale: float
    ) -> None:
        config, rope = self._config, self._rope
        for name in rope.keys() - {"rope_theta", "partial_rotary_factor"}:
            del rope[name]
        rope |= {"rope_type": "longrope", "attention_factor": scale}
        rope |= {"short_factor": list(short), "long_factor": list(long)}
        rope["factor"] = max(1.0, config.max_position_embeddings / original)
        self._set_original(original)

    def _set_original(self, length: int) -> None:
        self._rope["original_max_position_embeddings"] = length
        if hasattr(self._config, "original_max_position_embeddings"):  # which goes before the other
            self._config.original_max_position_embeddings = length


def computed_rope(network: torch.nn.Module, config: Any) -> dict[str, Any]:
    """Return values of further keys that a network honours."""
    rope = getattr(config, "rope_parameters", None) or {}
    sizes = {
        2 * buffer.shape[-1]
        for name, buffer in network.named_buffers()
        if name.endswith("inv_freq")
    } or range(1 << 20)  # any, where positions are learned
    bases = {part["rope_theta"] for part in rope.values() if isinstance(part, Mapping)}
    return {
        **dict.fromkeys(("rope.dimension_count", "rope.dimension_count_swa"), sizes),
        "rope.freq_base_swa": bases or {rope.get("rope_theta")},
    }
