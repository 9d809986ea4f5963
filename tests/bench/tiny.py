"""A random pair with the built-in tokenizer, small enough to decode in milliseconds."""

from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from monge.api import built_in
from monge.loading.networks import load_tokenizer


def save_pair(folder: Path) -> tuple[str, str]:
    """Save a target of two layers and a draft of one; returns their folders."""
    tokenizer = load_tokenizer(built_in("target"))
    paths = []
    for name, layers in (("target", 2), ("draft", 1)):
        config = LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=4096,
            eos_token_id=0,
            bos_token_id=0,
            pad_token_id=0,
        )
        torch.manual_seed(layers)
        LlamaForCausalLM(config).save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
        paths.append(str(folder / name))
    return paths[0], paths[1]
