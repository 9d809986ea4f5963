"""Models and tokenizers from names, folders or objects."""

import math
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Protocol, runtime_checkable

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
)
from transformers.distributed.configuration_utils import DistributedConfig

from monge.backends.cpu.native_library import compiler_obstacle
from monge.backends.registry import BACKENDS, Backend
from monge.core.errors import (
    BackendError,
    ModelLoadError,
    OptionError,
    UnsupportedModelError,
    VocabularyMismatchError,
    unknown_name,
)
from monge.core.model import SequenceModel
from monge.core.words import counted
from monge.engine.models.cross_tokenizer import (
    CrossTokenizerModel,
    ResizedVocabulary,
    map_vocabulary,
)
from monge.engine.models.hf_tree import make_model_programs
from monge.engine.notices import notify, waiting
from monge.engine.process import free_memory
from monge.loading.hub import check_model_name
from monge.loading.named_models import NAMED, PANELS_FILE
from monge.loading.sources import is_gguf, no_tokenizer_reason, resolve

DTYPES: Final = ("float32", "float16", "bfloat16", "float64")
"""Types of weights by name."""
_COMPUTED: Final = frozenset({"auto", "float32", "torch.float32"})
_BYTES_PER_S: Final = 5e8  # of weights, by the slower disks of today


@runtime_checkable
class AdaptedModel(Protocol):
    """A network inside a wrapper that adds adapters to its layers, such as a `PeftModel`."""

    def get_base_model(self) -> Any:
        """The network, with its adapters."""
        ...


def unwrapped(source: Any) -> Any:
    """Return the network of an `AdaptedModel`, with its adapters; anything else unchanged.

    Raises:
        UnsupportedModelError: If the adapter is not inside the network, as learned prompts are not.
    """
    if isinstance(source, PreTrainedModel | str | Path) or not isinstance(source, AdaptedModel):
        return source
    if getattr(getattr(source, "active_peft_config", None), "is_prompt_learning", False):
        raise UnsupportedModelError(
            f"{type(source).__name__}: learned prompts are not part of the network, and the "
            "decoder would leave them out; use monge.accelerate(model), or an adapter of layers "
            "such as LoRA"
        )
    network = source.get_base_model()
    if not isinstance(network, PreTrainedModel):
        raise UnsupportedModelError(
            f"{type(source).__name__} wraps a {type(network).__name__}; expected a model of "
            "transformers"
        )
    return network


def backend_for(source: object, backend: str | Backend | None, **loading: Any) -> str | Backend:
    """Return the backend that runs a model.

    Args:
        source: As for `load_network`.
        backend: The backend; `None` keeps the types of a GGUF file on a CPU, and runs anything else
            as `transformers` does.
        **loading: Options of `load_network`. A file is run by `transformers` too if they ask for
            another device, or for another type or attention than this backend computes.
    """
    if backend is not None:
        return backend
    is_usual = _unusual(loading) is None and loading.get("attention") in {None, "sdpa"}
    if not (is_gguf(source) and is_usual):
        return "eager"
    if (reason := compiler_obstacle()) is not None:
        notify(f"{source} runs many times slower than it could: {reason}")
        return "eager"
    return "compiled(weights='file')"


def _unusual(loading: Mapping[str, Any]) -> str | None:
    """Return the first option of `load_network` that file weights do not allow, or `None`."""
    fits = {"dtype": _COMPUTED, "device": {"cpu"}, "tensor_parallel": set[str]()}
    given = {name: str(loading[name]) for name in fits if loading.get(name) is not None}
    return next((name for name, value in given.items() if value not in fits[name]), None)


def resolve_for(
    source: str | Path, backend: str | Backend, *, is_draft: bool = False
) -> str | Path:
    """Return a source that `load_network` loads in the form that a backend runs.

    Args:
        source: As for `resolve`.
        backend: The backend.
        is_draft: Whether the source may be another than a GGUF file where the backend keeps the
            types of one, since draft models take the target's backend.

    Raises:
        OptionError: If the backend keeps the types of a GGUF file, and the source is none.
        BackendError: If there is no compiler.
        ModelLoadError: As `resolve`.
    """
    chosen = BACKENDS.parse(backend) if isinstance(backend, str) else backend
    if not chosen.keeps_file_types:
        return resolve(source)
    if not is_draft and not is_gguf(source):
        raise OptionError(
            f"weights='file' keeps the types of a GGUF file, and {str(source)!r} is none; use "
            "weights='exact', 'int8' or 'int4'"
        )
    if is_gguf(source) and (reason := compiler_obstacle()) is not None:
        raise BackendError(f"weights='file' needs a C++ compiler: {reason}")
    return resolve(source, file_weights=True)


