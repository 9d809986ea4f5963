"""vLLM in a process of its own.

`python vllm_host.py REQUEST`, where REQUEST is JSON; the last line of output is the answer.
"""

import json
import os
import sys

os.environ |= {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


def main(asked):
    from vllm import LLM, SamplingParams

    engine = LLM(
        model=asked["target"],
        dtype="float32",
        max_model_len=256,
        max_num_seqs=asked["max_num_seqs"],
        enable_prefix_caching=False,
        enforce_eager=True,
        generation_config="vllm",
        disable_log_stats=False,
        speculative_config=asked["speculative"],
        additional_config=asked["additional"],
    )
    rules = SamplingParams(
        temperature=0.0, max_tokens=asked["max_tokens"], ignore_eos=True, detokenize=False
    )
    done = engine.generate(asked["prompts"], rules, use_tqdm=False)
    counters = {
        metric.name: metric.value for metric in engine.get_metrics() if hasattr(metric, "value")
    }
    return {
        "token_ids": [list(one.outputs[0].token_ids) for one in done],
        "counters": {
            name: value for name, value in counters.items() if name.startswith("vllm:spec_decode")
        },
    }


if __name__ == "__main__":
    sys.stdout.write(json.dumps(main(json.loads(sys.argv[1]))) + "\n")
