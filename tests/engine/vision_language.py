"""Tiny random vision-language networks of many families."""

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedModel

from tests.engine.tiny import COMMON, WINDOW, seeded

TOWER = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_heads": 2,
    "depth": 1,
    "image_size": 28,
    "patch_size": 14,
    "projection_dim": 32,
    "embed_dim": 16,
    # Of Qwen2-VL and its successors.
    "out_hidden_size": 32,
    "fullatt_block_indexes": [0],
    "deepstack_visual_indexes": [0],
    "num_position_embeddings": 16,
    # Of Mllama.
    "num_global_layers": 1,
    "attention_heads": 2,
    "max_num_tiles": 1,
    "supported_aspect_ratios": [[1, 1]],
    "intermediate_layers_indices": [0],
    "vision_output_dim": 32,
}
"""Settings of a vision tower, as far as it knows them."""
IMAGE_TOKEN = 96
AXES = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}}
BY_TURNS = {"num_hidden_layers": 4, "sliding_window": WINDOW}
BY_TURNS |= {"layer_types": ["sliding_attention", "full_attention"] * 2}
TREES: dict[str, dict[str, Any]] = {
    "llava": {},
    "qwen2_vl": AXES | BY_TURNS | {"use_sliding_window": True},
    "qwen2_5_vl": AXES,
    "qwen3_vl": AXES | {"head_dim": 8},
    "gemma3": BY_TURNS | {"head_dim": 8, "query_pre_attn_scalar": 8},
    "idefics3": {},
    "smolvlm": {},
    "internvl": {},
    "mistral3": {"head_dim": 8, "sliding_window": WINDOW},
    # Text passes by the layers that read images.
    "mllama": {"num_hidden_layers": 3, "cross_attention_layers": [1]},
}
"""Settings of the text model."""
CHAINS: dict[str, dict[str, Any]] = {
    "lfm2_vl": {"num_hidden_layers": 4, "layer_types": ["conv", "full_attention"] * 2},
}
REFUSED: dict[str, dict[str, Any]] = {"paligemma": {"head_dim": 8}}
NEEDS_IMAGES: dict[str, dict[str, Any]] = {"idefics": {}}


def made(name: str, attention: str = "eager") -> PreTrainedModel:
    """The tiny network of a family.

    Args:
        name: Its model type.
        attention: Name of the attention.
    """
    usual = AutoConfig.for_model(name)
    text = (TREES | CHAINS | REFUSED | NEEDS_IMAGES)[name]
    parts: dict[str, Any] = {}
    for part in usual.sub_configs:
        if (config := getattr(usual, part)) is not None:
            own = _known(config, COMMON) | text if part == "text_config" else _known(config, TOWER)
            parts[part] = {"model_type": config.model_type, **own}
    if "text_config" not in parts:
        parts = _known(usual, COMMON) | text | parts
    image = {"image_token_id": IMAGE_TOKEN, "image_token_index": IMAGE_TOKEN}
    top = {"vision_feature_layer": -1, "projector_hidden_size": 16, "tie_word_embeddings": False}
    settings = _known(usual, image | top | {"image_seq_length": 4}) | parts
    config = AutoConfig.for_model(name, **settings)
    options: dict[str, Any] = {"attn_implementation": attention, "dtype": torch.float32}
    return seeded(lambda: AutoModelForImageTextToText.from_config(config, **options).eval())


def _known(config: Any, settings: dict[str, Any]) -> dict[str, Any]:
    names = vars(config).keys() | config.attribute_map.keys()
    return {name: value for name, value in settings.items() if name in names}
