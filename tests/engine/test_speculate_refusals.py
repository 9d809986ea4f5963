"""What `speculate` cannot honour is refused by name, never ignored."""

import pytest
import torch
from transformers import (
    DynamicCache,
    LogitsProcessorList,
    StoppingCriteriaList,
    SynthIDTextWatermarkingConfig,
    T5Config,
    T5ForConditionalGeneration,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)

import monge
from monge.core.errors import ContextLengthError, OptionError, VocabularyMismatchError
from tests.engine.tiny import network, padded, perturbed, prompts

ROWS = prompts((6, 4), seed=8)


def speculate(**settings):
    target = network("llama")
    options = {"max_new_tokens": 4, "do_sample": False, "draft_model": perturbed(target), **padded(ROWS), **settings}
    return target.generate(**options, custom_generate=monge.speculate)


SYNTHID = SynthIDTextWatermarkingConfig(ngram_len=3, keys=[1, 2, 3])
REFUSED = {
    "beams": ({"num_beams": 2}, "decoding method 'beam_search'"),
    "contrastive": ({"penalty_alpha": 0.6, "top_k": 4}, "decoding method 'contrastive_search'"),
    "assisted": ({"prompt_lookup_num_tokens": 3}, "decoding method 'assisted_generation'"),
    "static cache": ({"cache_implementation": "static"}, "cache_implementation='static'"),
    "no cache": ({"use_cache": False}, "use_cache=False"),
    "scores": ({"return_dict_in_generate": True, "output_scores": True}, "output_scores"),
    "logits": ({"return_dict_in_generate": True, "output_logits": True}, "output_logits"),
    "hidden states": ({"return_dict_in_generate": True, "output_hidden_states": True}, "output_hidden_states"),
    "stateful processor": ({"watermarking_config": SYNTHID, "do_sample": True}, "SynthID.*changes its state"),
    "right padding": ({"attention_mask": torch.tensor([[1] * 6, [1] * 4 + [0] * 2])}, "pad on the left"),
    "hole": ({"attention_mask": torch.tensor([[1] * 6, [1, 0, 1, 1, 1, 1]])}, "pad on the left"),
    "positions": ({"position_ids": torch.arange(6).repeat(2, 1) + 1}, "position_ids"),
    "tree and object": ({"drafter": "ngram", "tree": "chain"}, "takes no"),
    "unknown tree": ({"tree": "oak"}, "tree 'oak'"),
    "chain rule for trees": ({"verifier": "single_draft", "tree": "best_first"}, "at most 1 candidate"),
}


@pytest.mark.filterwarnings("ignore")  # transformers warns of some combinations before it calls us
@pytest.mark.parametrize(("settings", "message"), REFUSED.values(), ids=REFUSED)
def test_refused(settings, message):
    with pytest.raises(monge.core.errors.MongeError, match=message):
        speculate(**settings)


def test_guidance_model():
    processor = UnbatchedClassifierFreeGuidanceLogitsProcessor(1.5, network("llama"))
    with pytest.raises(OptionError, match="UnbatchedClassifierFreeGuidance.*runs a model of its own"):
        speculate(logits_processor=LogitsProcessorList([processor]))


def test_filled_cache():
    target, inputs = network("llama"), padded(ROWS[:1])
    cache = DynamicCache(config=target.config)
    with torch.no_grad():
        target(inputs["input_ids"][:, :-1], past_key_values=cache)
    with pytest.raises(OptionError, match="a cache that holds text already"):
        speculate(**inputs, past_key_values=cache)


def test_inputs_beside_the_text():
    with pytest.raises(OptionError, match="model inputs beside the text: token_type_ids"):
        network("gpt2").generate(
            **padded(ROWS),
            token_type_ids=torch.zeros(2, 6, dtype=torch.long),
            max_new_tokens=2,
            custom_generate=monge.speculate,
        )


@pytest.mark.filterwarnings("ignore")  # T5 has no settings of its own for the length
def test_encoder_decoder():
    sizes = {"vocab_size": 32, "d_model": 16, "d_kv": 4, "d_ff": 16, "num_layers": 1, "num_heads": 2}
    model = T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=0)).eval()
    with pytest.raises(OptionError, match="encoder-decoder"):
        model.generate(torch.tensor([[3, 4]]), max_new_tokens=2, custom_generate=monge.speculate)


def test_training_mode():
    target = perturbed(network("llama"), noise=0.01)
    target.train()
    try:
        with pytest.raises(OptionError, match="training mode.*call model.eval"):
            target.generate(**padded(ROWS), max_new_tokens=2, do_sample=False, custom_generate=monge.speculate)
    finally:
        target.eval()


def test_another_vocabulary():
    with pytest.raises(VocabularyMismatchError, match="88 tokens, the target 97"):
        speculate(draft_model=network("llama", vocab_size=88))


def test_longer_than_the_context():
    target = network("llama", max_position_embeddings=16)
    with pytest.raises(ContextLengthError, match="exceeds the target's context of 16"):
        target.generate(**padded(ROWS), max_new_tokens=11, do_sample=False, custom_generate=monge.speculate, drafter="none")


def test_generate_drops_the_tokenizer_of_stop_strings():
    with pytest.raises(ValueError, match="could not locate a tokenizer"):
        speculate(stop_strings=["a"])


def test_nothing_to_stop_for_is_no_trap():
    assert speculate(stopping_criteria=StoppingCriteriaList()).shape == (2, 10)
