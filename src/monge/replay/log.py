"""A log of a run: texts, and the target's law at every position."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Bool, Float64, Int64
from torch import Tensor

from monge.core.draws import Draws
from monge.core.errors import MongeError, OptionError
from monge.core.law import Law, SparseLaw
from monge.core.prompt import PromptProfile
from monge.core.sampling_rules import SamplingRules


class ForeignLogError(MongeError, ValueError):
    """A log that was made with another model, tokenizer or vocabulary."""


class UnavailableError(MongeError, ValueError):
    """A question that a log cannot answer exactly."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelIdentity:
    """The network that wrote a log.

    Args:
        name: Folder or name, for people.
        vocab_size: Tokens that have a logit.
        network: Digest of architecture and weights; empty where it is not known.
        tokenizer: Digest of the tokenizer's vocabulary; empty where there was none.
    """

    name: str
    vocab_size: int
    network: str = ""
    tokenizer: str = ""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Masses:
    """Target laws along one text.

    Args:
        probs: Complete: mass of every token of the vocabulary. Compact: masses of `token_ids`.
        token_ids: Compact only: the most probable tokens of every law, increasing.
        committed: Compact only: mass of the committed token.
    """

    probs: Float64[Tensor, "seq support"]
    token_ids: Int64[Tensor, "seq support"] | None = None
    committed: Float64[Tensor, " seq"] | None = None

    def compact(self, top: int, committed_ids: tuple[int, ...]) -> "Masses":
        """Keep the `top` most probable tokens of every law, and the mass of the committed token."""
        if not 1 <= top < self.probs.shape[1] or self.token_ids is not None:
            raise OptionError(
                f"compact: need complete laws and 1 <= top < {self.probs.shape[1]} "
                f"tokens; got top={top}"
            )
        token_ids = torch.topk(self.probs, top, dim=1).indices.sort(dim=1).values
        committed = self.probs[torch.arange(len(committed_ids)), torch.tensor(committed_ids)]
        return Masses(
            probs=self.probs.gather(1, token_ids), token_ids=token_ids, committed=committed
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedToken:
    """The token that was committed after some prefix, and the target's law there.

    Args:
        token: The committed token.
        law: The target's law. In a compact log, all other tokens are one token, `other`.
        other: That token, outside of the vocabulary; `None` if the law is complete.
        scale: Factor of the target, for rules that look at whole chains.
    """

    token: int
    law: SparseLaw
    other: int | None = None
    scale: float = 1.0

    def covers(self, q: Law) -> bool:
        """Return whether the target's mass of every token of a draft law is known."""
        if self.other is None:
            return True
        return bool(self._is_logged(q.sparse()).all())

    def require(self, q: Law) -> None:
        """Raise `UnavailableError` if a draft law reaches beyond the logged tokens."""
        if not self.covers(q):
            part = q.sparse()
            missing = int((~self._is_logged(part)).sum())
            raise UnavailableError(
                "replay: this rule needs the target's mass of every token that can be drafted; the log "
                f"keeps {self.law.token_ids.numel() - 1} tokens of a law, and {missing} of "
                f"{part.token_ids.numel()} draftable ones are not among them; log complete laws (no "
                "--top), or compare rules that test one draw a node"
            )

    def rejected(self, q: Law, left: Law, draws: Draws) -> int:
        """Draw from q, given a rejection for the target `left`: from `(q - left)_+`, normalised.

        If a compact log does not cover q, another token of q is drawn; see `stands_in`.
        """
        if not self.covers(q):
            return draws.categorical(q.sparse().without(self.token) or q)
        # The excess is empty only by rounding: a law below the target is never rejected.
        return draws.categorical(q.sparse().excess_over(left) or q)

    def _is_logged(self, part: SparseLaw) -> Bool[Tensor, " support"]:
        return torch.isin(part.token_ids, self.law.token_ids)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LoggedText:
    """One request of a run.

    Args:
        tag: Kind of text, for tables.
        prompt_ids: Prompt.
        token_ids: What the target wrote, at least one token.
        max_new_tokens: Limit of the request: near it, drafts are cut short.
        masses: The target's laws, one for each token of `token_ids`.
        vocab_size: Of the target.
        profile: Text of the prompt and its surprisal under the target; `None` if not logged.
    """

    tag: str
    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    max_new_tokens: int
    masses: Masses
    vocab_size: int
    profile: PromptProfile | None = None
    all_ids: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "all_ids", (*self.prompt_ids, *self.token_ids))

    def logged_token(self, place: int, scale: float = 1.0) -> LoggedToken:
        """Return the logged token at `place` of the whole text."""
        row, token = place - len(self.prompt_ids), self.all_ids[place]
        masses = self.masses
        if masses.token_ids is None or masses.committed is None:
            law = masses.probs[row]
            ids = law.nonzero().squeeze(-1)
            return LoggedToken(token=token, law=SparseLaw(ids, law[ids]), scale=scale)
        ids, probs, other = masses.token_ids[row], masses.probs[row], self.vocab_size
        if not bool((ids == token).any()):
            ids, order = torch.cat([ids, ids.new_tensor([token])]).sort()
            probs = torch.cat([probs, masses.committed[row : row + 1]])[order]
        support = probs > 0.0
        rest = max(0.0, 1.0 - float(probs.sum()))
        ids, probs = ids[support], probs[support]
        if rest > 0.0:
            ids = torch.cat([ids, ids.new_tensor([other])])
            probs = torch.cat([probs, probs.new_tensor([rest])])
        law = SparseLaw(ids, probs / probs.sum())
        return LoggedToken(token=token, law=law, other=other, scale=scale)


@dataclass(frozen=True, slots=True, kw_only=True)
class LawLog:
    """The laws of a run.

    Args:
        model: Which target.
        rules: Sampling rules of the laws.
        texts: The requests.
        top: Tokens that a compact log keeps of a law; `None` for complete laws.
        costs: Measured times of the target's rounds and of drafters, see `monge.replay.costs`;
            empty where none were measured.
        about: Where the log comes from; for people.
    """

    model: ModelIdentity
    rules: SamplingRules
    texts: tuple[LoggedText, ...]
    top: int | None = None
    costs: Mapping[str, Any] = field(default_factory=dict)
    about: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.texts:
            raise OptionError("a log needs at least one text")

    @property
    def num_tokens(self) -> int:
        """Return the number of logged positions."""
        return sum(len(text.token_ids) for text in self.texts)

    @property
    def tags(self) -> tuple[str, ...]:
        """Return the kinds of texts, in order of appearance."""
        return tuple(dict.fromkeys(text.tag for text in self.texts))

    def check_model(self, other: ModelIdentity, whose: str) -> None:
        """Raise `ForeignLogError` if vocabulary, tokenizer or network differ; empty digests agree with all."""
        for name, key in (
            ("vocabulary size", "vocab_size"),
            ("tokenizer", "tokenizer"),
            ("network", "network"),
        ):
            logged, actual = getattr(self.model, key), getattr(other, key)
            if logged and actual and logged != actual:
                raise ForeignLogError(
                    f"the log was made with {self.model.name!r}, {name} {logged}; {whose} "
                    f"{other.name!r} has {actual}; log the texts again with `monge replay record`, or "
                    "replay with the models that the log was made for"
                )
