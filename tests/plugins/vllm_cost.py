"""CPU time of a verdict and of a drawn draft, vLLM's and ours, on the same drafts and one thread.

`python tests/plugins/vllm_cost.py [REPEATS]` in the environment of vLLM, from the root of a checkout.
"""

import os
import sys
import time
from types import SimpleNamespace

os.environ |= {
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
}


def main(repeats):
    import torch
    from vllm.platforms import current_platform
    from vllm.v1.sample import rejection_sampler
    from vllm.v1.spec_decode.llm_base_proposer import compute_probs_and_sample_next_token

    from monge.backends.cpu.law_masses import load_law_masses
    from monge.plugins.vllm.verify import DraftedBatch, draw_draft, rejection_sample

    torch.set_num_threads(1)
    load_law_masses()
    current_platform.register_triton_kernel_overrides()
    torch.manual_seed(0)
    for batch, depth, vocab in ((64, 4, 64), (8, 4, 4096), (8, 4, 32_000), (8, 4, 128_256)):
        rules = SimpleNamespace(
            all_greedy=False,
            all_random=True,
            temperature=torch.ones(batch),
            top_k=torch.full((batch,), 40, dtype=torch.int32),
            top_p=torch.full((batch,), 0.9),
            generators={},
        )
        programs = {
            "vLLM": lambda drafts: rejection_sampler.rejection_sample(*drafts),
            "block": lambda drafts: rejection_sample("block", drafts),
            "speculative_sampling": lambda drafts: rejection_sample("speculative_sampling", drafts),
        }
        draws = {
            "draft, temperature": lambda logits: compute_probs_and_sample_next_token(logits, rules),  # noqa: B023
            "draft, request": lambda logits: draw_draft(logits, rules),  # noqa: B023
        }
        spent = dict.fromkeys((*programs, *draws), 0.0)
        accepted = dict.fromkeys(programs, 0)

        def timed(name, program, argument):
            before = time.process_time()
            result = program(argument)
            spent[name] += time.process_time() - before  # noqa: B023
            return result

        for step in range(repeats + 1):
            logits = 2 * torch.randn(batch * depth, vocab)
            laws = logits.softmax(-1)
            drafts = DraftedBatch(
                draft_token_ids=torch.multinomial(laws, 1).squeeze(1).int(),
                num_draft_tokens=[depth] * batch,
                max_spec_len=depth,
                cu_num_draft_tokens=torch.arange(1, batch + 1).int() * depth,
                draft_probs=laws,
                target_logits=logits + torch.randn(batch * depth, vocab),
                bonus_token_ids=torch.zeros(batch, 1, dtype=torch.int64),
                sampling_metadata=rules,
            )
            for name, program in programs.items():
                copied = drafts._replace(target_logits=drafts.target_logits.clone())
                output = timed(name, program, copied)
                accepted[name] += int((output >= 0).sum()) - batch
            for name, draw in draws.items():
                timed(name, draw, logits[::depth].clone())
            if step == 0:  # the first calls compile
                spent, accepted = dict.fromkeys(spent, 0.0), dict.fromkeys(accepted, 0)
        costs = [f"{name} {1e3 * value / repeats:.2f} ms" for name, value in spent.items()]
        rates = [f"{name} {count / batch / repeats:.3f}" for name, count in accepted.items()]
        line = f"batch {batch}, {depth} drafted, vocabulary {vocab}: "
        sys.stdout.write(f"{line}{', '.join(costs)}; accepted a round: {', '.join(rates)}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(int(sys.argv[1]) if sys.argv[1:] else 10)
