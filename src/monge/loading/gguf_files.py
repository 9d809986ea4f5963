"""GGUF files, converted to folders that `transformers` reads."""

import hashlib
import json
import shutil
import struct
import tempfile
import time
import warnings
from contextlib import closing
from itertools import pairwise
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Any, Final

import torch
import transformers
from safetensors import SafetensorError, safe_open
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedModel,
)

from monge.backends.cpu.code_cache import MODELS, cache_folder, only_process
from monge.core.errors import ModelLoadError, OptionError
from monge.core.extras import require
from monge.loading.gguf_header import Header
from monge.loading.gguf_tokenizer import gguf_tokenizer
from monge.requests.chat_format import TemplateFormat
from monge.runtime.notices import notify, waiting

_FORMAT: Final = 5  # raised whenever what is written from a GGUF file changes
_SAMPLES: Final = 8  # blocks of a tensor that the digest reads, spread over it
_BLOCK: Final = 1 << 12
_STRING, _ARRAY = 8, 9
_WIDTHS: Final = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
"""Bytes of the other types of values in a header."""
_PACKED_FORMAT: Final = 2  # the same for panels
_BYTES_PER_S: Final = 4e6  # of a file that is dequantised and written, on two cores
_PACKED_BYTES_PER_S: Final = 6e7  # of a file whose types are kept
_HEADER_S: Final = 8  # for the vocabulary of a file, which is read several times
_MOST_PACKED: Final = 2  # of the bytes of a file: those of Q2_K grow most
_NO_TOKENIZER: Final = "no_tokenizer.txt"
_NARROW: Final = (torch.bfloat16, torch.float16)
_END_OF_TURN: Final = ("tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")
_ADDED: Final = ("content", "lstrip", "normalized", "rstrip", "single_word", "special")


def converted(path: Path, *, file_weights: bool = False) -> Path:
    """Return the folder of a GGUF file in the form that `load_network` reads.

    A file is converted once: its weights are dequantised and kept with its tokenizer in the cache
    folder (`$MONGE_CACHE`), each tensor in the narrowest type that holds it exactly.

    Args:
        path: The file.
        file_weights: Keep matrices in the types of the file, for the backend
            `compiled(weights='file')`. A file for which that is not known to be exact is dequantised,
            with a warning that says why.

    Raises:
        ModelLoadError: If the file is missing, truncated, of an unknown architecture, or there is no
            room for its weights.
        OptionError: If a package that reads GGUF files is missing.
    """
    if not path.is_file():
        raise ModelLoadError(f"no file {str(path)!r}; give the path of a GGUF file")
    if file_weights:
        from monge.loading.packed_files import CannotPackError

        try:
            return _converted(path, packs=True)
        except CannotPackError as error:
            warnings.warn(
                f"{path.name} is dequantised, which takes more memory and time: {error}",
                stacklevel=3,
            )
    return _converted(path, packs=False)


def why_no_tokenizer(folder: str | Path) -> str | None:
    """Return why the tokenizer of a converted GGUF file could not be rebuilt, or `None`."""
    note = Path(folder) / _NO_TOKENIZER
    return note.read_text(encoding="utf-8") if note.is_file() else None


def _converted(path: Path, *, packs: bool) -> Path:
    if path.stat().st_size < 4:
        raise ModelLoadError(f"{str(path)!r} is no GGUF file: it has {path.stat().st_size} bytes")
    kind = f"file{_PACKED_FORMAT}-" if packs else ""
    folder = cache_folder() / MODELS / f"{path.stem}-{kind}{_digest(path)}"
    if (folder / "config.json").is_file():
        if (damage := _damage(folder)) is None:
            return folder
        notify(f"{folder} is removed and written again: {damage}")
        shutil.rmtree(folder)
    with path.open("rb") as file:
        magic = file.read(4)
    if magic != b"GGUF":
        raise ModelLoadError(f"{str(path)!r} is no GGUF file: it starts with {magic!r}")
    require("gguf", f"reading {path.name}")
    with only_process(MODELS, folder.name, f"the form of {path.name} that is loaded"):
        if not (folder / "config.json").is_file():
            _convert(path, folder, packs=packs)
    return folder


