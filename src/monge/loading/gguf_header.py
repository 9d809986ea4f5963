"""What the header of a GGUF file says about a network, and whether `transformers` makes that network of it.

Keys mean what they mean to llama.cpp. An unknown key that changes the computation is refused by
name, as is a missing tensor, or a tensor that no part of the network reads.
"""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from transformers import PreTrainedModel
from transformers import modeling_gguf_pytorch_utils as host

from monge.core.errors import ModelLoadError
from monge.core.words import counted
from monge.loading.gguf_rope import FACTORS, ROPE_KEYS, RopeReader, computed_rope
from monge.networks.network_facts import layer_windows

_NEEDED: Final = (
    *("block_count", "context_length", "embedding_length", "feed_forward_length"),
    "attention.head_count",
)
_EPSILONS: Final = (
    *("rms_norm_eps", "norm_eps", "layer_norm_epsilon", "norm_epsilon", "layer_norm_eps"),
)
_SETTINGS: Final[Mapping[str, tuple[str, ...]]] = {
    "attention.key_length": ("head_dim",),
    "attention.key_length_swa": ("head_dim",),
    "attention.layer_norm_epsilon": _EPSILONS,
    "attention.layer_norm_rms_epsilon": _EPSILONS,
    "attention.shared_kv_layers": ("num_kv_shared_layers",),
    "attention.sliding_window": ("sliding_window",),
    "attn_logit_softcapping": ("attn_logit_softcapping",),
    "embedding_length_per_layer_input": ("hidden_size_per_layer_input",),
    "expert_count": ("num_experts", "num_local_experts"),
    "expert_feed_forward_length": ("moe_intermediate_size",),
    "expert_shared_feed_forward_length": ("shared_expert_intermediate_size",),
    "expert_used_count": ("num_experts_per_tok",),
    "expert_weights_norm": ("norm_topk_prob",),
    "final_logit_softcapping": ("final_logit_softcapping",),
}
"""Attributes of configurations, of which a key sets the first that there is."""
_SETTLED: Final = frozenset(
    {
        *ROPE_KEYS,
        # The shapes of tensors say the same.
        *_NEEDED,
        *("attention.head_count_kv", "expert_feed_forward_length", "vocab_size"),
        # These change nothing where the next token is computed.
        *("pooling_type", "tensor_data_layout"),
        "use_parallel_residual",  # the host goes by the tensors, as llama.cpp does
    }
)
_HYBRIDS: Final = frozenset({"lfm2", "mamba", "qwen35", "qwen35moe"})
_OF_HYBRIDS: Final = (
    *("full_attention_interval", "nextn_predict_layers", "rope.dimension_sections"),
    *("shortconv.l_cache", "ssm."),
)
"""Beginnings of keys that transformers reads for `_HYBRIDS`."""
_LARGEST: Final = frozenset({("gemma2", 46), ("gemma3_text", 62)})
"""Type and layers of the 27B networks, whose attention is scaled by their width; no key says so."""


