"""vLLM in a process of its own.

`python vllm_host.py REQUEST ANSWER`, two files of JSON. REQUEST holds the arguments of the engine,
and jobs, each with prompts, sampling parameters and the settings of the plugin while it runs.
"""

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

os.environ |= {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
MEND = "mend"
"""Instead of settings: vLLM's own rule, with the temperatures that its CPU build leaves uninitialised."""


class Switch:
    """Changes the settings of a running engine, so that rules are compared in one process."""

    def __init__(self, engine):
        from monge.plugins.vllm import hooks

        self._manager = engine.llm_engine.engine_core.engine_core.structured_output_manager
        places = [hooks._place(path) for path in hooks.SEAMS if "Manager" not in path]
        self._originals = [(*place, getattr(*place)) for place in places]

    def to(self, settings):
        import torch

        from monge.plugins.vllm import hooks, verify
        from monge.plugins.vllm.grammar import mend
        from monge.plugins.vllm.settings import settings_of

        for owner, name, function in self._originals:
            setattr(owner, name, function)
        for name in ("validate_tokens", "grammar_bitmask"):
            vars(self._manager).pop(name, None)
        if settings == MEND:
            owner, name = hooks._place(f"{hooks._SAMPLER}:expand_batch_to_tokens")
            setattr(owner, name, verify.expand_batch_to_tokens)
            return
        chosen = settings_of(SimpleNamespace(additional_config={"monge": settings}))
        hooks.use(chosen, torch.device("cpu"))
        if chosen.verifies:
            mend(self._manager)


def sampling_params(job):
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    for given in job["rules"]:
        rules = {"ignore_eos": True, "detokenize": False, **given}
        if "regex" in rules:
            rules["structured_outputs"] = StructuredOutputsParams(regex=rules.pop("regex"))
        yield SamplingParams(**rules)


def counters(engine):
    values = {}
    for metric in engine.get_metrics():
        if metric.name.startswith("vllm:spec_decode") and hasattr(metric, "value"):
            values[metric.name.removeprefix("vllm:spec_decode_")] = metric.value
    return values


def schedule_asynchronously():
    """Have vLLM prepare a step while the last one runs: its default on GPUs, switched off on CPUs."""
    from vllm.platforms.cpu import CpuPlatform

    usual = CpuPlatform.check_and_update_config

    def check(vllm_config):
        usual(vllm_config)
        vllm_config.scheduler_config.async_scheduling = True

    CpuPlatform.check_and_update_config = staticmethod(check)


def main(asked):
    from vllm import LLM

    if asked["is_async"]:
        schedule_asynchronously()
    engine = LLM(
        dtype="float32",
        max_model_len=256,
        enable_prefix_caching=False,
        enforce_eager=True,
        generation_config="vllm",
        disable_log_stats=False,
        **asked["engine"],
    )
    is_switched = any("settings" in job for job in asked["jobs"])
    core = engine.llm_engine.engine_core
    assert not asked["is_async"] or core.engine_core.async_scheduling
    switch = Switch(engine) if is_switched else None
    answers, before = [], counters(engine)
    for job in asked["jobs"]:
        if switch is not None:
            switch.to(job["settings"])
        prompts = [
            prompt if isinstance(prompt, str) else {"prompt_token_ids": prompt}
            for prompt in job["prompts"]
        ]
        texts = engine.generate(prompts, [*sampling_params(job)], use_tqdm=False)
        outputs, after = [text.outputs[0] for text in texts], counters(engine)
        logprobs = [
            [{token: value.logprob for token, value in place.items()} for place in one.logprobs]
            for one in outputs
            if one.logprobs
        ]
        counts = {name: value - before.get(name, 0) for name, value in after.items()}
        ids = [list(one.token_ids) for one in outputs]
        answers.append({"token_ids": ids, "logprobs": logprobs, "counters": counts})
        before = after
    return answers


if __name__ == "__main__":
    request, answer = map(Path, sys.argv[1:])
    answer.write_text(json.dumps(main(json.loads(request.read_text()))))
