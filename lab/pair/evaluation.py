"""Losses and measurements of `lab.pair.train`.

The loss of both, the draft's acceptance, what a forward of each costs.

In the maths p = target, q = draft. Acceptance is sum_v min(p_v, q_v), the probability that a
drafted token survives. It is measured on held-out text and, since that is where a draft works,
along text that the target itself continues from held-out prompts.
"""

import statistics
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel

from lab.pair.data import COOL, Corpus, cached, draw_prompts, sample_rows, seeded

MAX_ROWS = 24
MAX_LOSS_ROWS = 64
ROWS_AT_ONCE = 8
TEMPERATURES = (1.0, COOL, 0.0)


def arithmetic(device: str) -> torch.dtype:
    """Returns the type in which models run on a kind of device: most CPUs only imitate bf16."""
    return torch.bfloat16 if device == "cuda" else torch.float32


def load(folder: Path, device: str) -> PreTrainedModel:
    """Loads a model for inference."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=arithmetic(device))
    return model.eval().to(device)


@torch.inference_mode()
def held_out_losses(
    target: PreTrainedModel, held_out: dict[str, Corpus]
) -> dict[str, dict[str, float]]:
    """Returns nats per token of each domain's held-out rows."""
    losses: dict[str, dict[str, float]] = {}
    for name, corpus in held_out.items():
        rows = corpus.rows[:MAX_LOSS_ROWS].to(target.device)
        each = []
        for part in rows.split(ROWS_AT_ONCE):
            logits = target(part, use_cache=False).logits[:, :-1].float()
            each.append(
                functional.cross_entropy(
                    logits.flatten(0, 1), part[:, 1:].flatten(), reduction="none"
                )
            )
        losses[name] = {"nats_per_token": float(torch.cat(each).mean()), "rows": len(rows)}
    return losses


def own_text(
    target: PreTrainedModel, held_out: dict[str, Corpus], folder: Path, *, seq: int, seed: int
) -> dict:
    """Returns, for each temperature and domain, rows that the target continued from held-out prompts, and where it began."""
    texts = {}
    for index, temperature in enumerate(TEMPERATURES):
        prompts = {
            name: draw_prompts(corpus, MAX_ROWS, seeded(seed, 4, number))
            for number, (name, corpus) in enumerate(held_out.items())
        }
        flat = [prompt for group in prompts.values() for prompt in group]
        generator = seeded(seed, 5, index)
        stored = cached(
            folder / f"held_out_{index}.pt",
            lambda t=temperature, f=flat, g=generator: {
                "rows": sample_rows(target, f, seq=seq, temperature=t, generator=g)
            },
        )
        starts = torch.tensor([len(prompt) for prompt in flat]).split(MAX_ROWS)
        texts[temperature] = dict(
            zip(prompts, zip(stored["rows"].split(MAX_ROWS), starts, strict=True), strict=True)
        )
    return texts


@torch.inference_mode()
def compare_laws(
    draft: PreTrainedModel,
    target: PreTrainedModel,
    rows: Tensor,
    starts: Tensor,
    temperature: float,
) -> dict[str, float]:
    """Returns the mean KL(p || q), acceptance and agreement of the two argmaxes, over the tokens from each start on."""
    parts: list[Tensor] = []
    for part, start in zip(rows.split(ROWS_AT_ONCE), starts.split(ROWS_AT_ONCE), strict=True):
        is_after = (torch.arange(1, rows.shape[1]) >= start[:, None]).to(target.device)
        ids = part.to(target.device)
        logits = [
            model(ids, use_cache=False).logits[:, :-1][is_after].float()
            for model in (target, draft)
        ]
        p_log, q_log = (torch.log_softmax(each / temperature, -1) for each in logits)
        kl = (p_log.exp() * (p_log - q_log)).sum(-1)
        acceptance = torch.minimum(p_log, q_log).exp().sum(-1)
        agreement = (p_log.argmax(-1) == q_log.argmax(-1)).float()
        parts.append(torch.stack([kl, acceptance, agreement]))
    means = torch.cat(parts, -1).mean(-1).tolist()
    return dict(zip(("kl", "acceptance", "greedy_agreement"), means, strict=True))


def loss_weights(progress: float) -> tuple[float, float]:
    """Returns the weights of KL and TV.

    KL alone, then both, then TV alone at the end of the last third.
    """
    if progress < 1 / 3:
        return 1.0, 0.0
    return 0.5 * min(1.0, 3 * (1 - progress)), 1.0


def law_gradient(
    draft_logits: Tensor, target_logits: Tensor, kl: float, tv: float
) -> tuple[Tensor, Tensor]:
    """Returns the gradient of `kl * KL(p || q) + tv * TV(p, q)` in the draft's logits, and TV of each row.

    dKL/dz = q - p; with b = q where q < p and 0 elsewhere, dTV/dz = q * sum(b) - b. Written out
    because autograd reads and writes the vocabulary several times more.
    """
    p = torch.softmax(target_logits, -1, dtype=torch.float32)
    q = torch.softmax(draft_logits, -1, dtype=torch.float32)
    below = torch.where(q < p, q, 0.0)
    gradient = kl * (q - p) + tv * (q * below.sum(-1, keepdim=True) - below)
    return gradient, (p - q).clamp_min(0).sum(-1)


@torch.inference_mode()
def evaluate_draft(
    draft: PreTrainedModel, target: PreTrainedModel, held_out: dict[str, Corpus], texts: dict
) -> dict[str, dict[str, dict[str, float]]]:
    """Returns the comparison of each domain on held-out text and along the target's own text at each temperature."""
    report: dict[str, dict[str, dict[str, float]]] = {}
    for name, corpus in held_out.items():
        rows = corpus.rows[:MAX_ROWS]
        starts = torch.ones(len(rows), dtype=torch.long)
        report[name] = {"held_out_text": compare_laws(draft, target, rows, starts, 1.0)}
        for temperature in TEMPERATURES:
            # Greedy text is judged by the argmax alone, which no temperature moves.
            own_rows, own_starts = texts[temperature][name]
            measured = compare_laws(draft, target, own_rows, own_starts, temperature or 1.0)
            kept = measured if temperature else {"greedy_agreement": measured["greedy_agreement"]}
            report[name][f"own_text_at_{temperature}"] = kept
    first = next(iter(report.values()))
    report["mean"] = {
        text: {
            key: statistics.fmean(domain[text][key] for domain in report.values())
            for key in numbers
        }
        for text, numbers in first.items()
    }
    return report


@torch.inference_mode()
def token_latency_s(model: PreTrainedModel, num_tokens: int = 200) -> float:
    """Returns the median time of a forward of one token after 64 others."""
    cache = DynamicCache(config=model.config)
    model(torch.zeros(1, 64, dtype=torch.long), past_key_values=cache, use_cache=True)
    new_ids, seconds = torch.zeros(1, 1, dtype=torch.long), []
    for _ in range(num_tokens):
        started = time.perf_counter()
        model(new_ids, past_key_values=cache, use_cache=True)
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


def measure_pair(
    draft: PreTrainedModel, target: PreTrainedModel, held_out: dict[str, Corpus], texts: dict
) -> dict[str, Any]:
    """Returns the target's losses, the draft's acceptance and, on the CPU, what a forward of each costs."""
    report = {
        "target_held_out": held_out_losses(target, held_out),
        "pair": evaluate_draft(draft, target, held_out, texts),
    }
    return report | {
        "latency_s": {
            "target": token_latency_s(target.cpu()),
            "draft": token_latency_s(draft.cpu()),
        }
    }
