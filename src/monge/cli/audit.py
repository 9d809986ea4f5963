"""`monge audit`."""

import asyncio
import json
import math
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from monge.api import load as monge_load
from monge.cli import options
from monge.cli.console import output, quiet_host, reported
from monge.cli.out import check_out_file
from monge.cli.progress import working
from monge.cli.tables import plain_table, print_tables
from monge.core.errors import OptionError
from monge.core.extras import require
from monge.core.words import counted
from monge.engine.decoder import Decoder
from monge.options import LoadOptions, changed

if TYPE_CHECKING:
    from monge.audit.client import Client
    from monge.audit.report import Report

AUDIT = "Audit"
_PARTS = ("drafter", "tree", "verifier", "controller")
_SAME_TYPE_TOLERANCE = 0.05
"""Of an engine that runs in the type of the reference."""
Url = Annotated[
    str | None, options.option("--url", help="Address of the audited server.", panel=AUDIT)
]
Engine = Annotated[
    str | None,
    options.option(
        "--engine",
        help="Audit an engine that runs here instead: transformers-assisted, transformers-lookup "
        "or monge, against plain decoding of --target.",
        panel=AUDIT,
    ),
]
ReferenceUrl = Annotated[
    str | None,
    options.option(
        "--reference-url", help="The same model on a server without speculation.", panel=AUDIT
    ),
]
Target = Annotated[
    str | None,
    options.option(
        "--target",
        help="The target model, whose distributions are computed here; `built-in` is known.",
        panel=AUDIT,
        default="with --engine the built-in target",
    ),
]
Draft = Annotated[
    str | None,
    options.option(
        "--draft",
        help="Draft model of an --engine.",
        panel=AUDIT,
        default="the built-in draft, or none beside another --target",
    ),
]
Model = Annotated[
    str | None,
    options.option(
        "--model", help="Model of the audited server.", panel=AUDIT, default="its first"
    ),
]
ReferenceModel = Annotated[
    str | None,
    options.option(
        "--reference-model", help="Model of the reference server.", panel=AUDIT, default="its first"
    ),
]
ApiKey = Annotated[
    str | None,
    typer.Option(
        "--api-key", envvar="MONGE_API_KEY", help="Key of both servers.", rich_help_panel=AUDIT
    ),
]
Eos = Annotated[
    list[str] | None,
    options.option(
        "--eos",
        help="Token that ends a text, for a reference server; may be repeated.",
        panel=AUDIT,
        default="common names",
    ),
]
Budget = Annotated[
    int | None,
    options.option(
        "--budget", help="Sampled tokens to judge at most.", panel=AUDIT, default="20000"
    ),
]
GreedyBudget = Annotated[
    int | None,
    options.option(
        "--greedy-budget",
        help="Greedy tokens to compare at least.",
        panel=AUDIT,
        default="one text for each prompt",
    ),
]
Minutes = Annotated[
    float | None,
    options.option(
        "--minutes",
        help="Longest time for the sampled texts.",
        panel=AUDIT,
        default="no limit",
    ),
]
Quick = Annotated[
    bool, typer.Option("--quick", help="Four situations and 2,000 tokens.", rich_help_panel=AUDIT)
]
Alpha = Annotated[
    float | None,
    options.option(
        "--alpha", help="Largest probability of a false alarm.", panel=AUDIT, default="0.001"
    ),
]
Tolerance = Annotated[
    float | None,
    options.option(
        "--tolerance",
        help="Smallest difference of log-probabilities that counts in greedy texts.",
        panel=AUDIT,
        default="0.05 nats, and 0.25 with --url and --target",
    ),
]
Log = Annotated[
    Path | None,
    options.option(
        "--log", help="JSONL file of all texts; an existing one is continued.", panel=options.OUTPUT
    ),
]
Html = Annotated[
    Path | None, options.option("--html", help="Write a page with plots.", panel=options.OUTPUT)
]


