"""Every field of `GenerationConfig` is honoured, refused by name, or has no effect where nothing is searched."""

from functools import partial

import pytest
import torch
from transformers import (
    CompileConfig,
    DynamicCache,
    GenerationConfig,
    StaticCache,
    StoppingCriteria,
    WatermarkingConfig,
)

import monge
from monge.core.errors import OptionError
from monge.plugins import transformers_refusals
from monge.plugins.transformers_processors import row_processors
from monge.requests.processors import has_state
from tests.engine.tiny import EOS, network, padded, perturbed, prompts

ROWS = prompts((6, 4), seed=8)
GREEDY = {"do_sample": False, "max_new_tokens": 8}
PROCESSED = {
    "bad_words_ids": [[20], [30, 31]],
    "begin_suppress_tokens": [13],
    "encoder_no_repeat_ngram_size": 2,
    "encoder_repetition_penalty": 1.2,
    "epsilon_cutoff": 0.01,
    "eta_cutoff": 0.01,
    "exponential_decay_length_penalty": (5, 1.2),
    "forced_bos_token_id": 4,
    "forced_eos_token_id": 5,
    "min_length": 12,
    "min_new_tokens": 5,
    "min_p": 0.1,
    "no_repeat_ngram_size": 2,
    "remove_invalid_values": True,
    "renormalize_logits": True,
    "repetition_penalty": 1.3,
    "sequence_bias": [[[21], 2.0]],
    "suppress_tokens": [10, 11],
    "temperature": 0.7,
    "top_h": 0.4,
    "top_k": 5,
    "top_p": 0.7,
    "typical_p": 0.8,
    "watermarking_config": WatermarkingConfig(bias=3.0, seeding_scheme="lefthash"),
}
"""Fields that become processors, with a value each."""
HONOURED = {
    *("bos_token_id", "do_sample", "eos_token_id", "max_length", "max_new_tokens", "max_time"),
    *("num_assistant_tokens", "num_return_sequences", "output_logits", "output_scores"),
    *("pad_token_id", "return_dict_in_generate", "stop_strings"),
}
REFUSED = {
    "assistant_confidence_threshold": 0.3,
    "assistant_early_exit": 1,
    "assistant_ensemble_weight": 0.5,
    "assistant_lookbehind": 3,
    "cache_config": {"nbits": 4},
    "cache_implementation": "static",
    "compile_config": CompileConfig(),
    "constraints": ["some"],
    "dola_layers": "low",
    "force_words_ids": [[[3]]],
    "guidance_scale": 1.5,
    "max_matching_ngram_size": 3,
    "num_assistant_tokens_schedule": "heuristic",
    "num_beams": 2,
    "output_attentions": True,
    "output_hidden_states": True,
    "penalty_alpha": 0.6,
    "prefill_chunk_size": 4,
    "prompt_lookup_num_tokens": 3,
    "speculation_type": "dflash",
    "target_lookbehind": 3,
    "token_healing": True,
    "use_cache": False,
    "use_mtp": True,
}
WITHOUT_EFFECT = {
    "continuous_batching_config": "of generate_batch",
    "decoder_start_token_id": "of encoder-decoders",
    "disable_compile": "with a static cache",
    "diversity_penalty": "with groups of beams",
    "early_stopping": "with beams",
    "is_assistant": "set by the host for a draft model",
    "length_penalty": "with beams",
    "low_memory": "in contrastive search",
    "max_cache_len": "with a static cache",
    "num_beam_groups": "with beams",
    "transformers_version": "who wrote the file",
}
METHODS = {"constraints", "dola_layers", "force_words_ids", "num_beams", "penalty_alpha", "use_mtp"}
"""Fields by which the host chooses a decoding method that is left to it, except by the callable."""
BESIDE = {"output_attentions", "output_hidden_states"}
FIELDS = {name for name in vars(GenerationConfig()) if not name.startswith("_")}
"""The fields of this version; others are not tried."""
pytestmark = pytest.mark.filterwarnings("ignore")  # the host's own, about these settings


def test_every_field_of_this_version_is_known():
    known = {*PROCESSED, *HONOURED, *REFUSED, *WITHOUT_EFFECT}
    assert not FIELDS - known, "honour, refuse or explain these"
    assert transformers_refusals.REFUSED.keys() & FIELDS <= REFUSED.keys()


@pytest.mark.parametrize("place", ["call", "config", "callable"])
@pytest.mark.parametrize("name", sorted(REFUSED.keys() & FIELDS))
def test_refused_by_name_or_left_to_the_host(name, place):
    target, extra = network("llama"), {name: REFUSED[name]}
    if place == "callable" and name in {"guidance_scale", "token_healing"}:
        pytest.skip("the host runs it, or raises, before it calls")
    extra |= {"top_k": 4} if name == "penalty_alpha" else {}
    extra |= {"return_dict_in_generate": True} if name in BESIDE else {}
    given = {**padded(ROWS), **GREEDY, **extra}
    if place == "config":
        config = GenerationConfig(**GREEDY, pad_token_id=2, **extra)
        given = {**padded(ROWS), "generation_config": config}
    shown = {"guidance_scale": "ClassifierFreeGuidance"} | dict.fromkeys(METHODS, "decoding method")
    generate = partial(monge.generate, target)
    if place == "callable":
        generate = partial(target.generate, custom_generate=monge.speculate)
    elif name in METHODS:
        with pytest.warns(UserWarning, match="left to transformers"):
            assert outcome(generate, given) == outcome(target.generate, given)
        return
    with pytest.raises(OptionError, match=shown.get(name, name)):
        generate(**given)


