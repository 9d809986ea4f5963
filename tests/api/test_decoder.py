"""The public way in, on the built-in pair and on tables."""

import pytest

from monge.api import load, make_components
from monge.engine.decoder import Decoder
from tests.kit.tables import table

PROMPT = "Question: Tom has 3 apples and buys 4 more. How many apples does he have?\nAnswer:"


@pytest.fixture(scope="module")
def pair() -> Decoder:
    return load(dtype="float32")


def test_the_built_in_pair_writes_text(pair):
    (result,) = pair.generate(PROMPT, max_new_tokens=24, controller="fixed")
    assert result.text.strip()
    assert result.finish_reason in {"length", "eos"}
    assert result.stats.block_efficiency > 1.2
    assert result.stats.num_tokens == len(result.token_ids)
    assert pair.tokenizer.decode(result.token_ids, skip_special_tokens=True) == result.text


def test_every_drafter_writes_the_same_greedy_text(pair):
    (expected,) = load(drafter="none", dtype="float32").generate(PROMPT, max_new_tokens=24)
    for parts in (
        {},
        {"drafter": "ngram"},
        {"tree": "chain(3)"},
        {"tree": "best_first(8)", "verifier": "sample_and_match"},
    ):
        (result,) = load(dtype="float32", **parts).generate(PROMPT, max_new_tokens=24)
        assert result.token_ids == expected.token_ids, parts


@pytest.mark.parametrize("options", [{"temperature": 1.0, "seed": 3}, {"stop": "e "}], ids=str)
def test_streamed_pieces_are_the_text(pair, options):
    (result,) = pair.generate(PROMPT, max_new_tokens=24, **options)
    pieces = list(pair.stream(PROMPT, max_new_tokens=24, **options))
    assert "".join(piece.text for piece in pieces) == result.text
    assert tuple(token for piece in pieces for token in piece.token_ids) == result.token_ids
    assert {piece.finish_reason for piece in pieces[:-1]} == {None}
    assert pieces[-1].finish_reason == result.finish_reason


def test_seed_and_row_alone_decide(pair):
    options = {"max_new_tokens": 12, "temperature": 1.0}
    crowd = pair.generate([PROMPT] * 4, seed=5, **options)
    assert len({result.token_ids for result in crowd}) == 4
    for row, result in enumerate(crowd):
        assert (result.seed, result.row) == (5, row)
        (alone,) = pair.generate(PROMPT, seed=result.seed, row=result.row, **options)
        assert alone.token_ids == result.token_ids
    for seed in (6, 5 + 2**32, 5 + 2**33):
        assert pair.generate(PROMPT, seed=seed, **options)[0].token_ids != crowd[0].token_ids
    (drawn,) = pair.generate(PROMPT, controller="fixed", **options)
    assert pair.generate(PROMPT, seed=drawn.seed, **options)[0].token_ids == drawn.token_ids


def test_a_stop_string_ends_the_text_before_it(pair):
    (free,) = pair.generate(PROMPT, max_new_tokens=40)
    stop = free.text[8:12]
    (result,) = pair.generate(PROMPT, max_new_tokens=40, stop=stop)
    assert result.finish_reason == "stop"
    assert result.text == free.text[: free.text.index(stop)]
    plain = load(drafter="none", dtype="float32").generate(PROMPT, max_new_tokens=40, stop=stop)[0]
    assert result.token_ids == plain.token_ids


def of_tables(max_batch_size: int) -> Decoder:
    parts = make_components(table(1, 6), table(2, 6))
    return Decoder(parts, eos_ids=frozenset({5}), max_batch_size=max_batch_size)


@pytest.mark.parametrize("max_batch_size", [1, 2, 7])
def test_requests_join_and_leave(max_batch_size):
    prompts = [[token, 0] for token in range(5)]
    options = {"max_new_tokens": 9, "temperature": 1.0, "seed": 2}
    expected, found = (of_tables(size).generate(prompts, **options) for size in (8, max_batch_size))
    assert [one.token_ids for one in found] == [one.token_ids for one in expected]
    assert {result.finish_reason for result in found} <= {"eos", "length"}


def test_an_abandoned_stream_gives_its_caches_back():
    decoder = of_tables(8)
    stream = decoder.stream([0, 1], max_new_tokens=50, ignore_eos=True)
    next(stream)
    stream.close()
    with pytest.raises(KeyError):
        decoder.components.target.length(0)