class Header:
    """The header of a GGUF file that holds a whole network.

    Args:
        path: The file.

    Attributes:
        reader: A `gguf.GGUFReader`.
        architecture: Name of the architecture in GGUF files.
        fields: Values by key, without the vocabulary.
        keys: Values of the architecture's keys, by their names behind it.

    Raises:
        ModelLoadError: If the file is damaged or truncated, or holds something else.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.reader: Any = _reader(path)
            self.fields = {
                name: field.contents()
                for name, field in self.reader.fields.items()
                if not name.startswith("tokenizer.") or len(field.data) == 1
            }
        except (ValueError, KeyError, IndexError, OverflowError, MemoryError) as error:
            # What `gguf` says of damage is about its arrays.
            is_clear = isinstance(error, _HeaderError) or "version" in str(error)
            reason = str(error) if is_clear else "its header ends early, or is damaged"
            raise self._refused(f"{reason}; it may be truncated, so fetch it again") from error
        self.architecture = str(self.fields.get("general.architecture"))
        start = f"{self.architecture}."
        named = {name: value for name, value in self.fields.items() if name.startswith(start)}
        self.keys = {name.removeprefix(start): value for name, value in named.items()}
        known: Any = host.GGUF_TO_TRANSFORMERS_MAPPING["config"]
        others = (self.architecture.replace("moe", "_moe"), self.architecture.replace("-", "_"))
        names = (name for name in (self.architecture, *others) if name in known)
        # Attributes of the configuration that the host itself sets, by key.
        self._mapped: Mapping[str, str | None] = known.get(next(names, ""), {})
        self._check_kind()

    def describe(self, config: Any) -> None:
        """Set what transformers leaves out of a configuration.

        Raises:
            ModelLoadError: If a key names something that it cannot be set to.
        """
        keys, heads = self.keys, getattr(config, "num_attention_heads", None)
        try:
            if "attention.head_count_kv" not in keys and hasattr(config, "num_key_value_heads"):
                config.num_key_value_heads = heads
            sizes = {key for key, name in self._mapped.items() if name == "head_dim"}
            if hasattr(config, "head_dim") and keys.keys().isdisjoint(
                {"attention.key_length", *sizes}
            ):
                _set(config, "head_dim", config.hidden_size // heads)
            for key, name in self._named(config):
                if keys.get(key, 0) != 0 and not self._mapped.get(key):
                    _set(config, name, keys[key])
            # What the host leaves at its defaults.
            if config.model_type == "mistral":
                config.sliding_window = keys.get("attention.sliding_window")
            if config.model_type == "gpt2":
                config.n_positions = keys["context_length"]
            pattern = keys.get("attention.sliding_window_pattern")
            if pattern is not None and hasattr(config, "layer_types"):
                config.layer_types = _layer_types(pattern, config.num_hidden_layers)
            if (config.model_type, config.num_hidden_layers) in _LARGEST:
                config.query_pre_attn_scalar = config.hidden_size // heads
            if getattr(config, "rope_parameters", None):
                RopeReader(keys, self._factors(), config).set()
        except (AttributeError, TypeError, ValueError) as error:
            raise self._refused(
                f"its rotary embedding or another setting is not understood: {error}"
            ) from error

    def check(self, network: PreTrainedModel) -> None:
        """Refuse what a network of the described configuration does not honour.

        Raises:
            ModelLoadError: With the name of the key.
        """
        known, is_hybrid = self._computed(network), self.architecture in _HYBRIDS
        for key, value in self.keys.items():
            # The host takes the width of rotary embeddings for that of heads.
            is_mapped = self._mapped.get(key) and key != "rope.dimension_count"
            if is_mapped or key in _SETTLED:
                continue
            if is_hybrid and key.startswith(_OF_HYBRIDS):
                continue
            amount = any(value) if isinstance(value, list) else value
            if amount not in known.get(key, {0, 1} if key.endswith("scale") else {0}):
                raise self._refused(
                    f"{self.architecture}.{key} = {value} changes what is computed, and "
                    f"{type(network).__name__} does not do that"
                )

    def tensors(self, network: PreTrainedModel) -> dict[str, str] | None:
        """Return the network's tensor names by the file's; `None` if only transformers has them.

        Raises:
            ModelLoadError: If a tensor is missing, or is read by no part of the network.
        """
        try:
            places: dict[str, str] = host.get_gguf_hf_weights_map(network, self.processor(network))
        except NotImplementedError:
            return None
        # The host knows tensors of several experts without the ending of their names.
        names = {
            tensor.name: places.get(tensor.name, places.get(tensor.name.removesuffix(".weight")))
            for tensor in self.reader.tensors
            if tensor.name not in FACTORS
        }
        unread = [name for name, place in names.items() if place is None]
        files = {place: name for name, place in places.items()}
        absent = network.state_dict().keys() - names.values() - network.all_tied_weights_keys.keys()
        self.refuse(network, unread, [files.get(place, place) for place in absent])
        return {name: place for name, place in names.items() if place is not None}

    def processor(self, network: PreTrainedModel) -> host.TensorProcessor:
        """Return what turns the file's tensors into those of a network, as transformers does."""
        kind = host.TENSOR_PROCESSORS.get(self.architecture, host.TensorProcessor)
        return kind(config=network.config.to_dict())

    def refuse(
        self, network: PreTrainedModel, unread: Collection[str], missing: Collection[str]
    ) -> None:
        """Refuse tensors that no part of a network reads, and those that it lacks.

        Raises:
            ModelLoadError: If there are any.
        """
        kind = type(network).__name__
        for names, what in ((unread, "is read by no part"), (missing, "is missing, a part")):
            if names:
                more = f", and {counted(len(names) - 1, 'other')}" if len(names) > 1 else ""
                raise self._refused(f"tensor {min(names)} {what} of a {kind}{more}")

    def _refused(self, reason: str) -> ModelLoadError:
        return ModelLoadError(f"{str(self.path)!r} cannot be read: {reason}")

    def _check_kind(self) -> None:
        kind = self.fields.get("general.type", "model")
        if kind != "model" or "adapter.type" in self.fields:
            raise self._refused(
                f"it holds no whole model (general.type = {kind}); merge an adapter into its model, "
                "and give the model's own file in place of a projector"
            )
        if (count := int(self.fields.get("split.count", 1))) > 1:
            raise self._refused(
                f"it is one of {count} parts (split.count = {count}); join them: llama-gguf-split "
                "--merge FIRST_PART WHOLE"
            )
        if self.reader.byte_order == "S":
            raise self._refused("its numbers are in the other byte order; convert the model again")
        needed = [key for key in _NEEDED if self._mapped.get(key)]
        if "expert_feed_forward_length" in self.keys:
            needed.remove("feed_forward_length")
        if not any("epsilon" in key for key in self.keys):
            needed += [key for key in self._mapped if "epsilon" in key]
        if missing := [key for key in needed if key not in self.keys]:
            raise self._refused(f"its header has no {self.architecture}.{missing[0]}")

    def _factors(self) -> dict[str, list[float]]:
        from gguf import dequantize

        return {
            tensor.name: dequantize(tensor.data, tensor.tensor_type).reshape(-1).tolist()
            for tensor in self.reader.tensors
            if tensor.name in FACTORS
        }

    def _named(self, config: Any) -> Iterator[tuple[str, str]]:
        """Keys, and the attributes that they set."""
        for key, names in _SETTINGS.items():
            if (name := next((name for name in names if hasattr(config, name)), None)) is not None:
                yield key, name

    def _computed(self, network: PreTrainedModel) -> dict[str, Collection[object]]:
        """Values with which a network computes, by key."""
        config, keys = network.config, self.keys
        known: dict[str, Collection[object]] = {
            key: {0, getattr(config, name)} for key, name in self._named(config)
        }
        if heads := getattr(config, "num_attention_heads", None):
            size = config.hidden_size // heads
            known.setdefault("attention.key_length", {size})
            for ending in ("", "_swa"):
                of_keys = keys.get(f"attention.key_length{ending}", size)
                known[f"attention.value_length{ending}"] = {of_keys}
        window = keys.get("attention.sliding_window", 0)
        hides = window < keys.get("context_length", 0)
        known["attention.sliding_window"] = {0, *layer_windows(config).values()}
        if not hides:
            known["attention.sliding_window"] = {window}
        if hasattr(config, "layer_types"):
            known["attention.sliding_window_pattern"] = range(config.num_hidden_layers + 1)
        scale = keys.get("attention.scale", 0)
        scales: list[Any] = [getattr(module, "scaling", scale) for module in network.modules()]
        if all(math.isclose(usual, scale, rel_tol=1e-5) for usual in scales):
            known["attention.scale"] = {scale}
        return (
            known
            | {
                "attention.causal": {True},
                "attention.max_alibi_bias": {8 if self.architecture == "bloom" else 0},
                "expert_gating_func": {0, 1},  # softmax
            }
            | computed_rope(network, config)
        )


