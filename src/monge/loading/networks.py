"""Models and tokenizers from names, folders or objects."""

import math
import re
import warnings
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open
from torch.distributed.tensor import DTensor
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_MULTIMODAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMultimodalLM,
    AutoTokenizer,
    PreTrainedModel,
    TokenizersBackend,
)

from monge.backends.cpu.native_library import why_no_compiler
from monge.backends.registry import BACKENDS, Backend, Eager
from monge.core.errors import (
    BackendError,
    ModelLoadError,
    OptionError,
    UnsupportedModelError,
    VocabularyMismatchError,
    unknown_name,
)
from monge.core.words import counted
from monge.loading.gguf_files import converted, why_no_tokenizer
from monge.loading.hub import check_model_name
from monge.loading.named_models import PANELS_FILE
from monge.loading.sources import ModelSource
from monge.networks.base import SequenceModel
from monge.networks.cross_tokenizer import (
    CrossTokenizerModel,
    ResizedVocabulary,
    map_vocabulary,
)
from monge.networks.hf_tree import make_models_ready
from monge.runtime.notices import notify, waiting
from monge.runtime.process import free_memory, trim_heap

DTYPES: Final = ("float32", "float16", "bfloat16", "float64")
"""Types of weights by name."""
_COMPUTED: Final = frozenset({"auto", "float32", "torch.float32"})
_PADDING: Final = re.compile(r"\[PAD\d+\]")
"""How converters of GGUF files name rows of a network that are no token."""
_OF_TOKENIZERS: Final = ("tokenizer.json", "tokenizer_config.json")
_FEW_TOKENS: Final = 1000
"""Tokenizers of fewer tokens are asked whether they have a vocabulary."""
_BYTES_PER_S: Final = 5e8  # of weights, by the slower disks of today


def prepare(
    source: ModelSource,
    backend: str | Backend | None = None,
    *,
    is_draft: bool = False,
    **loading: Any,
) -> ModelSource:
    """Choose the backend of a model, and find its files in the form that the backend runs.

    Args:
        source: The model; a prepared model is returned as it is.
        backend: The backend. `None` keeps the types of a GGUF file on a CPU, and runs anything else
            as `transformers` does.
        is_draft: Whether the model may be no GGUF file although the backend keeps the types of a
            GGUF file, since draft models take the target's backend.
        **loading: Options of `load_network`. Without a backend, a GGUF file is run by
            `transformers` too if they ask for another device, or for another type or attention
            than `compiled(weights='file')` computes.

    Raises:
        OptionError: If the backend keeps the types of a GGUF file, and the model is none.
        BackendError: If there is no compiler for such a backend.
        ModelLoadError: If the model is missing, or its file cannot be read.
    """
    if source.place and source.network is None:
        return source
    if backend is None:
        backend = _usual_backend(source, loading)
    chosen = BACKENDS.of(backend)
    place, keeps = source.path, chosen.keeps_file_types
    if source.network is not None:
        return replace(source, backend=backend)
    if keeps and not source.is_gguf and not is_draft:
        raise OptionError(
            f"weights='file' keeps the types of a GGUF file, and {source.name!r} is none; use "
            "weights='exact', 'int8' or 'int4'"
        )
    if source.is_gguf:
        if keeps and (reason := why_no_compiler()) is not None:
            raise BackendError(f"weights='file' needs a C++ compiler: {reason}")
        place = converted(Path(place), file_weights=keeps)
    path = Path(place)
    if not path.exists():
        # A `Path` is no name, wherever it points.
        check_model_name(str(path.absolute() if isinstance(place, Path) else place))
    elif path.is_file():
        raise ModelLoadError(
            f"{str(place)!r} is a file; give the folder of a checkpoint (config.json and "
            "weights), or a *.gguf file"
        )
    elif not (path / "config.json").is_file():
        raise ModelLoadError(
            f"{str(place)!r} has no config.json; is it the folder of a checkpoint?"
        )
    return replace(source, place=place, backend=backend)


def _usual_backend(source: ModelSource, loading: Mapping[str, Any]) -> str:
    is_usual = _unusual(loading) is None and loading.get("attention") in {None, "sdpa"}
    if not (source.is_gguf and is_usual):
        return "eager"
    if (reason := why_no_compiler()) is not None:
        notify(f"{source.name} runs many times slower than it could: {reason}")
        return "eager"
    return "compiled(weights='file')"


