"""OpenVINO GenAI, for `worker.py`.

A method that begins with `int8` or `int4` has weights of so many bits, and the arithmetic and cache
that the engine chooses itself. All others are in float32.
"""

import subprocess
import sys
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

_OF_BITS = {
    "int8": ("--weight-format", "int8"),
    "int4": ("--weight-format", "int4", "--group-size", "32", "--ratio", "1.0"),
}
"""Options of the export; as in Q4_1, 32 numbers share a scale and a base, and the output layer has 8 bits."""


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
        first, _, rest = method.partition(" ")
        kind = first if first in _OF_BITS else "fp32"
        method = rest if kind == first else method
        options = float32(threads)
        if kind != "fp32":
            options = {
                name: options[name] for name in ("INFERENCE_NUM_THREADS", "PERFORMANCE_HINT")
            }
        extra: dict[str, Any] = {}
        if method == "draft":
            extra["draft_model"] = self._host.draft_model(exported(draft, work), "CPU", **options)
        elif method == "lookup":
            extra["prompt_lookup"] = True
        if extra:
            extra["scheduler_config"] = self._host.SchedulerConfig()
        folder = exported(target, work, kind)
        self._pipeline = self._host.LLMPipeline(folder, "CPU", **extra, **options)

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


def exported(folder: str, work: str, kind: str = "fp32") -> str:
    """Folder of the exported checkpoint."""
    suffix = "" if kind == "fp32" else f"-{kind}"
    out = Path(work) / f"openvino-{Path(folder).name}{suffix}"
    if not (out / "openvino_model.xml").exists():
        bits = _OF_BITS.get(kind, ("--weight-format", "fp32"))
        task = ["--task", "text-generation-with-past", *bits]
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
