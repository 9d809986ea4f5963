"""Text for `lab.pair.train`.

The permissively licensed corpora, and text sampled from the target.

Whole records are held out before any training. Everything random is a function of the seed and an
index, so that an interrupted run, restarted, draws what it would have drawn.
"""

import gzip
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase, StaticCache

END = 0  # <|end|>: separates documents
COOL = 0.6  # the second temperature at which the draft is trained and measured
SAMPLED_TEMPERATURES = (1.0, COOL, 1.0, 1.0, 0.0, 1.0, COOL, 1.0)
INSTRUCTION = ("Instruction: {instruction}\nInput: {input}\nResponse:", " {output}")
PROMPT_TEMPLATES = {
    "gsm8k_train.jsonl": ("Question: {question}\nAnswer:", " {answer}"),
    "instruction_data_1100.json": INSTRUCTION,
    "self_instruct_user_oriented.jsonl": INSTRUCTION,
}
MOST_PROMPT_TOKENS = 128  # of a prompt that text is sampled from
PLAIN_RECORD_LINES = 200  # a plain text file is cut into records of so many lines


@dataclass(frozen=True, slots=True, kw_only=True)
class Domain:
    """One source of text: where it is, how often an epoch of the target has it, and its share of the draft's rows."""

    paths: tuple[str, ...]
    share: float
    repeats: int = 1
    held_out_every: int = 100