def _convert(path: Path, folder: Path, *, packs: bool) -> None:
    size = path.stat().st_size
    written = "weights in their own types" if packs else "dequantised weights"
    notify(f"reading {path.name} ({size / 1e6:.0f} MB) and writing its {written} to {folder}, once")
    began = time.perf_counter()
    # Another process that reads at the same time finds the whole folder or none.
    with (
        waiting(
            f"reading {path.name}",
            _HEADER_S + size / (_PACKED_BYTES_PER_S if packs else _BYTES_PER_S),
        ),
        tempfile.TemporaryDirectory(dir=folder.parent, prefix=".writing-") as temporary,
    ):
        _write(path, Path(temporary), packs=packs)
        try:
            Path(temporary).rename(folder)
        except OSError:
            if not (folder / "config.json").is_file():
                raise
    notify(f"{path.name} is ready after {time.perf_counter() - began:.0f} s")


def _damage(folder: Path) -> str | None:
    """Return why a converted file cannot be read, without reading its tensors, or `None`."""
    files = list(folder.glob("*.safetensors"))
    try:
        json.loads((folder / "config.json").read_text(encoding="utf-8"))
        for file in files:
            with safe_open(file, "pt"):  # which compares its header with its size
                pass
    except (OSError, ValueError, SafetensorError) as error:
        return f"{type(error).__name__}: {error}"
    return None if files else "it has no weights"


def _digest(path: Path) -> str:
    """Return a name for the contents: the whole header, and samples of every tensor of a file that may be huge.

    The host writes what is read later, so its version counts too. Numbers that are changed between
    the samples are not seen.
    """
    with path.open("rb") as file, closing(mmap(file.fileno(), 0, access=ACCESS_READ)) as contents:
        size = len(contents)
        known = f"{_FORMAT} {transformers.__version__} {size}"
        try:
            end, starts = _layout(contents)
        except (struct.error, LookupError, ValueError):
            end, starts = 0, [0]  # which is refused when it is read
        digest = hashlib.sha256(known.encode() + contents[:end])
        for start, stop in pairwise([*starts, size]):
            for number in range(_SAMPLES):
                place = start + number * max(0, stop - start - _BLOCK) // (_SAMPLES - 1)
                digest.update(contents[place : min(place + _BLOCK, stop)])
    return digest.hexdigest()[:16]


