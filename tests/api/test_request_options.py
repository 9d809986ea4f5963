"""Options of `Decoder.generate`: the same names and meanings as in the server's requests."""

import importlib
import sys
import warnings

import pytest

import monge
from monge.core.errors import OptionError
from monge.core.former_modules import FORMER_MODULES
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
    settings = {"temperature": 1, "seed": 1, "ignore_eos": True, "stop_token_ids": [whole[3]]}
    longer = ids(**settings, min_tokens=20)
    assert len(longer) > 20
    assert whole[3] not in longer[:20]
    with pytest.raises(OptionError, match=r"stop_token_ids: token ids must lie in 0\.\..*-1"):
        ids(stop_token_ids=[-1])
    with pytest.raises(OptionError, match="stop_token_ids: str is"):
        ids(stop_token_ids="12")


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


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("max_tokens", "max_new_tokens"),
        ("do_sample", "temperature"),
        ("num_return_sequences", "n"),
        ("temprature", "temperature"),
        ("stop_strings", "stop"),
    ],
)
def test_unknown_options_name_the_one_that_was_meant(name, meant):
    decoder = toy_decoder()
    for call in (decoder.generate, decoder.stream):
        with pytest.raises(OptionError, match=f"unknown option '{name}'; did you mean '{meant}'?"):
            list(call(PROMPT, **{name: 3}))


def test_former_names_of_options_are_taken_with_a_warning():
    """For one release."""
    calls = list[int]()
    former = {
        "processors": [lambda token_ids, scores: scores],
        "stop_check": lambda token_ids: calls.append(1) or len(calls) == 3,
        "keeps_trees": True,
    }
    for name, value in former.items():
        with pytest.warns(FutureWarning, match=f"{name} is \\w+ now"):
            (result,) = toy_decoder().generate(
                [PROMPT], max_new_tokens=8, ignore_eos=True, **{name: value}
            )
        assert len(result.token_ids) == (3 if name == "stop_check" else 8)
    assert result.records[-1].tree is not None
    with pytest.raises(OptionError, match="return_trees is given twice, also as keeps_trees"):
        ids(keeps_trees=True, return_trees=True)


@pytest.mark.parametrize(
    ("former", "present"),
    [
        ("target_walk", "sample_and_match"),
        ("rrs", "recursive_rejection"),
    ],
)
def test_former_names_of_verifiers_are_taken_with_a_warning(former, present):
    """For one release."""
    with pytest.warns(FutureWarning, match="the next release takes no other name"):
        verifier = monge.VERIFIERS.parse(former)
    assert verifier == monge.VERIFIERS.parse(present)


def test_former_names_of_loading_and_streaming_are_taken_with_a_warning():
    """For one release."""
    with pytest.warns(FutureWarning, match="monge.Piece is monge.StreamChunk now"):
        assert monge.Piece is monge.StreamChunk
    with pytest.warns(FutureWarning, match="exact_numerics is batch_invariant now"):
        monge.load(exact_numerics=False)


@pytest.mark.parametrize("former", sorted(FORMER_MODULES))
def test_former_names_of_modules_are_taken_with_a_warning(former):
    """For one release."""
    sys.modules.pop(former, None)
    with warnings.catch_warnings(record=True) as seen:  # a package may warn of itself as well
        warnings.simplefilter("always")
        module = importlib.import_module(former)
    present = importlib.import_module(FORMER_MODULES[former])
    assert any(f"{former} is {present.__name__} now" in str(entry.message) for entry in seen)
    assert module is present
    assert present.__spec__.name == FORMER_MODULES[former]