DOMAINS = {
    "gsm8k": Domain(paths=("prompts/gsm8k_train.jsonl",), repeats=2, share=0.25),
    "instructions": Domain(
        paths=("prompts/instruction_data_1100.json", "prompts/self_instruct_user_oriented.jsonl"),
        repeats=2,
        share=0.15,
        held_out_every=20,
    ),
    "peps": Domain(paths=("corpus/python_peps.jsonl.gz",), share=0.1),
    "textbooks": Domain(paths=("corpus/openstax_textbooks.jsonl.gz",), share=0.12),
    "prose": Domain(paths=("corpus/standardebooks_prose_core.jsonl.gz",), share=0.2),
    "swift": Domain(paths=("corpus/swift_evolution.jsonl.gz",), share=0.06),
    "eips": Domain(paths=("corpus/ethereum_eips.jsonl.gz",), share=0.06),
    "rust": Domain(
        paths=("corpus/rust_book.jsonl.gz", "corpus/rust_by_example.jsonl.gz"),
        share=0.03,
        held_out_every=20,
    ),
    "shakespeare": Domain(paths=("corpus/tinyshakespeare.txt",), share=0.03, held_out_every=40),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Corpus:
    """The tokens of one split of one domain, in rows, and prompts that start a text of that domain."""

    rows: Tensor  # [rows, seq]
    prompts: list[list[int]]
    has_questions: bool  # else a prompt is the start of a row, to be cut anywhere


def parse(path: Path) -> list[dict[str, str]]:
    """Returns the records of a file, by its suffixes."""
    text = gzip.decompress(path.read_bytes()).decode() if path.suffix == ".gz" else path.read_text()
    if path.suffix == ".json":
        return json.loads(text)
    if path.suffix == ".txt":
        lines = text.splitlines(keepends=True)
        return [
            {"text": "".join(lines[i : i + PLAIN_RECORD_LINES])}
            for i in range(0, len(lines), PLAIN_RECORD_LINES)
        ]
    # Splitlines cuts inside strings too.
    records = [json.loads(line) for line in text.strip("\n").split("\n")]
    # Self-instruct nests its inputs and outputs.
    return [record | instance for record in records for instance in record.get("instances", [{}])]


def read_records(data: Path, domain: Domain) -> list[tuple[str, str]]:
    """Returns (prompt, continuation) of each record; a plain document has no prompt."""
    pairs: list[tuple[str, str]] = []
    for path in domain.paths:
        prompt, continuation = PROMPT_TEMPLATES.get(Path(path).name, ("", "{text}"))
        pairs += [
            (prompt.format(**record), continuation.format(**record))
            for record in parse(data / path)
        ]
    # An instruction without input has no such line.
    return [(p.replace("\nInput: \n", "\n"), c) for p, c in pairs]


def read_corpora(
    data: Path, tokenizer: PreTrainedTokenizerBase, seq: int
) -> dict[str, dict[str, Corpus]]:
    """Returns `{"train": {domain: corpus}, "held_out": {domain: corpus}}`."""
    splits: dict[str, dict[str, Corpus]] = {"train": {}, "held_out": {}}
    for name, domain in tqdm(DOMAINS.items(), "corpora"):
        records = read_records(data, domain)
        for split, wants_held_out in (("train", False), ("held_out", True)):
            every = domain.held_out_every
            chosen = [
                r for i, r in enumerate(records) if (i % every == every // 2) == wants_held_out
            ]
            documents = tokenizer([p + c for p, c in chosen], add_special_tokens=False).input_ids
            tokens = torch.tensor([token for document in documents for token in (*document, END)])
            rows = tokens[: len(tokens) // seq * seq].view(-1, seq)
            questions = [p for p, _ in chosen if p]
            prompts = (
                tokenizer(questions, add_special_tokens=False).input_ids
                if questions
                else rows[:, :64].tolist()
            )
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


def draw_prompts(corpus: Corpus, count: int, generator: torch.Generator) -> list[list[int]]:
    """Draws prompts: whole questions, or prefixes of 16 to 64 tokens of plain documents."""
    cuts = (16 + draw_indices(49, count, generator)).tolist()
    chosen = [
        corpus.prompts[i] for i in draw_indices(len(corpus.prompts), count, generator).tolist()
    ]
    return [
        p[: MOST_PROMPT_TOKENS if corpus.has_questions else cut]
        for p, cut in zip(chosen, cuts, strict=True)
    ]


def draw_tokens(logits: Tensor, temperature: float, generator: torch.Generator) -> Tensor:
    """Draws one token per row by the inverse cumulative law; temperature 0 is the argmax."""
    if temperature == 0:
        return logits.argmax(-1)
    cumulative = torch.softmax(logits.double() / temperature, -1).cumsum(-1)
    # Drawn on the host, so that every device gets the same numbers.
    position = (
        torch.empty(len(logits), 1, dtype=torch.float64)
        .uniform_(generator=generator)
        .to(logits.device)
    )
    # Without the last entry: rounding may leave it below 1, and then the last token owns the rest.
    return torch.searchsorted(cumulative[:, :-1].contiguous(), position, right=True).squeeze(1)


@torch.inference_mode()
def sample_rows(
    target: PreTrainedModel,
    prompts: list[list[int]],
    *,
    seq: int,
    temperature: float,
    generator: torch.Generator,
) -> Tensor:
    """Samples continuations of prompts of any lengths.

    Tokens inside a prompt are forced, so nothing is padded.
    """
    lengths = torch.tensor([len(prompt) for prompt in prompts])
    rows = torch.zeros(len(prompts), seq, dtype=torch.long)
    for row, prompt in zip(rows, prompts, strict=True):
        row[: len(prompt)] = torch.tensor(prompt)
    rows, lengths = rows.to(target.device), lengths.to(target.device)
    # A GPU would read all of a static cache at every step; a CPU would rather not copy a growing
    # one.
    on_cpu = target.device.type == "cpu"
    cache = (
        StaticCache(config=target.config, max_cache_len=seq)
        if on_cpu
        else DynamicCache(config=target.config)
    )
    start = int(lengths.min())
    new_ids = rows[:, :start]
    for position in range(start, seq):
        logits = target(new_ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[
            :, -1
        ]
        drawn = draw_tokens(logits, temperature, generator)
        rows[:, position] = torch.where(position < lengths, rows[:, position], drawn)
        new_ids = rows[:, position : position + 1]
    return rows.cpu()


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """Rows of a few kinds, kind by kind, and the share of each kind in what is drawn."""

    rows: Tensor
    sizes: Tensor
    shares: Tensor

    @staticmethod
    def of(kinds: list[Tensor], shares: list[float], device: torch.device) -> "Pool":
        """Joins the kinds on a device."""
        sizes = torch.tensor([len(rows) for rows in kinds])
        return Pool(rows=torch.cat(kinds).to(device), sizes=sizes, shares=torch.tensor(shares))

    def draw(self, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Draws rows, and the index of the kind of each."""
        bounds = self.shares.cumsum(0)
        kinds = torch.searchsorted(
            bounds[:-1], torch.empty(count).uniform_(generator=generator) * bounds[-1], right=True
        )
        sizes, starts = self.sizes[kinds], (self.sizes.cumsum(0) - self.sizes)[kinds]
        within = (
            torch.empty(count, dtype=torch.float64).uniform_(generator=generator) * sizes
        ).long()
        return self.rows[(starts + within).to(self.rows.device)], kinds


@dataclass(frozen=True, slots=True, kw_only=True)
class Pools:
    """The draft's two sources of text.

    Sampled from the target (warm and cool) and read from the corpora (by domain).
    """

    sampled: Pool
    read: Pool

    def draw(
        self, count: int, sampled_fraction: float, generator: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        """Draws rows, and whether each was sampled cool."""
        num_sampled = round(count * sampled_fraction)
        sampled, is_cool = self.sampled.draw(num_sampled, generator)
        read, kinds = self.read.draw(count - num_sampled, generator)
        return torch.cat([sampled, read]), torch.cat(
            [is_cool == 1, torch.zeros_like(kinds, dtype=torch.bool)]
        )


def sampled_pool(
    target: PreTrainedModel,
    corpora: dict[str, Corpus],
    folder: Path,
    *,
    num_tokens: int,
    shard_rows: int,
    seq: int,
    seed: int,
) -> Pool:
    """Returns text sampled from the target after training prompts, stored shard by shard.

    Warm rows and cool rows.
    """

    def make(index: int) -> dict[str, Tensor]:
        generator = seeded(seed, 2, index)
        prompts: list[list[int]] = []
        for name, corpus in corpora.items():
            prompts += draw_prompts(corpus, round(shard_rows * DOMAINS[name].share), generator)
        temperature = SAMPLED_TEMPERATURES[index % len(SAMPLED_TEMPERATURES)]
        return {
            "rows": sample_rows(
                target, prompts, seq=seq, temperature=temperature, generator=generator
            )
        }

    kinds: tuple[list[Tensor], list[Tensor]] = ([], [])
    for i in tqdm(range(max(2, num_tokens // (shard_rows * seq))), "sampled text"):
        is_cool = SAMPLED_TEMPERATURES[i % len(SAMPLED_TEMPERATURES)] < 1
        kinds[is_cool].append(cached(folder / f"sampled_{i}.pt", lambda i=i: make(i))["rows"])
    joined = [torch.cat(kind) for kind in kinds]
    return Pool.of(joined, [float(len(rows)) for rows in joined], target.device)
