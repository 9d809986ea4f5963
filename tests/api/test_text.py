"""Text handed out in pieces is the text, whatever characters and stop strings do to the seams."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from monge.api import built_in
from monge.loading.networks import load_tokenizer
from monge.requests.text import PlacedTexts, TextStream, TokenTexts

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


LETTERS = [chr(code) for code in range(ord("a"), ord("a") + 16)]
SPECIAL = ["<unk>", "<s>", "</s>"]


def pieces_tokenizer():
    """A SentencePiece vocabulary: bytes, letters, and letters behind a blank."""
    words = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *LETTERS]
    words += [f"▁{letter}" for letter in LETTERS]
    vocabulary = {word: number for number, word in enumerate(words)}
    merges = [("▁", letter) for letter in LETTERS]
    core = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True))
    core.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    core.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    names = dict(zip(("unk_token", "bos_token", "eos_token"), SPECIAL, strict=True))
    return PreTrainedTokenizerFast(tokenizer_object=core, **names)


def bytes_tokenizer():
    """One token a byte, a special token and an added one that is not special."""
    letters = bytes_to_unicode()
    core = Tokenizer(models.BPE({letters[byte]: byte for byte in range(256)}, []))
    core.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(tokenizer_object=core)
    made.add_tokens([AddedToken("<|mark|>", special=True), AddedToken("<think>")])
    return made


class Counting:
    """Counts the tokens that it decodes."""

    def __init__(self, tokenizer):
        self.tokenizer, self.num_decoded = tokenizer, 0

    def __call__(self, text):
        return self.tokenizer(text)

    def decode(self, token_ids, **options):
        self.num_decoded += len(token_ids)
        return self.tokenizer.decode(token_ids, **options)


@pytest.mark.parametrize("every", [1, 3, 100])
@pytest.mark.parametrize("cycle", [b"\xff", b"\xf0\x9f", b"a\xe6\x97", b"\x80\xe6\x97\xa5"])
def test_bytes_that_are_no_text_do_not_wait(cycle, every):
    tokenizer = Counting(bytes_tokenizer())
    data = (cycle * 2000)[:4000] + "😀 z".encode()
    stream, pieces = TextStream(tokenizer, list(b"So "), ()), []
    for count, byte in enumerate(data, 1):
        stream.push(byte)
        if count % every == 0:
            pieces.append(stream.take(last=False))
            text = data[:count].decode(errors="replace")
            assert len("".join(pieces)) >= len(text) - 3 if count % 20 == 0 else True
    stream.finish()
    pieces.append(stream.take(last=True))
    assert "".join(pieces) == data.decode(errors="replace")
    assert tokenizer.num_decoded < 400 * len(data)


def test_a_long_run_of_byte_tokens_stays_whole():
    tokenizer = pieces_tokenizer()
    text = "日本é😀" * 40
    ids = [3 + byte for byte in text.encode()]
    stream = TextStream(tokenizer, [*ids[:60], *ids[:1]], ())
    pieces = []
    for token in [*ids[1:], *ids]:
        stream.push(token)
        pieces.append(stream.take(last=False))
    assert "".join(pieces) == text * 2


def test_texts_of_tokens_in_their_places():
    tokenizer = pieces_tokenizer()
    texts = TokenTexts(tokenizer)
    word, letter, byte = tokenizer.convert_tokens_to_ids(["▁a", "a", "<0x61>"])
    assert [texts.name(one) for one in (word, letter, byte, 2)] == [" a", "a", "a", "</s>"]
    assert texts.utf8(word) == [32, 97]
    assert texts.names([letter, byte, word, letter]) == ["a", f"token_id:{byte}", " a", "a"]
    assert texts.name(3 + 0xF0) == r"bytes:\xf0"
    assert texts.utf8(3 + 0xF0) == [0xF0]
    emoji = [3 + byte for byte in "😀".encode()]
    ids = [1, word, letter, *emoji, 2, word, emoji[0]]
    placed = list(PlacedTexts(texts, ()).of(ids, last=True))
    assert [text for text, _ in placed] == [
        *("<s>", "a", "a"),
        *("", "", "", "😀"),
        *("</s>", " a", "\N{REPLACEMENT CHARACTER}"),
    ]
    assert sum(size for _, size in placed) == len(tokenizer.decode(ids, skip_special_tokens=True))


def test_a_stop_string_that_is_an_added_token():
    tokenizer = bytes_tokenizer()
    mark, think = tokenizer.convert_tokens_to_ids(["<|mark|>", "<think>"])
    for token, stop in ((mark, "<|mark|>"), (think, "<think>")):
        stream = TextStream(tokenizer, list(b"So "), ("zz", stop))
        assert not any(map(stream.push, b"hi \xe6"))
        assert stream.push(token)
        assert stream.stop_string == stop
        assert stream.take(last=True) == "hi \N{REPLACEMENT CHARACTER}"
    stream = TextStream(tokenizer, list(b"So "), ("<|mark|>",))
    assert [stream.push(byte) for byte in b"<|mark|>"] == [False] * 7 + [True]
    assert stream.take(last=True) == ""
