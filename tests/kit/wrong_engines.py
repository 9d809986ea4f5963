"""Small engines that decode a table speculatively.

One is exact, the others have faults that real engines had.

Each is a rule of a few lines. p = target law, q = draft law, x = drafted token.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final, Protocol, runtime_checkable

import numpy as np

from monge.core.sampling_rules import SamplingRules
from monge.laws.draws import Draws, SeededDraws
from monge.oracle.tabular import LawTable, RandomTable

VOCAB: Final = 13
END: Final = 0
_ORDER: Final = 3  # tokens on which a law depends: few laws, made once
_NO_RULES: Final = SamplingRules()

Text = tuple[int, ...]
Probs = np.ndarray
Rule = Callable[[Probs, Probs, int, Draws], int]
"""`(p, q, x, draws) -> token`: x itself where it is accepted."""


class ToyTable:
    """Laws of the next token after the last three: a `LawTable` with few ends of text.

    Args:
        seed: Tables of different seeds are unrelated.
        blend: Weight of the table of seed 0, which makes a draft model resemble its target.
    """

    def __init__(self, seed: int, blend: float = 0.0) -> None:
        self._own, self._other, self._blend = RandomTable(VOCAB, seed), RandomTable(VOCAB, 0), blend
        self._made: dict[Text, list[float]] = {}

    def __call__(self, token_ids: Text) -> Sequence[float]:
        context = token_ids[-_ORDER:]
        if context not in self._made:
            masses = (1 - self._blend) * np.array(self._own(context)) + self._blend * np.array(
                self._other(context)
            )
            masses = masses**2
            masses[END] = 0.03 * masses.sum()
            self._made[context] = (masses / masses.sum()).tolist()
        return self._made[context]


class UnigramTable:
    """One law after every text, far from uniform: a drafter that does not look at the text.

    Args:
        seed: Of the law.
    """

    def __init__(self, seed: int) -> None:
        masses = np.array(RandomTable(VOCAB, seed)((1,))) ** 3
        self._masses: list[float] = (masses / masses.sum()).tolist()

    def __call__(self, token_ids: Text) -> Sequence[float]:
        return self._masses


@dataclass(frozen=True, slots=True)
class StructuredTable:
    """A table under the regex of an audit: e to h not at even places, i to l not at odd ones.

    Args:
        table: The table without a grammar.
        start: Tokens of the prompt.
    """

    table: LawTable
    start: int

    def __call__(self, token_ids: Text) -> Sequence[float]:
        is_odd = (len(token_ids) - self.start) % 2
        forbidden = {9, 10, 11, 12, END} if is_odd else {5, 6, 7, 8}
        masses = enumerate(self.table(token_ids))
        return [0.0 if token in forbidden else mass for token, mass in masses]


@runtime_checkable
class Engine(Protocol):
    """Writes a text."""

    def generate(
        self, prompt: Text, rules: SamplingRules, max_tokens: int, draws: Draws, *, num_at_once: int
    ) -> list[int]:
        """Tokens after a prompt, up to an end of text or `max_tokens`; `num_at_once` requests are in work."""
        ...


def speculative_sampling(p: Probs, q: Probs, x: int, draws: Draws) -> int:
    """The exact rule."""
    return x if draws.uniform() * q[x] < p[x] else _drawn(_excess(p, q), draws)


def _uniform_reused(p: Probs, q: Probs, x: int, draws: Draws) -> int:
    uniform = draws.uniform()
    return x if uniform * q[x] < p[x] else _at(_excess(p, q), uniform)


def _target_after_rejection(p: Probs, q: Probs, x: int, draws: Draws) -> int:
    return x if draws.uniform() * q[x] < p[x] else _drawn(p, draws)


def _zeroed_out(p: Probs, q: Probs, x: int, draws: Draws) -> int:
    if draws.uniform() * q[x] < p[x]:
        return x
    left = p.copy()
    left[x] = 0.0
    return _drawn(left, draws)


def _ratio_to_largest(p: Probs, q: Probs, x: int, draws: Draws) -> int:
    return x if draws.uniform() * p.max() < p[x] else _drawn(_excess(p, q), draws)


def _always_accepted(p: Probs, q: Probs, x: int, draws: Draws) -> int:
    return x


def _typical(p: Probs, q: Probs, x: int, draws: Draws) -> int:
    return x if p[x] > 0.1 else _drawn(p, draws)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainEngine:
    """Drafts chains of three tokens and verifies them token by token. The defaults are exact.

    Args:
        rule: What decides about a drafted token.
        drafts_greedily: Draft the most probable token, and declare q nevertheless.
        reuses_noise: Draw the correction token with the draft token's Gumbel noise.
        declares_raw_law: Verify with the draft law before sampling rules.
        bonus_from_parent: Draw the bonus token from the law one token earlier.
        temperature_power: Applied to the temperature of the target.
        ignores: Sampling rules that the target ignores.
        mixes_crowds: With other requests in work, read the law of another text at every eighth
            position.
        skips_end: Drop drafted ends of text that are accepted.
        drops_forbidden: Drop drafted tokens that the grammar of the request forbids, and draw the
            position from the target law.
    """

    rule: Rule = speculative_sampling
    drafts_greedily: bool = False
    reuses_noise: bool = False
    declares_raw_law: bool = False
    bonus_from_parent: bool = False
    temperature_power: float = 1.0
    ignores: frozenset[str] = frozenset()
    mixes_crowds: bool = False
    skips_end: bool = False
    drops_forbidden: bool = False
    target: LawTable = field(default_factory=lambda: TARGET)
    draft: LawTable = field(default_factory=lambda: DRAFT)

    def generate(
        self, prompt: Text, rules: SamplingRules, max_tokens: int, draws: Draws, *, num_at_once: int
    ) -> list[int]:
        given = {"top_k": rules.top_k, "top_p": rules.top_p} | dict.fromkeys(
            self.ignores & {"top_k"}, None
        )
        given |= dict.fromkeys(self.ignores & {"top_p"}, 1.0)
        applied = SamplingRules(temperature=rules.temperature**self.temperature_power, **given)  # type: ignore[arg-type]
        text = list(prompt)

        def target_law() -> Probs:
            mixed = self.mixes_crowds and num_at_once > 1 and len(text) % 8 == 0
            return law(self.target, (*text[:-1], 1) if mixed else tuple(text), applied)

        text.append(_drawn(target_law(), draws))  # the prefill's own token, as in most engines
        while len(text) < len(prompt) + max_tokens and text[-1] != END:
            p = np.zeros(VOCAB)
            for _ in range(3):
                p, q = target_law(), law(self.draft, tuple(text), rules)
                noise = -np.log(-np.log([draws.uniform() for _ in range(VOCAB)]))
                with np.errstate(divide="ignore"):
                    x = int(q.argmax() if self.drafts_greedily else (np.log(q) + noise).argmax())
                    declared = (
                        law(self.draft, tuple(text), _NO_RULES) if self.declares_raw_law else q
                    )
                    token = self.rule(p, declared, x, draws)
                    if self.drops_forbidden and self.target(tuple(text))[x] == 0.0:
                        token = _drawn(p, draws)
                    if token != x and self.reuses_noise:
                        token = int((np.log(_excess(p, q)) + noise).argmax())
                if not (token == x == END and self.skips_end):
                    text.append(token)
                if token != x or text[-1] == END:
                    break
            else:
                text.append(_drawn(p if self.bonus_from_parent else target_law(), draws))
        return text[len(prompt) : len(prompt) + max_tokens]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainEngine:
    """Decodes token by token.

    Args:
        is_greedy: Take the most probable token, whatever was asked for.
        num_bits: Mantissa bits to which logits are rounded, as in a 16-bit forward.
        reads_stale_prefix: For a prompt that begins as an earlier one, read the first law without
            the last prompt token.
        stays_at_one_seed: Give all requests the same random numbers.
    """

    is_greedy: bool = False
    num_bits: int | None = None
    reads_stale_prefix: bool = False
    stays_at_one_seed: bool = False
    target: LawTable = field(default_factory=lambda: TARGET)
    _seen: dict[Text, Text] = field(default_factory=dict[Text, Text])

    def generate(
        self, prompt: Text, rules: SamplingRules, max_tokens: int, draws: Draws, *, num_at_once: int
    ) -> list[int]:
        draws = SeededDraws(7) if self.stays_at_one_seed else draws
        is_stale = self.reads_stale_prefix and self._seen.get(prompt[:2], prompt) != prompt
        self._seen[prompt[:2]] = prompt
        text = list(prompt)
        while len(text) < len(prompt) + max_tokens and text[-1] != END:
            read = text[:-1] if is_stale and len(text) == len(prompt) else text
            p = law(self.target, tuple(read), rules, self.num_bits)
            text.append(int(p.argmax()) if self.is_greedy else _drawn(p, draws))
        return text[len(prompt) :]


def law(table: LawTable, text: Text, rules: SamplingRules, num_bits: int | None = None) -> Probs:
    """Masses of the next token under sampling rules."""
    masses = np.array(table(text))
    is_admitted = masses > 0  # a grammar forbids the others
    logits = np.log(masses, where=is_admitted, out=np.full(len(masses), -np.inf))
    if num_bits is not None:
        finite = logits[is_admitted]
        scale = 2.0 ** (num_bits - np.floor(np.log2(np.abs(finite))))
        logits[is_admitted] = np.round(finite * scale) / scale
    if rules.temperature == 0:
        return np.eye(len(logits))[logits.argmax()]
    probs = np.exp((logits - logits.max()) / rules.temperature)
    order = np.argsort(-probs, kind="stable")
    if rules.top_k is not None:
        probs[order[rules.top_k :]] = 0.0
    probs /= probs.sum()
    before = probs[order].cumsum() - probs[order]
    probs[order[before >= rules.top_p]] = 0.0
    return probs / probs.sum()


def _excess(p: Probs, q: Probs) -> Probs:
    excess = np.maximum(p - q, 0.0)
    return excess if excess.sum() > 0 else p


def _drawn(masses: Probs, draws: Draws) -> int:
    return _at(masses, draws.uniform())


def _at(masses: Probs, uniform: float) -> int:
    cumulative = masses.cumsum()
    return int(np.searchsorted(cumulative, uniform * cumulative[-1], side="right"))


TARGET: Final = ToyTable(0)
DRAFT: Final = ToyTable(1, blend=0.3)

WRONG_ENGINES: Final[Mapping[str, Engine]] = MappingProxyType(
    {
        "draft noise reused for the correction token": ChainEngine(
            reuses_noise=True, draft=UnigramTable(1)
        ),
        "acceptance uniform reused in the residual draw": ChainEngine(rule=_uniform_reused),
        "draft law declared before sampling rules": ChainEngine(declares_raw_law=True),
        "ratio to the largest mass instead of p / q": ChainEngine(rule=_ratio_to_largest),
        "most probable draft declared as a draw": ChainEngine(drafts_greedily=True),
        "sampled requests decoded greedily": PlainEngine(is_greedy=True),
        "wrong text only with several requests at once": ChainEngine(mixes_crowds=True),
        "stale prefix cache": PlainEngine(reads_stale_prefix=True),
        "target law after a rejection": ChainEngine(rule=_target_after_rejection),
        "rejected token zeroed out": ChainEngine(rule=_zeroed_out),
        "bonus token from the parent": ChainEngine(bonus_from_parent=True),
        "every draft accepted": ChainEngine(rule=_always_accepted),
        "typical acceptance": ChainEngine(rule=_typical),
        "temperature applied twice": ChainEngine(temperature_power=2.0),
        "top-k ignored": ChainEngine(ignores=frozenset({"top_k"})),
        "top-p ignored": ChainEngine(ignores=frozenset({"top_p"})),
        "one seed for all requests": PlainEngine(stays_at_one_seed=True),
        "drafted end of text skipped": ChainEngine(skips_end=True),
        "forbidden drafts dropped": ChainEngine(drops_forbidden=True, draft=UnigramTable(1)),
    }
)
"""Engines that every audit must reject."""

EXACT_ENGINES: Final[Mapping[str, Engine]] = MappingProxyType(
    {
        "plain": PlainEngine(),
        "single draft": ChainEngine(),
        "logits rounded as in bfloat16": PlainEngine(num_bits=8),
    }
)
"""Engines that no audit may reject. The engine of this library joins them in the tests."""
