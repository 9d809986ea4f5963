"""From measured peers to numbers and a table."""

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from rich.box import SIMPLE_HEAD
from rich.table import Table

from lab.peers.engines import OURS, REFERENCE, Settings
from monge.bench.statistics import RepeatSummary, is_degenerate

PROMPT_LENGTHS: Final = (128, 512, 2000)
"""Tokens of the prompts whose reading is timed."""


@dataclass(slots=True, kw_only=True)
class PeerArm:
    """One way of decoding at one temperature.

    Args:
        peer: The engine.
        method: Its way of decoding.
        temperature: 0 is greedy.
        settings: The best settings found.
        version: Version of the engine.
        tried: Settings and what they reached, tokens per second, or why there is nothing.
        tokens_per_s: Of every repeat: all tokens / all seconds.
        completions: New tokens of every prompt and repeat.
        facts: Memory, seconds to first tokens, and perplexity, if measured.
        failure: Why there are no numbers.
    """

    peer: str
    method: str
    temperature: float
    settings: Settings = field(default_factory=dict[str, Any])
    version: str | None = None
    tried: list[dict[str, Any]] = field(default_factory=list)
    tokens_per_s: list[float] = field(default_factory=list)
    completions: list[tuple[int, ...]] = field(default_factory=list)
    facts: dict[str, float] = field(default_factory=dict[str, float])
    failure: str | None = None

    @property
    def name(self) -> str:
        """Name in tables."""
        return f"{self.peer} {self.method}"


def headline(arms: Sequence[PeerArm], temperature: float) -> dict[str, Any]:
    """Our fastest arm against the reference's plain decoding and against the fastest arm of any other engine."""
    shown = [arm for arm in arms if arm.temperature == temperature and arm.failure is None]

    def best(chosen: Iterator[PeerArm]) -> PeerArm | None:
        return max(chosen, key=lambda arm: statistics.median(arm.tokens_per_s), default=None)

    ours = best(arm for arm in shown if arm.peer == OURS)
    plain = best(arm for arm in shown if arm.name == f"{REFERENCE} plain")
    other = best(arm for arm in shown if arm.peer != OURS)
    return {
        "ours": None if ours is None else ours.name,
        "best_peer": None if other is None else other.name,
        "over_transformers_plain": _ratio(ours, plain),
        "over_best_peer": _ratio(ours, other),
    }


def _ratio(ours: PeerArm | None, theirs: PeerArm | None) -> float | None:
    """Median over the repeats of the ratio within each."""
    if ours is None or theirs is None:
        return None
    return statistics.median(
        top / bottom for top, bottom in zip(ours.tokens_per_s, theirs.tokens_per_s, strict=True)
    )


def arm_record(arm: PeerArm, arms: Sequence[PeerArm]) -> dict[str, Any]:
    """Everything about one arm, as plain values; a failed one has no numbers."""
    record: dict[str, Any] = {
        "arm": arm.name,
        "peer": arm.peer,
        "method": arm.method,
        "version": arm.version,
        "temperature": arm.temperature,
        "settings": dict(arm.settings),
        "tried": arm.tried,
        "facts": arm.facts,
        "failure": arm.failure,
    }
    if arm.failure is not None:
        return record
    plain = next(
        (
            other
            for other in arms
            if (other.name, other.temperature, other.failure)
            == (f"{REFERENCE} plain", arm.temperature, None)
        ),
        None,
    )
    same = None
    if plain is not None and arm.temperature == 0:
        pairs = zip(arm.completions, plain.completions, strict=True)
        same = statistics.fmean(ours == theirs for ours, theirs in pairs)
    return record | {
        "tokens_per_s": asdict(RepeatSummary.of(arm.tokens_per_s)),
        "ratio_to_plain": _ratio(arm, plain),
        "same_as_plain_share": same,
        "degenerate_share": statistics.fmean(
            is_degenerate(completion) for completion in arm.completions
        ),
    }


def peer_table(records: Sequence[dict[str, Any]], title: str) -> Table:
    """Arms of one temperature, the fastest first; those without numbers last."""
    table = Table(title=title, box=SIMPLE_HEAD, title_justify="left", caption_justify="left")
    for name in ("arm", "settings", "tokens/s", "range", "x plain", "same text", "loops"):
        table.add_column(name, justify="left" if name in {"arm", "settings"} else "right")
    shown = sorted(
        (record for record in records if record["failure"] is None),
        key=lambda record: -_median(record),
    )
    for record in shown:
        speed, same = record["tokens_per_s"], record["same_as_plain_share"]
        table.add_row(
            record["arm"],
            ", ".join(f"{name}={value}" for name, value in record["settings"].items()),
            f"{speed['median']:.1f}",
            f"{speed['low']:.0f}-{speed['high']:.0f}",
            "" if record["ratio_to_plain"] is None else f"{record['ratio_to_plain']:.2f}",
            "" if same is None else f"{same:.0%}",
            f"{record['degenerate_share']:.0%}",
        )
    for record in records:
        if record["failure"] is not None:
            table.add_row(record["arm"], "", "failed", "", "", "", "")
    return table


def facts_table(records: Sequence[dict[str, Any]]) -> Table:
    """What a second start takes, and how well engines predict the same text."""
    table = Table(box=SIMPLE_HEAD)
    lengths = sorted(
        {
            length
            for record in records
            for length in PROMPT_LENGTHS
            if read_fact(length) in record["facts"]
        }
    )
    names = (
        *("peak memory, MiB", "start to first token, s", "later first token, ms", "perplexity"),
        *(f"reads {length}, tokens/s" for length in lengths),
    )
    for name in ("arm", *names):
        table.add_column(name, justify="left" if name == "arm" else "right")
    for record in records:
        if facts := record["facts"]:
            perplexity = facts.get("perplexity")
            table.add_row(
                record["arm"],
                f"{facts['peak_bytes'] / 2**20:.0f}",
                f"{facts['start_s']:.1f}",
                f"{1e3 * facts['first_token_s']:.0f}",
                "" if perplexity is None else f"{perplexity:.4f}",
                *(
                    f"{facts[read_fact(length)]:.0f}" if read_fact(length) in facts else ""
                    for length in lengths
                ),
            )
    return table


def read_fact(length: int) -> str:
    """Name of the fact of prompts of a length."""
    return f"read_{length}_per_s"


def _median(record: dict[str, Any]) -> float:
    return float(record["tokens_per_s"]["median"])
