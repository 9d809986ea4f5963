"""Text handed out in pieces is the text, whatever characters and stop strings do to the seams."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from monge.api import built_in
from monge.engine.text import TextStream
from monge.loading.networks import load_tokenizer

TOKENIZER = load_tokenizer(built_in("target"))
TEXTS = st.text(alphabet="ab é€😀\n.x", min_size=1, max_size=60)


def ids_of(text: str) -> list[int]:
    return TOKENIZER(text)["input_ids"]


@given(text=TEXTS, every=st.integers(1, 5))
def test_pieces_add_up_to_the_text(text, every):
    stream = TextStream(TOKENIZER, ids_of("So "), ())
    pieces = []
    for count, token in enumerate(ids_of(text)):
        stream.push(token)
        if count % every == 0:
            pieces.append(stream.take(last=False))
    pieces.append(stream.take(last=True))
    assert "".join(pieces) == text == stream.text
    assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)


@given(text=TEXTS, stop=st.text(alphabet="ab .x", min_size=1, max_size=3))
def test_a_stop_string_is_found_at_the_token_that_completes_it(text, stop):
    stream, plain, pieces = TextStream(TOKENIZER, ids_of("So "), (stop,)), "", []
    for token in ids_of(text):
        stopped = stream.push(token)
        pieces.append(stream.take(last=stopped))
        plain = TOKENIZER.decode(ids_of(text)[: len(pieces)], skip_special_tokens=True)
        assert stopped == (stop in plain)
        if stopped:
            break
    else:
        stream.finish()
        pieces.append(stream.take(last=True))
    assert "".join(pieces) == text.partition(stop)[0]
    assert stop not in "".join(pieces)


def test_a_character_begun_in_the_prompt_is_completed():
    ids = ids_of("😀")
    assert len(ids) > 1
    stream = TextStream(TOKENIZER, ids[:-1], ())
    stream.push(ids[-1])
    assert stream.take(last=True) == "😀"


def test_an_incomplete_character_is_shown_only_at_the_end():
    stream = TextStream(TOKENIZER, ids_of("So "), ())
    stream.push(ids_of("😀")[0])
    assert stream.take(last=False) == ""
    stream.finish()
    assert stream.text == "\N{REPLACEMENT CHARACTER}"


@pytest.mark.parametrize("count", [1, 8, 100])
def test_long_texts_move_their_window(count):
    text = "word é " * count
    stream = TextStream(TOKENIZER, ids_of("So "), ())
    pieces = []
    for token in ids_of(text):
        stream.push(token)
        pieces.append(stream.take(last=False))
    assert "".join([*pieces, stream.take(last=True)]) == text
