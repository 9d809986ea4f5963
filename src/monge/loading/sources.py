"""What a user means by a model. Imports no torch, so that a command line can ask at once."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol, runtime_checkable

from monge.core.errors import OptionError, UnsupportedModelError
from monge.core.parts import built_in
from monge.loading.named_models import NAMED

BUILT_IN: Final = "built-in"
"""Name of the built-in target."""


@runtime_checkable
class AdaptedModel(Protocol):
    """A network inside a wrapper that adds adapters to its layers, such as a `PeftModel`."""

    def get_base_model(self) -> Any:
        """The network, with its adapters."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ModelSource:
    """The origin of a model: its name, its files, and its backend. `load` makes it once for each model.

    Attributes:
        name: What the user wrote: a name or a path; for a built-in model its folder.
        path: A GGUF file, or the folder or the name that `transformers` reads.
        network: The network, if it was given in memory; its `path` is then where it came from.
        is_gguf: Whether `path` is a GGUF file.
        head: Name of the head that drafts for the model where the user names nothing.
        is_built_in: Whether it is the built-in target.
        place: The folder or name that `transformers` reads, once `networks.prepare` has checked it,
            and converted a GGUF file to it.
        backend: What runs the network, once `networks.prepare` has chosen it.
    """

    name: str
    path: str | Path
    network: Any = None
    is_gguf: bool = False
    head: str | None = None
    is_built_in: bool = False
    place: str | Path = ""
    backend: Any = None

    @classmethod
    def of(cls, model: object) -> "ModelSource":
        """Return the source of a model.

        Args:
            model: A model of `transformers`, with or without adapters; a folder, a GGUF file, a
                name of `NAMED`, or a name that `transformers` resolves; `None` or `BUILT_IN` for
                the built-in target; or a source, which is returned as it is. A `Path` is no name.

        Raises:
            ModelLoadError: If the package of a model in `NAMED` is missing.
            OptionError: If it is something else.
            UnsupportedModelError: If an adapter is not inside its network, as learned prompts are not.
        """
        if isinstance(model, cls):
            return model
        if model is None or (isinstance(model, str) and model == BUILT_IN):
            path = built_in("target")
            return cls(name=str(path), path=path, is_built_in=True)
        if not isinstance(model, str | Path):
            network = _network(model)
            return cls(name=type(network).__name__, path=network.name_or_path, network=network)
        name = str(model)
        if isinstance(model, str) and name in NAMED:
            return cls(name=name, path=NAMED[name].path(), is_gguf=True, head=NAMED[name].head)
        path = Path(model).expanduser()
        is_gguf = path.suffix.lower() == ".gguf"
        return cls(name=name, path=path if is_gguf or path.exists() else model, is_gguf=is_gguf)


def _network(model: Any) -> Any:
    """Return a network in memory, with its adapters."""
    from transformers import PreTrainedModel

    if isinstance(model, PreTrainedModel):
        return model
    kind = type(model).__name__
    if not isinstance(model, AdaptedModel):
        compiled = "; give model._orig_mod" if hasattr(model, "_orig_mod") else ""
        raise OptionError(
            f"expected a model of transformers, a folder or a name; got {kind}{compiled}"
        )
    if getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False):
        raise UnsupportedModelError(
            f"{kind}: learned prompts are not part of the network, and the decoder would leave "
            "them out; use monge.accelerate(model), or an adapter of layers such as LoRA"
        )
    network = model.get_base_model()
    if not isinstance(network, PreTrainedModel):
        raise UnsupportedModelError(
            f"{kind} wraps a {type(network).__name__}; expected a model of transformers"
        )
    return network
