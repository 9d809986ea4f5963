"""Tiny pairs of networks for vLLM, with the exact law of a target's first tokens, and a test of samples against it."""

from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from scipy import stats
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from monge.verify.functional import probs_from_logits

VOCAB = 16
PROMPT = [3, 7, 1, 12, 5, 9, 0, 14, 2, 11, 4, 8, 15, 6, 13, 10]  # every token: look-ups find any


def _config(num_layers):
    sizes = {"vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 128, "head_dim": 32}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 256}
    ends = {"bos_token_id": 0, "eos_token_id": None, "pad_token_id": None}
    rest = {"tie_word_embeddings": False, "initializer_range": 0.25, "dtype": "float32"}
    return LlamaConfig(num_hidden_layers=num_layers, **sizes, **heads, **ends, **rest)


def write_tokenizer(folder: Path) -> None:
    """Token n is the nth letter, for grammars."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    letters = {chr(ord("a") + token): token for token in range(VOCAB)}
    tokenizer = Tokenizer(models.WordLevel(letters, unk_token="a"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="a", eos_token="p")
    wrapped.save_pretrained(folder)


def write_models(root: Path) -> None:
    """Write a target, a draft with noise on the target's weights, and random heads of EAGLE and EAGLE-3."""
    torch.manual_seed(5)
    target = LlamaForCausalLM(_config(2)).float()
    with torch.no_grad():
        target.lm_head.weight.mul_(0.9)
    target.save_pretrained(root / "target")
    torch.manual_seed(7)
    draft = LlamaForCausalLM(_config(2)).float()
    draft.load_state_dict(target.state_dict())
    with torch.no_grad():
        for weight in draft.parameters():
            if weight.ndim == 2:
                weight.add_(0.12 * weight.std() * torch.randn_like(weight))
    draft.save_pretrained(root / "draft")
    for name in ("target", "draft"):
        write_tokenizer(root / name)
    torch.manual_seed(9)
    layer = LlamaForCausalLM(_config(1)).float()
    state = {"fc.weight": 0.1 * torch.randn(64, 128)}
    for name, weight in layer.state_dict().items():
        if name.startswith("model.layers") and "input_layernorm" not in name:
            state[name.removeprefix("model.")] = weight.clone()
    _write_head(root / "eagle", state)
    third = {"fc.weight": state["fc.weight"], "norm.weight": torch.ones(64)}
    third["lm_head.weight"] = target.lm_head.weight.detach().clone()
    for name, weight in layer.state_dict().items():
        if name.startswith("model.layers.0."):
            third[name.replace("model.layers.0", "midlayer")] = weight.clone()
    third["midlayer.hidden_norm.weight"] = torch.ones(64)
    for name in "qkv":  # beside the hidden state, the layer reads the embedding
        third[f"midlayer.self_attn.{name}_proj.weight"] = 0.25 * torch.randn(64, 128)
    _write_head(root / "eagle3", third, eagle_aux_hidden_state_layer_ids=[1, 2])


def _write_head(folder: Path, state: dict[str, torch.Tensor], **settings) -> None:
    config = _config(1)
    config.architectures = ["LlamaForCausalLM"]
    config.update({**settings, "eagle_config": settings})
    config.save_pretrained(folder)
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})


def joint_law(network: LlamaForCausalLM, length: int, allowed=None, **rules) -> np.ndarray:
    """P of the first tokens after the prompt, `[vocab] * length`; `allowed(place)` are the grammar's tokens."""
    joint, prefixes = torch.ones(1, dtype=torch.float64), torch.tensor([PROMPT])
    for place in range(length):
        with torch.no_grad():
            logits = torch.cat([network(part).logits[:, -1:] for part in prefixes.split(512)])
        if allowed is not None:
            forbidden = sorted({*range(VOCAB)} - {*allowed(place)})
            logits[..., forbidden] = -torch.inf
        step = probs_from_logits(logits, **rules)[:, 0]
        joint = (joint[:, None] * step).flatten()
        following = torch.arange(VOCAB).repeat(len(prefixes))[:, None]
        prefixes = torch.cat([prefixes.repeat_interleave(VOCAB, 0), following], 1)
    return joint.view((VOCAB,) * length).numpy()


class Fit:
    """How samples fit a law: p-value, total variation, and the total variation that noise alone has."""

    def __init__(self, samples: np.ndarray, law: np.ndarray) -> None:
        expected, count = law.ravel(), len(samples)
        places = np.ravel_multi_index(samples[:, : law.ndim].T, law.shape)
        seen = np.bincount(places, minlength=expected.size).astype(float)
        self.impossible = int(seen[expected == 0].sum())
        self.distance = 0.5 * np.abs(seen / count - expected).sum()
        self.noise = 0.5 * np.sqrt(2 / np.pi * expected * (1 - expected) / count).sum()
        is_common = expected * count >= 5
        rest = max(expected[~is_common].sum(), 0.0)
        cells = np.append(expected[is_common], rest) * count
        found = np.append(seen[is_common], seen[~is_common].sum())
        if cells[-1] < 5:  # too few for the test's approximation
            cells[0], found[0] = cells[0] + cells[-1], found[0] + found[-1]
            cells, found = cells[:-1], found[:-1]
        statistic = ((found - cells) ** 2 / cells).sum()
        self.p_value = 0.0 if self.impossible else float(stats.chi2.sf(statistic, len(cells) - 1))

    def __repr__(self) -> str:
        return (
            f"p={self.p_value:.2g} distance={self.distance:.4f} noise={self.noise:.4f} "
            f"impossible={self.impossible}"
        )
