"""Options of `Decoder.generate`: the same names and meanings as in the server's requests."""

import pytest
import torch

from monge.core.errors import OptionError
from monge.engine.penalties import Penalties
from tests.serve.served import toy_decoder

PROMPT = "once upon a time"


def ids(**options):
    (result,) = toy_decoder().generate([PROMPT], **{"max_new_tokens": 40, **options})
    return result.token_ids


def test_several_texts_of_a_prompt():
    decoder = toy_decoder()
    several = decoder.generate([PROMPT, "a"], n=3, temperature=1, seed=5, max_new_tokens=20)
    assert [result.row for result in several] == list(range(6))
    assert len({result.token_ids for result in several[:3]}) > 1
    (alone,) = decoder.generate([PROMPT], temperature=1, seed=5, row=2, max_new_tokens=20)
    assert alone.token_ids == several[2].token_ids
    with pytest.raises(OptionError, match="stream: n must be 1"):
        next(decoder.stream(PROMPT, n=2))


def test_tokens_that_end_a_text():
    whole = ids(temperature=1, seed=1, ignore_eos=True)
    ended = ids(temperature=1, seed=1, ignore_eos=True, stop_token_ids=[whole[3]])
    assert ended == whole[: whole.index(whole[3]) + 1]
    with pytest.raises(OptionError, match=r"stop_token_ids: token ids must lie in 0\.\..*-1"):
        ids(stop_token_ids=[-1])
    with pytest.raises(OptionError, match="stop_token_ids: str is"):
        ids(stop_token_ids="12")


def test_fewest_tokens():
    whole = ids(temperature=1, seed=1, ignore_eos=True)
    settings = {"temperature": 1, "seed": 1, "ignore_eos": True, "stop_token_ids": [whole[3]]}
    longer = ids(**settings, min_tokens=20)
    assert len(longer) > 20
    assert whole[3] not in longer[:20]


@pytest.mark.parametrize("num_tokens", [0, 1, 2])
def test_ends_have_no_mass_before_the_fewest_tokens(num_tokens):
    """The law: that of the target without the ends, scaled to one."""
    processor = Penalties(
        num_prompt_tokens=3, vocab_size=6, min_tokens=2, end_ids=frozenset({1, 4})
    )
    logits = torch.randn(1, 6, generator=torch.Generator().manual_seed(0))
    law = processor(torch.zeros(1, 3 + num_tokens, dtype=torch.long), logits.clone()).softmax(1)
    expected = logits.softmax(1)
    if num_tokens < 2:
        expected[:, [1, 4]] = 0
        expected /= expected.sum()
    torch.testing.assert_close(law, expected)


def test_penalties_and_biases():
    plain = ids(temperature=1, seed=1)
    for option in (
        {"repetition_penalty": 3.0},
        {"presence_penalty": 2.0},
        {"frequency_penalty": 2.0},
        {"logit_bias": {5: 100.0}},
    ):
        assert ids(temperature=1, seed=1, **option) != plain, option
    assert set(ids(logit_bias={5: 100.0})) == {5}


@pytest.mark.parametrize("options", [{}, {"temperature": 1, "seed": 4}], ids=str)
def test_log_probabilities_of_every_token(options):
    decoder = toy_decoder()
    settings = {"max_new_tokens": 20, "logprobs": 2, **options}
    (result,) = decoder.generate([PROMPT], **settings)
    assert [one.token_id for one in result.logprobs] == list(result.token_ids)
    assert all(len(one.top) <= 2 and one.logprob <= 0 for one in result.logprobs)
    pieces = list(decoder.stream(PROMPT, **settings))
    assert [one for piece in pieces for one in piece.logprobs] == list(result.logprobs)
    (plain,) = decoder.generate([PROMPT], max_new_tokens=20, **options)
    assert plain.logprobs is None
    assert plain.token_ids == result.token_ids


MEANT = {
    "max_tokens": "max_new_tokens",
    "do_sample": "temperature",
    "num_return_sequences": "n",
    "temprature": "temperature",
    "stop_strings": "stop",
}


@pytest.mark.parametrize(("name", "meant"), MEANT.items())
@pytest.mark.parametrize("call", ["generate", "stream"])
def test_unknown_options_name_the_one_that_was_meant(name, meant, call):
    decoder = toy_decoder()
    with pytest.raises(OptionError, match=f"unknown option '{name}'; did you mean '{meant}'?"):
        list(getattr(decoder, call)(PROMPT, **{name: 3}))
