"""Models in a wrapper of adapters decode with the adapter."""

import copy

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

import monge
from monge.core.errors import BackendError
from tests.bench.tiny import save_pair
from tests.engine.compiling import require, shared_programs

PROMPT = "Once upon a time"


class LoraLinear(nn.Module):
    def __init__(self, base, rank=4):
        super().__init__()
        self.base_layer = base
        generator = torch.Generator().manual_seed(0)
        self.a = nn.Parameter(torch.randn(rank, base.in_features, generator=generator))
        self.b = nn.Parameter(torch.randn(base.out_features, rank, generator=generator))

    def set_adapter(self, names):
        raise NotImplementedError(names)

    def forward(self, x):
        return self.base_layer(x) + x @ self.a.T @ self.b.T


class PeftModel(nn.Module):
    """A wrapper that finds attributes in the network, as the classes of PEFT do."""

    is_prompt_learning = False
    active_peft_config = property(lambda self: self)

    def __init__(self, model):
        super().__init__()
        self.model = model
        for layer in model.model.layers:
            layer.self_attn.v_proj = LoraLinear(layer.self_attn.v_proj)

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self._modules["model"], name)

    def get_base_model(self):
        return self.model

    def generate(self, *arguments, **settings):
        return self.model.generate(*arguments, **settings)


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    return save_pair(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def base(paths):
    return AutoModelForCausalLM.from_pretrained(paths[0], dtype=torch.float32).eval()


@pytest.fixture
def wrapped(base):
    return PeftModel(base).eval()


@pytest.fixture
def tokenizer(paths):
    return monge.load(paths[0]).tokenizer


@pytest.fixture
def ids(tokenizer):
    return tokenizer(PROMPT, return_tensors="pt")["input_ids"]


def plain(model, ids):
    found = model.generate(input_ids=ids, max_new_tokens=12, do_sample=False, eos_token_id=None)
    return found[0, ids.shape[1] :].tolist()


def decoded(decoder):
    (result,) = decoder.generate([PROMPT], max_new_tokens=12, temperature=0, ignore_eos=True)
    return list(result.token_ids)


def test_load_and_accelerate_decode_with_the_adapter(base, paths, tokenizer, ids):
    without_adapter = plain(base, ids)
    wrapped = PeftModel(base).eval()
    with_adapter = plain(wrapped, ids)
    assert without_adapter != with_adapter
    assert decoded(monge.load(wrapped, paths[1], tokenizer=tokenizer)) == with_adapter
    monge.accelerate(wrapped, paths[1])
    assert plain(wrapped, ids) == with_adapter


def test_copies_of_adapted_weights_are_refused_before_anything_is_compiled(
    wrapped, tokenizer, ids, monkeypatch
):
    def compiled(*_):
        raise AssertionError("compiled all the same")

    monkeypatch.setattr("monge.backends.cpu.compiled.load_or_make", compiled)
    expected = "adapters that can be switched or trained .*v_proj.* model.merge_and_unload"
    with pytest.raises(BackendError, match=expected):
        monge.load(wrapped, tokenizer=tokenizer, backend="compiled(weights='int8')")
    with pytest.warns(UserWarning, match=expected) as said:
        decoder = monge.load(wrapped, tokenizer=tokenizer, drafter="none", backend="compiled")
    assert len([one for one in said if "merge_and_unload" in str(one.message)]) == 1
    assert decoded(decoder) == plain(wrapped, ids)


def test_learned_prompts_are_refused(wrapped, tokenizer):
    wrapped.is_prompt_learning = True
    with pytest.raises(monge.UnsupportedModelError, match="learned prompts"):
        monge.load(wrapped, tokenizer=tokenizer)


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")
def test_peft_itself(base, paths, tokenizer, ids):
    peft = pytest.importorskip("peft")
    settings = {"init_lora_weights": False, "task_type": "CAUSAL_LM"}
    config = peft.LoraConfig(r=4, target_modules=["v_proj"], **settings)
    model = peft.get_peft_model(base, config).eval()
    expected = plain(model, ids)
    assert decoded(monge.load(model, paths[1], tokenizer=tokenizer)) == expected


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")
@pytest.mark.parametrize(
    "extra", [{}, {"modules_to_save": ["lm_head"]}, {"use_dora": True}], ids=str
)
def test_adapters_are_merged_in_programs_and_followed(base, ids, tmp_path_factory, extra):
    """Trained, switched, scaled, off and merged: each text is that of the model as it is then."""
    peft = pytest.importorskip("peft")
    require("compiled")
    settings = {"init_lora_weights": False, "task_type": "CAUSAL_LM", **extra}
    config = peft.LoraConfig(r=4, target_modules=["v_proj", "down_proj"], **settings)
    model, texts = peft.get_peft_model(base, config).eval(), []
    if "modules_to_save" not in extra:
        model.add_adapter("other", config)
    with shared_programs(tmp_path_factory) as make:
        make(base)
        monge.accelerate(model, backend="compiled")
        programs = model.generate.compiled

        def check():
            texts.append(plain(model, ids))
            assert texts[-1] == plain(monge.restore(copy.deepcopy(model)), ids)
            assert programs._target.forward.name == "compiled"

        check()
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if "lora_B" in name or "modules_to_save" in name:
                    weight.mul_(-2)
        check()
        if "modules_to_save" not in extra:
            model.set_adapter("other")
            check()
        with model.disable_adapter():
            check()
        base.model.layers[0].self_attn.v_proj.scale_layer(5.0)
        check()
        model.merge_adapter()
        check()
        with model.disable_adapter():
            check()
    assert len(set(map(tuple, texts))) > len(texts) // 2


def test_a_decoder_shows_its_parts(paths):
    shown = repr(monge.load(*paths, drafter="model", tree="chain(4)", controller="fixed"))
    for part in (
        "target=Hf",
        "draft=Hf",
        "drafter=model(tree=chain(depth=4))",
        "verifier=block",
        "controller=fixed",
        "Llama",
    ):
        assert part in shown
