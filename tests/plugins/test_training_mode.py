"""A model in training mode, as trainers hold it, decodes if nothing acts in that mode alone."""

import copy

import pytest
import torch
from transformers import (
    FalconConfig,
    FalconForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    OPTConfig,
    OPTForCausalLM,
)

import monge
from monge.core.errors import OptionError
from monge.plugins.transformers_training import acting_modules
from tests.engine.tiny import network, padded, perturbed, prompts

ROWS = padded(prompts((6, 4), seed=8))
SHORT = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
SIZES = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
GATED = SIZES | {"intermediate_size": 32, "num_key_value_heads": 2}
ENDS = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}


def llama(**rates):
    return LlamaForCausalLM(LlamaConfig(**GATED, **rates))


def gpt2(**rates):
    sizes = {"vocab_size": 64, "n_embd": 16, "n_layer": 2, "n_head": 2}
    rates = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0} | rates
    return GPT2LMHeadModel(GPT2Config(**sizes, **ENDS, **rates))


def falcon(**rates):
    return FalconForCausalLM(FalconConfig(**SIZES, **ENDS, **rates))


def mixtral(**rates):
    return MixtralForCausalLM(MixtralConfig(**GATED, **rates))


def opt(**rates):
    sizes = SIZES | {"ffn_dim": 32, "word_embed_proj_dim": 16, **ENDS}
    return OPTForCausalLM(OPTConfig(**sizes, **{"dropout": 0.0} | rates))


class Normed(LlamaForCausalLM):
    """A network with another layer before the output."""

    def __init__(self, layer):
        super().__init__(LlamaConfig(**GATED))
        self.lm_head = torch.nn.Sequential(layer, self.lm_head)


ACTING = {
    "dropout": (lambda: gpt2(resid_pdrop=0.1), "transformer.h.0.attn.resid_dropout (p=0.1)"),
    "of embeddings": (lambda: gpt2(embd_pdrop=0.2), "transformer.drop (p=0.2)"),
    "of attention": (lambda: llama(attention_dropout=0.1), "self_attn (attention_dropout=0.1)"),
    "of a function": (lambda: falcon(hidden_dropout=0.1), "transformer.h.0 (hidden_dropout=0.1)"),
    "of layers": (lambda: opt(layerdrop=0.1), "model.decoder (layerdrop=0.1)"),
    "noise": (lambda: mixtral(router_jitter_noise=0.1), "mlp (jitter_noise=0.1)"),
    "statistics": (lambda: Normed(torch.nn.BatchNorm1d(16)), "lm_head.0 (BatchNorm1d)"),
    "channels": (lambda: Normed(torch.nn.Dropout1d(0.1)), "lm_head.0 (p=0.1)"),
    "self-normalising": (lambda: Normed(torch.nn.AlphaDropout(0.1)), "lm_head.0 (p=0.1)"),
    "slopes": (lambda: Normed(torch.nn.RReLU()), "lm_head.0 (RReLU)"),
}
QUIET = {
    "llama": llama,
    "gpt2": gpt2,
    "falcon": falcon,
    "mixtral": mixtral,
    "opt": opt,
    "dropout of nothing": lambda: Normed(torch.nn.Dropout(0.0)),
    "statistics of the input": lambda: Normed(torch.nn.InstanceNorm1d(16)),
}


@pytest.mark.parametrize(("make", "named"), ACTING.values(), ids=ACTING)
def test_modules_that_act_in_training_mode_are_named(make, named):
    model = make().train()
    assert any(named in one for one in acting_modules(model)), acting_modules(model)
    assert acting_modules(model.eval()) == []


@pytest.mark.parametrize("make", QUIET.values(), ids=QUIET)
def test_quiet_modules_in_training_mode_are_not_named(make):
    assert acting_modules(make().train()) == []


def test_rates_that_are_set_to_nothing_do_not_act():
    """As `disable_dropout` of trainers does; the configuration keeps its number."""
    model = gpt2(resid_pdrop=0.1).train()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    assert acting_modules(model) == []


@pytest.mark.parametrize("function", [monge.accelerate, None], ids=["accelerate", "speculate"])
def test_an_acting_model_is_refused(function):
    model = gpt2(resid_pdrop=0.1).train()
    ways = {"custom_generate": monge.speculate}
    if function is not None:
        function(model)
        ways = {}
    with pytest.raises(OptionError, match=r"training mode.*by 4 modules: .*p=0\.1.*model\.eval"):
        model.generate(torch.tensor([[3, 4]]), **SHORT, **ways)
    only = model.eval().transformer.h[1].mlp.dropout.train()
    with pytest.raises(OptionError, match=r"by 1 module: transformer\.h\.1\.mlp\.dropout"):
        model.generate(torch.tensor([[3, 4]]), **SHORT, **ways)
    only.eval()
    assert model.generate(torch.tensor([[3, 4]]), **SHORT, **ways).shape == (1, 8)


@pytest.mark.parametrize("checkpoints", [False, True])
def test_rollouts_follow_the_weights_and_leave_the_modes_of_modules(checkpoints):
    target = copy.deepcopy(network("llama"))
    if checkpoints:
        old = target.gradient_checkpointing_enable
        getattr(target, "activation_checkpointing_enable", old)()
    model = monge.accelerate(target.train(), perturbed(target))
    model.model.layers[0].eval()
    modes = [module.training for module in model.modules()]
    texts = []
    for _ in range(2):
        expected = monge.restore(copy.deepcopy(model)).eval().generate(**ROWS, **SHORT)
        texts.append(model.generate(**ROWS, **SHORT))
        assert torch.equal(texts[-1], expected)
        assert [module.training for module in model.modules()] == modes
        with torch.no_grad():
            model.lm_head.weight.copy_(model.lm_head.weight.roll(7, 0))
    assert not torch.equal(*texts)


def test_modes_come_back_after_an_error():
    target = copy.deepcopy(network("llama")).train()

    def fails(_, __):
        raise RuntimeError("of the caller")

    with pytest.raises(Exception, match="of the caller"):
        monge.generate(target, **ROWS, **SHORT, logits_processor=[fails])
    assert all(module.training for module in target.modules())
