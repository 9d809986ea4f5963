"""Arguments of `generate` that cannot be honoured here, refused by name."""

from collections.abc import Mapping
from typing import Any, Final

import torch
import transformers
from torch import Tensor
from transformers import Cache, GenerationConfig, StaticCache
from transformers.cache_utils import CacheLayerMixin
from transformers.generation.configuration_utils import GenerationMode
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled
from transformers.integrations.fsdp import is_fsdp_managed_module

from monge.core.errors import OptionError
from monge.core.words import counted
from monge.networks.network_facts import CACHE_KEYWORDS, forward_parameters
from monge.plugins.transformers_training import acting_modules

REFUSED: Final[Mapping[str, str]] = {
    "assistant_confidence_threshold": "a controller takes its place, as controller='goodput'",
    "assistant_early_exit": "give a draft model, a head, or drafter='ngram' instead",
    "assistant_ensemble_weight": "it changes the distribution of the text",
    "assistant_lookbehind": "it belongs to other tokenizers",
    "assistant_tokenizer": "the draft model must have the target's tokenizer here; `monge.load` "
    "takes another one",
    "backend": "give it to monge.accelerate, which keeps the compiled model for all calls",
    "cache_config": "the cache is this library's own",
    "compile_config": "the network is compiled here, if it can be",
    "custom_generate": "the model is accelerated; call it without, or undo with `monge.restore(model)`",
    "max_matching_ngram_size": "give drafter='ngram(...)' instead",
    "num_assistant_tokens_schedule": "a controller takes its place, as controller='fsm'",
    "prefill_chunk_size": "prompts are read whole here",
    "prompt_lookup_num_tokens": "give drafter='ngram(num_draft_tokens=N)' instead",
    "speculation_type": "give a head as draft instead",
    "synced_gpus": "ranks that must step together are not supported",
    "target_lookbehind": "it belongs to other tokenizers",
    "token_healing": "give the prompt that model.heal_tokens(input_ids, tokenizer) returns",
    **dict.fromkeys(
        CACHE_KEYWORDS,
        "give the whole text without a cache; it would not be filled, the cache is this library's "
        "own",
    ),
}
"""Arguments and settings that would be ignored, and what to do instead."""
NUMBERS: Final = frozenset(
    {
        *("encoder_no_repeat_ngram_size", "encoder_repetition_penalty", "epsilon_cutoff"),
        *("eta_cutoff", "max_length", "max_new_tokens", "max_time", "min_length"),
        *("min_new_tokens", "min_p", "no_repeat_ngram_size", "num_assistant_tokens"),
        *("num_return_sequences", "repetition_penalty", "temperature", "top_h", "top_k", "top_p"),
        "typical_p",
    }
)
"""Settings of `GenerationConfig` that are numbers; transformers takes truth values for them."""
_HARMLESS: Final = frozenset(
    {
        *("attention_mask", "position_ids", "use_cache", "logits_to_keep"),
        # Without `return_dict_in_generate` they have no effect in plain decoding either.
        *("output_attentions", "output_hidden_states"),
    }
)
"""Model inputs that `generate` itself prepares, or that have no effect."""
TAKEN: Final = frozenset({GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE})
"""Decoding methods of transformers that this library speeds up."""
_MODES: Final = frozenset(
    {
        *("constraints", "do_sample", "dola_layers", "force_words_ids", "num_beam_groups"),
        *("num_beams", "penalty_alpha", "top_k", "use_mtp"),
    }
)
"""Settings by which transformers chooses its decoding method, beside those of `REFUSED`."""
_TEXT_MARKS: Final = frozenset({"mm_token_type_ids", "token_type_ids"})
"""Inputs of vision-language models that hold the kind of every token, 0 for text."""


def check_arguments(settings: dict[str, Any]) -> None:
    """Refuse keywords of a call of `generate`; those that were given as `None` are removed.

    Raises:
        OptionError: If an argument would be ignored.
    """
    _check_numbers(settings)
    config = settings.get("generation_config")
    for name, instead in REFUSED.items():
        value = settings.pop(name, None)
        if value is None and config is not None:
            value = getattr(config, name, None)
        if value is not None and value is not False:
            raise OptionError(f"generate: {name} is not supported: {instead}")


def decoding_method(model: Any, settings: Mapping[str, Any]) -> GenerationMode:
    """Return the method that transformers chooses for the arguments of a call of `generate`."""
    named = {name: settings[name] for name in _MODES & settings.keys()}
    config, _ = model._prepare_generation_config(settings.get("generation_config"), **named)
    return config.get_generation_mode()


