"""The mixed stream that controllers are measured on.

Prompts of six kinds, one a line with its task, for `--prompts`.

    python -m lab.pair.mixed_prompts FOLDER --per-task 5 --out mixed.jsonl
    monge bench decode --prompts mixed.jsonl

FOLDER holds the published files, by these names: `gsm8k_test.jsonl` (openai/grade-school-math),
`humaneval.jsonl.gz` (openai/human-eval), `mt_bench_question.jsonl` (lm-sys/FastChat) and
`spec_bench_question.jsonl` (hemingkx/Spec-Bench). Not all of their terms let this package ship
them. Prose is shipped with it.
"""

import argparse
import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from monge.prompts import shipped

FILES = {
    "gsm8k": "gsm8k_test.jsonl",
    "humaneval": "humaneval.jsonl.gz",
    "mt_bench": "mt_bench_question.jsonl",
    "summarization": "spec_bench_question.jsonl",
    "translation": "spec_bench_question.jsonl",
}
OF_MANY = frozenset({"summarization", "translation"})  # categories of a file that has others too


def records(path: Path) -> Iterator[dict[str, Any]]:
    whole = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    return map(json.loads, whole.decode("utf-8").rstrip("\n").split("\n"))


def text_of(task: str, record: dict[str, Any]) -> str:
    if task == "gsm8k":
        return f"Question: {record['question']}\nAnswer:"
    return record["prompt"] if task == "humaneval" else record["turns"][0]


def prompts_of(task: str, folder: Path, per_task: int, longest: int) -> list[str]:
    """The first that are not too long for a model of a short context."""
    if task == "prose":
        texts = [prompt.text for prompt in shipped(("prose",))]
    else:
        of_task = (
            one
            for one in records(folder / FILES[task])
            if task not in OF_MANY or one["category"] == task
        )
        texts = [text_of(task, one) for one in of_task]
    found = [text for text in texts if len(text) <= longest][:per_task]
    if len(found) < per_task:
        raise SystemExit(
            f"mixed_prompts: there are {len(found)} prompts of {task} of at most {longest} "
            f"characters; expected {per_task}: "
            "raise --longest or lower --per-task"
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--per-task", type=int, default=5, help="prompts of each kind")
    parser.add_argument(
        "--longest", type=int, default=1600, help="characters of the longest prompt"
    )
    parser.add_argument("--out", type=Path, default=Path("mixed.jsonl"))
    asked = parser.parse_args()
    if asked.per_task < 1:
        parser.error(f"--per-task must be at least 1; got {asked.per_task}")
    missing = sorted({name for name in FILES.values() if not (asked.folder / name).is_file()})
    if missing:
        parser.error(f"{asked.folder} lacks {', '.join(missing)}; put the published files there")
    tasks = {
        task: prompts_of(task, asked.folder, asked.per_task, asked.longest)
        for task in (*FILES, "prose")
    }
    lines = [
        json.dumps({"task": task, "prompt": text}, ensure_ascii=False)
        for task, texts in tasks.items()
        for text in texts
    ]
    asked.out.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"{len(lines)} prompts of {len(tasks)} kinds in {asked.out}")


if __name__ == "__main__":
    main()
