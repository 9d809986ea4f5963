"""What is taken of a checkpoint's generation settings: the ends of texts, and no sampling settings."""

import warnings

import pytest
from transformers import AutoModelForCausalLM

import monge
from tests.bench.tiny import save_pair

PROMPT = [[5, 6, 7, 8]]


@pytest.fixture
def network(tmp_path):
    return AutoModelForCausalLM.from_pretrained(save_pair(tmp_path)[0])


def written(network, **options):
    decoder = monge.load(network, drafter="none", controller="fixed")
    return decoder, decoder.generate(PROMPT, max_new_tokens=12, **options)[0].token_ids


@pytest.mark.parametrize(
    ("settings", "shown"),
    [
        ({"do_sample": True, "temperature": 0.6, "top_k": 1}, r"temperature=0.6, top_k=1\)"),
        ({"repetition_penalty": 5.0, "temperature": 0.6}, r"\(repetition_penalty=5.0\)"),
        ({"suppress_tokens": list(range(400))}, r"\(suppress_tokens="),
    ],
)
def test_sampling_settings_are_named_and_not_applied(network, settings, shown):
    _, plain = written(network)
    network.generation_config.update(**settings)
    with pytest.warns(UserWarning, match=f"{shown}.*are not applied.*give them as options") as said:
        _, ours = written(network)
    assert len(said) == 1
    assert ours == plain


@pytest.mark.parametrize("settings", [{}, {"temperature": 0.6}, {"max_new_tokens": 3}])
def test_settings_that_change_no_law_are_not_named(network, settings):
    network.generation_config.update(**settings)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        written(network)


def test_every_end_of_text_is_taken(network):
    _, plain = written(network, ignore_eos=True)
    network.generation_config.eos_token_id = [0, plain[3]]
    decoder, ours = written(network)
    assert decoder.eos_ids == {0, plain[3]}
    assert ours == plain[: plain.index(plain[3]) + 1]
