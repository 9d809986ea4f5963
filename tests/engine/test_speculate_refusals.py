"""What `speculate` cannot honour is refused by name, never ignored."""

import copy
import re
from functools import partial

import pytest
import torch
import transformers
from transformers import (
    DynamicCache,
    LlamaForCausalLM,
    StaticCache,
    StoppingCriteriaList,
    T5Config,
    T5ForConditionalGeneration,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)

import monge
from monge.core.errors import ContextLengthError, MongeError, OptionError
from monge.networks.network_facts import cache_keyword
from tests.engine.tiny import network, padded, perturbed, prompts

ROWS = prompts((6, 4), seed=8)


def speculate(**settings):
    target = network("llama")
    options = {"max_new_tokens": 4, "do_sample": False, "draft_model": perturbed(target)}
    return target.generate(**options | padded(ROWS) | settings, custom_generate=monge.speculate)


GUIDANCE = [UnbatchedClassifierFreeGuidanceLogitsProcessor(1.5, None)]
# Fields of the configuration have theirs in `tests/plugins/test_generation_settings.py`.
REFUSED = {
    "right padding": ({"attention_mask": torch.tensor([[1] * 6, [1] * 4 + [0, 0]])}, "on the left"),
    "hole": ({"attention_mask": torch.tensor([[1] * 6, [1, 0, 1, 1, 1, 1]])}, "pad on the left"),
    "positions": ({"position_ids": torch.arange(6).repeat(2, 1) + 1}, "position_ids"),
    "tree and object": ({"drafter": "ngram", "tree": "chain"}, "takes no"),
    "unknown tree": ({"tree": "oak"}, "tree 'oak'"),
    "chain rule for trees": (
        {"verifier": "speculative_sampling", "tree": "best_first"},
        "at most 1 cand",
    ),
    "guidance": ({"logits_processor": GUIDANCE}, "FreeGuidance.*runs a model of its own"),
    "vocabulary": ({"draft_model": network("llama", vocab_size=88)}, "88 tokens, the target 97"),
}


@pytest.mark.filterwarnings("ignore")  # transformers warns of some combinations before it calls us
@pytest.mark.parametrize(("settings", "message"), REFUSED.values(), ids=REFUSED)
def test_settings_that_speculate_cannot_honour_are_refused(settings, message):
    with pytest.raises(MongeError, match=message):
        speculate(**settings)


def test_a_filled_cache_is_refused():
    target, inputs = network("llama"), padded(ROWS[:1])
    keyword = cache_keyword(target)
    cache = DynamicCache(config=target.config)
    with torch.no_grad():
        target(inputs["input_ids"][:, :-1], **{keyword: cache})
    with pytest.raises(OptionError, match="a cache that holds text already"):
        speculate(**inputs, **{keyword: cache})


def handed(target, **later):
    """What a host would get that hands over more keywords than those that are known here."""

    def decoding_method(model, input_ids, **prepared):
        return monge.speculate(model, input_ids, **prepared, **later)

    return target.generate(
        **padded(ROWS), max_new_tokens=4, do_sample=False, custom_generate=decoding_method
    )


class Scaled(LlamaForCausalLM):
    """A network whose forward has a setting of its own."""

    def forward(self, *args, logit_power=1, **inputs):
        return super().forward(*args, **inputs)


@pytest.mark.parametrize(
    "later", [{"later": None}, {"later": DynamicCache()}, {"later": None, "even_later": None}]
)
def test_keywords_of_a_later_host_that_say_nothing_are_accepted(later):
    target = network("llama")
    assert torch.equal(handed(target, **later), handed(target))


def test_default_values_of_forward_arguments_are_accepted():
    target = copy.deepcopy(network("llama"))
    target.__class__ = Scaled
    assert torch.equal(handed(target, logit_power=1), handed(network("llama")))
    with pytest.raises(OptionError, match="logit_power"):
        handed(target, logit_power=2)


@pytest.mark.parametrize("value", [False, 0, "", "some", torch.zeros(2)])
def test_keywords_of_a_later_host_that_may_say_something_are_refused_by_name(value):
    version = re.escape(transformers.__version__)
    expected = f"beside the text: later; leave .* 'transformers {version}'"
    with pytest.raises(OptionError, match=expected):
        handed(network("llama"), later=value)


@pytest.mark.parametrize(
    "later", [DynamicCache, partial(StaticCache, config=network("llama").config, max_cache_len=8)]
)
def test_a_filled_or_static_cache_is_refused_under_any_keyword(later):
    cache, states = later(), torch.zeros(1, 2, 1, 8)
    if isinstance(cache, DynamicCache):
        cache.update(states, states, 0)
    with pytest.raises(OptionError, match="holds text already|a static cache"):
        handed(network("llama"), later=cache)


def test_model_inputs_beside_the_text_are_refused():
    kinds = {"token_type_ids": torch.zeros(2, 6, dtype=torch.long), "max_new_tokens": 4}
    with pytest.raises(OptionError, match="model inputs beside the text: token_type_ids"):
        network("gpt2").generate(**padded(ROWS), **kinds, custom_generate=monge.speculate)


@pytest.mark.filterwarnings("ignore")  # T5 has no settings of its own for the length
def test_an_encoder_decoder_is_refused():
    sizes = {"vocab_size": 32, "d_model": 16, "d_kv": 4, "d_ff": 16}
    sizes |= {"num_layers": 1, "num_heads": 2}
    model = T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=0)).eval()
    with pytest.raises(OptionError, match="encoder-decoder"):
        model.generate(torch.tensor([[3, 4]]), max_new_tokens=2, custom_generate=monge.speculate)


def test_a_text_longer_than_the_context_is_refused():
    target = network("llama", max_position_embeddings=16)
    options = {"custom_generate": monge.speculate, "drafter": "none"}
    with pytest.raises(ContextLengthError, match="exceeds the target's context length of 16"):
        target.generate(**padded(ROWS), max_new_tokens=11, do_sample=False, **options)


def test_generate_drops_the_tokenizer_of_stop_strings():
    with pytest.raises(ValueError, match="could not locate a tokenizer"):
        speculate(stop_strings=["a"])


def test_an_empty_list_of_stopping_criteria_is_accepted():
    assert speculate(stopping_criteria=StoppingCriteriaList()).shape == (2, 10)
