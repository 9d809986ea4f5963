"""This library, for `worker.py`: the method names the backend, the settings are parts by name.

A method that begins with a kind of weights, such as `int4`, has rounded weights in the compiled backend.
"""

import warnings
from typing import Any, Final

import torch

from monge.api import load
from monge.bench.provenance import versions
from monge.networks.base import NodeBlock
from monge.networks.network_facts import WEIGHTS

_CHUNK: Final = 32  # tokens that are scored at once


class Engine:
    """A decoder."""

    def __init__(
        self,
        *,
        target: str,
        draft: str,
        work: str,
        threads: int,
        method: str,
        settings: dict[str, Any],
    ) -> None:
        torch.set_num_threads(threads)
        names: dict[str, Any] = {"drafter": "model"} | settings
        # A head names its own drafter.
        is_head = names["drafter"] == "head"
        names = {name: own for name, own in names.items() if not (is_head and name == "drafter")}
        pair: dict[str, Any] = {"draft": draft} if is_head or "model" in names["drafter"] else {}
        kind, *way = method.split(maxsplit=1)
        if way == ["default"]:
            names, pair = dict(settings), {"draft": draft} if draft else {}
        backend = f"compiled(weights={kind!r})" if kind in WEIGHTS else kind
        self.version = versions("monge")["monge"]
        with warnings.catch_warnings():
            # A backend that is not used would be measured under its name.
            warnings.simplefilter("error", UserWarning)
            self._decoder = load(target, **pair, **names, backend=backend, dtype="float32")

    def generate(
        self, *, prompt_ids: list[int], max_new_tokens: int, temperature: float, seed: int
    ) -> tuple[int, ...]:
        """New tokens."""
        options = {
            "max_new_tokens": max_new_tokens,
            "temperature": temperature,
            "seed": seed,
            "ignore_eos": True,
        }
        (result,) = self._decoder.generate([tuple(prompt_ids)], **options)
        if result.error is not None:
            raise RuntimeError(result.error)
        return result.token_ids

    def score(self, *, token_ids: list[int]) -> float:
        """Negative log-probability of the tokens after the second, in nats."""
        target, number, nats = self._decoder.components.target, -1, 0.0
        target.open({number: token_ids[:1]})
        for first in range(1, len(token_ids) - 1, _CHUNK):
            read = token_ids[first : min(first + _CHUNK, len(token_ids) - 1)]
            logits = target.extend({number: NodeBlock.chain(read)})[number]
            target.commit({number: range(len(read))})
            following = torch.tensor(token_ids[first + 1 : first + 1 + len(read)])
            nats -= float(logits.double().log_softmax(-1).gather(1, following[:, None]).sum())
        target.close(number)
        return nats