def outcome(generate, given):
    """The text, or the error of the host."""
    try:
        return generate(**given).tolist()
    except Exception as error:  # noqa: BLE001 (whatever the host raises)
        return type(error), str(error)


@pytest.mark.parametrize("name", sorted(PROCESSED.keys() & FIELDS))
def test_processors_of_settings_are_known_functions(name):
    made = []

    def capture(model, input_ids, logits_processor, **_):
        made.append(logits_processor)
        return input_ids

    given = {"max_new_tokens": 4, "do_sample": True, "top_k": 0, name: PROCESSED[name]}
    network("llama").generate(**padded(ROWS), **given, custom_generate=capture)
    assert len(made[0]) > 0
    assert not has_state(row_processors(made[0], 1, 2, torch.tensor([[2, 2]])))


@pytest.mark.parametrize("name", sorted(transformers_refusals.NUMBERS & FIELDS))
def test_truth_values_are_no_numbers(name):
    with pytest.raises(OptionError, match=rf"{name} must be a number; got True"):
        monge.generate(network("llama"), **padded(ROWS), **{"do_sample": True, name: True})


@pytest.mark.parametrize("name", ["cache", "past_key_values"])
def test_a_cache_of_the_caller_is_refused(name):
    target = network("llama")
    for cache in (DynamicCache(), StaticCache(config=target.config, max_cache_len=32)):
        with pytest.raises(OptionError, match=f"{name} is not supported: give the whole text"):
            monge.generate(target, **padded(ROWS), **GREEDY, **{name: cache})
    assert monge.generate(target, **padded(ROWS), **GREEDY, **{name: None}).shape[1] > 6


def test_a_cache_of_the_caller_is_refused_where_the_host_marks_it():
    cache, given = DynamicCache(), {**padded(ROWS), **GREEDY}
    cache._is_user_defined = True
    with pytest.raises(OptionError, match="a cache of the caller's"):
        network("llama").generate(
            **given, past_key_values=cache, custom_generate=monge.speculate, drafter="none"
        )


@pytest.mark.parametrize("name", sorted(BESIDE))
def test_outputs_that_nobody_returns_have_no_effect(name):
    target = network("llama")
    given = {**padded(ROWS), **GREEDY, name: True}
    assert torch.equal(monge.generate(target, **given), target.generate(**given))


def test_no_end_of_text():
    target = network("llama")
    # Every second token ends a text, so that one comes.
    given = {**padded(ROWS), "do_sample": False, "max_new_tokens": 20}
    ends = {"eos_token_id": list(range(0, 97, 2)), "pad_token_id": 2}
    assert target.generate(**given, **ends).shape[1] < 26
    config = target.generation_config
    try:
        target.generation_config = GenerationConfig(**ends)
        plain = target.generate(**given, eos_token_id=None)
        ours = monge.generate(target, **given, eos_token_id=None, draft=perturbed(target))
    finally:
        target.generation_config = config
    assert plain.shape[1] == 26
    assert torch.equal(ours, plain)
    assert config.eos_token_id == EOS


class Confident(StoppingCriteria):
    """Ends a text at a token that was probable, by the scores that criteria are shown."""

    def __init__(self):
        self.shapes = []

    def __call__(self, input_ids, scores, **_):
        self.shapes.append((len(scores), tuple(scores[-1].shape)))
        return torch.softmax(scores[-1], dim=-1).amax(dim=-1) > 0.3


@pytest.mark.parametrize("rows", [ROWS[:1], ROWS], ids=["one", "ragged"])
def test_criteria_see_the_scores_of_plain_decoding(rows):
    target, criteria = network("llama"), (Confident(), Confident())
    given = {**padded(rows), **GREEDY, "max_new_tokens": 20, "eos_token_id": None}
    given |= {"return_dict_in_generate": True, "output_scores": True, "repetition_penalty": 1.2}
    plain = target.generate(**given, stopping_criteria=[criteria[0]])
    ours = monge.generate(target, **given, stopping_criteria=[criteria[1]], draft=perturbed(target))
    assert torch.equal(ours.sequences, plain.sequences)
    assert criteria[1].shapes == criteria[0].shapes
    assert len(criteria[0].shapes) < 20


def test_the_length_of_the_chain_arrives_in_every_way():
    target = network("llama")
    draft = perturbed(target)
    given, rows, counts = {**padded(ROWS), **GREEDY}, [], []
    hook = draft.register_forward_pre_hook(lambda *_: rows.append(1))
    config = GenerationConfig(**GREEDY, num_assistant_tokens=1, pad_token_id=2)
    ours = partial(monge.generate, target, draft=draft)
    callable_ = partial(target.generate, custom_generate=monge.speculate, draft_model=draft)
    for call in (
        partial(ours, **given, num_assistant_tokens=1),
        partial(ours, **padded(ROWS), generation_config=config),
        partial(callable_, **given, num_assistant_tokens=1),
        partial(ours, **given, num_assistant_tokens=5),
    ):
        rows.clear()
        call(controller="fixed")
        counts.append(len(rows))
    hook.remove()
    assert counts[0] == counts[1] == counts[2] != counts[3]


@pytest.mark.usefixtures("unchecked_types")
def test_a_compiled_model_is_refused_by_name():
    target = network("llama")
    compiled = torch.compile(target)
    for call in (
        lambda: monge.generate(compiled, **padded(ROWS)),
        lambda: monge.accelerate(compiled),
        lambda: monge.generate(target, **padded(ROWS), draft=compiled),
        lambda: monge.load(compiled),
    ):
        with pytest.raises(OptionError, match="got OptimizedModule.*_orig_mod"):
            call()
