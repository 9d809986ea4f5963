"""Write prompts that a head of SmolLM2 can be trained on.

The target answers them itself: `monge train eagle3 --target smollm2 --data prompts.jsonl --out my-head`.
All sources may be redistributed; test sets (MT-Bench, HumanEval, GSM8K test, ...) are not among them.

    python -m lab.pair.head_prompts DATA_FOLDER prompts.jsonl
"""

import gzip
import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

TASKS = (
    "Summarize the following text:",
    "Rewrite the following text in simple words:",
    "List the main points of this text:",
    "What is the following text about?",
    "Write a short continuation of this text:",
    "Explain the following passage to a student:",
    "Correct the mistakes in this text:",
    "Repeat the following text, but replace every name in it:",
    "Turn this text into questions and answers:",
)


def instructions(folder: Path) -> Iterator[str]:
    """Instructions with their inputs."""
    for row in json.loads((folder / "instruction_data_1100.json").read_text(encoding="utf-8")):
        yield row["instruction"] + (f"\n{row['input']}" if row["input"] else "")
    for row in _rows(folder / "self_instruct_user_oriented.jsonl"):
        given = row["instances"][0]["input"]
        yield row["instruction"] + (f"\n{given}" if given else "")


def passages(folder: Path, rng: random.Random, *, each: int) -> Iterator[str]:
    """Tasks about passages of the corpora."""
    for path in sorted(folder.glob("*.jsonl.gz")):
        with gzip.open(path, "rt", encoding="utf-8") as file:
            texts = [json.loads(line)["text"] for line in file]
        for _ in range(each):
            text = rng.choice(texts)
            if len(text) < 900:
                continue
            start = rng.randrange(len(text) - 800)
            task = rng.choice(TASKS)
            yield f"{task}\n\n{text[start : start + rng.randrange(300, 800)].strip()}"


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    with path.open(encoding="utf-8") as file:
        yield from map(json.loads, file)


def main() -> None:
    data, out = Path(sys.argv[1]), Path(sys.argv[2])
    rng = random.Random(0)
    questions = [str(row["question"]) for row in _rows(data / "prompts" / "gsm8k_train.jsonl")]
    prompts = [*instructions(data / "prompts"), *rng.sample(questions, 2500)]
    prompts += passages(data / "corpus", rng, each=500)
    rng.shuffle(prompts)
    with out.open("w", encoding="utf-8") as file:
        for prompt in dict.fromkeys(prompts):
            file.write(json.dumps({"prompt": prompt}) + "\n")
    print(f"{len(set(prompts))} prompts in {out}")


if __name__ == "__main__":
    main()
