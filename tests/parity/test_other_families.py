"""Families that no other test knows.

Each decodes as plain `generate` does, or is refused in words, never with a bare error.
"""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

import monge
from monge.core.errors import UnsupportedModelError
from tests.engine.tiny import COMMON, WINDOW, padded, perturbed, prompts, seeded
from tests.parity.comparing import assert_same_tokens, plain_greedy

NUM_TOKENS = 12
ROWS = prompts((9, 5), seed=5)
TREE = "best_first(num_nodes=8)"

HYBRID = {"num_hidden_layers": 4}
MAMBA2 = {
    "mamba_d_state": 8,
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 4,
}
MOE = {
    "num_local_experts": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
}
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "first_k_dense_replace": 1,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
}
BY_TURNS = ["sliding_attention", "full_attention"] * 2

TREES = {
    "codegen": {"rotary_dim": 4},
    "gptj": {"rotary_dim": 4},
    "gpt_bigcode": {},
    "ctrl": {"dff": 48},
    "cohere2": {**HYBRID, "sliding_window": WINDOW, "layer_types": BY_TURNS},
    "gemma3n_text": {
        **HYBRID,
        "head_dim": 8,
        "sliding_window": WINDOW,
        "layer_types": BY_TURNS,
        "num_kv_shared_layers": 2,
        "vocab_size_per_layer_input": COMMON["vocab_size"],
        "hidden_size_per_layer_input": 8,
        "laurel_rank": 4,
        "activation_sparsity_pattern": [0.0] * 4,
        "intermediate_size": [48] * 4,
        "altup_num_inputs": 2,
    },
    "gpt_oss": {**MOE, "head_dim": 8, "sliding_window": WINDOW, "layer_types": BY_TURNS[:2]},
    "deepseek_v2": {**LATENT, **MOE},
    "bert": {"is_decoder": True},
}
CHAINS = {
    "mpt": {},
    "gpt_neo": {
        "attention_types": [[["global", "local"], 1]],
        "num_layers": 2,
        "num_heads": 4,
        "window_size": WINDOW,
    },
    "llama4_text": {
        **MOE,
        **HYBRID,
        "head_dim": 8,
        "attention_chunk_size": 8,
        "intermediate_size_mlp": 48,
        "layer_types": ["chunked_attention"] * 3 + ["full_attention"],
    },
}
RECURRENT = {
    "mamba2": {"num_heads": 4, "head_dim": 16, "n_groups": 1, "state_size": 8, "chunk_size": 4},
    "falcon_mamba": {"state_size": 4, "conv_kernel": 4},
    "lfm2": {**HYBRID, "layer_types": ["conv", "full_attention"] * 2},
    "lfm2_moe": {
        **HYBRID,
        **MOE,
        "layer_types": ["conv", "full_attention"] * 2,
        "num_dense_layers": 1,
    },
    "jamba": {
        **HYBRID,
        **MOE,
        "attn_layer_offset": 1,
        "attn_layer_period": 2,
        "use_mamba_kernels": False,
        "mamba_dt_rank": 4,
    },
    "bamba": {**HYBRID, **MAMBA2, "attn_layer_indices": [1, 3]},
    "falcon_h1": {**MAMBA2, "mamba_d_ssm": 64},
    "granitemoehybrid": {**HYBRID, **MAMBA2, **MOE, "layer_types": ["mamba", "attention"] * 2},
    "zamba2": {
        **HYBRID,
        "layers_block_type": ["mamba", "hybrid"] * 2,
        "mamba_ngroups": 1,
        "n_mamba_heads": 4,
        "mamba_headdim": 16,
        "mamba_d_state": 8,
        "chunk_size": 4,
        "num_mem_blocks": 1,
        "adapter_rank": 4,
    },
    "nemotron_h": {
        **HYBRID,
        "layers_block_type": ["mamba", "attention"] * 2,
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "n_groups": 1,
        "ssm_state_size": 8,
        "chunk_size": 4,
    },
}
LOSES_STATE = ("falcon_mamba", "jamba")
"""Families whose networks of `transformers` do not continue from their state with several tokens."""
STATES = {
    **{name: settings for name, settings in RECURRENT.items() if name not in LOSES_STATE},
    "glm_moe_dsa": {**LATENT, **MOE},
}
PLAIN = {
    **{name: (RECURRENT[name], "does not continue from its") for name in LOSES_STATE},
    "prophetnet": (
        {"num_decoder_layers": 2, "num_decoder_attention_heads": 4, "pad_token_id": 0},
        "cannot read several tokens",
    ),
}
REFUSED = {
    "recurrent_gemma": (
        {**HYBRID, "attention_window_size": WINDOW, "lru_width": 32},
        "a way of its "
        # In its
        # modules.
        "own",
    ),
    "minimax": (MOE, "a way of its own"),
    "rwkv": ({}, "a way of its own"),
    "xlnet": ({"d_head": 8, "d_inner": 48}, "a way of its own"),
    "bert": ({}, "see those behind them"),
    "roformer": ({}, "see those behind them"),
    "xlm": ({"emb_dim": 32}, "see those behind them"),
    "cpmant": ({"dim_head": 8, "dim_ff": 48}, "cannot read a token behind its cache"),
}


def made(name: str, settings: dict[str, object]) -> PreTrainedModel:
    known = vars(AutoConfig.for_model(name))
    common = {
        key: value
        for key, value in COMMON.items()
        if key in known or key in AutoConfig.for_model(name).attribute_map
    }
    config = AutoConfig.for_model(name, **{**common, **settings})
    return seeded(
        lambda: AutoModelForCausalLM.from_config(
            config, attn_implementation="eager", dtype=torch.float32
        ).eval()
    )


def check(target: PreTrainedModel, **options) -> None:
    inputs = {
        **padded(ROWS),
        "max_new_tokens": NUM_TOKENS,
        "do_sample": False,
        "eos_token_id": None,
    }
    texts = target.generate(**inputs, custom_generate=monge.speculate, **options)[
        :, max(map(len, ROWS)) :
    ]
    for row, text in zip(ROWS, texts.tolist(), strict=True):
        assert_same_tokens(target, row, text, plain_greedy(target, row, NUM_TOKENS))


# Hints to install faster kernels, and that BERT is no decoder.
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", TREES)
def test_trees(name):
    target = made(name, TREES[name])
    check(target, draft_model=perturbed(target), tree=TREE)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CHAINS | STATES)
def test_chains(name):
    target = made(name, (CHAINS | STATES)[name])
    check(target, draft_model=perturbed(target), tree="chain(3)")
    with pytest.raises(UnsupportedModelError, match="trees are not possible.*use tree='chain'"):
        check(target, draft_model=perturbed(target), tree=TREE)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", PLAIN)
def test_plain_decoding_only(name):
    settings, reason = PLAIN[name]
    target = made(name, settings)
    with pytest.raises(
        UnsupportedModelError,
        match=f"speculation is not possible: .*{reason}.*; use drafter='none'",
    ):
        check(target)
    check(target, drafter="none")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", REFUSED)
def test_refused_whatever_drafts(name):
    settings, reason = REFUSED[name]
    target = made(name, settings)
    for drafter in ("none", None):
        with pytest.raises(UnsupportedModelError, match=reason):
            check(target, drafter=drafter)
