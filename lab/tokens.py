"""`python -m lab.tokens`."""

import json
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Any, Final

from tokenizers.pre_tokenizers import ByteLevel
from transformers import TokenizersBackend

from lab.command import run
from monge.cli import options
from monge.cli.console import output, reported
from monge.core.errors import MongeError, OptionError
from monge.loading.gguf_header import Header
from monge.loading.gguf_tokenizer import BLANK, PRE_TOKENIZERS, gguf_tokenizer

NUM_TEXTS = 200
_PARTS = (
    *("it's", "IT'S", "we'Ll", " don't", "'s", "Don", "camelCase", "HTTPServer", "word", " word"),
    *("1", "12", "123", "1234", "12345", " 7", "3.14", "1,000,000", "٣٤", "½", "²", "Ⅳ"),
    *(" ", "  ", "   ", "\t", "\n", "\n\n", "\r\n", " \n", "\n ", "\N{NO-BREAK SPACE}"),
    *("!", "!?", "...", " --", "$5", "a+b", "x=1", "<=>", "/path/to", "//\n", ";\n", "`c`", "^~|"),
    *(
        "é",
        "Ünï",
        "ﬁ",
        "ñandú",
        "ß",
        "Ж",
        "привет",
        "Ελλάδα",
        "世界",
        "漢字かな",
        "カナ",
        "한국어",
        "ไทย",
    ),
    *(
        "हिन्दी",
        "العربية",
        "עברית",
        "e\N{COMBINING ACUTE ACCENT}",
        "😀",
        "👩‍💻",
        "™",
        "€",
        "。",
        "、",
        "“q”",
    ),
)
_PROGRAM = """
import ctypes, json, sys
from ik_llama_cpp import _ctypes_api as C
texts = json.load(sys.stdin)
C.llama_backend_init()
settings = C.llama_model_default_params()
settings.vocab_only = True
model = C.llama_model_load_from_file(sys.argv[1].encode(), settings)
if not model:
    sys.exit(1)
ids = []
for text in texts:
    data = text.encode()
    count = abs(C.llama_tokenize(model, data, len(data), None, 0, True, True))
    room = (C.llama_token * max(count, 1))()
    count = C.llama_tokenize(model, data, len(data), room, count, True, True)
    ids.append(list(room[:max(count, 0)]))
print("RESULT" + json.dumps(ids))
"""


def texts() -> list[str]:
    """Return texts of parts that pre-tokenizers split in different ways."""
    count = len(_PARTS)
    mixed = (
        "".join(_PARTS[(31 * text + 7 * place * place) % count] for place in range(2 + text % 7))
        for text in range(NUM_TEXTS - count)
    )
    return [*_PARTS, *mixed]


@dataclass(frozen=True)
class Case:
    """What the header of a file says.

    Args:
        model: Value of `tokenizer.ggml.model`.
        pre: Value of `tokenizer.ggml.pre`.
        architecture: Value of `general.architecture`.
        leading_blank: Value of `tokenizer.ggml.add_space_prefix`.
    """

    model: str
    pre: str = "default"
    architecture: str = "llama"
    leading_blank: bool | None = None

    @property
    def fields(self) -> dict[str, Any]:
        """Values by key."""
        fields: dict[str, Any] = {
            "tokenizer.ggml.model": self.model,
            "tokenizer.ggml.pre": self.pre,
        }
        if self.leading_blank is not None:
            fields["tokenizer.ggml.add_space_prefix"] = self.leading_blank
        return fields

    @property
    def vocabulary(self) -> "Vocabulary":
        """The tokens."""
        if self.model == "llama":
            return _pieces()
        return _parts(PRE_TOKENIZERS[self.pre].is_byte_level)


@dataclass(frozen=True)
class Vocabulary:
    """Tokens of a file, with what joins them."""

    words: tuple[str, ...]
    kinds: tuple[int, ...]
    merges: tuple[str, ...] = ()
    scores: tuple[float, ...] = ()


