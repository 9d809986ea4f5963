"""`monge audit`."""

import asyncio
import json
import logging
import math
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import typer

from monge.api import load as monge_load
from monge.audit.settings import AUDIT, AuditSettings
from monge.audit.situations import situations_named
from monge.cli import options
from monge.cli.console import plain_table, print_tables, show
from monge.cli.options import option, panel
from monge.cli.progress import working
from monge.core.errors import OptionError
from monge.core.extras import require
from monge.core.files import write_text
from monge.core.words import counted
from monge.options import OUTPUT, LoadOptions, ServeOptions, changed

if TYPE_CHECKING:
    from monge.audit.report import Report

_audit: Final = panel(AUDIT)
_PARTS: Final = ("drafter", "tree", "verifier", "controller")
_SAME_TYPE_TOLERANCE: Final = 0.05
"""Of an engine that runs in the type of the reference."""
_COLORS: Final = {"lossless": "green", "not lossless": "red", "could not be judged": "yellow"}


@options.command(only=(*_PARTS, "dtype", "device"), one=("controller",))
def audit(
    *,
    url: str | None = _audit(None, "Address of the audited server."),
    engine: str | None = _audit(
        None,
        "Audit an engine that runs here instead: transformers-assisted, transformers-lookup or "
        "monge, against plain decoding of --target.",
    ),
    reference_url: str | None = _audit(None, "The same model on a server without speculation."),
    target: str | None = _audit(
        None,
        "The target model, whose distributions are computed here; `built-in` is known.",
        "with --engine the built-in target",
    ),
    draft: str | None = _audit(
        None,
        "Draft model of an --engine, or of the server beside --target (`built-in` is known): a bet on "
        "rejected drafts finds faults sooner.",
        "with --engine the built-in draft, or none beside another --target",
    ),
    load: LoadOptions,
    model: str | None = _audit(None, "Model of the audited server.", "its first"),
    reference_model: str | None = _audit(None, "Model of the reference server.", "its first"),
    api_key: str | None = _audit(None, "Key of both servers.", envvar="MONGE_API_KEY"),
    eos: list[str] | None = _audit(
        None, "Token that ends a text, for a reference server; may be repeated.", "common names"
    ),
    situation: list[str] | None = _audit(
        None, "Situation to judge; may be repeated.", "all; docs/audit.md names them"
    ),
    settings: AuditSettings,
    html: Path | None = option(None, OUTPUT, "Write a page with plots."),
    as_json: options.Json = False,
    markdown: options.Markdown = False,
) -> None:
    """Test whether a server samples from the distribution of its target model.

    The server needs `/v1/completions` with `logprobs`. The exit status is 0 if it is lossless
    within the stated power, 1 if it is not, and 2 if it could not be judged. docs/audit.md explains
    the test.

    **Examples**

        monge audit --url http://localhost:8000/v1 --reference-url http://localhost:8001/v1
        monge audit --url http://localhost:8000/v1 --target ./model --budget 100000 --html audit.html
        monge audit --url http://localhost:8000/v1 --target built-in --quick
        monge audit --url http://localhost:8000/v1 --target ./model --draft ./small --situation structured
        monge audit --engine transformers-assisted --target ./model --draft ./small
        monge audit --engine monge --tree "fixed_width((2, 2), 'iid')" --verifier layer
    """
    loading = changed(load)
    parts = {name: loading.pop(name) for name in _PARTS if name in loading}
    if engine is None:
        _check_urls(url, reference_url, target, draft)
        if parts:
            raise OptionError("--drafter, --tree, --verifier and --controller need --engine")
    elif url or reference_url:
        raise OptionError("--engine starts what is audited; leave --url and --reference-url out")
    options.check_out_file(settings.log, "--log")
    options.check_out_file(html, "--html")
    require("audit", "monge audit")
    from monge.audit import gate
    from monge.audit.engines import check_engine
    from monge.audit.report import EXIT, page

    if engine is not None:
        check_engine(engine, parts)
    if situation:
        settings = replace(settings, situations=situations_named(situation))
    reference: dict[str, Any] = {"target": target or "built-in", "draft": draft, **loading}
    if reference_url is not None:
        reference = {"url": reference_url, "model": reference_model, "api_key": api_key}
    if engine is not None and settings.tolerance is None:
        settings = replace(settings, tolerance=_SAME_TYPE_TOLERANCE)

    async def run() -> Any:  # noqa: ANN401 (the report's room is imported late)
        async with AsyncExitStack() as stack:
            server: Any = {"url": url, "model": model, "api_key": api_key}
            if engine is not None:
                opening = _started(engine, target, draft, parts, loading)
                with working("loading the models"):
                    server = await stack.enter_async_context(opening)
            # With a limit of time the sampled texts end by the clock.
            seconds = None if settings.minutes is None else 60.0 * settings.minutes
            total = settings.num_tokens if seconds is None else None
            work = stack.enter_context(working())
            stage = work.stage("judging tokens", total, expected_s=seconds)

            def on_tokens(num_tokens: int, log_e: float) -> None:
                shown = "infinite" if math.isinf(log_e) else f"{log_e:.1f}"
                stage.rename(f"judging tokens, log e-value {shown}")
                stage.reach(num_tokens)

            known = {"eos": eos} if eos else {}
            return await gate.audited(server, reference, settings, on_tokens=on_tokens, **known)

    report: Report = asyncio.run(run())
    if html is not None:
        text = page(report, str(engine or url), gate.name_of(reference))
        write_text(html, text, "the page")
    if as_json:
        typer.echo(json.dumps(report.as_json()))
    else:
        _print(report, html, markdown=markdown)
    raise typer.Exit(EXIT[report.verdict])


