"""Text for `train_default_pair.py`: the permissively licensed corpora, and text sampled from the target.

Whole records are held out before any training. Everything random is a function of the seed and an index, so that an interrupted
run, restarted, draws what it would have drawn.
"""

import gzip
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import LlamaForCausalLM, PreTrainedTokenizerBase, StaticCache

END = 0  # <|end|>: separates documents
SHARD_ROWS = 256
COOL = 0.6  # the second temperature at which the draft is trained and measured
SAMPLED_TEMPERATURES = (1.0, 1.0, 1.0, COOL, 1.0, 1.0, COOL, 0.0)
PROMPT_TEMPLATES = {
    "gsm8k_train.jsonl": ("Question: {question}\nAnswer:", " {answer}"),
    "instruction_data_1100.json": ("Instruction: {instruction}\nInput: {input}\nResponse:", " {output}"),
}

Shard = dict[str, Tensor]  # rows and the target's states
Pools = tuple[list[Shard], list[Shard]]  # sampled from the target, read from the corpora


@dataclass(frozen=True, slots=True, kw_only=True)
class Domain:
    """One source of text: where it is, how often the target sees it, and its share of the draft's rows."""

    path: str
    repeats: int
    share: float
    held_out_every: int = 100
    max_characters: int | None = None


DOMAINS = {
    "gsm8k": Domain(path="prompts/gsm8k_train.jsonl", repeats=2, share=0.3),
    "instructions": Domain(path="prompts/instruction_data_1100.json", repeats=2, share=0.15, held_out_every=20),
    "peps": Domain(path="corpus/python_peps.jsonl.gz", repeats=1, share=0.15),
    "textbooks": Domain(path="corpus/openstax_textbooks.jsonl.gz", repeats=1, share=0.15),
    "prose": Domain(path="corpus/standardebooks_prose_core.jsonl.gz", repeats=1, share=0.25, max_characters=9_000_000),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Corpus:
    """The tokens of one split of one domain, in rows, and prompts that start a text of that domain."""

    rows: Tensor  # [rows, seq]
    prompts: list[list[int]]
    has_questions: bool  # else a prompt is the start of a row, to be cut anywhere


def read_records(data: Path, domain: Domain) -> list[tuple[str, str]]:
    """Returns (prompt, continuation) of each record; a plain document has no prompt."""
    path = data / domain.path
    text = gzip.decompress(path.read_bytes()).decode() if path.suffix == ".gz" else path.read_text()
    records = json.loads(text) if path.suffix == ".json" else [json.loads(line) for line in text.splitlines()]
    prompt, continuation = PROMPT_TEMPLATES.get(path.name, ("", "{text}"))
    pairs = [(prompt.format(**record), continuation.format(**record)) for record in records]
    pairs = [(p.replace("\nInput: \n", "\n"), c) for p, c in pairs]  # an instruction without input has no such line
    # A strided subset keeps every book when only part of the characters is wanted.
    num_characters = sum(len(c) for _, c in pairs)
    stride = 1 if domain.max_characters is None else max(1, round(num_characters / domain.max_characters))
    return pairs[::stride]


def read_corpora(data: Path, tokenizer: PreTrainedTokenizerBase, seq: int) -> dict[str, dict[str, Corpus]]:
    """Returns `{"train": {domain: corpus}, "held_out": {domain: corpus}}`."""
    splits: dict[str, dict[str, Corpus]] = {"train": {}, "held_out": {}}
    for name, domain in DOMAINS.items():
        records = read_records(data, domain)
        for split, wants_held_out in (("train", False), ("held_out", True)):
            every = domain.held_out_every
            chosen = [r for i, r in enumerate(records) if (i % every == every // 2) == wants_held_out]
            documents = tokenizer([p + c for p, c in chosen], add_special_tokens=False).input_ids
            tokens = torch.tensor([token for document in documents for token in (*document, END)])
            rows = tokens[: len(tokens) // seq * seq].view(-1, seq)
            questions = [p for p, _ in chosen if p]
            prompts = tokenizer(questions, add_special_tokens=False).input_ids if questions else rows[:, :64].tolist()
            splits[split][name] = Corpus(rows=rows, prompts=prompts, has_questions=bool(questions))
    return splits


def seeded(*numbers: int) -> torch.Generator:
    """Returns a generator that depends on the numbers and on nothing else."""
    seed = 0
    for number in numbers:
        seed = (seed * 1_000_003 + number + 1) % 2**63
    return torch.Generator().manual_seed(seed)


def draw_indices(size: int, count: int, generator: torch.Generator) -> Tensor:
    """Returns `count` indices below `size`, with replacement."""
    return torch.empty(count, dtype=torch.long).random_(0, size, generator=generator)


def draw_order(size: int, generator: torch.Generator) -> Tensor:
    """Returns the indices below `size` in random order."""
    return torch.empty(size, dtype=torch.float64).uniform_(generator=generator).argsort()


def draw_prompts(corpus: Corpus, count: int, generator: torch.Generator, max_tokens: int = 128) -> list[list[int]]:
    """Draws prompts: whole questions, or prefixes of 16 to 64 tokens of plain documents."""
    cuts = (16 + draw_indices(49, count, generator)).tolist()
    chosen = [corpus.prompts[i] for i in draw_indices(len(corpus.prompts), count, generator).tolist()]
    return [p[: max_tokens if corpus.has_questions else cut] for p, cut in zip(chosen, cuts, strict=True)]


def draw_tokens(logits: Tensor, temperature: float, generator: torch.Generator) -> Tensor:
    """Draws one token per row by the inverse cumulative law; temperature 0 is the argmax."""
    if temperature == 0:
        return logits.argmax(-1)
    cumulative = torch.softmax(logits.double() / temperature, -1).cumsum(-1)
    position = torch.empty(len(logits), 1, dtype=torch.float64).uniform_(generator=generator)
    # Without the last entry: rounding may leave it below 1, and then the last token owns the rest.
    return torch.searchsorted(cumulative[:, :-1].contiguous(), position, right=True).squeeze(1)


@torch.inference_mode()
def sample_rows(
    target: LlamaForCausalLM, prompts: list[list[int]], *, seq: int, temperature: float, generator: torch.Generator
) -> Tensor:
    """Samples continuations of prompts of any lengths: tokens inside a prompt are forced, so nothing is padded."""
    lengths = torch.tensor([len(prompt) for prompt in prompts])
    rows = torch.zeros(len(prompts), seq, dtype=torch.long)
    for row, prompt in zip(rows, prompts, strict=True):
        row[: len(prompt)] = torch.tensor(prompt)
    cache = StaticCache(config=target.config, max_cache_len=seq)
    start = int(lengths.min())
    new_ids = rows[:, :start]
    for position in range(start, seq):
        logits = target(new_ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1]
        drawn = draw_tokens(logits, temperature, generator)
        rows[:, position] = torch.where(position < lengths, rows[:, position], drawn)
        new_ids = rows[:, position : position + 1]
    return rows


def save_atomically(value: object, path: Path) -> None:
    """Writes beside the file and renames, so that an interrupted write leaves the old file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(value, path.with_suffix(".partial"))
    path.with_suffix(".partial").replace(path)


def cached(path: Path, make: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
    """Returns the tensors stored at `path`, making and storing them first if they are not there."""
    if not path.exists():
        save_atomically(make(), path)
    return torch.load(path, mmap=True)


def with_states(target: LlamaForCausalLM, rows: Tensor) -> Shard:
    """Returns rows with the target's last hidden states, from which its laws are one matrix product away."""
    with torch.inference_mode():
        states = torch.cat([target.model(part, use_cache=False).last_hidden_state for part in rows.split(16)])
    return {"rows": rows.to(torch.uint16), "states": states}


def sampled_shards(
    target: LlamaForCausalLM, corpora: dict[str, Corpus], folder: Path, *, num_tokens: int, seq: int, seed: int
) -> list[Shard]:
    """Returns text sampled from the target after training prompts, stored shard by shard."""

    def make(index: int) -> Shard:
        generator = seeded(seed, 2, index)
        prompts: list[list[int]] = []
        for name, corpus in corpora.items():
            prompts += draw_prompts(corpus, round(SHARD_ROWS * DOMAINS[name].share), generator)
        temperature = SAMPLED_TEMPERATURES[index % len(SAMPLED_TEMPERATURES)]
        rows = sample_rows(target, prompts, seq=seq, temperature=temperature, generator=generator)
        return with_states(target, rows)

    num_shards = num_tokens // (SHARD_ROWS * seq)
    return [cached(folder / f"sampled_{i}.pt", lambda i=i: make(i)) for i in tqdm(range(num_shards), "sampled text")]


def corpus_shards(
    target: LlamaForCausalLM, corpora: dict[str, Corpus], folder: Path, *, num_tokens: int, seq: int, seed: int
) -> list[Shard]:
    """Returns rows of the corpora, in the domains' shares as far as they go, stored shard by shard."""
    picked = []
    for index, (name, corpus) in enumerate(corpora.items()):
        order = draw_order(len(corpus.rows), seeded(seed, 1, index))
        picked.append(corpus.rows[order[: int(DOMAINS[name].share * num_tokens / seq)]])
    rows = torch.cat(picked)
    parts = rows[draw_order(len(rows), seeded(seed, 1))].split(SHARD_ROWS)
    return [
        cached(folder / f"corpus_{i}.pt", lambda part=part: with_states(target, part))
        for i, part in enumerate(tqdm(parts, "corpus text"))
    ]


def draw_batch(pools: Pools, count: int, sampled_fraction: float, generator: torch.Generator) -> tuple[Tensor, list[Tensor]]:
    """Draws rows and the target's states of each; a row is sampled text with probability `sampled_fraction`."""
    rows, states = [], []
    for is_sampled in (torch.empty(count).uniform_(generator=generator) < sampled_fraction).tolist():
        pool = pools[0] if is_sampled else pools[1]
        shard = pool[int(draw_indices(len(pool), 1, generator))]
        index = int(draw_indices(len(shard["rows"]), 1, generator))
        rows.append(shard["rows"][index].long())
        states.append(shard["states"][index])
    return torch.stack(rows), states