def check_settings(model: Any, config: GenerationConfig, model_kwargs: dict[str, Any]) -> None:
    """Refuse settings and model inputs that would be ignored.

    Raises:
        OptionError: With the setting, and what to do instead.
    """
    _check_numbers(vars(config))
    for name, instead in REFUSED.items():
        if given(model, config, name) is not None:
            raise OptionError(f"generate: {name} is not supported: {instead}")
    mode = config.get_generation_mode()
    outputs = ("output_attentions", "output_hidden_states")
    requested = [
        name for name in outputs if getattr(config, name) and config.return_dict_in_generate
    ]
    caches = [value for value in model_kwargs.values() if isinstance(value, Cache)]
    names = [
        name
        for name in CACHE_KEYWORDS
        if getattr(model_kwargs.get(name), "_is_user_defined", False)
    ]
    unknown = _other_inputs(model, model_kwargs)
    sharded = is_deepspeed_zero3_enabled() or is_fsdp_managed_module(model)
    acting = acting_modules(model)
    refusals = {
        "encoder-decoder models; a decoder-only model is needed": model.config.is_encoder_decoder,
        "a model in training mode, whose distribution changes from call to call by "
        f"{counted(len(acting), 'module')}: {', '.join(acting[:3])}{', ...' * (len(acting) > 3)}; "
        "call model.eval(), or set their rates to 0": acting,
        f"the decoding method {mode.value!r}; leave out num_beams, penalty_alpha, constraints, "
        "dola_layers and use_mtp": mode not in TAKEN,
        f"{', '.join(requested)}; leave it out": requested,
        f"cache_implementation={config.cache_implementation!r}; leave it out, the cache is this "
        "library's own": config.cache_implementation not in {None, "dynamic"},
        # Some checkpoints have it in their settings, where it is no wish of the caller.
        "use_cache=False; leave it out": config.use_cache is False
        and model.generation_config.use_cache is not False,
        "a cache that holds text already; give the whole text as input_ids": any(
            map(_holds_text, caches)
        ),
        # The host passes an empty one of its own, and marks those of the caller since 5.24.
        f"a cache of the caller's ({', '.join(names)}); leave it out, it would not be filled": names,
        "a static cache; leave it out, the cache is this library's own": any(
            isinstance(cache, StaticCache) for cache in caches
        ),
        f"model inputs beside the text: {', '.join(unknown)}; leave them out, since only text is "
        "read here, and give prompts with images, video or audio to plain `generate`; where you "
        f"gave none, report this with 'transformers {transformers.__version__}'": unknown,
        "weights sharded by FSDP or ZeRO-3, whose ranks must step together": sharded
        and torch.distributed.is_initialized(),
    }
    for what, is_asked in refusals.items():
        if is_asked:
            raise OptionError(f"speculate does not support {what}")


def given(model: Any, config: GenerationConfig, name: str) -> Any:
    """Return a setting of the caller; `None` for defaults of transformers or the checkpoint."""
    value = getattr(config, name, None)
    defaults = config._get_default_generation_params()
    usual = (defaults.get(name), getattr(model.generation_config, name, None))
    return None if value is False or value in usual else value


def _check_numbers(settings: Mapping[str, Any]) -> None:
    for name in NUMBERS & settings.keys():
        if isinstance(value := settings[name], bool):
            raise OptionError(f"generate: {name} must be a number; got {value}")


def _other_inputs(model: Any, model_kwargs: dict[str, Any]) -> list[str]:
    """Return names of inputs that the model's forward would need.

    Caches are recognised by type, because transformers renames their keyword. `None`, an empty
    mapping, defaults of the forward, and marks that say "text" of every token are harmless.
    """
    parameters = forward_parameters(model)
    marks = _TEXT_MARKS if "pixel_values" in parameters else frozenset[str]()
    inputs: list[str] = []
    for name, value in model_kwargs.items():
        usual = parameters[name].default if name in parameters else None
        is_harmless = (
            name in _HARMLESS
            or isinstance(value, Cache)
            or value is None
            or value is usual
            or (isinstance(value, bool | int | float | str) and value == usual)
            or (isinstance(value, Mapping) and not value)
            or (name in marks and isinstance(value, Tensor) and not value.any())
        )
        if not is_harmless:
            # Inputs that the host has encoded already are named by what they were: an image, a video.
            what = f" ({', '.join(map(str, value))})" if isinstance(value, Mapping) else ""
            inputs.append(name + what)
    return sorted(inputs)


def _holds_text(cache: Cache) -> bool:
    layers = getattr(cache, "layers", ())
    if layers and not any(isinstance(layer, CacheLayerMixin) for layer in layers):
        # Recurrent state alone, which does not say how much it has read.
        return cache.has_previous_state()
    return cache.get_seq_length() > 0