@asynccontextmanager
async def _started(
    engine: str,
    target: str | None,
    draft: str | None,
    parts: dict[str, Any],
    loading: dict[str, Any],
) -> AsyncIterator[Any]:
    from monge.audit.engines import OURS, TransformersEngine

    if engine != OURS:
        yield TransformersEngine(engine, target, draft, **loading)
        return
    require("serve", f"monge audit --engine {OURS}")
    # `monge serve` in this process, without a socket and without a line of log for every request.
    import httpx

    from monge.audit.client import Client
    from monge.requests.chat_format import chat_format
    from monge.serve.http.app import create_app
    from monge.serve.observe.logs import REQUESTS

    # The law of the numbers themselves, as the reference's.
    decoder = monge_load(target, draft, **parts, **{"backend": "eager", **loading})
    decoder.chat_format = chat_format(decoder.tokenizer, "instruction")
    app = create_app(decoder, ServeOptions(served_model_name=OURS))
    client = Client(f"http://{OURS}", model=OURS, transport=httpx.ASGITransport(app=app))
    logging.getLogger(REQUESTS).setLevel(logging.WARNING)
    async with app.router.lifespan_context(app), client:
        yield client


def _check_urls(
    url: str | None, reference_url: str | None, target: str | None, draft: str | None
) -> None:
    if url is None:
        raise OptionError("name what is audited: --url, or --engine")
    if (reference_url is None) == (target is None):
        raise OptionError(
            "give either --reference-url or --target: probabilities of the audited server prove "
            "nothing"
        )
    if draft is not None and target is None:
        raise OptionError("--draft needs --engine or --target")
    if reference_url is not None and reference_url.rstrip("/") == url.rstrip("/"):
        raise OptionError(
            "--reference-url is the audited server; name a server without speculation"
        )


def _print(report: "Report", html: Path | None, *, markdown: bool) -> None:
    if report.situations:
        title = f"rejected at {math.log(1.0 / report.alpha):.1f}"
        table = plain_table(title, "situation", ("texts", "tokens", "log e-value"))
        table.add_column("finding")
        for situation in report.situations:
            counts = (str(situation.num_texts), str(situation.num_tokens))
            table.add_row(
                situation.name, *counts, f"{situation.log_e:.1f}", situation.finding or "-"
            )
        print_tables([table], markdown=markdown)
    first = report.deterministic
    if first is not None:
        greedy = f"{counted(first.num_greedy, 'greedy token')}, differing texts: {len(first.differences)}"
        differ = "-" if first.first_difference is None else f"{first.first_difference:.4f}"
        show(f"{greedy}; log-probabilities of first tokens differ by {differ} nats")
    for note in report.notes:
        show(f"note: {note}", "yellow")
    show(f"{report.verdict}: {report.reason}", f"bold {_COLORS[report.verdict]}")
    if html is not None:
        show(f"written to {html}", "dim")
