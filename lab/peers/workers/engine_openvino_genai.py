"""OpenVINO GenAI, for `worker.py`: float32 weights, arithmetic and cache."""

import subprocess
import sys
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np


class Engine:
    """A pipeline over folders that optimum-intel exported, once."""

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
        self._host: Any = import_module("openvino_genai")
        self._tensors: Any = import_module("openvino")
        self.version = version("openvino-genai")
        self._settings = settings
        options = float32(threads)
        extra: dict[str, Any] = {}
        if method == "draft":
            extra["draft_model"] = self._host.draft_model(exported(draft, work), "CPU", **options)
        elif method == "lookup":
            extra["prompt_lookup"] = True
        if extra:
            extra["scheduler_config"] = self._host.SchedulerConfig()
        self._pipeline = self._host.LLMPipeline(exported(target, work), "CPU", **extra, **options)

    def generate(
        self, *, prompt_ids: list[int], max_new_tokens: int, temperature: float, seed: int
    ) -> list[int]:
        """New tokens."""
        config = self._host.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.apply_chat_template = (
            max_new_tokens,
            True,
            False,
        )
        config.do_sample = temperature > 0
        if temperature > 0:
            config.temperature, config.top_k, config.top_p, config.rng_seed = (
                temperature,
                2**31,
                1.0,
                seed,
            )
        for name, value in self._settings.items():
            setattr(config, name, value)
        ids = np.array([prompt_ids], dtype=np.int64)
        inputs = self._host.TokenizedInputs(
            self._tensors.Tensor(ids), self._tensors.Tensor(np.ones_like(ids))
        )
        return list(self._pipeline.generate(inputs, config).tokens[0])


def float32(threads: int) -> dict[str, Any]:
    """Properties of a model."""
    return {
        "INFERENCE_NUM_THREADS": threads,
        "INFERENCE_PRECISION_HINT": "f32",
        "KV_CACHE_PRECISION": "f32",
        "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0",
        "PERFORMANCE_HINT": "LATENCY",
    }


def exported(folder: str, work: str) -> str:
    """Folder of the exported checkpoint."""
    out = Path(work) / f"openvino-{Path(folder).name}"
    if not (out / "openvino_model.xml").exists():
        task = ["--task", "text-generation-with-past", "--weight-format", "fp32"]
        command = [
            str(Path(sys.executable).with_name("optimum-cli")),
            "export",
            "openvino",
            "--model",
            folder,
            *task,
            str(out),
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise RuntimeError(f"optimum-cli failed: {done.stderr.strip().splitlines()[-1:]}")
    return str(out)