def load_network(
    source: str | Path | PreTrainedModel,
    *,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device | None = None,
    attention: str | None = None,
    trust_remote_code: bool = False,
    tensor_parallel: int | None = None,
) -> PreTrainedModel:
    """Load a causal language model in evaluation mode.

    Args:
        source: A loaded model (returned as it is), a folder, a GGUF file, `smollm2`, or a name that
            `transformers` resolves.
        dtype: Type of the weights; `auto` takes that of the checkpoint.
        device: Device of the weights; `None` leaves them on the CPU.
        attention: `eager`, `sdpa` or `flex_attention`; `None` takes the network's own default.
        trust_remote_code: Run code that comes with the checkpoint.
        tensor_parallel: Number of processes that share the weights; all of them call this at the
            same time.

    Raises:
        ModelLoadError: If the checkpoint is missing, incomplete or unreadable, or cannot be spread.
        UnsupportedModelError: If it is no decoder-only language model.
        OptionError: If there is no such type of weights, or the device cannot be used here.
    """
    if isinstance(source, PreTrainedModel):
        return source.eval()
    source = resolve(source)
    _check_folder(source)
    if (Path(source) / PANELS_FILE).is_file():
        return _load_packed(Path(source), str(dtype), device, attention, tensor_parallel)
    if isinstance(dtype, str) and dtype not in ("auto", *DTYPES):
        raise unknown_name("dtype", dtype, ("auto", *DTYPES))
    device = None if device is None else usable_device(device)
    options: dict[str, Any] = {"trust_remote_code": trust_remote_code}
    if attention is not None:
        options["attn_implementation"] = attention
    if tensor_parallel is not None:
        options["distributed_config"] = DistributedConfig(tp_size=tensor_parallel)
    try:
        config = AutoConfig.from_pretrained(source, trust_remote_code=trust_remote_code)
        kind = _class_for(config, source)
        size = sum(file.stat().st_size for file in Path(source).glob("*.safetensors"))
        name = str(config.dtype if dtype == "auto" else dtype).removeprefix("torch.")
        _check_memory(Path(source), getattr(torch, name) if name in DTYPES else None)
        with waiting(f"reading {Path(source).name}", size / _BYTES_PER_S or None):
            model, info = kind.from_pretrained(
                source, dtype=dtype, output_loading_info=True, **options
            )
    except UnsupportedModelError:
        raise
    except (OSError, ValueError, RuntimeError, KeyError, SafetensorError) as error:
        raise ModelLoadError(
            f"cannot load a model from {str(source)!r}: {type(error).__name__}: {error}"
        ) from error
    missing = sorted(info["missing_keys"])
    if missing:
        raise ModelLoadError(
            f"{str(source)!r} lacks {counted(len(missing), 'weight')} of a {type(model).__name__}, "
            f"{missing[0]} among them; fetch it again, or, if it is a head, give it to the "
            "drafter: head('folder')"
        )
    if device is not None:
        torch.nn.Module.to(model, device)
    return model.eval()


def _load_packed(
    folder: Path, dtype: str, device: object, attention: str | None, tensor_parallel: int | None
) -> PreTrainedModel:
    from monge.loading.packed_files import read_packed

    given = {"dtype": dtype, "device": device, "tensor_parallel": tensor_parallel}
    if (wrong := _unusual(given)) is not None:
        raise OptionError(
            f"{wrong}={str(given[wrong])!r}: weights='file' computes in float32 on one CPU; "
            "leave it out, or use backend='eager'"
        )
    _check_memory(folder, None)
    try:
        return read_packed(folder, attention)
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise ModelLoadError(
            f"cannot load a model from {str(folder)!r}: {type(error).__name__}: {error}; delete the "
            "folder, and load the file again"
        ) from error


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


def load_tokenizer(source: str | Path, *, trust_remote_code: bool = False) -> Any:
    """Load the tokenizer beside a checkpoint.

    Raises:
        ModelLoadError: If there is none or it cannot be read.
    """
    source = resolve(source)
    _check_folder(source)
    if (reason := no_tokenizer_reason(source)) is not None:
        raise ModelLoadError(
            f"the tokenizer in {source} could not be rebuilt ({reason}); give one: tokenizer=..."
        )
    try:
        return AutoTokenizer.from_pretrained(source, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError) as error:
        raise ModelLoadError(
            f"cannot load a tokenizer from {str(source)!r}: {type(error).__name__}: {error}"
        ) from error