class _HeaderError(ValueError):
    """A header that cannot be used, with the reason in words."""


def _set(config: Any, name: str, value: object) -> None:
    if getattr(config, name) != value:  # some are computed, and cannot be set
        setattr(config, name, value)


def _layer_types(pattern: int | Sequence[bool], count: int) -> list[str]:
    if isinstance(pattern, int):
        pattern = [pattern > 0 and (layer + 1) % pattern > 0 for layer in range(count)]
    return ["sliding_attention" if slides else "full_attention" for slides in pattern]


def _reader(path: Path) -> Any:
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFReader

    class Reader(GGUFReader):
        data: Any

        def _build_fields(self, offs: int, count: int) -> int:
            # Parts of a memory map cost four times as much: seconds for a vocabulary.
            mapped, self.data = self.data, self.data.view(np.ndarray)
            end = super()._build_fields(offs, count)
            self.data = mapped
            return end

        def _build_tensors(self, start_offs: int, fields: Any) -> None:
            for field in fields:
                *_, dims, kind, offset = field.parts
                if int(kind[0]) not in set(GGMLQuantizationType):
                    raise _HeaderError(f"{field.name} has numbers of the unknown type {kind[0]}")
                block, size = GGML_QUANT_SIZES[GGMLQuantizationType(kind[0])]
                end = start_offs + int(offset[0]) + math.prod(map(int, dims)) * size // block
                if end > len(self.data):
                    raise _HeaderError(
                        f"its header promises {end} bytes or more, and it has {len(self.data)}"
                    )
            super()._build_tensors(start_offs, fields)

    return Reader(path)
