"""Read and write logs: one `safetensors` file, with a JSON header and a digest in its metadata.

`probs/i` holds the laws of text i, `[tokens, vocab]`, float64; of a compact log `probs/i` and
`ids/i` hold the most probable tokens, `[tokens, top]`, and `own/i` what the committed tokens have,
`[tokens]`. `prompt/i` and `text/i` are token ids.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from monge.core.errors import MongeError, OptionError
from monge.core.prompt import PromptProfile
from monge.core.sampling_rules import SamplingRules
from monge.replay.log import LawLog, LoggedText, Masses, ModelIdentity

VERSION: Final = 1
_PROFILE: Final = ("text", "surprisal", "entropy")
_AGAIN: Final = "make the log again with `monge replay record`"


class LogFileError(MongeError, ValueError):
    """A file that is not a log, or is truncated, corrupted or of another version."""


def write_log(log: LawLog, path: Path) -> Path:
    """Write a log; a file of that name is replaced only when the new one is complete.

    Raises:
        OptionError: If it cannot be written.
    """
    tensors: dict[str, Tensor] = {}
    for number, text in enumerate(log.texts):
        masses = text.masses
        fields = {
            "prompt": torch.tensor(text.prompt_ids),
            "text": torch.tensor(text.token_ids),
            "probs": masses.probs,
            "ids": masses.token_ids,
            "own": masses.committed,
        }
        tensors |= {
            f"{key}/{number}": tensor.contiguous()
            for key, tensor in fields.items()
            if tensor is not None
        }
    header = json.dumps(
        {
            "version": VERSION,
            "model": asdict(log.model),
            "rules": asdict(log.rules),
            "top": log.top,
            "texts": [
                {
                    "tag": text.tag,
                    "max_new_tokens": text.max_new_tokens,
                    "profile": text.profile
                    and {name: getattr(text.profile, name) for name in _PROFILE},
                }
                for text in log.texts
            ],
            "costs": log.costs,
            "about": log.about,
        }
    )
    unfinished = path.with_name(f"{path.name}.part{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished.touch()
        usual = unfinished.stat().st_mode
        save_file(
            tensors, unfinished, metadata={"monge_log": header, "digest": _digest(header, tensors)}
        )
        unfinished.chmod(usual)  # safetensors makes a file that nobody else may read
        unfinished.replace(path)
    except (OSError, SafetensorError) as error:
        with suppress(OSError):
            unfinished.unlink()
        raise OptionError(f"cannot write the log to {str(path)!r}: {error}") from error
    return path


def read_log(path: Path) -> LawLog:
    """Read a log and check it.

    Raises:
        LogFileError: If the file is no log, of another version, truncated or corrupted.
    """
    header, tensors = _raw(path)
    try:
        texts: list[LoggedText] = []
        for number, entry in enumerate(header["texts"]):
            prompt_ids = tuple(tensors[f"prompt/{number}"].tolist())
            profile = entry.get("profile")
            texts.append(
                LoggedText(
                    tag=entry["tag"],
                    prompt_ids=prompt_ids,
                    token_ids=tuple(tensors[f"text/{number}"].tolist()),
                    max_new_tokens=entry["max_new_tokens"],
                    masses=Masses(
                        probs=tensors[f"probs/{number}"],
                        token_ids=tensors.get(f"ids/{number}"),
                        committed=tensors.get(f"own/{number}"),
                    ),
                    vocab_size=header["model"]["vocab_size"],
                    profile=profile and PromptProfile(token_ids=prompt_ids, **profile),
                )
            )
        return LawLog(
            model=ModelIdentity(**header["model"]),
            rules=SamplingRules(**header["rules"]),
            texts=tuple(texts),
            top=header["top"],
            costs=header["costs"],
            about=header["about"],
        )
    except (KeyError, TypeError, MongeError) as error:
        raise LogFileError(f"{path}: header: {type(error).__name__}: {error}; {_AGAIN}") from error


def _raw(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    if path.is_dir():
        raise LogFileError(
            f"{path}: a folder, not a log; name the file in it, such as {path / 'run.mlog'}"
        )
    if not path.is_file():
        raise LogFileError(
            f"{path}: no such file; make a log with `monge replay record --out {path}`"
        )
    try:
        with safe_open(path, framework="pt") as file:
            metadata: Mapping[str, str] = file.metadata() or {}
            if "monge_log" not in metadata:
                raise LogFileError(
                    f"{path}: field 'monge_log' is missing: not a log of this library; {_AGAIN}"
                )
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (a file, not a mapping)
    except (SafetensorError, OSError) as error:
        size = path.stat().st_size
        raise LogFileError(
            f"{path}: truncated or not a log: its {size} bytes are not what the file's header "
            f"announces ({error}); {_AGAIN}"
        ) from error
    digest, expected = _digest(metadata["monge_log"], tensors), metadata.get("digest", "nothing")
    if digest != expected:
        raise LogFileError(
            f"{path}: corrupted: field 'digest' expects {expected}, the contents give {digest}; "
            f"copy the file again, or {_AGAIN}"
        )
    header = json.loads(metadata["monge_log"])
    if header.get("version") != VERSION:
        raise LogFileError(
            f"{path}: field 'version': got {header.get('version')}, this release "
            f"reads {VERSION}; {_AGAIN}"
        )
    return header, tensors


def _digest(header: str, tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.blake2b(header.encode(), digest_size=16)
    for name in sorted(tensors):
        digest.update(f"{name} {tensors[name].dtype} {tuple(tensors[name].shape)}".encode())
        digest.update(tensors[name].contiguous().numpy().tobytes())
    return digest.hexdigest()
