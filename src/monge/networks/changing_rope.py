"""Rotary embeddings whose frequencies depend on the length of the text."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

import torch
from transformers import PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

_KINDS: Final = ("dynamic", "longrope")


class ChangingRope:
    """Frequencies at which transformers' `generate` reads texts that are longer than a limit.

    Up to the limit, all texts have the same frequencies. transformers reads a longer prompt at the
    frequencies of its length, and each later token at those of the text up to there; keys in the
    cache stay as they are. Networks like Phi-3 read the whole text again when it passes the limit.
    Modules of transformers keep the frequencies of the last text that they read, so they are set
    for every forward.

    Args:
        network: A network of which `limit_of` knows a limit.

    Attributes:
        limit: Most tokens of a text before the change.
        rereads: Whether a text is read again when it passes the limit.
        reason: Why nothing is drafted in longer texts.
    """

    def __init__(self, network: PreTrainedModel) -> None:
        config = network.config.get_text_config()
        kind, self.limit = _change(config) or ("", 0)
        # Which Phi-3's `prepare_inputs_for_generation` asks for.
        self.rereads = hasattr(config, "original_max_position_embeddings")
        self.reason = (
            f"the rotary embedding of {type(network).__name__} ({kind}) changes with the length of "
            f"texts of more than {self.limit} tokens"
        )

    @contextmanager
    def at_length(self, network: PreTrainedModel, length: int) -> Iterator[None]:
        """Run forwards of a network of these settings at the frequencies of a text of this length."""
        before: list[tuple[torch.nn.Module, str, Any]] = []
        try:
            for module in filter(_is_rotary, network.modules()):
                for name, value in _frequencies(module, length).items():
                    before.append((module, name, getattr(module, name, self.limit)))
                    setattr(module, name, value)
            yield
        finally:
            for module, name, value in before:
                setattr(module, name, value)


def changing_rope(network: PreTrainedModel) -> ChangingRope | None:
    """Return the rotary embedding of a network, or `None` if its frequencies never change."""
    return None if _change(network.config.get_text_config()) is None else ChangingRope(network)


def _change(config: Any) -> tuple[str, int] | None:
    """Type of a rotary embedding that changes, and the longest text before it does."""
    rope: Mapping[str, Any] = getattr(config, "rope_parameters", None) or {}
    for part in (rope, *(part for part in rope.values() if isinstance(part, Mapping))):
        kind = part.get("rope_type")
        if kind == "dynamic":
            return kind, int(config.max_position_embeddings)
        if kind == "longrope" and part["short_factor"] != part["long_factor"]:
            return kind, int(part["original_max_position_embeddings"])
    return None


def _is_rotary(module: torch.nn.Module) -> bool:
    return hasattr(module, "rope_type") and hasattr(module, "max_seq_len_cached")


def _frequencies(module: Any, length: int) -> dict[str, Any]:
    """Attributes of a rotary module that has read a text of this length."""
    types = module.rope_type
    kinds: Mapping[str | None, str] = types if isinstance(types, Mapping) else {None: types}
    values: dict[str, Any] = {}
    for layers, kind in kinds.items():
        if kind not in _KINDS:
            continue
        prefix = "" if layers is None else f"{layers}_"
        device = getattr(module, f"{prefix}inv_freq").device
        frequencies, _ = ROPE_INIT_FUNCTIONS[kind](
            module.config,
            device,
            seq_len=torch.tensor(length, device=device),  # type: ignore[arg-type]  # as the host does
            **({} if layers is None else {"layer_type": layers}),
        )
        # The host returns to the original frequencies in short texts: both are those of the length.
        values |= {f"{prefix}{name}inv_freq": frequencies for name in ("", "original_")}
        values[f"{prefix}max_seq_len_cached"] = length
    return values