def is_sharded(network: PreTrainedModel) -> bool:
    """Return whether weights are spread over processes, so that a forward takes all of them."""
    return any(isinstance(weight, DTensor) for weight in network.parameters())


def as_sequence_model(
    network: PreTrainedModel, *, backend: str | Backend = "eager"
) -> SequenceModel:
    """Return the network as a model that reads trees where it can, and chains otherwise.

    Args:
        network: A causal language model in evaluation mode.
        backend: One of `BACKENDS`. Parts that it cannot run here run eagerly, with a warning that
            says why.

    Raises:
        OptionError: If there is no such backend.
        BackendError: If it is not installed, or cannot run this network with these weights.
        UnsupportedModelError: If the network is sharded, and the backend does not support that.
    """
    chosen = BACKENDS.parse(backend) if isinstance(backend, str) else backend
    if is_sharded(network) and not chosen.reads_shards:
        raise UnsupportedModelError(
            f"the weights of this {type(network).__name__} lie in several processes, which must "
            "agree on every token; load it with monge.distributed.tensor_parallel (--tensor-parallel)"
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
    if model.no_draft_reason is not None:
        raise UnsupportedModelError(f"the draft model cannot draft: {model.no_draft_reason}")
    found = [one.get_vocab() for one in (tokenizer, target_tokenizer) if one is not None]
    known = len(found) == 2
    ours, theirs = found if known else ({}, {})
    if cross_tokenizer and not known:
        raise VocabularyMismatchError(
            "cross_tokenizer needs both tokenizers; load target and draft model from folders or "
            "names"
        )
    if cross_tokenizer and ours != theirs:
        make_model_programs((model,))  # the model around it does not pass them on
        mapping = map_vocabulary(target_tokenizer, tokenizer, target.vocab_size, model.vocab_size)
        return CrossTokenizerModel(model, mapping, tokenizer, target_tokenizer)
    if ours != theirs:
        both = ours.keys() | theirs.keys()
        differing = sorted(token for token in both if ours.get(token) != theirs.get(token))
        raise VocabularyMismatchError(
            f"draft model and target use different tokenizers: {len(differing)} of {len(both)} "
            f"tokens differ, for example {differing[0]!r}; a draft model must share the target's "
            "tokenizer, or be loaded with cross_tokenizer=True (--cross-tokenizer)"
        )
    if model.vocab_size == target.vocab_size:
        return model
    if not known:
        raise VocabularyMismatchError(
            f"the draft model has {model.vocab_size} tokens, the target {target.vocab_size}; if "
            "only padding differs, load both from folders with their tokenizers, so that this can "
            "be checked"
        )
    make_model_programs((model,))
    return ResizedVocabulary(model, target.vocab_size)


def _check_memory(folder: Path, dtype: torch.dtype | None) -> None:
    """Warn of weights that are larger than the free memory, before they are read.

    Args:
        folder: A checkpoint.
        dtype: Their type in memory; `None` for those of the files.
    """
    needed, free = 0, free_memory()
    for path in folder.glob("*.safetensors"):
        if dtype is None:
            needed += path.stat().st_size
            continue
        with safe_open(path, "pt") as file:
            shapes = (file.get_slice(name).get_shape() for name in file.keys())  # noqa: SIM118
            needed += dtype.itemsize * sum(map(math.prod, shapes))
    if free is not None and needed > free:
        mapped = "the backend of a GGUF file's own types, " if dtype is not None else ""
        warnings.warn(
            f"the weights of {folder.name} take {needed / 1e9:.1f} GB, and {free / 1e9:.1f} GB of "
            f"memory are free: every token may wait for the disk; use {mapped}a smaller file or a "
            "smaller model",
            stacklevel=4,
        )


def _check_folder(source: str | Path) -> None:
    path = Path(source).expanduser()
    if not path.exists():
        # A `Path` is no name, wherever it points.
        check_model_name(str(path.absolute() if isinstance(source, Path) else source), NAMED)
    elif path.is_file():
        raise ModelLoadError(
            f"{str(source)!r} is a file; give the folder of a checkpoint (config.json and "
            "weights), or a *.gguf file"
        )
    elif not (path / "config.json").is_file():
        raise ModelLoadError(
            f"{str(source)!r} has no config.json; is it the folder of a checkpoint?"
        )
