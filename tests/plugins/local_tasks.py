"""Two lm-eval tasks that need no download: texts to write, and continuations to choose from."""

import json
from pathlib import Path

WRITTEN = "monge_written"
CHOSEN = "monge_chosen"

# Half of the answers are what the built-in target writes, so that the score is neither 0 nor 1.
QUESTIONS = [
    ("Instruction: What do bees make?\nResponse:", "The opposite of the sentence is 'hum.'"),
    ("Instruction: Name three colours.\nResponse:", "red, green, blue"),
    (
        "Instruction: Write one sentence about the sea.\nResponse:",
        "The chemical formula for the store is a mile.",
    ),
    ("Instruction: Count to five.\nResponse:", "one two three four five"),
    (
        "Question: Tom has 3 apples and buys 4 more apples. How many apples does he have?\nAnswer:",
        "7",
    ),
    (
        "Instruction: What is the capital of France?\nResponse:",
        "The capital of 20 is the capital of 20 is 200.",
    ),
    (
        "The history of the world and of its countries, as far as it was written down by those who",
        "lived",
    ),
    ("def", "main"),
]
CHOICES = [
    ("The history of", [" the world", " zebra of", " of of"], 0),
    ("Once upon a time there was a", [" little girl", " the the", " because"], 0),
    ("Tom has 3 apples and buys 4 more. He has 3 + 4 =", [" 8", " 7", " blue"], 1),
    ("Instruction: Name a colour.\nResponse:", [" Seven", " The colour is red."], 1),
    ("Economics is the study of", [" how people use resources", " qwxz"], 0),
    ("She opened the door and", [" import os", " looked out"], 1),
]
_COMMON = {
    "dataset_path": "json",
    "test_split": "test",
    "doc_to_text": "{{question}}",
    "doc_to_target": "{{answer}}",
    "metadata": {"version": 1.0},
}


def write_tasks(folder: Path, *, until: tuple[str, ...] = ("\n",)) -> Path:
    """Both tasks as files, for `include_path`."""
    folder.mkdir(parents=True, exist_ok=True)
    questions = [{"question": question, "answer": f" {answer}"} for question, answer in QUESTIONS]
    choices = [
        {"question": question, "choices": some, "answer": right}
        for question, some, right in CHOICES
    ]
    written = {
        "output_type": "generate_until",
        "generation_kwargs": {"until": list(until), "max_gen_toks": 40, "do_sample": False},
        "metric_list": _metrics("exact_match"),
    }
    chosen = {
        "output_type": "multiple_choice",
        "doc_to_choice": "{{choices}}",
        "target_delimiter": "",
        "metric_list": _metrics("acc", "acc_norm"),
    }
    for name, rows, own in ((WRITTEN, questions, written), (CHOSEN, choices, chosen)):
        data = folder / f"{name}.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        task = _COMMON | own | {"task": name, "dataset_kwargs": {"data_files": {"test": str(data)}}}
        # JSON is YAML.
        (folder / f"{name}.yaml").write_text(json.dumps(task), encoding="utf-8")
    return folder


def _metrics(*names: str) -> list[dict[str, object]]:
    return [{"metric": name, "aggregation": "mean", "higher_is_better": True} for name in names]
