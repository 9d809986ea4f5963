"""`assert_lossless`: an audit as an assertion in tests, and what it shares with the command."""

import asyncio
import json
import math
import unittest
from collections.abc import Callable, Collection, Mapping
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, Literal

from monge.api import built_in, load
from monge.audit.client import Client, Server
from monge.audit.references import LocalReference, Reference, ServerReference
from monge.audit.report import Report, page
from monge.audit.run import audit, neutral_fields, probe
from monge.audit.settings import AuditSettings
from monge.audit.situations import Situation
from monge.audit.structured import structured_fields
from monge.core.errors import MongeError, OptionError
from monge.core.files import write_text
from monge.core.words import counted
from monge.requests.text import TOKEN_ID

EOS_NAMES: Final = (
    *("</s>", "<|endoftext|>", "<|im_end|>", "<|eot_id|>", "<|end_of_text|>"),
    *("<|end|>", "<eos>", "<end_of_turn>"),
)
LOCAL_TOLERANCE: Final = 0.25
"""Noise of a server in 16 bits, beside a local forward in another type."""

Place = str | Mapping[str, Any]


class InconclusiveError(MongeError, RuntimeError):
    """An audit that could not judge the server."""


def assert_lossless(
    server: Place | Server,
    reference: Place | Reference,
    *,
    budget: int | None = None,
    minutes: float | None = None,
    alpha: float = 0.001,
    tolerance: float | None = None,
    greedy_budget: int = 0,
    quick: bool = False,
    situations: tuple[Situation, ...] | None = None,
    eos: Collection[str] = EOS_NAMES,
    inconclusive: Literal["fail", "skip"] = "fail",
    out: str | Path | None = None,
) -> Report:
    """Assert that a server samples from the distribution of its target model.

    Use it in the test suite of an engine, with any test runner. It judges greedy and sampled texts
    as `monge audit` does.

    Args:
        server: Address of the audited server, or options of `Client` with their `url`.
        reference: Address of the same model without speculation, or options of `Client` with their
            `url`; or `{"target": "./model"}`, with further options of `monge.load`, to compute the
            distributions in this process. Its `draft`, the draft model of the server,
            adds a bet on rejected drafts, which finds faults sooner.
        budget: Sampled tokens to judge at most; by default 20,000, or 2,000 with `quick`, and no
            limit with `minutes`.
        minutes: Longest time for the sampled texts.
        alpha: Largest probability of a false alarm.
        tolerance: Smallest difference of two log-probabilities that counts in greedy texts, in
            nats; by default 0.05, and 0.25 with a `target`.
        greedy_budget: Least number of greedy tokens to compare; at least a text for each prompt is
            compared.
        quick: Judge four situations instead of twelve.
        situations: The situations, instead of those of the audit.
        eos: Names of tokens that end a text, for a reference server.
        inconclusive: Outcome if the server could not be judged: `fail` raises `InconclusiveError`, and
            `skip` skips the test.
        out: File for the report: a page if its name ends in `.html`, otherwise JSON.

    Returns:
        The report of a lossless server.

    Raises:
        AssertionError: If the server is not lossless. The message says what was found, where, the
            evidence, and the smallest deviation that this audit finds.
        InconclusiveError: If the server could not be judged.
        unittest.SkipTest: Likewise, with `inconclusive="skip"`. pytest shows a skipped test.
        ServerError: If a server cannot be reached or does not return what an audit needs.
        OptionError: If an option is out of its range.
    """
    if inconclusive not in {"fail", "skip"}:
        raise OptionError(f"inconclusive must be 'fail' or 'skip'; got {inconclusive!r}")
    settings = AuditSettings(
        budget=budget,
        minutes=minutes,
        alpha=alpha,
        tolerance=tolerance,
        greedy_budget=greedy_budget,
        quick=quick,
        situations=situations,
    )
    report = asyncio.run(audited(server, reference, settings, eos=eos))
    names = name_of(server), name_of(reference)
    if out is not None:
        is_page = Path(out).suffix == ".html"
        text = page(report, *names) if is_page else json.dumps(report.as_json())
        write_text(Path(out), text, "the report")
    text = f"{names[0]} against {names[1]}: {summary(report)}"
    if report.verdict == "not lossless":
        raise AssertionError(text)
    if report.verdict == "could not be judged":
        raise unittest.SkipTest(text) if inconclusive == "skip" else InconclusiveError(text)
    return report


