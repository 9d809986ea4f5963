"""`python -m lab.quality`."""

import json
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Annotated

from rich.box import SIMPLE_HEAD
from rich.table import Table
from transformers import PreTrainedModel

from lab.command import run
from lab.quality.measure import Estimate, compare, summary
from monge.api import built_in, load
from monge.backends.cpu.rounded_weights import check_weights, round_weights
from monge.cli import options
from monge.cli.console import output, quiet_host, reported
from monge.cli.progress import working
from monge.core.errors import OptionError
from monge.loading.networks import load_network, load_tokenizer, prepare
from monge.loading.sources import ModelSource
from monge.prompts import read_prompts
from monge.requests.chat_format import chat_format

KINDS = ("bfloat16", "int8", "int4")
NUM_TOKENS = 4000


@reported
def main(
    *,
    target: options.Target = None,
    data: Annotated[
        Path,
        options.measuring(
            "--data", "Held-out prompts: lines, or *.jsonl with `prompt`, `question` or `turns`."
        ),
    ],
    kinds: list[str] | None = options.measuring(
        None, "Kind of weights; may be repeated.", ", ".join(KINDS), "--weights"
    ),
    answers: int = options.measuring(
        100, "Tokens that the target answers.", None, "--answer-tokens"
    ),
    tokens: int = options.measuring(NUM_TOKENS, "Tokens of all answers together.", str(NUM_TOKENS)),
    seed: int = options.measuring(0, "Seed of the answers."),
    threads: options.Threads = None,
    as_json: options.Json = False,
) -> None:
    """Compare the next-token distributions of a network with those of its rounded weights.

    Kind `file` keeps the types of a GGUF file, whose dequantised numbers are the network.
    Both read prompts, through the chat template if there is one, with answers that the network
    itself writes at temperature 1. Errors are standard errors between texts. With `--json` the last line of standard output is
    one JSON object.

    **Examples**

        python -m lab.quality --target smollm2 --data questions.jsonl
        python -m lab.quality --target smollm2 --data questions.jsonl --weights int8 --tokens 10000
    """
    quiet_host()
    options.set_threads(threads)
    options.check_positive(answer_tokens=answers, tokens=tokens)
    for kind in kinds or ():
        check_weights(kind)
    source = built_in("target") if target is None else target
    network, tokenizer = load_network(source), load_tokenizer(source)
    chat = chat_format(tokenizer, is_built_in=target is None)
    prompts = [
        chat.encode([{"role": "user", "content": one.text}])
        for one in islice(read_prompts(data), -(-tokens // answers))
    ]
    decoder = load(network, tokenizer=tokenizer, drafter="none")
    written = decoder.generate(prompts, max_new_tokens=answers, temperature=1, seed=seed)
    texts = [(*ids, *one.token_ids) for ids, one in zip(prompts, written, strict=True)]
    if len(texts) < 2:
        raise OptionError(f"quality: {str(data)!r} holds {len(texts)} texts; give at least two")
    found: dict[str, dict[str, Estimate]] = {}
    with working() as work:
        for kind in kinds or KINDS:
            advance = work.stage(f"reading with {kind} weights", len(texts), is_begun=False).advance
            rounded = _of_file(source) if kind == "file" else round_weights(network, kind)
            read = compare(network, rounded, texts, advance)
            found[kind] = summary(read)
    output(110).print(table(found))
    if as_json:
        rows = {kind: {key: asdict(one) for key, one in row.items()} for kind, row in found.items()}
        print(json.dumps({"texts": len(texts), "tokens": sum(map(len, texts)), "weights": rows}))


def _of_file(source: str | Path) -> PreTrainedModel:
    return load_network(prepare(ModelSource.of(source), "compiled(weights='file')"))


def table(found: dict[str, dict[str, Estimate]]) -> Table:
    """One row for every kind of weights, below that of the network."""
    made = Table(box=SIMPLE_HEAD)
    made.add_column("weights")
    for name in ("perplexity", "ratio", "KL, nats", "total variation", "equal argmax"):
        made.add_column(name, justify="right", no_wrap=True)
    (first, *_) = found.values()
    made.add_row("as they are", _shown(first["perplexity_of_network"]), "1", "0", "0", "1")
    for kind, row in found.items():
        names = ("perplexity", "perplexity_ratio", "divergence", "variation", "equal_argmax")
        made.add_row(kind, *(_shown(row[name]) for name in names))
    return made


def _shown(of: Estimate) -> str:
    return f"{of.mean:.4g} ± {of.error:.1g}"


if __name__ == "__main__":
    run(main)
