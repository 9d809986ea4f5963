"""The tokenizer of a GGUF file, built from its header.

Names and defaults mean what they mean to llama.cpp; `python -m lab.tokens` compares the tokens.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)
from transformers import TokenizersBackend

from monge.core.errors import ModelLoadError
from monge.loading.gguf_header import Header

BLANK: Final = "\N{LOWER ONE EIGHTH BLOCK}"
_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4  # types of tokens in GGUF files
_KEYS: Final = "tokenizer.ggml."
_KINDS: Final = ("gemma4", "gpt2", "llama")
_NAMED: Final = {
    "bos": "bos_token_id",
    "eos": "eos_token_id",
    "eot": "eot_token_id",
    "eom": "eom_token_id",
    "unk": "unknown_token_id",
}
_OF_SENTENCEPIECE: Final = {"bos": 1, "eos": 2, "unk": 0}
"""Ids that hold where a SentencePiece vocabulary does not name them."""
_ENDS: Final = frozenset(
    {
        *("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>"),
        *("<|eom_id|>", "<EOT>", "[EOT]", "<|end_of_text|>", "<end_of_utterance>"),
        "<\N{FULLWIDTH VERTICAL LINE}end▁of▁sentence\N{FULLWIDTH VERTICAL LINE}>",
    }
)
"""Tokens that are marks whatever type a file gives them."""
_NOT_STRIPPING: Final = frozenset({"<unk>", "<s>", "<|endoftext|>"})
"""Marks of Phi-3 that keep the blanks behind them; all others strip them."""

_CASELESS: Final = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES: Final = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_WORD: Final = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_MARKS: Final = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_GPT2: Final = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3: Final = rf"{_CASELESS}|{_WORD}|\p{{N}}{{1,3}}|{_MARKS}|{_SPACES}"
_QWEN2: Final = rf"{_CASELESS}|{_WORD}|\p{{N}}|{_MARKS}|{_SPACES}"
_DIGIT: Final = r"\p{N}"
_ASCII_MARK: Final = r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"
_DEEPSEEK_WORD: Final = rf"{_ASCII_MARK}[A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+"
_DEEPSEEK3: Final = rf"{_DEEPSEEK_WORD}| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}"
_CJK: Final = r"[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_BLOOM: Final = r" ?[^(\s|.,!?…。，、।۔،)]+"


def _by_case(ending: str, numbers: str, *, without: str = "") -> str:
    """Return words of capitals before small letters, as `o200k` splits them."""
    upper, lower = (
        rf"[\p{{{case}}}\p{{Lm}}\p{{Lo}}\p{{M}}{without}]" for case in (r"Lu}\p{Lt", "Ll")
    )
    start = r"[^\r\n\p{L}\p{N}]?"
    return (
        rf"{start}{upper}*{lower}+{ending}|{start}{upper}+{lower}*{ending}|{numbers}"
        rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
    )


_GPT4O: Final = _by_case(f"{_CASELESS}?", r"\p{N}{1,3}")
_NO_HAN: Final = r"&&[^\p{Han}]"


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """How texts are split before merges.

    Args:
        splits: Expressions; each splits what the expressions before it left.
        ignores_merges: A word that is a token is that token, whatever the merges say.
        adds_bos: Texts start with BOS where the header does not say.
        is_byte_level: Tokens are spelled in the byte alphabet, and not in letters with `BLANK`.
    """

    splits: tuple[str, ...]
    ignores_merges: bool = False
    adds_bos: bool = False
    is_byte_level: bool = True


def _table() -> dict[str, PreTokenizer]:
    table: dict[str, PreTokenizer] = {}

    def add(names: str, *splits: str, **more: bool) -> None:
        table.update(dict.fromkeys(names.split(), PreTokenizer(splits, **more)))

    add(
        "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano",
        _LLAMA3,
        ignores_merges=True,
        adds_bos=True,
    )
    add("dbrx smaug-bpe chatglm-bpe glm4", _LLAMA3)
    add(
        "gpt-2 phi-2 jina-es jina-de jina-v2-es jina-v2-de jina-v1-en jina-v2-code roberta-bpe "
        "gigachat a.x-4.0 mellum modern-bert mpt olmo jais trillion granite-docling exaone4",
        _GPT2,
    )
    add(
        "smollm starcoder refact command-r codeshell exaone minerva-7b mellum2",
        *(_DIGIT, _GPT2),
    )
    add(
        "qwen2 deepseek-r1-qwen kormo f2llmv2 megrez stablelm2 hunyuan solar-open grok-2",
        _QWEN2,
    )
    add(
        "qwen35",
        rf"{_CASELESS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
        rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}",
    )
    add("ufakzeka", rf"{_WORD}|\p{{N}}|{_MARKS}|{_SPACES}")
    add("laguna", r"[^\n]+|[\n]+", _QWEN2)
    add(
        "minicpm5",
        *(r"\p{N}{1,3}", rf"{_CASELESS}|{_WORD}|\p{{N}}+|{_MARKS}|{_SPACES}"),
        ignores_merges=True,
    )
    blanks = "|".join(rf"\s{{{count}}}(?!\S)" for count in (512, 256, 128, 64, 32, 16, 8, 4))
    add(
        "jais-2",
        rf"{_CASELESS}|{_WORD}|\p{{N}}{{1,3}}|{_MARKS}|\s*[\r\n]+|{blanks}|\s{{1,2}}(?!\S)|\s{{1}}",
    )
    add(
        "seed-coder",
        rf"{_CASELESS}|{_WORD}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}",
    )
    add(
        "bailingmoe bailingmoe2 llada-moe",
        rf"'(?i:[sdmt]|ll|ve|re)|{_WORD}|\p{{N}}|{_MARKS}|\s*[\r\n]|\s+(?!\S)|\s+",
    )
    add(
        "exaone-moe",
        rf"{_CASELESS}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+",
    )
    add("tekken", _by_case("", r"\p{N}"), ignores_merges=True, adds_bos=True)
    add("gpt-4o llama4 kanana2 talkie minimax-m2", _GPT4O)
    add("granite-embed-multi-97m", _GPT4O, ignores_merges=True)
    add("tiny_aya cohere2moe", r"\d{1,3}(?=(?:\d{3})*\b)", _GPT4O)
    add(
        "kimi-k2",
        r"[\p{Han}]+|"
        + _by_case(f"{_CASELESS}?", r"\p{N}{1,3}", without=_NO_HAN).replace(
            r"[\r\n/]*", r"[\r\n]*"
        ),
    )
    add("deepseek-v3 hunyuan-dense joyai-llm hy_v4", r"\p{N}{1,3}", _CJK, _DEEPSEEK3)
    add(
        "spark2_5",
        *(r"\p{N}{1,3}", _CJK),
        rf"{_DEEPSEEK_WORD}| ?[\p{{P}}\p{{S}}]+|[\r\n]|\s+(?!\S)|\s+",
        _DIGIT,
    )
    add(
        "deepseek-coder",
        *(r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", r"[一-龥ࠀ-一가-퟿]+", _DIGIT),
    )
    add(
        "deepseek-llm",
        *(r"[\r\n]", rf"\s?[{_CASED}]+", r"\s?[!-/:-~！-／：-～‘-‟　-。]+", r"\s+$"),
        *(r"[一-龥ࠀ-一가-퟿]+", r"\p{N}+"),
    )
    add(
        "afmoe",
        r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))",
        r"[一-鿿㐀-䶿\uf900-\ufaff぀-ゟ゠-ヿ･-ﾟ⼀-⿟เ-๿຀-໿ក-៿က-႟ꩠ-ꩿꧠ-꧿가-힯ᄀ-ᇿ]+",
        _DEEPSEEK3,
    )
    add(
        "youtu",
        "[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-〿︰-﹏]+|[ㄅ-ㄯ]+|[一-龥぀-ゟ゠-ヿ]+",
        _by_case(f"{_CASELESS}?", r"\p{N}"),
        ignores_merges=True,
    )
    add("falcon", r"[\p{P}$+<=>^~|`]+", _GPT2, "[0-9][0-9][0-9]")
    add("default", r"[\p{P}$+<=>^~|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")
    add("poro-chat bloom gpt3-finnish", _BLOOM)
    add("viking", _BLOOM, _DIGIT)
    add("superbpe", r"\p{N}+", r"(?=(\d{3})+(?!\d))")
    add(
        "chameleon",
        *("<sentinel:[0-9]+>", "(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z", r"([\t\n]|    |  )"),
        *(_DIGIT, r"[\p{P}!-/:-@\[-`{-~]", _GPT2),
        adds_bos=True,
    )
    add("gemma4 granite-embed-multi-311m", r"[^\n]+|[\n]+", adds_bos=True, is_byte_level=False)
    add("sarvam-moe", r"[^\n]+|[\n]+", is_byte_level=False)
    return table


_CASED: Final = r"[\p{Lu}\p{Ll}\p{Lt}]&&[^\u10d0-\u10ff\x{1d400}-\x{1d7ff}]"
"""Letters that DeepSeek LLM keeps together."""
PRE_TOKENIZERS: Final[Mapping[str, PreTokenizer]] = _table()
"""By the name in `tokenizer.ggml.pre`."""


def gguf_tokenizer(header: Header, num_tokens: int) -> tuple[TokenizersBackend, bool]:
    """Build the tokenizer that a header describes.

    Args:
        header: The header of a GGUF file.
        num_tokens: Tokens of the network.

    Returns:
        The tokenizer, and whether texts start with BOS.

    Raises:
        ModelLoadError: If the header describes none that is known here, names tokens that it does
            not have, or has more tokens than the network.
    """
    fields, words = header.fields, _list(header, "tokens")
    kind = fields.get(f"{_KEYS}model")
    if kind not in _KINDS:
        raise _refused(f"{_KEYS}model = {kind}, and known are {', '.join(_KINDS)}")
    if not words:
        raise _refused(f"no {_KEYS}tokens")
    pre = _pre_tokenizer(header, kind)
    words = [word or f"[EMPTY_{token}]" for token, word in enumerate(words)]
    vocabulary = {word: token for token, word in enumerate(words)}
    if len(vocabulary) < len(words):
        twice = next(word for token, word in enumerate(words) if vocabulary[word] != token)
        raise _refused(f"token {twice!r} has two ids, {words.index(twice)} and {vocabulary[twice]}")
    if len(words) > num_tokens:
        raise _refused(f"{len(words)} tokens, and the network has {num_tokens}")
    named = _named(header, len(words), _OF_SENTENCEPIECE if pre is None else {})
    marks = {name: words[token] for name, token in named.items()}
    if pre is None:
        tokenizer = _sentencepiece(header, vocabulary, marks.get("unk"))
    else:
        tokenizer = _merging(header, vocabulary, pre, marks.get("unk"))
    kinds = _list(header, "token_type") or [1] * len(words)
    tokenizer.add_tokens(_added(words, kinds, marks, strips=header.architecture == "phi3"))
    adds_bos = pre is None or pre.adds_bos
    if kind != "gemma4":  # whose files say otherwise by mistake
        adds_bos = bool(fields.get(f"{_KEYS}add_bos_token", adds_bos))
    adds_bos &= "bos" in named
    around = ["$A"]
    if adds_bos:
        around.insert(0, marks["bos"])
    if fields.get(f"{_KEYS}add_eos_token") and "eos" in named:
        around.append(marks["eos"])
    if len(around) > 1:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=around,
            special_tokens=[(mark, vocabulary[mark]) for mark in {*around} - {"$A"}],
        )
    padding = fields.get(f"{_KEYS}padding_token_id")
    if padding is not None and 0 <= padding < len(words):
        marks["pad"] = words[padding]
    special = {
        f"{name}_token": marks[name] for name in ("bos", "eos", "unk", "pad") if name in marks
    }
    built = TokenizersBackend(
        tokenizer_object=tokenizer,
        clean_up_tokenization_spaces=False,
        **special,
    )
    built.chat_template = fields.get("tokenizer.chat_template")
    return built, adds_bos


def _named(header: Header, count: int, defaults: Mapping[str, int]) -> dict[str, int]:
    """Return the ids of tokens that a header names, or that hold where it does not."""
    named = {name: token for name, token in defaults.items() if token < count}
    for name, key in _NAMED.items():
        if (token := header.fields.get(f"{_KEYS}{key}")) is None:
            continue
        if not 0 <= token < count:
            raise _refused(f"{_KEYS}{key} = {token}, and there are {count} tokens")
        named[name] = int(token)
    return named


def _pre_tokenizer(header: Header, kind: str) -> PreTokenizer | None:
    """Return how texts are split, or `None` for SentencePiece, whose texts are not."""
    if kind == "llama":
        return None
    name = "gemma4" if kind == "gemma4" else header.fields.get(f"{_KEYS}pre", "default")
    if name not in PRE_TOKENIZERS:
        raise _refused(f"{_KEYS}pre = {name} is unknown: nothing says how texts are split")
    return PRE_TOKENIZERS[name]


def _merging(
    header: Header, vocabulary: Mapping[str, int], pre: PreTokenizer, unknown: str | None
) -> Tokenizer:
    merges = [_pair(merge) for merge in _list(header, "merges") or ()]
    if not merges:
        raise _refused(f"no {_KEYS}merges")
    bytewise = pre.is_byte_level
    tokenizer = Tokenizer(
        models.BPE(
            vocab=dict(vocabulary),
            merges=_possible(merges, vocabulary),
            ignore_merges=pre.ignores_merges,
            byte_fallback=not bytewise,
            unk_token=unknown,
            fuse_unk=not bytewise,
        )
    )
    splits: list[Any] = [pre_tokenizers.Split(Regex(split), "isolated") for split in pre.splits]
    if bytewise:
        splits.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
        tokenizer.decoder = decoders.ByteLevel()
    else:
        tokenizer.normalizer = normalizers.Replace(" ", BLANK)
        tokenizer.decoder = _sentence_decoder(strips=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(splits)
    return tokenizer


def _sentencepiece(header: Header, vocabulary: Mapping[str, int], unknown: str | None) -> Tokenizer:
    scores = _list(header, "scores")
    if scores is None:
        raise _refused(f"no {_KEYS}scores")
    tokenizer = Tokenizer(
        models.BPE(
            vocab=dict(vocabulary),
            merges=_merges_of(vocabulary, scores),
            byte_fallback=True,
            unk_token=unknown,
            fuse_unk=True,
        )
    )
    starts = bool(header.fields.get(f"{_KEYS}add_space_prefix", True))
    blanks = normalizers.Replace(" ", BLANK)
    tokenizer.normalizer = (
        normalizers.Sequence([normalizers.Prepend(BLANK), blanks]) if starts else blanks
    )
    tokenizer.decoder = _sentence_decoder(strips=starts)
    return tokenizer


def _sentence_decoder(*, strips: bool) -> Any:
    steps = [decoders.Replace(BLANK, " "), decoders.ByteFallback(), decoders.Fuse()]
    return decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strips else steps)


def _merges_of(vocabulary: Mapping[str, int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """Return merges by falling score of what they make, as SentencePiece joins pieces."""
    ordered = sorted(vocabulary.items(), key=lambda item: (-scores[item[1]], item[1]))
    return [
        (word[:place], word[place:])
        for word, _ in ordered
        for place in range(1, len(word))
        if word[:place] in vocabulary and word[place:] in vocabulary
    ]


def _pair(merge: str) -> tuple[str, str]:
    place = merge.find(" ", 1)
    return merge[:place], merge[place + 1 :]


def _possible(
    merges: Sequence[tuple[str, str]], vocabulary: Mapping[str, int]
) -> list[tuple[str, str]]:
    """Return the merges of tokens to a token, each once."""
    return [
        pair
        for pair in dict.fromkeys(merges)
        if pair[0] in vocabulary and pair[1] in vocabulary and pair[0] + pair[1] in vocabulary
    ]


def _added(
    words: Sequence[str], kinds: Sequence[int], marks: Mapping[str, str], *, strips: bool
) -> list[AddedToken]:
    """Return tokens that are found in a text before it is split."""
    always = _ENDS | {*marks.values()}
    return [
        AddedToken(
            word,
            normalized=False,
            special=kind != _USER_DEFINED or word in always,
            rstrip=strips and word not in _NOT_STRIPPING,
        )
        for word, kind in zip(words, kinds, strict=False)
        if kind in {_UNKNOWN, _CONTROL, _USER_DEFINED} or word in always
    ]


def _list(header: Header, name: str) -> list[Any] | None:
    field = header.reader.fields.get(f"{_KEYS}{name}")
    return None if field is None else field.contents()


def _refused(reason: str) -> ModelLoadError:
    return ModelLoadError(f"its header has {reason}")
