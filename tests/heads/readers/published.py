"""Small checkpoints in the layouts in which heads are published, for a target of any hidden size and vocabulary."""

import json
import math
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

INNER, DIM, HEADS, KV = 4, 2, 2, 1
LLAMA = {
    "intermediate_size": INNER,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV,
    "head_dim": DIM,
    "num_hidden_layers": 1,
    "rms_norm_eps": 1e-5,
    "rope_theta": 50.0,
    "hidden_act": "silu",
}


@dataclass
class Published:
    """A checkpoint before it is written."""

    config: dict[str, Any]
    tensors: dict[str, Tensor] = field(default_factory=dict)
    file: str = "model.safetensors"

    def add(self, name: str, *shape: int, around: float = 0.0) -> None:
        """Numbers that depend on nothing but their name and place."""
        start = zlib.crc32(name.encode()) % 1000
        numbers = torch.sin(
            1.7 * torch.arange(math.prod(shape), dtype=torch.float64) + start
        ).reshape(shape)
        self.tensors[name] = around + numbers * (0.2 if around else 1.0)

    def norm(self, name: str, width: int) -> None:
        self.add(f"{name}.weight", width, around=1.0)

    def write(self, folder: Path) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.config))
        if self.file.endswith(".safetensors"):
            save_file(self.tensors, folder / self.file)
        else:
            torch.save(self.tensors, folder / self.file)
        return folder


def layer(
    made: Published,
    name: str,
    hidden: int,
    *,
    doubled: bool = False,
    norms: bool = False,
    gated: bool = False,
) -> None:
    """Attention and network of one layer; its first norm is the caller's."""
    width = 2 * hidden if doubled else hidden
    made.add(f"{name}.self_attn.q_proj.weight", HEADS * DIM * (2 if gated else 1), width)
    made.add(f"{name}.self_attn.k_proj.weight", KV * DIM, width)
    made.add(f"{name}.self_attn.v_proj.weight", KV * DIM, width)
    made.add(f"{name}.self_attn.o_proj.weight", hidden, HEADS * DIM)
    if norms:
        made.norm(f"{name}.self_attn.q_norm", DIM)
        made.norm(f"{name}.self_attn.k_norm", DIM)
    made.add(f"{name}.mlp.gate_proj.weight", INNER, hidden)
    made.add(f"{name}.mlp.up_proj.weight", INNER, hidden)
    made.add(f"{name}.mlp.down_proj.weight", hidden, INNER)
    made.norm(f"{name}.post_attention_layernorm", hidden)


def medusa(hidden: int, vocab: int) -> Published:
    # The configuration names two heads, as the published ones do; the file has three.
    config = {"medusa_num_heads": 2, "medusa_num_layers": 1, "base_model_name_or_path": "elsewhere"}
    made = Published(config, file="medusa_lm_head.pt")
    for head in range(3):
        made.add(f"{head}.0.linear.weight", hidden, hidden)
        made.add(f"{head}.0.linear.bias", hidden)
        made.add(f"{head}.1.weight", vocab, hidden)
    return made