CASES: Final[Mapping[str, Case]] = {
    **{name: Case("gemma4" if name == "gemma4" else "gpt2", name) for name in PRE_TOKENIZERS},
    "sentencepiece": Case("llama"),
    "sentencepiece/no-leading-blank": Case("llama", leading_blank=False),
    "sentencepiece/phi3": Case("llama", architecture="phi3"),
}
"""Names of pre-tokenizers, and kinds of SentencePiece."""
_DEPARTURES: Final = {
    "misses contractions in capitals, whose small letters it seeks in a table without order": (
        "chatglm-bpe dbrx deepseek-r1-qwen f2llmv2 falcon-h1 falcon3 glm4 grok-2 hunyuan "
        "jina-v5-nano kormo lfm2 llama-bpe llama-v3 llama3 megrez midm-2.0 pixtral qwen2 smaug-bpe "
        "solar-open stablelm2"
    ),
    "takes [a-z] and [A-Z] for the cases of all alphabets, and no marks into words": (
        "gpt-4o kanana2 llama4 minimax-m2 tekken"
    ),
    "does not know the classes Lu and Ll": "youtu",
    "does not know the classes Lu and Ll, and groups digits whatever follows them": "tiny_aya",
    "keeps capitals and small letters together, and takes no marks into words": "kimi-k2",
    "has no `~` among the symbols": "deepseek-v3 hunyuan-dense joyai-llm",
    "has no `~` among the symbols, and leaves digits with what stands before them": "afmoe",
    "takes only digits of ASCII for digits": "superbpe",
    "strips only blanks of ASCII behind a mark": "sentencepiece/phi3",
}
"""What llama.cpp does where it departs from the expression that a model was published with."""
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 1, 2, 3, 4, 6
_MARKS: Final = {"<s>": _CONTROL, "</s>": _CONTROL, "<unk>": _UNKNOWN, "<|endoftext|>": _CONTROL}
_BYTES: Final = {f"<0x{byte:02X}>": _BYTE for byte in range(256)}
_ONLY_IF_MERGES_ARE_IGNORED: Final = "camelCase"


def departures() -> dict[str, str]:
    """Return what llama.cpp does otherwise than the published tokenizers, by name."""
    return {name: reason for reason, names in _DEPARTURES.items() for name in names.split()}


@cache
def _parts(bytewise: bool) -> Vocabulary:
    """Return a vocabulary of all parts of the texts.

    Whatever a pre-tokenizer leaves together becomes one token, since merges to longer parts come
    first: an id differs wherever a split does.
    """
    if bytewise:
        letters = dict.fromkeys(sorted(ByteLevel.alphabet()), _NORMAL)
        level = ByteLevel(add_prefix_space=False, use_regex=False)
        pieces = [level.pre_tokenize_str(text)[0][0] for text in texts()]
    else:
        # llama.cpp looks up no merge across the ends of lines.
        pieces = [line for text in texts() for line in text.replace(" ", BLANK).split("\n")]
        letters = _BYTES | dict.fromkeys(sorted({*"".join(pieces)}), _NORMAL)
    parts = {
        piece[start:end]
        for piece in pieces
        for start in range(len(piece))
        for end in range(start + 2, len(piece) + 1)
    }
    joined = sorted(parts, key=lambda part: (-len(part), part))
    words = _MARKS | letters | dict.fromkeys(joined, _NORMAL)
    merges = tuple(
        f"{part[:place]} {part[place:]}"
        for part in joined
        for place in sorted({1, len(part) - 1})
        if part != _ONLY_IF_MERGES_ARE_IGNORED
    )
    return Vocabulary(tuple(words), tuple(words.values()), merges=merges)


@cache
def _pieces() -> Vocabulary:
    """Return a vocabulary of scored pieces, without some letters."""
    spelled = [text.replace(" ", BLANK) for text in texts()]
    missing = {letter for letter in {*"".join(spelled)} if _chance(letter) < 0.1}
    parts = {
        part
        for text in spelled
        for start in range(len(text))
        for end in range(start + 1, min(start + 5, len(text) + 1))
        if missing.isdisjoint(part := text[start:end]) and (len(part) == 1 or _chance(part) < 0.5)
    }
    marked = {"HTTPServer": _CONTROL, "/path/to": _USER_DEFINED, "   ": _USER_DEFINED}
    words = _MARKS | _BYTES | dict.fromkeys(sorted(parts), _NORMAL) | marked
    scores = tuple(-_chance(f"score of {word}") for word in words)
    return Vocabulary(tuple(words), tuple(words.values()), scores=scores)


def _chance(word: str) -> float:
    return int.from_bytes(sha256(word.encode()).digest()[:4]) / 2**32


