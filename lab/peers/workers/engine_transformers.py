"""`transformers.generate`, for `worker.py`."""

from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, GenerationConfig, set_seed


class Engine:
    """Two networks in memory."""

    def __init__(self, *, target: str, draft: str, work: str, threads: int, method: str, settings: dict[str, Any]) -> None:
        torch.set_num_threads(threads)
        self.version = transformers.__version__
        self._target = _network(target)
        self._method, self._settings = method, settings
        self._draft = _network(draft) if method == "draft" else None

    def generate(self, *, prompt_ids: list[int], max_new_tokens: int, temperature: float, seed: int) -> list[int]:
        """New tokens."""
        options: dict[str, Any] = {"do_sample": False}
        if temperature > 0:
            options = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
            set_seed(seed)
        if self._draft is not None:
            fixed = {"num_assistant_tokens_schedule": "constant", "assistant_confidence_threshold": 0.0}
            self._draft.generation_config = GenerationConfig(pad_token_id=0, **fixed, **self._settings)
            options["assistant_model"] = self._draft
        elif self._method == "lookup":
            options |= self._settings
        ids = torch.tensor([prompt_ids])
        output = self._target.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_new_tokens, **options)
        return output[0, len(prompt_ids) :].tolist()


def _network(folder: str) -> Any:  # noqa: ANN401 (the host's)
    network: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    network.generation_config = GenerationConfig(pad_token_id=0)
    return network
