"""`python -m lab.quality.greedy`: greedy texts of GGUF files of every type, plain and speculative.

Rows of a forward are computed one by one whatever is beside them, so a verified token is the one
that plain decoding takes, to the last bit.
"""

import os
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, Final

import typer

from lab.command import run
from lab.grow.gguf_file import MIXES, write_gguf
from lab.grow.network import Shape, grown
from lab.never_slower.__main__ import PROMPTS
from monge.api import built_in, make_components
from monge.backends.cpu.code_cache import FOLDER_VARIABLE
from monge.cli import options
from monge.cli.console import quiet_host, reported
from monge.core.errors import OptionError, unknown_name
from monge.engine.decoder import Decoder
from monge.loading.networks import (
    as_draft_model,
    as_sequence_model,
    load_network,
    load_tokenizer,
    prepare,
)
from monge.loading.sources import ModelSource
from monge.prompts import encode, read_prompts, shipped

SHAPE: Final = Shape(width=2, kv_width=2, intermediate=2048, layers=2)
"""Of a target grown from the built-in draft model: whole blocks of 256, and soon compiled."""
_BACKEND: Final = "compiled(weights='file')"
_PROMPT: Final = 64  # tokens of a prompt, at most
_TREE: Final = {"drafter": "model", "controller": "fixed", "tree": "best_first"}
WAYS: Final[dict[str, tuple[dict[str, str], int]]] = {
    "chain": ({"drafter": "ngram(min_ngram=1)", "controller": "fixed"}, 1),
    "tree": (_TREE, 1),
    "batch": ({"drafter": "none"}, 8),
    "trees in a batch": (_TREE, 8),
}
"""Ways of decoding beside plain: parts, and texts at a time."""


@reported
def main(
    *,
    types: Annotated[
        list[str] | None, options.measuring("--type", "A type or mix; may be repeated.", "all")
    ] = None,
    prompts: int = options.measuring(100, "Prompts.", "100"),
    tokens: int = options.measuring(24, "Tokens of every text.", "24", "--max-new-tokens"),
    threads: options.Threads = None,
) -> None:
    """Write a small file of every type, and compare greedy texts in chains, trees and batches with plain ones.

    Prints a Markdown table, a row as soon as it is known; exits with 1 if any text differs.
    Everything is compiled in a temporary folder, half a minute for each type.

    **Examples**

        python -m lab.quality.greedy
        python -m lab.quality.greedy --type Q4_K --type Q6_K --prompts 20
    """
    quiet_host()
    options.set_threads(threads)
    options.check_positive(prompts=prompts, max_new_tokens=tokens)
    for name in types or ():
        if name not in MIXES:
            raise unknown_name("type", name, MIXES)
    print(f"| type | {' | '.join(WAYS)} | first difference |\n|{'---|' * (len(WAYS) + 2)}")
    is_equal = True
    with TemporaryDirectory() as folder:
        os.environ[FOLDER_VARIABLE] = folder
        for name in types or MIXES:
            found = dict(compared(name, Path(folder), prompts, tokens))
            places = [f"{way}: {place}" for way, (_, place) in found.items() if place is not None]
            counts = " | ".join(f"{count} of {prompts}" for count, _ in found.values())
            print(f"| {name} | {counts} | {'; '.join(places) or 'none'} |", flush=True)
            is_equal = is_equal and not places
    if not is_equal:
        raise typer.Exit(1)


def compared(
    name: str, folder: Path, num_prompts: int, num_tokens: int
) -> Iterator[tuple[str, tuple[int, str | None]]]:
    """For every way its equal texts, and the first place where one differs.

    Args:
        name: A key of `MIXES`.
        folder: Where the file is written.
        num_prompts: Prompts.
        num_tokens: Tokens of every text.
    """
    small, path = load_network(built_in("draft")), folder / f"{name}.gguf"
    tokenizer = load_tokenizer(built_in("target"))
    write_gguf(grown(small, SHAPE), tokenizer, path, name)
    target = as_sequence_model(
        load_network(prepare(ModelSource.of(path), _BACKEND)), backend=_BACKEND
    )
    draft = as_draft_model(small, target, backend="compiled")
    texts = _texts(tokenizer, num_prompts)

    def decoded(parts: dict[str, str], batch: int) -> list[tuple[int, ...]]:
        used = draft if parts["drafter"] == "model" else None
        components = make_components(target, used, **{"controller": None, **parts})
        results = Decoder(components, max_batch_size=batch).generate(
            texts, max_new_tokens=num_tokens, ignore_eos=True
        )
        return [one.token_ids for one in results]

    plain = decoded({"drafter": "none"}, 1)
    for way, (parts, batch) in WAYS.items():
        yield way, difference(plain, decoded(parts, batch))


def _texts(tokenizer: Any, count: int) -> list[tuple[int, ...]]:  # noqa: ANN401 (the host's)
    """Passages of the prompts at hand: the first of each, then the second ones."""
    found = [encode(tokenizer, one.text) for one in (*shipped(), *read_prompts(PROMPTS))]
    longest = max(map(len, found))
    passages = (
        ids[at : at + _PROMPT] for at in range(0, longest, _PROMPT) for ids in found if ids[at:]
    )
    texts = list(islice(passages, count))
    if len(texts) < count:
        raise OptionError(f"greedy: there are {len(texts)} prompts, and {count} were asked for")
    return texts


def difference(
    plain: Sequence[Sequence[int]], other: Sequence[Sequence[int]]
) -> tuple[int, str | None]:
    """Return how many texts are equal, and the first token that is not."""
    pairs = list(enumerate(zip(plain, other, strict=True)))
    wrong = [(row, pair) for row, pair in pairs if pair[0] != pair[1]]
    if not wrong:
        return len(pairs), None
    row, (ours, theirs) = wrong[0]
    place = next(at for at, two in enumerate(zip(ours, theirs, strict=True)) if two[0] != two[1])
    return len(pairs) - len(wrong), f"text {row + 1}, token {place + 1}"


if __name__ == "__main__":
    run(main)
