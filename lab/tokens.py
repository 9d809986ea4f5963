"""`python -m lab.tokens`."""

import json
import subprocess
import tempfile
from collections.abc import Collection, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Annotated

from lab.command import run
from monge.cli import options
from monge.cli.console import output, reported
from monge.core.errors import OptionError
from monge.loading.gguf_header import Header
from monge.loading.gguf_tokenizer import PRE_TOKENIZERS, gguf_tokenizer

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


def write(path: Path, pre: str) -> Path:
    """Write a GGUF file whose vocabulary joins all that a pre-tokenizer leaves together.

    Bytes join from left to right, and so do the words, as far as the texts reach: an id differs
    wherever a split does.
    """
    from gguf import GGUFWriter
    from tokenizers.pre_tokenizers import ByteLevel

    bytewise = PRE_TOKENIZERS[pre].is_byte_level
    marks = ["<s>", "</s>", "<unk>"]
    if bytewise:
        letters = sorted(ByteLevel.alphabet())
        level = ByteLevel(add_prefix_space=False, use_regex=False)
        pieces = [level.pre_tokenize_str(text)[0][0] for text in texts()]
    else:
        letters = [f"<0x{byte:02X}>" for byte in range(256)]
        pieces = [text.replace(" ", "▁") for text in texts()]
        letters += sorted({letter for piece in pieces for letter in piece})
    pairs = {piece[place : place + 2]: None for piece in pieces for place in range(len(piece) - 1)}
    pairs = [pair for pair in sorted(pairs) if bytewise or "\n" not in pair]
    file = GGUFWriter(path, "llama")
    file.add_tokenizer_model("gpt2" if bytewise else "gemma4")
    file.add_tokenizer_pre(pre)
    file.add_token_list(marks + letters + pairs)
    file.add_token_types([3] * len(marks) + [1] * (len(letters) + len(pairs)))
    file.add_token_merges([f"{pair[0]} {pair[1]}" for pair in pairs])
    file.add_bos_token_id(0)
    file.add_eos_token_id(1)
    for name in ("context_length", "embedding_length", "feed_forward_length"):
        getattr(file, f"add_{name}")(8)
    for name in ("block_count", "head_count"):
        getattr(file, f"add_{name}")(1)
    file.add_layer_norm_rms_eps(1e-5)
    file.write_header_to_file()
    file.write_kv_data_to_file()
    file.write_tensors_to_file()
    file.close()
    return path


def ours(path: Path) -> list[list[int]]:
    """Return the ids of the texts by our tokenizer of a GGUF file."""
    header = Header(path)
    tokenizer, _ = gguf_tokenizer(header, len(header.reader.fields["tokenizer.ggml.tokens"].data))
    return [tokenizer(text)["input_ids"] for text in texts()]


def digest(ids: Sequence[Sequence[int]], without: Collection[int]) -> str:
    """Return a digest of the ids of the texts, without those at some places."""
    kept = [list(each) for place, each in enumerate(ids) if place not in without]
    return sha256(json.dumps(kept).encode()).hexdigest()[:16]


def theirs(path: Path, python: Path) -> list[list[int]] | None:
    """Return the ids of the texts by llama.cpp; `None` if it does not read the file."""
    done = subprocess.run(
        [python, "-c", _PROGRAM, path],
        input=json.dumps(texts()),
        capture_output=True,
        encoding="utf-8",
        errors="replace",
        check=False,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT")]
    return json.loads(lines[0].removeprefix("RESULT")) if lines else None


@reported
def main(
    *,
    python: Annotated[
        Path,
        options.measuring("--python", "A Python that has the package `ik-llama-cpp-python`."),
    ],
    record: Path | None = options.measuring(
        None, "File for a digest of the ids of llama.cpp.", None, "--record"
    ),
    names: list[str] | None = options.measuring(None, "Name; may be repeated.", "all", "--pre"),
) -> None:
    """Compare the tokens of 200 texts with those of llama.cpp, by name in `tokenizer.ggml.pre`.

    **Examples**

        python -m lab.tokens --python other/bin/python --pre smollm
    """
    if unknown := set(names or ()) - PRE_TOKENIZERS.keys():
        raise OptionError(f"--pre {min(unknown)}: known are {', '.join(sorted(PRE_TOKENIZERS))}")
    recorded = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in names or sorted(PRE_TOKENIZERS):
            path = write(Path(folder) / "tokens.gguf", name)
            right = theirs(path, python)
            if right is None:
                output().print(f"{name}: not known to this llama.cpp")
                continue
            pairs = zip(ours(path), right, strict=True)
            places = [place for place, (got, want) in enumerate(pairs) if got != want]
            other = [texts()[place] for place in places]
            recorded[name] = {"other": places, "digest": digest(right, places)}
            output().print(
                f"{name}: {len(right) - len(other)} of {len(right)} equal"
                + (f"; others: {other[:3]!r}" if other else ""),
                markup=False,
            )
    if record is not None:
        record.write_text(json.dumps(recorded, indent=1), encoding="utf-8")


if __name__ == "__main__":
    run(main)
