"""Engines that an audit runs in this process, and the commands that start the others."""

import asyncio
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import torch

from monge.api import eos_ids_of
from monge.audit.client import Completion, one_at_a_time
from monge.core.errors import OptionError
from monge.core.parts import built_in
from monge.core.text import token_ids_of
from monge.loading.networks import load_network, load_tokenizer, prepare
from monge.loading.sources import ModelSource
from monge.requests.text import TOKEN_ID

ASSISTED: Final = "transformers-assisted"
LOOKUP: Final = "transformers-lookup"
OURS: Final = "monge"
NUM_LOOKUP_TOKENS: Final = 10
_FIRST_SEED: Final = 1 << 31  # of requests without a seed: far from the seeds of the others

HOW_TO_START: Final[Mapping[str, tuple[str, str]]] = MappingProxyType(
    {
        "vllm": (
            "vllm serve TARGET --port 8000 --speculative-config "
            '\'{"method": "draft_model", "model": "DRAFT", "num_speculative_tokens": 5}\'',
            "monge audit --url http://localhost:8000/v1 --target TARGET",
        ),
        "llama-cpp": (
            "llama-server -m TARGET.gguf -md DRAFT.gguf --port 8000 & "
            "llama-server -m TARGET.gguf --port 8001 --parallel 16",
            "monge audit --url http://localhost:8000/v1 --reference-url http://localhost:8001/v1 "
            "--eos token_id:ID",
        ),
        "openvino-genai": (
            "ovms --rest_port 8000 --task text_generation --source_model TARGET "
            "--draft_source_model DRAFT",
            "monge audit --url http://localhost:8000/v3 --target TARGET",
        ),
    }
)
"""Engines that run as a server: the command to start the server, and the command to audit it."""

STARTED: Final = (ASSISTED, LOOKUP, OURS)
"""Engines that an audit starts."""


def check_engine(name: str, parts: Collection[str]) -> None:
    """Refuse an engine that is unknown or takes no parts, or that the user must start, with the commands."""
    if name in HOW_TO_START:
        start, audit = HOW_TO_START[name]
        raise OptionError(
            f"an audit does not start {name}; start its server with `{start}`, then run `{audit}`"
        )
    if name not in STARTED:
        known = ", ".join((*STARTED, *HOW_TO_START))
        raise OptionError(f"unknown engine {name!r}; known: {known}")
    if parts and name != OURS:
        raise OptionError(
            "--drafter, --tree, --verifier and --controller are options of --engine monge"
        )


class TransformersEngine:
    """Speculative decoding of `transformers`: `generate` with a draft model or prompt lookup.

    It answers one request at a time, as `generate` speculates only for a single row. Its random
    numbers come from torch's global generator, whose state is restored after each request.

    Args:
        name: `transformers-assisted` or `transformers-lookup`.
        target: Folder or name of the target; `None` for the built-in model.
        draft: Likewise for the draft model of assisted decoding.
        **loading: Options of `load_network`.

    Raises:
        OptionError: If assisted decoding has no draft model, or lookup has a draft model.
        ModelLoadError: If a model cannot be loaded.
    """

    def __init__(
        self,
        name: str,
        target: str | Path | None = None,
        draft: str | Path | None = None,
        **loading: Any,
    ) -> None:
        if name == LOOKUP and draft is not None:
            raise OptionError(f"{LOOKUP} takes no draft model; leave --draft out")
        source = ModelSource.of(target)
        if name == ASSISTED and draft is None and not source.is_built_in:
            raise OptionError(f"{ASSISTED} needs a draft model; give one with --draft")
        source = prepare(source, "eager")
        self.url, self.model = name, str(target or "built-in")
        self._network: Any = load_network(source, **loading)
        self._tokenizer: Any = load_tokenizer(source)
        self._eos_ids = eos_ids_of(self._network)
        self._speculation: dict[str, Any] = {"prompt_lookup_num_tokens": NUM_LOOKUP_TOKENS}
        if name == ASSISTED:
            small = built_in("draft") if draft is None else draft
            self._speculation = {"assistant_model": load_network(small, **loading)}
        self._lock, self._num_requests = asyncio.Lock(), 0

    async def complete(self, prompt: str | Sequence[int], **fields: Any) -> Completion:
        """Return a completion, whose tokens are named by their ids. See `Server`."""
        return await one_at_a_time(self._lock, self._complete, prompt, fields)

    def _complete(self, prompt: str | Sequence[int], fields: Mapping[str, Any]) -> Completion:
        if isinstance(prompt, str):
            prompt = token_ids_of(self._tokenizer, prompt)
        ids = torch.tensor([list(prompt)], device=self._network.device)
        sampling: dict[str, Any] = {"do_sample": False}
        if fields.get("temperature", 1.0) > 0:
            sampling = {
                "do_sample": True,
                "temperature": fields.get("temperature", 1.0),
                "top_k": max(0, fields.get("top_k") or 0),  # left out, it would be 50
                "top_p": fields.get("top_p") or 1.0,
            }
        seed = fields.get("seed")
        self._num_requests += 1
        with torch.random.fork_rng(devices=[]):
            # The host draws from the global generator.
            torch.manual_seed(_FIRST_SEED + self._num_requests if seed is None else seed)  # noqa: TID251
            output = self._network.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=fields["max_tokens"],
                pad_token_id=min(self._eos_ids, default=0),
                **sampling,
                **self._speculation,
            )
        new = output[0, ids.shape[1] :].tolist()
        return Completion(
            text=self._tokenizer.decode(new, skip_special_tokens=True),
            finish="stop" if new and new[-1] in self._eos_ids else "length",
            tokens=tuple(f"{TOKEN_ID}{token}" for token in new),
            speculates=True,
        )
