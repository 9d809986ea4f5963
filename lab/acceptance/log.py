"""Laws of a real pair along the target's own text.

p = target law, q = draft law. The target writes texts at a temperature; then both networks read
them once, and the laws after every chosen prefix are kept. q is truncated to its most probable
tokens *as a draft law*: it is what candidates are drawn from. Tokens that cannot be drafted only
matter by their sum: no rule tells them apart before it emits one, and none is a candidate.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float64

from monge.api import make_components
from monge.audit.references import logits_along
from monge.bench.pair import Pair
from monge.core.errors import OptionError
from monge.core.sampling_rules import SamplingRules
from monge.engine.decoder import Decoder
from monge.laws.draws import RequestDraws
from monge.laws.from_logits import law_from_logits

Vector = Float64[np.ndarray, " tokens"]
TokenIds = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LoggedNode:
    """The two laws after one prefix.

    Args:
        text: Number of the text.
        p: Target masses of the draftable tokens, and of all others together, `[support + 1]`.
        q: Draft masses of the same; the last is zero.
    """

    text: int
    p: Vector
    q: Vector


@dataclass(frozen=True, slots=True, kw_only=True)
class Root:
    """A prefix at which rounds start."""

    text: int
    token_ids: TokenIds


@dataclass(frozen=True, slots=True, kw_only=True)
class LawLog:
    """Logged laws of one temperature.

    Args:
        temperature: Of target and draft law.
        nodes: Logged laws.
        roots: Where rounds start.
        num_texts: Number of texts, the clusters of the bootstrap.
    """

    temperature: float
    nodes: tuple[LoggedNode, ...]
    roots: tuple[Root, ...]
    num_texts: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LogSettings:
    """Settings of texts and their prefixes.

    Args:
        max_new_tokens: Length of every text.
        nodes_per_text: Logged prefixes of a text, evenly spaced.
        roots_per_text: Prefixes at which rounds start, likewise.
        draft_top_k: Tokens that the draft law keeps.
        seed: Of the texts.
    """

    max_new_tokens: int = 64
    nodes_per_text: int = 32
    roots_per_text: int = 4
    draft_top_k: int = 64
    seed: int = 0


def log_laws(
    pair: Pair, prompt_ids: Sequence[TokenIds], temperature: float, settings: LogSettings
) -> LawLog:
    """Let the target write a text after every prompt, and log the laws along them.

    Args:
        pair: The networks.
        prompt_ids: Prompts.
        temperature: Above zero: at zero all laws are point masses, and all rules are equal.
        settings: How much.

    Raises:
        OptionError: If there is no draft model, or the temperature is zero.
    """
    draft_model = pair.draft_model
    if draft_model is None:
        raise OptionError("bench acceptance compares two laws: give a --draft model")
    if not temperature > 0:
        raise OptionError(
            "bench acceptance needs temperatures above 0 (at 0 all rules are "
            f"equal); got {temperature}"
        )
    decoder = Decoder(
        make_components(pair.target_model, draft_model), max_batch_size=len(prompt_ids)
    )
    results = decoder.generate(
        prompt_ids,
        max_new_tokens=settings.max_new_tokens,
        temperature=temperature,
        seed=settings.seed,
        ignore_eos=True,
    )
    rules = SamplingRules(temperature=temperature)
    draft_rules = draft_rules_of(temperature, settings)
    nodes: list[LoggedNode] = []
    roots: list[Root] = []
    for text, (prompt, result) in enumerate(zip(prompt_ids, results, strict=True)):
        token_ids = (*prompt, *result.token_ids)
        starts = range(len(prompt), len(token_ids))
        chosen = _spaced(len(starts), settings.nodes_per_text)
        target_logits, draft_logits = (
            torch.cat([*logits_along(model, token_ids[:-1], starts.start - 1)])
            for model in (pair.target_model, draft_model)
        )
        for position in chosen:
            q = law_from_logits(draft_logits[position], draft_rules).sparse()
            p = law_from_logits(target_logits[position], rules).sparse()
            kept = p.at(q.token_ids)
            # Summed over the others, not one minus the kept: of a small rest no digit is lost.
            rest = p.probs[~torch.isin(p.token_ids, q.token_ids)].sum()
            nodes.append(
                LoggedNode(
                    text=text,
                    p=np.append(kept.cpu().numpy(), float(rest)),
                    q=np.append(q.probs.cpu().numpy(), 0.0),
                )
            )
        roots += [
            Root(text=text, token_ids=token_ids[: len(prompt) + position])
            for position in _spaced(len(starts), settings.roots_per_text)
        ]
    return LawLog(
        temperature=temperature, nodes=tuple(nodes), roots=tuple(roots), num_texts=len(prompt_ids)
    )


def draft_rules_of(temperature: float, settings: LogSettings) -> SamplingRules:
    """The draft law: the target's temperature, and the most probable tokens only."""
    return SamplingRules(temperature=temperature, top_k=settings.draft_top_k)


def seeded(*names: object) -> RequestDraws:
    """Draws that are a function of names: equal ones give equal draws, whatever else is run."""
    digest = hashlib.blake2b(repr(names).encode(), digest_size=8).digest()
    return RequestDraws(int.from_bytes(digest, "big"))


def _spaced(length: int, count: int) -> list[int]:
    """At most `count` positions of 0..length-1, evenly spaced from 0."""
    count = min(length, count)
    return [length * number // count for number in range(count)]
