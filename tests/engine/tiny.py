"""Tiny random networks of many families, and perturbed copies that draft for them with partial acceptance."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

VOCAB = 97
PAD, EOS = 2, 1
FIRST_WORD = 3  # prompts hold no special tokens

COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.25,  # the usual 0.02 would make every law flat
    "pad_token_id": PAD,
    "bos_token_id": 0,
    "eos_token_id": EOS,
    "tie_word_embeddings": False,
}
MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
GPT2_SIZES = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 512}
GPT2_SIZES |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0}
WINDOW = 12  # prompts of a few tokens cross it while they are decoded


SLIDES = "sliding_attention"
GEMMA = {"num_hidden_layers": 4, "head_dim": 8, "sliding_window": WINDOW}
GEMMA |= {"query_pre_attn_scalar": 8}


@dataclass(frozen=True)
class Family:
    """How to make one architecture tiny."""

    model_type: str
    settings: dict[str, Any]
    reads_trees: bool = True


FAMILIES = {
    "llama": Family("llama", {}),
    "qwen2": Family("qwen2", {}),
    "qwen3": Family("qwen3", {"head_dim": 8}),
    "mistral": Family("mistral", {"sliding_window": None}),
    "mistral_window": Family("mistral", {"sliding_window": WINDOW}),
    "gemma2": Family("gemma2", GEMMA),
    "gemma3": Family(
        "gemma3_text", GEMMA | {"layer_types": [SLIDES, SLIDES, "full_attention", SLIDES]}
    ),
    "phi3": Family("phi3", {}),
    "gpt2": Family("gpt2", GPT2_SIZES),
    "gpt_neox": Family("gpt_neox", {}),
    "opt": Family("opt", {"ffn_dim": 48, "word_embed_proj_dim": 32, "init_std": 0.25}),
    "bloom": Family("bloom", {"n_layer": 2, "n_head": 4}, reads_trees=False),
    "falcon": Family("falcon", {"new_decoder_architecture": False, "alibi": False}),
    "falcon_alibi": Family(
        "falcon", {"new_decoder_architecture": False, "alibi": True}, reads_trees=False
    ),
    "mixtral": Family("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3_moe": Family(
        "qwen3_moe", {**MOE, "head_dim": 8, "num_experts": 4, "decoder_sparse_step": 1}
    ),
    "deepseek_v3": Family(
        "deepseek_v3",
        MOE
        | {"num_key_value_heads": 4, "n_routed_experts": 4, "n_shared_experts": 1, "n_group": 2}
        | {"topk_group": 1, "first_k_dense_replace": 1, "q_lora_rank": 16, "kv_lora_rank": 16}
        | {"qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8},
    ),
}
STATEFUL = {
    "mamba": {"state_size": 4, "conv_kernel": 4},
    "qwen3_next": {
        **MOE,
        "num_hidden_layers": 4,
        "head_dim": 8,
        "num_experts": 4,
        "shared_expert_intermediate_size": 24,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
    },
}
TREE_FAMILIES = tuple(name for name, family in FAMILIES.items() if family.reads_trees)
CHAIN_FAMILIES = tuple(name for name, family in FAMILIES.items() if not family.reads_trees)


def network(name: str, attention: str = "eager", **changes: Any) -> PreTrainedModel:
    """The tiny network of a family; made once, so nobody may change it."""
    return _made(name, attention, tuple(sorted(changes.items())))


@cache
def _made(name: str, attention: str, changes: tuple[tuple[str, Any], ...]) -> PreTrainedModel:
    family = FAMILIES[name]
    settings = {**COMMON, **family.settings, **dict(changes)}
    config = AutoConfig.for_model(family.model_type, **settings)
    options = {"attn_implementation": attention, "dtype": torch.float32}
    return seeded(lambda: AutoModelForCausalLM.from_config(config, **options).eval())


@cache
def perturbed(model: PreTrainedModel, noise: float = 0.15) -> PreTrainedModel:
    """A copy whose weights differ a little.

    A draft model whose tokens are accepted now and then.
    """
    other = copy.deepcopy(model)

    def shake() -> PreTrainedModel:
        with torch.no_grad():
            for weights in other.parameters():
                if weights.ndim > 1:
                    weights.add_(torch.randn_like(weights) * weights.std() * noise)
        return other

    return seeded(shake)


def seeded(make: Callable[[], PreTrainedModel]) -> PreTrainedModel:
    """Make a network with its own seed, leaving torch's generator as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(11)
        return make()


def prompts(lengths: tuple[int, ...], seed: int = 0, vocab: int = VOCAB) -> list[tuple[int, ...]]:
    """Random prompts of these lengths."""
    generator = torch.Generator().manual_seed(seed)
    return [
        tuple(torch.randint(FIRST_WORD, vocab, (length,), generator=generator).tolist())
        for length in lengths
    ]


def padded(rows: list[tuple[int, ...]]) -> dict[str, torch.Tensor]:
    """Inputs of `generate` for ragged prompts: padded on the left."""
    width = max(map(len, rows))
    ids = torch.tensor([[PAD] * (width - len(row)) + list(row) for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    return {"input_ids": ids, "attention_mask": mask}
