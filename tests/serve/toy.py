"""Small decoders, generations and ways to make trouble."""

import math
import queue
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from monge.api import make_components
from monge.core.sampling_rules import SamplingRules
from monge.engine.decoder import Decoder
from monge.engine.session import Request
from monge.oracle.tabular import RandomTable, TabularModel
from monge.serve.api.streaming import merged
from monge.serve.scheduling.generation import Output
from monge.serve.scheduling.scheduler import Scheduler

VOCAB = 7


class Oops(Exception):
    """An error that no library knows."""


class Letters:
    """A tokenizer: token i is letter i."""

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": [ord(letter) - ord("a") for letter in text]}

    def decode(self, token_ids: Any, *, skip_special_tokens: bool) -> str:
        return "".join(chr(ord("a") + token) for token in token_ids)


class Model(TabularModel):
    """A tabular model that knows what it was asked to read, and that raises on demand."""

    def __init__(self, seed: int, max_length: int | None = None) -> None:
        super().__init__(RandomTable(VOCAB, seed), VOCAB, max_length)
        self.pieces: list[tuple[int, int]] = []
        self.failing: set[int] = set()  # first tokens of texts that break the network
        # First tokens of prompts that break it while they are read.
        self.failing_prompts: set[int] = set()
        self.nan: set[int] = set()  # first tokens of texts whose logits are NaN
        self.commits_fail = False

    @property
    def open_sequences(self) -> int:
        """Sequences that hold room."""
        return len(self._committed)

    def append(self, pieces: Any) -> None:
        self.pieces += [(sequence, len(tokens)) for sequence, tokens in pieces.items() if tokens]
        for sequence, tokens in pieces.items():
            if tokens and (*self.text(sequence), *tokens)[0] in self.failing_prompts:
                raise Oops(f"sequence {sequence}: a prompt that breaks the network")
        super().append(pieces)

    def extend(self, blocks: Any) -> Any:
        logits = super().extend(blocks)
        for sequence in blocks:
            if self.text(sequence)[:1] and self.text(sequence)[0] in self.failing:
                raise ZeroDivisionError(f"sequence {sequence}: a text that breaks the network")
            if self.text(sequence)[:1] and self.text(sequence)[0] in self.nan:
                logits[sequence] = torch.full_like(logits[sequence], math.nan)
        return logits

    def commit(self, paths: Any) -> None:
        if self.commits_fail and any(paths.values()):
            raise MemoryError("the caches are gone")
        super().commit(paths)


def decoder(
    *, tokenizer: Any = None, max_batch_size: int = 8, max_length: int | None = None, **options: Any
) -> Decoder:
    """A fresh pair of tables."""
    parts = make_components(Model(1, max_length), Model(2), **({"tree": "chain(3)"} | options))
    return Decoder(parts, tokenizer=tokenizer, max_batch_size=max_batch_size)


def generation(
    *prompt: int, seed: int = 0, tokens: int = 12, temperature: float = 1.0, **options: Any
) -> Request:
    """A request for a sampled completion."""
    rules = SamplingRules(temperature=temperature)
    return Request(
        prompt_ids=prompt or (1, 2), max_new_tokens=tokens, rules=rules, seed=seed, **options
    )


class Handle:
    """Outputs of one generation, for a thread that waits for them."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.outputs = queue.SimpleQueue[Output]()
        self.scheduler, self.request_id, self.is_ended = scheduler, -1, False

    def cancel(self) -> None:
        self.scheduler.cancel([self.request_id])

    def completion(self, timeout_s: float | None = None) -> Output:
        """All outputs in one."""
        self.timeout_s = timeout_s
        return merged(list(self))

    timeout_s: float | None = 60

    def __iter__(self) -> Iterator[Output]:
        while not self.is_ended:
            output = self.outputs.get(timeout=self.timeout_s)
            self.is_ended = output.finish_reason is not None
            yield output


def submit_all(scheduler: Scheduler, requests: Sequence[Request], **options: Any) -> list[Handle]:
    """Handles of requests that come together."""
    handles = [Handle(scheduler) for _ in requests]

    def put(place: int, output: Output) -> None:
        handles[place].outputs.put(output)

    ids = scheduler.submit(requests, put, **options)
    for handle, request_id in zip(handles, ids, strict=True):
        handle.request_id = request_id
    return handles


def submit(scheduler: Scheduler, request: Request, **options: Any) -> Handle:
    """The handle of one request."""
    return submit_all(scheduler, [request], **options)[0]


def alone(made: Request, **options: Any) -> tuple[int, ...]:
    """What a generation's completion is offline."""
    (result,) = decoder(**options).generate(
        [made.prompt_ids],
        max_new_tokens=made.max_new_tokens,
        temperature=made.rules.temperature,
        seed=made.seed,
        stop=made.stop,
        logits_processors=made.processors,
    )
    return result.token_ids


class Gate:
    """A processor that changes nothing and holds the decoding thread until it is opened."""

    def __init__(self) -> None:
        self.reached, self.opened = threading.Event(), threading.Event()

    def __call__(self, token_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.reached.set()
        assert self.opened.wait(60), "nobody opened the gate"
        return scores

    def __deepcopy__(self, memo: dict[int, object]) -> "Gate":
        return self  # whoever holds the gate opens it for all


class Mine:
    """A processor that raises once a text has so many tokens."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __call__(self, token_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if token_ids.shape[-1] >= self.length:
            raise Oops("stepped on")
        return scores


class Stumbling(Letters):
    """Cannot decode texts that begin with letter g once they are longer than a prompt."""

    def decode(self, token_ids: Any, *, skip_special_tokens: bool) -> str:
        if len(token_ids) > 4 and token_ids[0] == VOCAB - 1:
            raise Oops("an unspeakable text")
        return super().decode(token_ids, skip_special_tokens=skip_special_tokens)