async def audited(
    server: Place | Server,
    reference: Place | Reference,
    settings: AuditSettings,
    *,
    eos: Collection[str] = EOS_NAMES,
    on_tokens: Callable[[int, float], None] | None = None,
) -> Report:
    """Open the server and the reference, and judge the server. Arguments as for `assert_lossless`."""
    async with AsyncExitStack() as stack:
        if isinstance(server, str | Mapping):
            server = await stack.enter_async_context(Client(**_options(server)))
        prompts = settings.planned[0].prompts
        naming, neutral = await probe(server, prompts[0]), await neutral_fields(server, prompts[0])
        if isinstance(reference, Mapping) and "target" in reference:
            # The law of the numbers themselves, whatever the backend that a user would get.
            loading: dict[str, Any] = {"backend": "eager", **reference}
            target, draft = loading.pop("target"), loading.pop("draft", None)
            if settings.tolerance is None:
                settings = replace(settings, tolerance=LOCAL_TOLERANCE)
            decoder = load(target, drafter="none", **loading)
            small = built_in("draft") if draft == "built-in" else draft
            reference = LocalReference(
                decoder.components.target,
                decoder.tokenizer,
                decoder.eos_ids,
                by_id=naming == "ids",
                draft=small and load(small, drafter="none", **loading).components.target,
            )
        elif isinstance(reference, str | Mapping):
            twin = await stack.enter_async_context(Client(**_options(reference)))
            names = frozenset(eos)
            if naming == "ids" and not all(name.startswith(TOKEN_ID) for name in names):
                naming = "names"  # the id of the end of text is unknown
            reference = ServerReference(twin, eos_names=names, by_id=naming == "ids")
        structured = dict[str, Any]()
        if any(situation.is_structured for situation in settings.planned) and not isinstance(
            reference, ServerReference
        ):
            structured = await structured_fields(server, prompts)
        settings = replace(settings, naming=naming, neutral=neutral, structured=structured)
        return await audit(server, reference, settings, on_tokens=on_tokens)


def name_of(place: object) -> str:
    """Return the name of a server or a reference, for reports."""
    if isinstance(place, Mapping):
        return str(place.get("url", place.get("target")))
    if isinstance(place, str):
        return place
    return place.url if isinstance(place, Server) else "the reference"


def summary(report: Report) -> str:
    """Return a report in a few lines: finding, situations, evidence and power."""
    bound = math.log(1.0 / report.alpha)
    lines = [
        f"{report.verdict}: {report.reason}",
        f"{counted(report.num_tokens, 'sampled token')} judged, log e-value {report.log_e:.1f} "
        f"(rejected at {bound:.1f}, alpha {report.alpha:g})",
    ]
    lines += [
        f"situation {result.name!r}: log e-value {result.log_e:.1f}, {result.finding}"
        for result in report.situations
        if result.finding is not None
    ]
    if report.num_tokens:
        lines.append(
            f"this many tokens show a mean total variation of {report.smallest_deviation:.3f} "
            "with probability 0.9"
        )
    return "\n  ".join([*lines, *(f"note: {note}" for note in report.notes)])


def _options(place: Place) -> dict[str, Any]:
    if isinstance(place, str):
        return {"url": place}
    if "url" not in place:
        raise OptionError(
            f"{sorted(place)} name no server; give its `url`, or for a reference a `target`"
        )
    return dict(place)
