"""This library, for `worker.py`: the method names the backend, the settings are parts by name."""

import warnings
from typing import Any

import torch

from monge.api import load
from monge.bench.provenance import versions


class Engine:
    """A decoder."""

    def __init__(self, *, target: str, draft: str, work: str, threads: int, method: str, settings: dict[str, Any]) -> None:
        torch.set_num_threads(threads)
        names: dict[str, Any] = {"drafter": "model"} | settings
        pair: dict[str, Any] = {"draft": draft} if "model" in names["drafter"] else {}
        self.version = versions("monge")["monge"]
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)  # a backend that is not used would be measured under its name
            self._decoder = load(target, **pair, **names, backend=method.split(maxsplit=1)[0], dtype="float32")

    def generate(self, *, prompt_ids: list[int], max_new_tokens: int, temperature: float, seed: int) -> tuple[int, ...]:
        """New tokens."""
        options = {"max_new_tokens": max_new_tokens, "temperature": temperature, "seed": seed, "ignore_eos": True}
        (result,) = self._decoder.generate([tuple(prompt_ids)], **options)
        if result.error is not None:
            raise RuntimeError(result.error)
        return result.token_ids
