"""The cases of `transformers`' own generation tests, through the wrapper, over ten architectures."""

import copy
from contextlib import suppress
from functools import cache

import pytest
import torch
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    MaxLengthCriteria,
    StoppingCriteria,
    StoppingCriteriaList,
    WatermarkingConfig,
)

import monge
from monge.core.errors import BackendError, OptionError
from tests.engine.compiling import require, shared_programs
from tests.engine.tiny import PAD, VOCAB, network, padded, perturbed, prompts

ARCHITECTURES = (
    *("llama", "qwen2", "qwen3", "mistral_window", "gemma3"),
    *("phi3", "gpt2", "mixtral", "bloom", "falcon"),
)
ROWS = prompts((9, 4), seed=11)
SETTINGS = {"do_sample": False, "max_new_tokens": 10, "pad_token_id": PAD}


class Odd(LogitsProcessor):
    """Only odd tokens."""

    def __call__(self, input_ids, scores):
        return scores.masked_fill(torch.arange(scores.shape[-1]) % 2 == 0, -torch.inf)


class Seen(StoppingCriteria):
    """Ends a text whose last token is a multiple of seven."""

    def __call__(self, input_ids, scores, **_):
        return input_ids[:, -1] % 7 == 0


CASES = {
    "greedy": {},
    "one text": {"rows": ROWS[:1]},
    "several ends": {"eos_token_id": [1, 17, 33, 71]},
    "min_new_tokens": {"eos_token_id": list(range(0, VOCAB, 3)), "min_new_tokens": 6},
    "min_length": {"eos_token_id": list(range(0, VOCAB, 3)), "min_length": 15},
    "max_length": {"max_new_tokens": None, "max_length": 18},
    "repetition_penalty": {"repetition_penalty": 1.3},
    "encoder_repetition_penalty": {"encoder_repetition_penalty": 1.3},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 2},
    "bad_words_ids": {"bad_words_ids": [[5], [9, 3]]},
    "suppress_tokens": {"suppress_tokens": list(range(0, VOCAB, 2))},
    "begin_suppress_tokens": {"begin_suppress_tokens": list(range(VOCAB // 2))},
    "sequence_bias": {"sequence_bias": [[[7], 4.0], [[3, 4], -6.0]]},
    "forced_eos_token_id": {"forced_eos_token_id": 3},
    "encoder_no_repeat_ngram_size": {"encoder_no_repeat_ngram_size": 1},
    "watermark": {"watermarking_config": WatermarkingConfig(bias=3.0, seeding_scheme="lefthash")},
    "several": {"repetition_penalty": 1.3, "no_repeat_ngram_size": 3, "min_new_tokens": 4},
    "exponential decay": {"eos_token_id": 3, "exponential_decay_length_penalty": (4, 1.5)},
    "logits_processor": {"logits_processor": LogitsProcessorList([Odd()])},
    "stopping_criteria": {"stopping_criteria": StoppingCriteriaList([Seen()])},
    "max length criterion": {
        "stopping_criteria": StoppingCriteriaList([MaxLengthCriteria(max_length=14)])
    },
    "prefix_allowed_tokens_fn": {
        "prefix_allowed_tokens_fn": lambda row, ids: list(range(3 + row, VOCAB, 2))
    },
    "remove_invalid_values": {"remove_invalid_values": True},
    "renormalize_logits": {"renormalize_logits": True},
    "use_cache": {"use_cache": True},
    "dynamic cache": {"cache_implementation": "dynamic"},
    "num_return_sequences": {"rows": ROWS[:1], "do_sample": True, "top_k": 1},
}


OFTEN = {"greedy", "several ends", "several", "num_return_sequences", "stopping_criteria"}

pytestmark = pytest.mark.filterwarnings("ignore")  # the host's own, about settings of these cases


@cache
def pair(family, backend=None):
    plain = network(family)
    return plain, monge.accelerate(copy.deepcopy(plain), perturbed(plain), backend=backend)


def cases(is_slow):
    return pytest.mark.parametrize(
        ("family", "case"),
        [
            pytest.param(family, case, marks=[pytest.mark.slow] * is_slow(place, case))
            for place, family in enumerate(ARCHITECTURES)
            for case in CASES
        ],
    )


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    require("compiled")
    with shared_programs(tmp_path_factory) as make:
        yield cache(make)


# Settings are the host's code; a few show that a family's caches do as they say.
@cases(is_slow=lambda place, case: place > 1 and case not in OFTEN)
def test_the_text_is_that_of_generate(family, case):
    check(*pair(family), case)


# Each compiles a network; `test_accelerate_compiled.py` has the texts of one.
@cases(is_slow=lambda place, case: True)
def test_the_text_of_compiled_forwards_is_that_of_generate(programs, family, case):
    with suppress(BackendError):  # positions from the order of tokens
        programs(network(family))
    check(*pair(family, "compiled"), case)


def check(plain, ours, case):
    settings = SETTINGS | CASES[case]
    inputs = padded(settings.pop("rows", ROWS))
    settings = {name: value for name, value in settings.items() if value is not None}
    expected = plain.generate(**inputs, **settings)
    found = ours.generate(**inputs, **settings)
    assert found.tolist() == expected.tolist()
    assert expected.shape[1] > inputs["input_ids"].shape[1]


def test_embeddings_for_a_prompt_are_refused():
    _, ours = pair("llama")
    with pytest.raises(OptionError):
        ours.generate(**padded(ROWS), **SETTINGS, inputs_embeds=torch.zeros(2, 9, 32))