def _layout(contents: mmap) -> tuple[int, list[int]]:
    """Return where the header of a GGUF file ends and where its tensors begin, in order.

    transformers' reader makes an array of every token, which takes seconds.
    """
    order = ">" if contents[4:6] == b"\0\0" else "<"  # of the version
    long, short = struct.Struct(order + "Q"), struct.Struct(order + "I")
    number, read = long.unpack_from, short.unpack_from

    def after_strings(place: int, count: int) -> int:
        for _ in range(count):
            place += 8 + number(contents, place)[0]
        return place

    def after_value(kind: int, place: int) -> int:
        if kind == _STRING:
            return after_strings(place, 1)
        if kind != _ARRAY:
            return place + _WIDTHS[kind]
        (inner,), (count,) = read(contents, place), number(contents, place + 4)
        place += 12
        if inner == _STRING:
            return after_strings(place, count)
        if inner != _ARRAY:
            return place + _WIDTHS[inner] * count
        for _ in range(count):
            place = after_value(inner, place)
        return place

    (num_tensors,), (num_keys,) = number(contents, 8), number(contents, 16)
    place, alignment = 24, 32
    for _ in range(num_keys):
        behind = after_strings(place, 1)
        (kind,) = read(contents, behind)
        if contents[place + 8 : behind] == b"general.alignment":
            (alignment,) = read(contents, behind + 4)
        place = after_value(kind, behind + 4)
    offsets = list[int]()
    for _ in range(num_tensors):
        place = after_strings(place, 1)
        place += 4 + 8 * read(contents, place)[0] + 4  # dimensions and type
        offsets += number(contents, place)
        place += 8
    begin = -(-place // alignment) * alignment
    starts = sorted({begin + offset for offset in offsets})
    if not starts or starts[-1] >= len(contents):
        raise ValueError("there are no tensors where the header has them")
    return place, starts


def _write(path: Path, folder: Path, *, packs: bool) -> None:
    from monge.loading.packed_files import empty_network

    header = Header(path)
    num_weights = sum(int(tensor.n_elements) for tensor in header.reader.tensors)
    needed = _MOST_PACKED * path.stat().st_size if packs else 4 * num_weights
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise ModelLoadError(
            f"{path.name}: its weights take up to {needed / 1e9:.1f} GB, and {folder.parent} has "
            f"{free / 1e9:.1f} GB; make room, or set MONGE_CACHE to another folder"
        )
    try:
        config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
        header.describe(config)
        network: Any = empty_network(config)
        header.check(network)
        names = header.tensors(network)
        if not packs:
            network = _dequantised(header, config)
    except ModelLoadError:
        raise
    except Exception as error:
        raise ModelLoadError(
            f"transformers cannot read {path.name}: {type(error).__name__}: {error}"
        ) from error
    _set_ends(network, header.fields)
    if packs:
        _write_packed(header, network, names, folder)
    else:
        for weights in network.parameters():
            narrow = (weights.to(dtype) for dtype in _NARROW)
            exact = (tensor for tensor in narrow if torch.equal(tensor.to(weights.dtype), weights))
            weights.data = next(exact, weights).data
        network.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    # That of the computation, not of the first tensor.
    config |= {"dtype": "float32", "_name_or_path": path.name}
    (folder / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    try:
        tokenizer, adds_bos = gguf_tokenizer(header, _num_tokens(network))
        if adds_bos:
            _start_chats_with_bos(tokenizer)
        tokenizer.save_pretrained(folder)
        # Without this list the host parses the vocabulary twice more, in Python.
        place = folder / "tokenizer_config.json"
        tokens = tokenizer.added_tokens_decoder.items()
        added = {token: {name: getattr(kind, name) for name in _ADDED} for token, kind in tokens}
        settings = json.loads(place.read_text(encoding="utf-8")) | {"added_tokens_decoder": added}
        place.write_text(json.dumps(settings, indent=2), encoding="utf-8")
    except Exception as error:  # noqa: BLE001 (whatever a tokenizer raises; the weights are good all the same)
        (folder / _NO_TOKENIZER).write_text(f"{type(error).__name__}: {error}", encoding="utf-8")


def _write_packed(
    header: Header, network: PreTrainedModel, names: dict[str, str] | None, folder: Path
) -> None:
    from monge.loading.packed_files import CannotPackError, write_panels

    try:
        write_panels(header, network, names, folder)
    except (CannotPackError, MemoryError, OSError):
        raise
    except Exception as error:  # another version of the host may read files in another way
        raise CannotPackError(f"{type(error).__name__}: {error}") from error
    network.config.architectures = [type(network).__name__]
    network.config.save_pretrained(folder)
    if network.generation_config is not None:
        network.generation_config.save_pretrained(folder)


def _dequantised(header: Header, config: Any) -> PreTrainedModel:
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        header.path.parent,
        gguf_file=header.path.name,
        config=config,
        dtype=torch.float32,
        output_loading_info=True,
    )
    network, info = loaded
    header.refuse(network, info["unexpected_keys"], info["missing_keys"])
    # It holds plain weights by now, and says otherwise.
    network.hf_quantizer = None
    if hasattr(network.config, "quantization_config"):
        del network.config.quantization_config
    return network


def _num_tokens(network: PreTrainedModel) -> int:
    embedding: Any = network.get_input_embeddings()
    return int(embedding.weight.shape[0])


def _set_ends(network: PreTrainedModel, fields: dict[str, Any]) -> None:
    """Let tokens that end a turn, which GGUF files name apart, end a text."""
    config = network.generation_config
    named = [int(fields[name]) for name in _END_OF_TURN if name in fields]
    named = [token for token in named if 0 <= token < _num_tokens(network)]
    if config is None or not named:
        return
    ids = config.eos_token_id
    ends = [] if ids is None else list(ids) if isinstance(ids, list | tuple) else [int(ids)]
    config.eos_token_id = ends + [token for token in named if token not in ends]


def _start_chats_with_bos(tokenizer: Any) -> None:
    """Let the chat template write BOS where it does not, as engines that read GGUF files do."""
    template, start = tokenizer.chat_template, tokenizer.bos_token
    if not isinstance(template, str) or start is None:
        return
    try:
        text = TemplateFormat(tokenizer).written([{"role": "user", "content": "Hello"}])
    except OptionError:  # which the first conversation will say
        return
    if not text.startswith(start):
        tokenizer.chat_template = "{{ bos_token }}" + template
