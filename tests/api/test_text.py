"""Text handed out in pieces is the text, whatever characters and stop strings do to the seams."""

from hypothesis import example, given
from hypothesis import strategies as st

from monge.api import built_in
from monge.engine.text import TextStream
from monge.loading.networks import load_tokenizer

TOKENIZER = load_tokenizer(built_in("target"))
TEXTS = st.text(alphabet="ab é€😀\n.x", min_size=1, max_size=60)


def ids_of(text: str) -> list[int]:
    return TOKENIZER(text)["input_ids"]


@given(text=TEXTS, every=st.integers(1, 5))
@example(text="word é " * 100, every=1)
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


def test_characters_of_several_tokens():
    first, *rest = ids_of("😀")
    assert rest
    stream = TextStream(TOKENIZER, [first, *rest[:-1]], ())
    stream.push(rest[-1])
    assert stream.take(last=True) == "😀", "it began in the prompt"
    stream = TextStream(TOKENIZER, ids_of("So "), ())
    stream.push(first)
    assert stream.take(last=False) == ""
    stream.finish()
    assert stream.text == "\N{REPLACEMENT CHARACTER}", "an incomplete one is shown at the end"