def hydra(hidden: int, vocab: int, *, arch: str = "mlp", grounded: bool = True) -> Published:
    config = {
        "hydra_num_heads": 3,
        "hydra_num_layers": 2,
        "hydra_head_arch": arch,
        "grounded_heads": grounded,
    }
    made = Published(config, file="hydra_lm_head.pt")
    made.add("input_embed_fn.weight", vocab, hidden)
    if arch == "eagle-attn":
        made.config |= {**LLAMA, "hydra_num_heads": 1}
        made.add("fc.weight", hidden, 2 * hidden)
        made.add("fc.bias", hidden)
        layer(made, "attn", hidden)
        made.norm("attn.input_layernorm", hidden)
        return made
    prefix = arch == "prefix-mlp"
    for head in range(3):
        width = hidden * (head + 2) if grounded else hidden
        for place, columns in zip((1, 3) if prefix else (0, 1), (width, hidden), strict=True):
            made.add(f"hydra_mlp.{head}.{place}.linear.weight", hidden, columns)
            made.add(f"hydra_mlp.{head}.{place}.linear.bias", hidden)
        if grounded:
            made.add(f"hydra_mlp.{head}.{1 if prefix else 0}.res_connection.weight", hidden, width)
            made.add(f"hydra_mlp.{head}.{1 if prefix else 0}.res_connection.bias", hidden)
        output = f"hydra_lm_head.{head}" + (".1" if prefix else "")
        made.add(f"{output}.weight", vocab, hidden)
        made.add(f"{output}.bias", vocab)
    if prefix:
        made.config |= LLAMA
        made.add("prefix_embeding_layer.embed_tokens.weight", vocab, hidden)
        layer(made, "prefix_embeding_layer.layers.0", hidden)
        made.norm("prefix_embeding_layer.layers.0.input_layernorm", hidden)
        made.norm("prefix_embeding_layer.norm", hidden)
    return made


def eagle(hidden: int, vocab: int) -> Published:
    config = {
        **LLAMA,
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": hidden,
        "vocab_size": vocab,
        "bias": True,
    }
    made = Published(config, file="pytorch_model.bin")
    made.add("embed_tokens.weight", vocab, hidden)
    made.add("fc.weight", hidden, 2 * hidden)
    made.add("fc.bias", hidden)
    layer(made, "layers.0", hidden)
    return made


def vocabulary(made: Published, drafted: list[int], vocab: int) -> None:
    """A draft vocabulary of these tokens of the target."""
    made.tensors["d2t"] = torch.tensor(drafted) - torch.arange(len(drafted))
    made.tensors["t2d"] = torch.tensor([token in drafted for token in range(vocab)])


def eagle3(
    hidden: int, vocab: int, *, name: str = "midlayer", version: str = "3", fused: int = 3
) -> Published:
    config = {
        **LLAMA,
        "architectures": ["LlamaForCausalLMEagle3"],
        "hidden_size": hidden,
        "vocab_size": vocab,
        "draft_vocab_size": vocab - 1,
        "eagle_aux_hidden_state_layer_ids": [0, 1, 1][:fused],
    }
    made = Published(config)
    made.add("fc.weight", hidden, fused * hidden)
    layer(made, name, hidden, doubled=True)
    for norm in (f"{name}.hidden_norm", f"{name}.input_layernorm", "norm"):
        made.norm(norm, hidden)
    made.add("lm_head.weight", vocab - 1, hidden)
    vocabulary(made, [token for token in range(vocab) if token != 1], vocab)
    if version == "3.1":
        made.config |= {"fc_norm": True, "norm_output": True, "norm_before_residual": True}
        for one in range(fused):
            made.norm(f"fc_norm.{one}", hidden)
    return made


def mtp_parts(
    made: Published, names: tuple[str, str, str, str, str], hidden: int, **kind: bool
) -> Published:
    """A prediction module under a layout's names.

    Norms of embedding and state, projection, last norm, layer.
    """
    embedding, state, projection, last, inner = names
    for norm in (embedding, state, last, f"{inner}.input_layernorm"):
        made.norm(norm, hidden)
    made.add(f"{projection}.weight", hidden, 2 * hidden)
    layer(made, inner, hidden, **kind)
    return made


def qwen_mtp(hidden: int, vocab: int) -> Published:
    text = {
        **LLAMA,
        "model_type": "qwen3_5_text",
        "hidden_size": hidden,
        "vocab_size": vocab,
        "mtp_num_hidden_layers": 1,
    }
    names = (
        "mtp.pre_fc_norm_embedding",
        "mtp.pre_fc_norm_hidden",
        "mtp.fc",
        "mtp.norm",
        "mtp.layers.0",
    )
    return mtp_parts(Published({"text_config": text}), names, hidden, norms=True, gated=True)