def _unusual(loading: Mapping[str, Any]) -> str | None:
    """Return the first option of `load_network` that file weights do not allow, or `None`."""
    fits = {"dtype": _COMPUTED, "device": {"cpu"}}
    given = {name: str(loading[name]) for name in fits if loading.get(name) is not None}
    return next((name for name, value in given.items() if value not in fits[name]), None)


def load_network(
    model: object,
    *,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device | None = None,
    attention: str | None = None,
    trust_remote_code: bool = False,
) -> PreTrainedModel:
    """Load a causal language model in evaluation mode.

    Args:
        model: The model, as for `ModelSource.of`; a model in memory is returned as it is.
        dtype: Type of the weights; `auto` takes that of the checkpoint.
        device: Device of the weights; `None` leaves them on the CPU.
        attention: `eager`, `sdpa` or `flex_attention`; `None` takes the network's own default.
        trust_remote_code: Run code that comes with the checkpoint.

    Raises:
        ModelLoadError: If the checkpoint is missing, incomplete or unreadable.
        UnsupportedModelError: If it is no decoder-only language model.
        OptionError: If there is no such type of weights, or the device cannot be used here.
    """
    source = prepare(ModelSource.of(model), "eager")
    if source.network is not None:
        return source.network.eval()
    place = source.place
    is_packed = (Path(place) / PANELS_FILE).is_file()
    given = {"dtype": dtype, "device": device}
    if is_packed and (wrong := _unusual(given)) is not None:
        raise OptionError(
            f"{wrong}={str(given[wrong])!r}: weights='file' computes in float32 on one CPU; "
            "leave it out, or use backend='eager'"
        )
    if isinstance(dtype, str) and dtype not in ("auto", *DTYPES):
        raise unknown_name("dtype", dtype, ("auto", *DTYPES))
    device = None if device is None else usable_device(device)
    options: dict[str, Any] = {"trust_remote_code": trust_remote_code}
    if attention is not None:
        options["attn_implementation"] = attention
    needed = 0
    try:
        if is_packed:
            from monge.loading.packed_files import read_packed

            needed = _num_bytes(Path(place), None)
            _check_memory(Path(place), needed, is_mapped=True)
            return read_packed(Path(place), attention)
        config = AutoConfig.from_pretrained(place, trust_remote_code=trust_remote_code)
        kind = _class_for(config, place)
        size = sum(file.stat().st_size for file in Path(place).glob("*.safetensors"))
        name = str(config.dtype if dtype == "auto" else dtype).removeprefix("torch.")
        needed = _num_bytes(Path(place), getattr(torch, name) if name in DTYPES else None)
        _check_memory(Path(place), needed, is_mapped=name not in DTYPES)
        with waiting(f"reading {Path(place).name}", size / _BYTES_PER_S or None):
            network, info = kind.from_pretrained(
                place, dtype=dtype, output_loading_info=True, **options
            )
    except UnsupportedModelError:
        raise
    except (OSError, ValueError, RuntimeError, KeyError, SafetensorError, MemoryError) as error:
        if isinstance(error, MemoryError) or "allocate memory" in str(error):
            raise ModelLoadError(
                f"not enough memory for {str(place)!r}: its weights take {_in_gb(needed)}, and "
                f"{_in_gb(free_memory())} are free; use a smaller model, or a narrower dtype"
            ) from error
        way_out = "; delete the folder, and load the file again" if is_packed else ""
        raise ModelLoadError(
            f"cannot load a model from {str(place)!r}: {type(error).__name__}: {error}{way_out}"
        ) from error
    missing = sorted(info["missing_keys"])
    if missing:
        raise ModelLoadError(
            f"{str(place)!r} lacks {counted(len(missing), 'weight')} of a {type(network).__name__}, "
            f"{missing[0]} among them; fetch it again, or, if it is a head, give it to the "
            "drafter: head('folder')"
        )
    if device is not None:
        torch.nn.Module.to(network, device)
    return network.eval()


def _class_for(config: Any, source: str | Path) -> Any:
    if config.is_encoder_decoder:
        raise UnsupportedModelError(
            f"{source}: {config.model_type} is an encoder-decoder; a decoder-only model is needed"
        )
    # Vision-language models are read whole if they have no class for text alone.
    has_text_class = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING
    if type(config) in MODEL_FOR_MULTIMODAL_LM_MAPPING and not has_text_class:
        return AutoModelForMultimodalLM
    return AutoModelForCausalLM


