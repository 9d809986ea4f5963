"""vLLM's wheel for the CPU, for `worker.py`."""

import os
from importlib import import_module
from typing import Any


class Engine:
    """An engine in this process. Only greedy requests are asked of it: see the list of peers."""

    def __init__(self, *, target: str, draft: str, work: str, threads: int, method: str, settings: dict[str, Any]) -> None:
        os.environ |= {
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": str(threads),
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
        }
        self._host: Any = import_module("vllm")
        self.version = self._host.__version__
        counts = dict(settings)
        is_eager = bool(counts.pop("enforce_eager", False))
        speculative = None
        if method == "draft":
            speculative = {"method": "draft_model", "model": draft, "max_model_len": 1024, **counts}
        elif method == "lookup":
            speculative = {"method": "ngram", **counts}
        self._engine = self._host.LLM(
            model=target,
            dtype="float32",
            max_model_len=1024,
            max_num_seqs=1,
            enable_prefix_caching=False,
            disable_log_stats=True,
            enforce_eager=is_eager,
            generation_config="vllm",
            speculative_config=speculative,
        )

    def generate(self, *, prompt_ids: list[int], max_new_tokens: int, temperature: float, seed: int) -> list[int]:
        """New tokens."""
        rules = self._host.SamplingParams(
            temperature=temperature, seed=seed, max_tokens=max_new_tokens, ignore_eos=True, detokenize=False
        )
        (request,) = self._engine.generate([{"prompt_token_ids": prompt_ids}], rules, use_tqdm=False)
        return list(request.outputs[0].token_ids)