def deepseek_mtp(hidden: int, vocab: int) -> Published:
    config = {
        **LLAMA,
        "hidden_size": hidden,
        "vocab_size": vocab,
        "num_hidden_layers": 7,
        "num_nextn_predict_layers": 1,
    }
    names = tuple(
        f"model.layers.7{part}"
        for part in (".enorm", ".hnorm", ".eh_proj", ".shared_head.norm", "")
    )
    made = mtp_parts(Published(config), names, hidden)
    made.add("model.layers.7.shared_head.head.weight", vocab, hidden)
    made.add("model.layers.7.embed_tokens.weight", vocab, hidden)
    return made


def mimo_mtp(hidden: int, vocab: int) -> Published:
    config = {**LLAMA, "model_type": "mimo", "hidden_size": hidden, "vocab_size": vocab}
    parts = (".token_layernorm", ".hidden_layernorm", ".input_proj", ".final_layernorm", "")
    return mtp_parts(
        Published(config), tuple(f"model.mtp_layers.0{part}" for part in parts), hidden
    )


def dflash(hidden: int, vocab: int, *, method: str = "dflash", block: int = 4) -> Published:
    config = {
        **LLAMA,
        "architectures": [
            {"dflash": "DFlashDraftModel", "dflash2": "DFlash2DraftModel"}.get(
                method, "DSparkDraftModel"
            )
        ],
        "hidden_size": hidden,
        "vocab_size": vocab,
        "num_hidden_layers": 2,
        "num_target_layers": 1,
        "dflash_config": {"block_size": block, "mask_token_id": 2, "target_layer_ids": [-1, 0]},
    }
    made = Published(config)
    made.add("fc.weight", hidden, 2 * hidden)
    made.norm("hidden_norm", hidden)
    made.norm("norm", hidden)
    for one in range(2):
        layer(made, f"layers.{one}", hidden, norms=True)
        made.norm(f"layers.{one}.input_layernorm", hidden)
        if method == "dflash2":
            for part in ("attention", "mlp"):
                made.add(f"layers.{one}.{part}_conv.base_kernel", 2, 2, hidden)
                made.add(
                    f"layers.{one}.{part}_conv.kernel_projection.weight", 2 * 2 * hidden, hidden
                )
    if method == "dflash2":
        settings = {
            "conv_kernel_size": 2,
            "conv_group_size": 1,
            "selector_rank": 2,
            "selector_top_k": vocab - 1,
        }
        made.config["dflash_config"] |= settings
        made.add("candidate_selector.predecessor_codebook", vocab, 2)
        made.add("candidate_selector.successor_codebook", vocab, 2)
        made.add("candidate_selector.hidden_projection.weight", 2, hidden)
    elif method != "dflash":
        markov(made, method, hidden, (vocab, vocab))
        made.add("confidence_head.proj.weight", 1, hidden + 2)
    return made


def markov(made: Published, kind: str, hidden: int, sizes: tuple[int, int]) -> None:
    """DSpark's dependence on the token before; of rank 2."""
    made.config |= {"markov_rank": 2, "markov_head_type": kind}
    made.add("markov_head.markov_w1.weight", sizes[0], 2)
    made.add("markov_head.markov_w2.weight", sizes[1], 2)
    if kind == "gated":
        made.add("markov_head.gate_proj.weight", 2, hidden + 2)
        made.add("markov_head.gate_proj.bias", 2)
    if kind == "rnn":
        made.add("markov_head.joint_proj.weight", 6, 4 + hidden)
        made.add("markov_head.joint_proj.bias", 6)