def usable_device(device: str | torch.device) -> torch.device:
    """Return a device that this build of torch knows and this machine has.

    Raises:
        OptionError: If there is none of that name.
    """
    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError) as error:
        raise OptionError(
            f"device {str(device)!r} cannot be used: {str(error).splitlines()[0]}"
        ) from error


def load_tokenizer(model: object, *, trust_remote_code: bool = False) -> Any:
    """Load the tokenizer beside a checkpoint; `None` for a network that was given in memory.

    Args:
        model: The model, as for `ModelSource.of`; or a folder that holds a tokenizer alone.
        trust_remote_code: Run code that comes with the checkpoint.

    Raises:
        ModelLoadError: If there is none or it cannot be read.
    """
    source = ModelSource.of(model)
    if source.network is not None and not source.place:
        return None
    holds_one = any((Path(source.path) / name).is_file() for name in _OF_TOKENIZERS)
    place = source.path if holds_one else prepare(source, "eager").place
    if (reason := why_no_tokenizer(place)) is not None:
        raise ModelLoadError(
            f"the tokenizer of {source.name} could not be built ({reason}); give the folder of one: "
            "tokenizer=... (--tokenizer)"
        )
    try:
        # A kind of model may have a class that splits texts in its own way, whatever the file says.
        kind: Any = TokenizersBackend if source.is_gguf else AutoTokenizer
        tokenizer = kind.from_pretrained(place, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError, ImportError) as error:
        _check_vocabulary(Path(place))
        raise ModelLoadError(
            f"cannot load a tokenizer from {str(place)!r}: {type(error).__name__}: {error}"
        ) from error
    # Without files, the host makes a tokenizer of a few special tokens.
    if len(tokenizer) < _FEW_TOKENS and len(tokenizer.get_added_vocab()) == len(tokenizer):
        _check_vocabulary(Path(place))
    trim_heap()  # parsing a large vocabulary leaves up to 300 MB free, which weights cannot use
    return tokenizer


def _check_vocabulary(folder: Path) -> None:
    names = ("tokenizer.json", "tekken.json", "vocab.*", "*.model", "*.tiktoken")
    if folder.is_dir() and not any(True for name in names for _ in folder.glob(name)):
        raise ModelLoadError(
            f"there is no tokenizer in {str(folder)!r}, which has none of {', '.join(names)}; give "
            "the folder of one: tokenizer=... (--tokenizer)"
        )


def as_sequence_model(
    network: PreTrainedModel, *, backend: str | Backend = "eager"
) -> SequenceModel:
    """Return the network as a model that reads trees where it can, and chains otherwise.

    Args:
        network: A causal language model in evaluation mode.
        backend: A member of `BACKENDS`. Parts that it cannot run here run eagerly, with a warning
            that says why.

    Raises:
        OptionError: If there is no such backend.
        BackendError: If it is not installed, or cannot run this network with these weights.
        UnsupportedModelError: If weights are offloaded, or spread over processes.
    """
    chosen = BACKENDS.of(backend)
    # Hooks bring such weights when a layer runs; compiled code, and caches beside the first layer, read them before.
    # Weights of other kinds may have no memory of their own either: only hooks bring it back.
    is_hooked = any(hasattr(module, "_hf_hook") for module in network.modules())
    is_offloaded = is_hooked and any(weight.is_meta for weight in network.parameters())
    if is_offloaded and (network.device.type == "meta" or not isinstance(chosen, Eager)):
        raise UnsupportedModelError(
            f"weights of this {type(network).__name__} are offloaded (device_map, or hooks of "
            "`accelerate`), and cannot be read here; load it without offload, or keep its "
            "embedding in memory and use backend='eager'"
        )
    if any(isinstance(weight, DTensor) for weight in network.parameters()):
        raise UnsupportedModelError(
            f"the weights of this {type(network).__name__} lie in several processes, which must "
            "agree on every token; load it in one process, without tp_plan"
        )
    return chosen.sequence_model(network)


