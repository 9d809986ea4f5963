"""Prediction modules of mixture models.

The same logits as the host's own class gives with the same weights.
"""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel
from transformers.modeling_layers import MtpModel

from monge.draft.head_run import Pairs, TargetEnds
from monge.draft.published_heads import run_of
from monge.heads.readers.base import ChainHead
from monge.heads.readers.registry import load_head
from monge.networks.hf_tree import HfTreeModel
from monge.networks.network_facts import cache_keyword
from tests.engine.tiny import FAMILIES, Family, network, prompts, seeded

LARGEST_DIFFERENCE = 2e-5

FAMILIES.setdefault(
    "glm4_moe",
    Family(
        "glm4_moe",
        {
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "head_dim": 8,
            "use_qk_norm": True,
            "attention_bias": True,
        },
    ),
)


def names_in_files(model: MtpModel, last: int, *, split: bool) -> dict[str, torch.Tensor]:
    """The module's weights under the names that published files have.

    Experts one by one, or all in one tensor.
    """
    found: dict[str, torch.Tensor] = {}
    for own, tensor in model.layers[0].state_dict().items():
        name = own.replace("mtp_block.", "").replace("post_norm.", "shared_head.norm.")
        if split and name.endswith("experts.gate_up_proj"):
            for one, pair in enumerate(tensor):
                gate, up = pair.chunk(2)
                found[name.replace("gate_up_proj", f"{one}.gate_proj.weight")] = gate
                found[name.replace("gate_up_proj", f"{one}.up_proj.weight")] = up
        elif split and name.endswith("experts.down_proj"):
            found |= {
                name.replace("down_proj", f"{one}.down_proj.weight"): down
                for one, down in enumerate(tensor)
            }
        else:
            found[name] = tensor
    return {
        f"model.layers.{last}.{name}": tensor.contiguous().clone() for name, tensor in found.items()
    }


def module_of(target: PreTrainedModel) -> MtpModel:
    def make() -> MtpModel:
        model = MtpModel(target, 1).eval()
        with torch.no_grad():
            for name, weight in model.layers.named_parameters():
                weight.copy_(torch.randn_like(weight) * 0.2 + ("norm" in name))
            for buffer in model.layers.buffers():
                buffer.copy_(torch.randn_like(buffer) * 0.2)
        return model

    return seeded(make)


def host_logits(target: PreTrainedModel, model: MtpModel, tokens: tuple[int, ...]) -> torch.Tensor:
    """Logits after every pair of a state and the token after it."""
    with torch.inference_mode():
        states = target(torch.tensor([tokens[:-1]]), output_hidden_states=True).hidden_states[-1]
        embeds = target.get_input_embeddings()(torch.tensor([tokens[1:]]))
        count = len(tokens) - 1
        positions = torch.arange(1, count + 1)[None]
        hidden = torch.full((count, count), torch.finfo(torch.float32).min).triu(1)[None, None]
        found = model.layers[0](
            embeds,
            states,
            position_embeddings=model.rotary_emb(embeds, position_ids=positions),
            attention_mask=hidden,
            position_ids=positions,
            **{cache_keyword(target): None},
        )
        return target.lm_head(found)[0]


@pytest.mark.parametrize(("name", "split"), [("deepseek_v3", True), ("glm4_moe", False)])
def test_logits_are_those_of_the_host_s_module(name: str, split: bool, tmp_path: Path) -> None:
    target = network(name)
    model, last = module_of(target), target.config.num_hidden_layers
    save_file(names_in_files(model, last, split=split), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(target.config.to_dict(), default=str))
    head = load_head(tmp_path)
    assert isinstance(head, ChainHead)
    (tokens,) = prompts((9,), seed=2)
    read = HfTreeModel(target)
    watched = read.watch(head.layers(last))
    read.open({0: tokens[:-1]})
    features = watched.take(0)
    assert features is not None
    run = run_of(head, read, TargetEnds(read))
    expected = host_logits(target, model, tokens)
    run.open(0)
    with torch.inference_mode():
        for place in range(len(tokens) - 1):
            run.read(
                {
                    0: Pairs(
                        features[place : place + 1],
                        tokens[place + 1 : place + 2],
                    )
                }
            )
            found = run.begin({0: tokens[place + 1]})[0][0]
            torch.testing.assert_close(found, expected[place], atol=LARGEST_DIFFERENCE, rtol=1e-4)
