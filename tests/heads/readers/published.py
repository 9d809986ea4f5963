"""Small checkpoints in the layouts in which heads are published, for a target of any hidden size and vocabulary."""

import json
import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from monge.heads.readers.base import ChainHead
from monge.heads.readers.steps import ChainStep

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
        places = torch.arange(math.prod(shape), dtype=torch.float64)
        numbers = torch.sin(1.7 * places + start).reshape(shape)
        self.tensors[name] = around + numbers * (0.2 if around else 1.0)

    def linear(self, name: str, *shape: int) -> None:
        self.add(f"{name}.weight", *shape)
        self.add(f"{name}.bias", shape[0])

    def norm(self, name: str, width: int) -> None:
        self.add(f"{name}.weight", width, around=1.0)

    def write(self, folder: Path) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.config))
        save: Any = save_file if self.file.endswith(".safetensors") else torch.save
        save(self.tensors, folder / self.file)
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
    attention, mlp = f"{name}.self_attn", f"{name}.mlp"
    made.add(f"{attention}.q_proj.weight", HEADS * DIM * (2 if gated else 1), width)
    made.add(f"{attention}.k_proj.weight", KV * DIM, width)
    made.add(f"{attention}.v_proj.weight", KV * DIM, width)
    made.add(f"{attention}.o_proj.weight", hidden, HEADS * DIM)
    for part in ("q", "k") if norms else ():
        made.norm(f"{attention}.{part}_norm", DIM)
    made.add(f"{mlp}.gate_proj.weight", INNER, hidden)
    made.add(f"{mlp}.up_proj.weight", INNER, hidden)
    made.add(f"{mlp}.down_proj.weight", hidden, INNER)
    made.norm(f"{name}.post_attention_layernorm", hidden)


def sizes(hidden: int, vocab: int, **more: Any) -> dict[str, Any]:
    return {**LLAMA, "hidden_size": hidden, "vocab_size": vocab, **more}


def without_one(made: Published, vocab: int) -> None:
    """A draft vocabulary of all tokens of the target but token 1."""
    drafted = [token for token in range(vocab) if token != 1]
    made.tensors["d2t"] = torch.tensor(drafted) - torch.arange(len(drafted))
    made.tensors["t2d"] = torch.tensor([token in drafted for token in range(vocab)])


def eagle3(
    hidden: int, vocab: int, *, name: str = "midlayer", version: str = "3", fused: int = 3
) -> Published:
    config = sizes(hidden, vocab, architectures=["LlamaForCausalLMEagle3"])
    made = Published(config, file="pytorch_model.bin")
    made.config |= {"draft_vocab_size": vocab - 1}
    made.config |= {"eagle_aux_hidden_state_layer_ids": [0, 1, 1][:fused]}
    made.add("fc.weight", hidden, fused * hidden)
    layer(made, name, hidden, doubled=True)
    for norm in (f"{name}.hidden_norm", f"{name}.input_layernorm", "norm"):
        made.norm(norm, hidden)
    made.add("lm_head.weight", vocab - 1, hidden)
    without_one(made, vocab)
    if version == "3.1":
        made.config |= {"fc_norm": True, "norm_output": True, "norm_before_residual": True}
        for one in range(fused):
            made.norm(f"fc_norm.{one}", hidden)
    return made


_MIMO = (".token_layernorm", ".hidden_layernorm", ".input_proj", ".final_layernorm", "")
_DEEPSEEK = (".enorm", ".hnorm", ".eh_proj", ".shared_head.norm", "")
_QWEN = (".pre_fc_norm_embedding", ".pre_fc_norm_hidden", ".fc", ".norm", ".layers.0")
LAYOUTS = {
    prefix: tuple(prefix + part for part in parts)
    for prefix, parts in {
        "mtp": _QWEN,
        "model.layers.7": _DEEPSEEK,
        "model.mtp_layers.0": _MIMO,
        "mtp_layers.0": _MIMO,
    }.items()
}
"""Norms of embedding and state, projection, last norm and layer of a prediction module, by prefix."""


def module(made: Published, prefix: str, hidden: int, **kind: bool) -> Published:
    """A prediction module under a layout's names."""
    embedding, state, projection, last, inner = LAYOUTS[prefix]
    for norm in (embedding, state, last, f"{inner}.input_layernorm"):
        made.norm(norm, hidden)
    made.add(f"{projection}.weight", hidden, 2 * hidden)
    layer(made, inner, hidden, **kind)
    return made


def qwen_mtp(hidden: int, vocab: int) -> Published:
    text = sizes(hidden, vocab, model_type="qwen3_5_text", mtp_num_hidden_layers=1)
    return module(Published({"text_config": text}), "mtp", hidden, norms=True, gated=True)


def deepseek_mtp(hidden: int, vocab: int) -> Published:
    config = sizes(hidden, vocab, num_hidden_layers=7, num_nextn_predict_layers=1)
    made = module(Published(config), "model.layers.7", hidden)
    for name in ("shared_head.head", "embed_tokens"):
        made.add(f"model.layers.7.{name}.weight", vocab, hidden)
    return made


def mimo_mtp(hidden: int, vocab: int) -> Published:
    return module(Published(sizes(hidden, vocab, model_type="mimo")), "model.mtp_layers.0", hidden)