def as_draft_model(
    network: PreTrainedModel,
    target: SequenceModel,
    *,
    tokenizer: Any = None,
    target_tokenizer: Any = None,
    backend: str | Backend = "eager",
    cross_tokenizer: bool = False,
) -> SequenceModel:
    """Return the draft model, in the target's vocabulary.

    Args:
        network: The draft network.
        target: The target.
        tokenizer: The draft model's tokenizer, if known.
        target_tokenizer: The target's, if known.
        backend: Backend of the draft network.
        cross_tokenizer: Accept a draft model with another tokenizer, and translate its tokens.

    Raises:
        VocabularyMismatchError: If tokens differ without `cross_tokenizer`, or none is shared; or
            if sizes differ and the tokenizers do not prove that only padding does.
        UnsupportedModelError: If the draft model cannot take tokens back.
    """
    model = as_sequence_model(network, backend=backend)
    if model.why_no_draft is not None:
        raise UnsupportedModelError(f"the draft model cannot draft: {model.why_no_draft}")
    tokenizers = [each for each in (tokenizer, target_tokenizer) if each is not None]
    are_known = len(tokenizers) == 2
    ours, theirs = [each.get_vocab() for each in tokenizers] if are_known else ({}, {})
    if cross_tokenizer and not are_known:
        raise VocabularyMismatchError(
            "cross_tokenizer needs both tokenizers; load target and draft model from folders or "
            "names"
        )
    differing = _differing_tokens(ours, theirs, min(model.vocab_size, target.vocab_size))
    if cross_tokenizer and differing:
        make_models_ready((model,))  # the model around it does not pass them on
        mapping = map_vocabulary(target_tokenizer, tokenizer, target.vocab_size, model.vocab_size)
        return CrossTokenizerModel(model, mapping, tokenizer, target_tokenizer)
    if differing:
        both = ours.keys() | theirs.keys()
        raise VocabularyMismatchError(
            f"draft model and target use different tokenizers: {len(differing)} of {len(both)} "
            f"tokens differ, for example {differing[0]!r}; a draft model must share the target's "
            "tokenizer, or be loaded with cross_tokenizer=True (--cross-tokenizer)"
        )
    if model.vocab_size == target.vocab_size:
        return model
    if not are_known:
        raise VocabularyMismatchError(
            f"the draft model has {model.vocab_size} tokens, the target {target.vocab_size}; if "
            "only padding differs, load both from folders with their tokenizers, so that this can "
            "be checked"
        )
    make_models_ready((model,))
    return ResizedVocabulary(model, target.vocab_size)


def _differing_tokens(
    ours: Mapping[str, int], theirs: Mapping[str, int], num_shared: int
) -> list[str]:
    """Return the tokens of which two vocabularies differ in the ids that both networks have, but for padding.

    Only one of the networks has larger ids: the draft model never proposes them.
    """

    def shared(vocabulary: Mapping[str, int]) -> set[tuple[str, int]]:
        return {
            (token, number)
            for token, number in vocabulary.items()
            if number < num_shared and not _PADDING.fullmatch(token)
        }

    return sorted({token for token, _ in shared(ours) ^ shared(theirs)})


def _in_gb(num_bytes: int | None) -> str:
    return "an unknown number of bytes" if num_bytes is None else f"{num_bytes / 1e9:.1f} GB"


def _check_memory(folder: Path, needed: int, *, is_mapped: bool) -> None:
    """Warn of weights that are larger than the free memory, before they are read."""
    free = free_memory()
    if free is not None and needed > free:
        mapped = "" if is_mapped else "the backend of a GGUF file's own types, "
        warnings.warn(
            f"the weights of {folder.name} take {needed / 1e9:.1f} GB, and {free / 1e9:.1f} GB of "
            f"memory are free: every token may wait for the disk; use {mapped}a smaller file or a "
            "smaller model",
            stacklevel=4,
        )


def _num_bytes(folder: Path, dtype: torch.dtype | None) -> int:
    """Return the bytes of a checkpoint's weights; `dtype` is `None` for the types of the files."""
    needed = 0
    for path in folder.glob("*.safetensors"):
        size = path.stat().st_size
        if dtype is not None:
            # A file that cannot even be mapped counts as it is.
            with suppress(MemoryError), safe_open(path, "pt") as file:
                shapes = (file.get_slice(name).get_shape() for name in file.keys())  # noqa: SIM118
                size = dtype.itemsize * sum(map(math.prod, shapes))
        needed += size
    return needed
