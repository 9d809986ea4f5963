"""Check names of models on the Hugging Face hub with a single request. Imports no torch."""

import difflib
from collections.abc import Collection
from functools import lru_cache
from pathlib import Path
from typing import Final

from monge.core.errors import ModelLoadError
from monge.loading.named_models import NAMED
from monge.loading.sources import BUILT_IN

_TIMEOUT_S: Final = 5.0
_MARK: Final = "config.json"
"""The file that every model on the hub has."""


def check_model_name(name: str, heads: Collection[str] = ()) -> None:
    """Refuse the name of a model that is neither here nor on the hub.

    Folders, and what the local cache of the hub holds, are found without the network. Otherwise it
    makes a request to the hub, of at most 5 s, or none if `HF_HUB_OFFLINE` is set.

    Args:
        name: What a user wrote, such as `org/model`.
        heads: Names of heads, where one may be given.

    Raises:
        ModelLoadError: If there is no such model, or the hub cannot be asked.
    """
    known = (BUILT_IN, *NAMED, *heads)
    if name in known or Path(name).expanduser().exists():
        return
    if name.startswith((".", "/", "~")) or name.lower().endswith(".gguf"):
        kind = "file" if name.lower().endswith(".gguf") else "folder"
        raise ModelLoadError(
            f"no {kind} {name!r}{nearest(name)}; give the folder of a checkpoint (config.json and "
            "weights), or a *.gguf file"
        )
    try:
        _ask_hub(name)
    except ModelLoadError as error:
        raise ModelLoadError(
            f"no model {name!r}: there is no such folder here{nearest(name, known)}, and {error}"
        ) from error


def nearest(name: str | Path, known: Collection[str] = ()) -> str:
    """Return a question with the nearest of known names and of files beside a path, or ""."""
    path = Path(name).expanduser()
    beside = [file.name for file in path.parent.iterdir()] if path.parent.is_dir() else []
    near = difflib.get_close_matches(path.name, [*known, *beside], n=1, cutoff=0.7)
    if not near:
        return ""
    written = near[0] if near[0] in known else str(name).removesuffix(path.name) + near[0]
    return f" (did you mean {written!r}?)"


@lru_cache(maxsize=64)
def _ask_hub(name: str) -> None:
    """Raise the reason why the hub cannot give a model; pass where transformers will say more."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
    from huggingface_hub.errors import (
        EntryNotFoundError,
        GatedRepoError,
        HFValidationError,
        RepositoryNotFoundError,
    )

    try:
        if isinstance(try_to_load_from_cache(name, _MARK), str):
            return
        get_hf_file_metadata(hf_hub_url(name, _MARK), timeout=_TIMEOUT_S)
    except EntryNotFoundError:
        return
    except Exception as error:  # every version of the client has its own errors of the network
        if isinstance(error, HFValidationError):
            reason = "the hub has no such names: they are NAME or OWNER/NAME"
        elif isinstance(error, GatedRepoError):
            reason = "the hub gives it only to accounts that asked for it; set HF_TOKEN"
        elif isinstance(error, RepositoryNotFoundError):
            reason = "the hub has no model of that name, or a private one that needs HF_TOKEN"
        else:
            text = " ".join(str(error).split()) or type(error).__name__
            reason = f"the hub cannot be asked: {text}"
        raise ModelLoadError(reason) from error