def write(path: Path, vocabulary: Vocabulary, architecture: str, fields: Mapping[str, Any]) -> Path:
    """Write a GGUF file that has a header and no tensors."""
    from gguf import GGUFValueType, GGUFWriter

    file = GGUFWriter(path, architecture)
    for key, value in fields.items():
        file.add_key_value(key, value, GGUFValueType.get_type(value))
    file.add_name(architecture)  # by which llama.cpp knows Phi-3
    file.add_token_list(vocabulary.words)
    file.add_token_types(vocabulary.kinds)
    if vocabulary.merges:
        file.add_token_merges(vocabulary.merges)
    if vocabulary.scores:
        file.add_token_scores(vocabulary.scores)
    for named, token in (("bos", 0), ("eos", 1), ("unk", 2)):
        getattr(file, f"add_{named}_token_id")(token)
    for size in ("context_length", "embedding_length", "feed_forward_length"):
        getattr(file, f"add_{size}")(8)
    for size in ("block_count", "head_count"):
        getattr(file, f"add_{size}")(1)
    file.add_layer_norm_rms_eps(1e-5)
    file.write_header_to_file()
    file.write_kv_data_to_file()
    file.write_tensors_to_file()
    file.close()
    return path


@cache
def _header(vocabulary: Vocabulary, architecture: str) -> Header:
    """Return a header, which is read once for a vocabulary: that takes a second."""
    with tempfile.TemporaryDirectory() as folder:
        return Header(write(Path(folder) / "tokens.gguf", vocabulary, architecture, {}))


def built(name: str) -> TokenizersBackend:
    """Return our tokenizer of a case."""
    case = CASES[name]
    header = copy(_header(case.vocabulary, case.architecture))
    header.fields = header.fields | case.fields
    return gguf_tokenizer(header, len(case.vocabulary.words))[0]


def ours(name: str) -> list[list[str]]:
    """Return the tokens of the texts by our tokenizer of a case."""
    words, tokenizer = CASES[name].vocabulary.words, built(name)
    return [[words[token] for token in tokenizer(text)["input_ids"]] for text in texts()]


def theirs(name: str, python: Path) -> list[list[str]] | None:
    """Return the tokens of the texts by llama.cpp; `None` if it does not know the case."""
    case = CASES[name]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tokens.gguf"
        done = subprocess.run(
            [python, "-c", _PROGRAM, write(path, case.vocabulary, case.architecture, case.fields)],
            input=json.dumps(texts()),
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            check=False,
        )
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT")]
    if not lines:
        return None
    words = case.vocabulary.words
    return [[words[token] for token in ids] for ids in json.loads(lines[0].removeprefix("RESULT"))]


def digest(tokens: Sequence[Sequence[str]]) -> str:
    """Return a digest of the tokens of texts."""
    return sha256(json.dumps(tokens).encode()).hexdigest()[:16]


@reported
def main(
    *,
    python: Annotated[
        Path,
        options.measuring("--python", "A Python that has the package `ik-llama-cpp-python`."),
    ],
    record: Path | None = options.measuring(
        None, "File for what the test of the tokens expects.", None, "--record"
    ),
    names: list[str] | None = options.measuring(None, "Name; may be repeated.", "all", "--pre"),
) -> None:
    """Compare the tokens of 200 texts with those of llama.cpp, by name in `tokenizer.ggml.pre`.

    Names that begin with `sentencepiece` compare SentencePiece.

    **Examples**

        python -m lab.tokens --python other/bin/python --pre smollm
    """
    if unknown := set(names or ()) - CASES.keys():
        raise OptionError(f"--pre {min(unknown)}: known are {', '.join(sorted(CASES))}")
    expected, unexplained = {}, []
    for name in names or CASES:
        right = theirs(name, python)
        if right is None:
            output().print(f"{name}: not known to this llama.cpp", markup=False)
            continue
        got = ours(name)
        places = [place for place in range(NUM_TEXTS) if got[place] != right[place]]
        reason = departures().get(name)
        line = f"{name}: {NUM_TEXTS - len(places)} of {NUM_TEXTS} equal"
        if places:
            line += f"; in {len(places)} llama.cpp {reason or 'differs, and nobody knows why'}"
            unexplained += [] if reason else [name]
        output().print(line, markup=False)
        other = {texts()[place]: got[place] for place in places}
        equal = [tokens for place, tokens in enumerate(right) if place not in places]
        expected[name] = {"digest": digest(equal), "other": other}
    if record is not None:
        record.write_text(json.dumps(_grouped(expected), ensure_ascii=False, indent=1) + "\n")
    if unexplained:
        raise MongeError(f"the tokens of {', '.join(unexplained)} differ from llama.cpp's")


def _grouped(expected: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return what is expected, with the names for which it is the same."""
    groups: dict[str, dict[str, Any]] = {}
    for name, each in expected.items():
        groups.setdefault(json.dumps(each), {"names": [], **each})["names"].append(name)
    return list(groups.values())


if __name__ == "__main__":
    run(main)
