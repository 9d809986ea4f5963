"""`monge audit`."""

import asyncio
import json
import math
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from monge.api import load
from monge.cli import options
from monge.cli.console import notes, output, quiet_host, reported
from monge.cli.out import check_out_file
from monge.core.errors import OptionError

if TYPE_CHECKING:
    from monge.audit.report import Report

AUDIT = "Audit"
Url = Annotated[
    str, typer.Option("--url", help="Address of the audited server.", rich_help_panel=AUDIT)
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
        default="0.05 nats, and 0.25 with --target",
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

_EOS_NAMES = (
    "</s>",
    "<|endoftext|>",
    "<|im_end|>",
    "<|eot_id|>",
    "<|end_of_text|>",
    "<|end|>",
    "<eos>",
    "<end_of_turn>",
)
_LOCAL_TOLERANCE = 0.25
"""The server may run in 16 bits, whose noise reaches this size.

The local forward runs in the type of `--dtype`.
"""


@reported
def audit(
    url: Url,
    *,
    reference_url: ReferenceUrl = None,
    target: Target = None,
    model: Model = None,
    reference_model: ReferenceModel = None,
    api_key: ApiKey = None,
    eos: Eos = None,
    budget: Budget = None,
    quick: Quick = False,
    alpha: Alpha = None,
    tolerance: Tolerance = None,
    dtype: options.Dtype = None,
    device: options.Device = None,
    log: Log = None,
    html: Html = None,
    as_json: options.Json = False,
) -> None:
    """Test whether a server samples from the distribution of its target model.

    The server needs `/v1/completions` with `logprobs`. The exit status is 0 if it is lossless
    within the stated power, 1 if it is not, and 2 if it could not be judged. docs/audit.md explains
    the test.

    **Examples**

        monge audit --url http://localhost:8000/v1 --reference-url http://localhost:8001/v1
        monge audit --url http://localhost:8000/v1 --target ./model --budget 100000 --html audit.html
        monge audit --url http://localhost:8000/v1 --target built-in --quick
    """
    if (reference_url is None) == (target is None):
        raise OptionError(
            "give either --reference-url or --target: probabilities of the audited "
            "server prove nothing"
        )
    if reference_url is not None and reference_url.rstrip("/") == url.rstrip("/"):
        raise OptionError(
            "--reference-url is the audited server; name a server without speculation"
        )
    options.check_positive(budget=budget)
    if alpha is not None and not 0 < alpha < 1:
        raise OptionError(f"--alpha must lie between 0 and 1; got {alpha}")
    for file in (log, html):
        if file is not None:
            check_out_file(file)
    run = _audit_room()
    given = options.given(budget=budget, alpha=alpha, tolerance=tolerance, log=log)
    if quick:
        given = {"budget": run.QUICK_BUDGET, "played": run.situations(is_quick=True)} | given
    if target is not None:
        given = {"tolerance": _LOCAL_TOLERANCE} | given
    sources = {
        "model": model,
        "reference_url": reference_url,
        "reference_model": reference_model,
        "target": target,
    }
    loading = options.given(dtype=dtype, device=device)
    report: Report = asyncio.run(_audited(url, given, sources, loading, api_key=api_key, eos=eos))
    if html is not None:
        from monge.audit.page import page

        html.write_text(page(report, url, str(reference_url or target)))
    if as_json:
        typer.echo(json.dumps(report.as_json()))
    else:
        _print(report, html)
    from monge.audit.report import EXIT

    raise typer.Exit(EXIT[report.verdict])


def _audit_room() -> ModuleType:
    quiet_host()
    try:
        from monge.audit import run
    except ImportError as error:
        raise OptionError(
            f"monge audit needs packages that are not installed ({error}): pip "
            "install 'monge[audit]'"
        ) from error
    return run


async def _audited(
    url: str,
    given: dict[str, Any],
    sources: dict[str, str | None],
    loading: dict[str, Any],
    *,
    api_key: str | None,
    eos: list[str] | None,
) -> Any:  # noqa: ANN401 (the report's room is imported late)
    from contextlib import AsyncExitStack

    from monge.audit.client import TOKEN_ID, Client
    from monge.audit.references import LocalReference, ServerReference
    from monge.audit.run import Settings, audit, probe

    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(
            Client(url, model=sources["model"], api_key=api_key)
        )
        naming = await probe(client, Settings(**given).played[0].prompts[0])
        if sources["target"] is not None:
            source = None if sources["target"] == "built-in" else sources["target"]
            decoder = load(source, drafter="none", **loading)
            reference: Any = LocalReference(
                decoder.components.target, decoder.tokenizer, decoder.eos_ids, by_id=naming == "ids"
            )
        else:
            other = Client(
                str(sources["reference_url"]), model=sources["reference_model"], api_key=api_key
            )
            twin = await stack.enter_async_context(other)
            names = frozenset(eos or _EOS_NAMES)
            if naming == "ids" and not all(name.startswith(TOKEN_ID) for name in names):
                naming = "names"  # the id of the end of text is unknown
            reference = ServerReference(twin, eos_names=names, by_id=naming == "ids")
        settings = Settings(**given, naming=naming)
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
        )
        with Progress(*columns, console=notes(), transient=True) as progress:
            task = progress.add_task("judging tokens", total=settings.budget)

            def on_tokens(num_tokens: int, log_e: float) -> None:
                shown = "infinite" if math.isinf(log_e) else f"{log_e:.1f}"
                progress.update(
                    task, completed=num_tokens, description=f"judging tokens, log e-value {shown}"
                )

            return await audit(client, reference, settings, on_tokens=on_tokens)


def _print(report: "Report", html: Path | None) -> None:
    console = output()
    if report.situations:
        bound = math.log(1.0 / report.alpha)
        table = Table(
            "situation",
            "texts",
            "tokens",
            "log e-value",
            "finding",
            title=f"rejected at {bound:.1f}",
        )
        for one in report.situations:
            table.add_row(
                one.name,
                str(one.num_texts),
                str(one.num_tokens),
                f"{one.log_e:.1f}",
                one.finding or "-",
            )
        console.print(table)
    first = report.deterministic
    if first is not None:
        agree = f"{first.num_greedy} greedy tokens, {len(first.differences)} texts differ"
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