def speculators(made: Published, algorithm: str, outer: Mapping[str, Any]) -> Published:
    """The same tensors with the configuration that the library writes."""
    inner = {
        key: value
        for key, value in made.config.items()
        if key in {*LLAMA, "hidden_size", "vocab_size", "model_type"}
    }
    method = {
        "proposal_type": "greedy",
        "speculative_tokens": 3,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    config = {
        "speculators_model_type": algorithm,
        "speculators_version": "0.3",
        "architectures": ["Speculator"],
        "speculators_config": {
            "algorithm": algorithm,
            "proposal_methods": [method],
            "verifier": {"name_or_path": "elsewhere"},
        },
        "transformer_layer_config": inner,
        **outer,
    }
    return Published(config, made.tensors)


def speculators_eagle3(hidden: int, vocab: int) -> Published:
    made = eagle3(hidden, vocab, name="layers.0")
    made.add("embed_tokens.weight", vocab, hidden)
    return speculators(
        made,
        "eagle3",
        {
            "draft_vocab_size": vocab - 1,
            "eagle_aux_hidden_state_layer_ids": [0, 1, 1],
            "norm_before_residual": True,
        },
    )


def speculators_block(hidden: int, vocab: int, algorithm: str) -> Published:
    made = dflash(hidden, vocab)
    if algorithm == "dspark":
        markov(made, "vanilla", hidden, (vocab, vocab - 1))
    made.add("embed_tokens.weight", vocab, hidden)
    made.add("lm_head.weight", vocab - 1, hidden)
    vocabulary(made, [token for token in range(vocab) if token != 1], vocab)
    outer = {
        "block_size": 4,
        "mask_token_id": 2,
        "aux_hidden_state_layer_ids": [0, 1],
        "draft_vocab_size": vocab - 1,
        "markov_rank": 2,
        "markov_head_type": "vanilla",
    }
    if algorithm == "dflash":
        outer = {key: value for key, value in outer.items() if not key.startswith("markov")}
    return speculators(made, algorithm, outer)


def speculators_mtp(hidden: int, vocab: int) -> Published:
    config = {**LLAMA, "model_type": "qwen3_next", "hidden_size": hidden, "vocab_size": vocab}
    parts = (".token_layernorm", ".hidden_layernorm", ".input_proj", ".final_layernorm", "")
    made = mtp_parts(
        Published(config),
        tuple(f"mtp_layers.0{part}" for part in parts),
        hidden,
        norms=True,
        gated=True,
    )
    return speculators(made, "mtp", {"num_nextn_predict_layers": 1})


KINDS: dict[str, Callable[[int, int], Published]] = {
    "medusa": medusa,
    "hydra": hydra,
    "hydra-blind": lambda hidden, vocab: hydra(hidden, vocab, grounded=False),
    "hydra-prefix": lambda hidden, vocab: hydra(hidden, vocab, arch="prefix-mlp"),
    "hydra-eagle": lambda hidden, vocab: hydra(hidden, vocab, arch="eagle-attn"),
    "eagle": eagle,
    "eagle3": eagle3,
    "eagle3.1": lambda hidden, vocab: eagle3(hidden, vocab, version="3.1", fused=2),
    "mtp-qwen": qwen_mtp,
    "mtp-deepseek": deepseek_mtp,
    "mtp-mimo": mimo_mtp,
    "dflash": dflash,
    "dflash2": lambda hidden, vocab: dflash(hidden, vocab, method="dflash2"),
    "dspark": lambda hidden, vocab: dflash(hidden, vocab, method="vanilla"),
    "dspark-gated": lambda hidden, vocab: dflash(hidden, vocab, method="gated"),
    "dspark-rnn": lambda hidden, vocab: dflash(hidden, vocab, method="rnn"),
    "speculators-eagle3": speculators_eagle3,
    "speculators-dflash": lambda hidden, vocab: speculators_block(hidden, vocab, "dflash"),
    "speculators-dspark": lambda hidden, vocab: speculators_block(hidden, vocab, "dspark"),
    "speculators-mtp": speculators_mtp,
}
"""Every layout that is read, by a name of its own."""