def dflash(hidden: int, vocab: int, *, method: str = "dflash", block: int = 4) -> Published:
    names = {"dflash": "DFlashDraftModel", "dflash2": "DFlash2DraftModel"}
    made = Published(sizes(hidden, vocab, num_hidden_layers=2, num_target_layers=1))
    made.config |= {"architectures": [names.get(method, "DSparkDraftModel")]}
    own = {"block_size": block, "mask_token_id": 2, "target_layer_ids": [-1, 0]}
    made.config["dflash_config"] = own
    made.add("fc.weight", hidden, 2 * hidden)
    made.norm("hidden_norm", hidden)
    made.norm("norm", hidden)
    for name in ("layers.0", "layers.1"):
        layer(made, name, hidden, norms=True)
        made.norm(f"{name}.input_layernorm", hidden)
        for part in ("attention_conv", "mlp_conv") if method == "dflash2" else ():
            made.add(f"{name}.{part}.base_kernel", 2, 2, hidden)
            made.add(f"{name}.{part}.kernel_projection.weight", 2 * 2 * hidden, hidden)
    if method == "dflash2":
        own |= {"conv_kernel_size": 2, "conv_group_size": 1}
        own |= {"selector_rank": 2, "selector_top_k": vocab - 1}
        for part in ("predecessor", "successor"):
            made.add(f"candidate_selector.{part}_codebook", vocab, 2)
        made.add("candidate_selector.hidden_projection.weight", 2, hidden)
    elif method != "dflash":
        markov(made, method, hidden, (vocab, vocab))
        made.add("confidence_head.proj.weight", 1, hidden + 2)
    return made


def markov(made: Published, kind: str, hidden: int, counts: tuple[int, int]) -> None:
    """DSpark's dependence on the token before; of rank 2."""
    made.config |= {"markov_rank": 2, "markov_head_type": kind}
    for place, count in enumerate(counts, start=1):
        made.add(f"markov_head.markov_w{place}.weight", count, 2)
    if kind == "gated":
        made.linear("markov_head.gate_proj", 2, hidden + 2)
    if kind == "rnn":
        made.linear("markov_head.joint_proj", 6, 4 + hidden)


def speculators(made: Published, algorithm: str, outer: Mapping[str, Any]) -> Published:
    """The same tensors with the configuration that the library writes."""
    kept = {*LLAMA, "hidden_size", "vocab_size", "model_type"}
    method = {"proposal_type": "greedy", "speculative_tokens": 3, "verifier_accept_k": 1}
    method |= {"accept_tolerance": 0.0}
    config = {
        "speculators_model_type": algorithm,
        "speculators_version": "0.3",
        "architectures": ["Speculator"],
        "speculators_config": {
            "algorithm": algorithm,
            "proposal_methods": [method],
            "verifier": {"name_or_path": "elsewhere"},
        },
        "transformer_layer_config": {key: made.config[key] for key in made.config.keys() & kept},
        **outer,
    }
    return Published(config, made.tensors)


def speculators_eagle3(hidden: int, vocab: int) -> Published:
    made = eagle3(hidden, vocab, name="layers.0")
    made.add("embed_tokens.weight", vocab, hidden)
    names: Sequence[str] = ("draft_vocab_size", "eagle_aux_hidden_state_layer_ids")
    outer = {name: made.config[name] for name in names}
    return speculators(made, "eagle3", {**outer, "norm_before_residual": True})


def speculators_block(hidden: int, vocab: int, *, algorithm: str) -> Published:
    made = dflash(hidden, vocab)
    outer = {"block_size": 4, "mask_token_id": 2, "aux_hidden_state_layer_ids": [0, 1]}
    outer |= {"draft_vocab_size": vocab - 1}
    if algorithm == "dspark":
        markov(made, "vanilla", hidden, (vocab, vocab - 1))
        outer |= {"markov_rank": 2, "markov_head_type": "vanilla"}
    made.add("embed_tokens.weight", vocab, hidden)
    made.add("lm_head.weight", vocab - 1, hidden)
    without_one(made, vocab)
    return speculators(made, algorithm, outer)


def speculators_mtp(hidden: int, vocab: int) -> Published:
    made = Published(sizes(hidden, vocab, model_type="qwen3_next"))
    module(made, "mtp_layers.0", hidden, norms=True, gated=True)
    return speculators(made, "mtp", {"num_nextn_predict_layers": 1})


KINDS: dict[str, Callable[[int, int], Published]] = {
    "eagle3": eagle3,
    "eagle3.1": partial(eagle3, version="3.1", fused=2),
    "mtp-qwen": qwen_mtp,
    "mtp-deepseek": deepseek_mtp,
    "mtp-mimo": mimo_mtp,
    "dflash": dflash,
    "dflash2": partial(dflash, method="dflash2"),
    "dspark": partial(dflash, method="vanilla"),
    "dspark-gated": partial(dflash, method="gated"),
    "dspark-rnn": partial(dflash, method="rnn"),
    "speculators-eagle3": speculators_eagle3,
    "speculators-dflash": partial(speculators_block, algorithm="dflash"),
    "speculators-dspark": partial(speculators_block, algorithm="dspark"),
    "speculators-mtp": speculators_mtp,
}
"""Every layout that is read, by a name of its own."""


def steps_of(head: ChainHead, unembed=lambda states: states) -> tuple[ChainStep, ChainStep]:
    """Steps of a head on the target's states and on its own."""
    return tuple(ChainStep(head, unembed, fuses=fuses).eval() for fuses in (True, False))
