"""GRPO of a tiny policy by TRL, whose rollouts an accelerated model writes; also a script for several processes."""

import copy
import sys
import tempfile

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

import monge
from monge.api import built_in
from monge.backends.cpu.compiled import CompiledForward

PROMPTS = ["What is two plus two?", "Name a colour.", "Say hello", "Go"]
STEPS = 3
USUAL = {
    **{"bf16": False, "per_device_train_batch_size": 4, "num_generations": 4},
    **{"max_completion_length": 8, "max_steps": STEPS, "learning_rate": 0.1},
    **{"top_p": 0.9, "top_k": 20, "temperature": 0.9, "disable_dropout": True},
    **{"use_cpu": True, "report_to": [], "save_strategy": "no"},
}


def policy():
    """A random network of a few thousand parameters, beside the built-in target's tokenizer."""
    tokenizer = AutoTokenizer.from_pretrained(built_in("target"))
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "initializer_range": 0.25}
    ends = {"pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0}
    config = LlamaConfig(
        vocab_size=len(tokenizer), max_position_embeddings=256, **sizes, **heads, **ends
    )
    return LlamaForCausalLM(config), tokenizer


class Texts(TrainerCallback):
    """Compares greedy text with that of plain `generate` after every optimizer step."""

    def __init__(self, tokenizer):
        batch = tokenizer(PROMPTS[:2], return_tensors="pt", padding=True, padding_side="left")
        self.inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
        self.seen = []

    def on_step_end(self, args, state, control, model=None, **_):
        inner = model.module if hasattr(model, "module") else model
        modes = [module.training for module in inner.modules()]
        plain = monge.restore(copy.deepcopy(inner)).eval()
        settings = {**self.inputs, "max_new_tokens": 8, "do_sample": False}
        ours, expected = inner.generate(**settings), plain.generate(**settings)
        assert torch.equal(ours, expected), (ours, expected)
        assert [module.training for module in inner.modules()] == modes
        self.seen.append(tuple(expected.flatten().tolist()))


def train(backend, *, adapter=False, **settings):
    """Train for a few steps; returns the texts after each, and how many forwards programs did."""
    model, tokenizer = policy()
    monge.accelerate(model, backend=backend)
    texts, runs, output = Texts(tokenizer), [], CompiledForward._output

    def noting(self, inputs):
        runs.append(1)
        return output(self, inputs)

    def reward(completions, **_):
        return [float(len(set(text)) % 7) for text in completions]

    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    CompiledForward._output = noting
    try:
        with tempfile.TemporaryDirectory() as folder:
            trainer = GRPOTrainer(
                model=model,
                reward_funcs=reward,
                args=GRPOConfig(output_dir=folder, **USUAL | settings),
                train_dataset=Dataset.from_dict({"prompt": PROMPTS * 4}),
                processing_class=tokenizer,
                peft_config=config if adapter else None,
                callbacks=[texts],
            )
            trainer.train()
    finally:
        CompiledForward._output = output
    return texts.seen, len(runs)


if __name__ == "__main__":
    seen, num_runs = train(sys.argv[1] if sys.argv[1:] else None)
    sys.stdout.write(f"{len(set(seen))} texts, {num_runs} forwards of programs\n")