@reported
@options.command(only=(*_PARTS, "dtype", "device"), one=("controller",))
def audit(
    url: Url = None,
    *,
    engine: Engine = None,
    reference_url: ReferenceUrl = None,
    target: Target = None,
    draft: Draft = None,
    load: LoadOptions,
    model: Model = None,
    reference_model: ReferenceModel = None,
    api_key: ApiKey = None,
    eos: Eos = None,
    budget: Budget = None,
    greedy_budget: GreedyBudget = None,
    minutes: Minutes = None,
    quick: Quick = False,
    alpha: Alpha = None,
    tolerance: Tolerance = None,
    log: Log = None,
    html: Html = None,
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
        monge audit --engine transformers-assisted --target ./model --draft ./small
        monge audit --engine monge --tree "fixed_width((2, 2), 'iid')" --verifier layer
    """
    given = changed(load)
    parts = {name: given.pop(name) for name in _PARTS if name in given}
    loading = given
    if engine is not None:
        _check_engine(engine, parts, url=url, reference_url=reference_url)
    else:
        _check_urls(url, reference_url, target)
        if parts or draft is not None:
            raise OptionError(
                "--draft, --drafter, --tree, --verifier and --controller need --engine"
            )
    options.check_positive(budget=budget, greedy_budget=greedy_budget)
    if alpha is not None and not 0 < alpha < 1:
        raise OptionError(f"--alpha must lie between 0 and 1; got {alpha}")
    for file in (log, html):
        if file is not None:
            check_out_file(file)
    gate = _audit_room()
    reference: dict[str, Any] = {"target": target or "built-in", **loading}
    if reference_url is not None:
        reference = {"url": reference_url, "model": reference_model, "api_key": api_key}
    given = options.given(
        budget=budget, greedy_budget=greedy_budget, alpha=alpha, tolerance=tolerance, log=log
    )
    if engine is not None:
        given = {"tolerance": _SAME_TYPE_TOLERANCE} | given
    settings = gate.settings_of(reference, given, quick=quick, minutes=minutes)

    async def run() -> Any:  # noqa: ANN401 (the report's room is imported late)
        async with _opened(engine, target, draft, parts, loading) as started:
            server = started or {"url": url, "model": model, "api_key": api_key}
            with _progress(settings) as on_tokens:
                known = {"eos": eos} if eos else {}
                return await gate.audited(server, reference, settings, on_tokens=on_tokens, **known)

    report: Report = asyncio.run(run())
    if html is not None:
        from monge.audit.report import page

        html.write_text(page(report, str(engine or url), gate.name_of(reference)))
    if as_json:
        typer.echo(json.dumps(report.as_json()))
    else:
        _print(report, html, markdown=markdown)
    from monge.audit.report import EXIT

    raise typer.Exit(EXIT[report.verdict])


def _check_engine(
    engine: str, parts: dict[str, Any], *, url: str | None, reference_url: str | None
) -> None:
    _audit_room()
    from monge.audit.engines import OURS, check_engine

    check_engine(engine)
    if engine == OURS:
        require("serve", f"monge audit --engine {OURS}")
    if url is not None or reference_url is not None:
        raise OptionError("--engine starts what is audited; leave --url and --reference-url out")
    if parts and engine != OURS:
        raise OptionError(
            "--drafter, --tree, --verifier and --controller are options of --engine monge"
        )


def _check_urls(url: str | None, reference_url: str | None, target: str | None) -> None:
    if url is None:
        raise OptionError("name what is audited: --url, or --engine")
    if (reference_url is None) == (target is None):
        raise OptionError(
            "give either --reference-url or --target: probabilities of the audited "
            "server prove nothing"
        )
    if reference_url is not None and reference_url.rstrip("/") == url.rstrip("/"):
        raise OptionError(
            "--reference-url is the audited server; name a server without speculation"
        )


def _audit_room() -> ModuleType:
    quiet_host()
    require("audit", "monge audit")
    from monge.audit import gate

    return gate


@asynccontextmanager
async def _opened(
    engine: str | None,
    target: str | None,
    draft: str | None,
    parts: dict[str, Any],
    loading: dict[str, Any],
) -> AsyncIterator[Any]:
    """The engine that was named; `None` if there is none."""
    from monge.audit.engines import OURS, TransformersEngine

    source = None if target == "built-in" else target
    if engine is None:
        yield None
    elif engine != OURS:
        yield TransformersEngine(engine, source, draft, **loading)
    else:
        with working("loading the models"):
            decoder = monge_load(source, draft, **parts, **loading)
        async with our_server(decoder) as client:
            yield client


@asynccontextmanager
async def our_server(decoder: Decoder) -> AsyncIterator["Client"]:
    """A client of `monge serve` in this process, without a socket."""
    import httpx

    from monge.audit.client import Client
    from monge.serve.launch import ServerSettings, chat_format, create_app

    app = create_app(
        decoder, ServerSettings(model_name="monge"), chat_format(decoder.tokenizer, "instruction")
    )
    async with app.router.lifespan_context(app):
        client = Client("http://monge", model="monge", transport=httpx.ASGITransport(app=app))
        async with client:
            yield client


@contextmanager
def _progress(settings: Any) -> Iterator[Callable[[int, float], None]]:  # noqa: ANN401 (its room is imported late)
    with working() as work:
        # With a limit of time the sampled texts end by the clock.
        total = settings.budget if settings.seconds is None else None
        stage = work.stage("judging tokens", total, expected_s=settings.seconds)

        def on_tokens(num_tokens: int, log_e: float) -> None:
            shown = "infinite" if math.isinf(log_e) else f"{log_e:.1f}"
            stage.rename(f"judging tokens, log e-value {shown}")
            stage.reach(num_tokens)

        yield on_tokens


def _print(report: "Report", html: Path | None, *, markdown: bool) -> None:
    console = output()
    if report.situations:
        bound = math.log(1.0 / report.alpha)
        columns = ("texts", "tokens", "log e-value")
        table = plain_table(f"rejected at {bound:.1f}", "situation", columns)
        table.add_column("finding")
        for one in report.situations:
            table.add_row(
                one.name,
                str(one.num_texts),
                str(one.num_tokens),
                f"{one.log_e:.1f}",
                one.finding or "-",
            )
        print_tables([table], markdown=markdown)
    first = report.deterministic
    if first is not None:
        agree = f"{counted(first.num_greedy, 'greedy token')}, differing texts: {len(first.differences)}"
        differ = "-" if first.first_difference is None else f"{first.first_difference:.4f}"
        console.print(
            f"{agree}; log-probabilities of first tokens differ by {differ} nats",
            markup=False,
            soft_wrap=True,
        )
    for note in report.notes:
        console.print(f"note: {note}", style="yellow", markup=False, soft_wrap=True)
    color = {"lossless": "green", "not lossless": "red", "could not be judged": "yellow"}[
        report.verdict
    ]
    console.print(
        f"{report.verdict}: {report.reason}", style=f"bold {color}", markup=False, soft_wrap=True
    )
    if html is not None:
        console.print(f"written to {html}", style="dim", markup=False)
