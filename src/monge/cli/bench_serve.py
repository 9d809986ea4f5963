"""`monge bench serve`."""

import json
import shlex
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Final

from monge.bench.provenance import busy_note
from monge.bench.serve import ARMS, QUICK, LoadSettings, measure, num_steps
from monge.bench.servers import Beside
from monge.cli import options
from monge.cli.console import notes, output, reported
from monge.cli.options import measuring
from monge.cli.out import check_out_folder, plotting, write_document
from monge.cli.progress import call_bar
from monge.cli.tables import plain_table, print_tables
from monge.core.errors import OptionError
from monge.prompts import interleaved, read_prompts, shipped

_MS: Final = 1000.0
OUT: Final = Path("bench-serve")
_DEFAULTS: Final = LoadSettings()


Quick = Annotated[bool, measuring("--quick", "Two concurrencies, short completions, once.")]
Concurrency = Annotated[
    list[int] | None,
    measuring("--concurrency", "Clients; may be repeated.", default="1, 2, 4, ... 64"),
]
PerClient = Annotated[
    int | None, measuring("--requests", "Requests of every client.", default=_DEFAULTS.per_client)
]
MaxTokens = Annotated[
    int | None,
    measuring("--max-tokens", "Length of every completion.", default=_DEFAULTS.max_tokens),
]
Temperature = Annotated[
    float | None, measuring("--temperature", "Of every request.", default=_DEFAULTS.temperature)
]
Repeats = Annotated[
    int | None,
    measuring("--repeats", "How often everything is measured.", default=_DEFAULTS.repeats),
]
Prompts = Annotated[
    Path | None,
    measuring(
        "--prompts", "Text lines, or *.jsonl.", default="the shipped prompts, tasks in turns"
    ),
]
Server = Annotated[
    str | None,
    measuring(
        "--server", "Arguments of every server, in one string.", default=" ".join(_DEFAULTS.server)
    ),
]
Arm = Annotated[
    list[str] | None,
    measuring(
        "--arm",
        "Compare these instead, `name: arguments`; may be repeated.",
        default="speculation off, on, adaptive",
    ),
]
Besides = Annotated[
    list[str] | None,
    measuring(
        "--beside",
        "Another engine's server: `name: http://host:port`, or `name: command` with {port} and "
        "{target} in it; may be "
        "repeated.",
        default="none",
    ),
]
Fields = Annotated[
    list[str] | None,
    measuring(
        "--fields",
        "Fields of the requests to an arm or another engine, in place of ours, `name: JSON "
        "object`; null leaves one out.",
        default="ours",
    ),
]
Out = Annotated[
    Path,
    options.option(
        "--out", help="Folder for JSON and the plot.", panel=options.OUTPUT, default=OUT
    ),
]
Plots = Annotated[
    bool, options.option("--plots/--no-plots", help="Draw a PNG plot.", panel=options.OUTPUT)
]


@reported
def bench_serve(
    *,
    quick: Quick = False,
    concurrency: Concurrency = None,
    per_client: PerClient = None,
    max_tokens: MaxTokens = None,
    temperature: Temperature = None,
    repeats: Repeats = None,
    prompts: Prompts = None,
    server: Server = None,
    arm: Arm = None,
    beside: Besides = None,
    fields: Fields = None,
    out: Out = OUT,
    plots: Plots = True,
    as_json: options.Json = False,
    markdown: options.Markdown = False,
) -> None:
    """Load `monge serve` with 1 to 64 clients: throughput and latency.

    The arms have speculation off, on and adaptive. Every arm is a server process on this machine,
    and the clients take their processor time from it too. The first arm is the baseline of the
    others. The whole takes long; `--quick` is a first look.

    **Examples**

        monge bench serve --quick
        monge bench serve --concurrency 1 --concurrency 16 --temperature 0
        monge bench serve --server "./my-target ./my-draft --max-batch-size 32"
        monge bench serve --arm "plain: --drafter none" --arm "ngram: --drafter ngram"
        monge bench serve --arm "off:" --arm "on:" --fields 'off: {"speculation": false}'
        monge bench serve --beside "vllm: .venv-vllm/bin/vllm serve {target} --port {port}"
    """
    given = options.given(
        per_client=per_client, max_tokens=max_tokens, temperature=temperature, repeats=repeats
    )
    lists = {"concurrency": tuple(concurrency or ()), "server": tuple(shlex.split(server or ""))}
    settings = replace(
        QUICK if quick else LoadSettings(),
        **given,
        **{name: some for name, some in lists.items() if some},
    )
    shown = interleaved(shipped()) if prompts is None else read_prompts(prompts)
    if any(prompt.messages is not None for prompt in shown):
        raise OptionError(
            "--prompts: requests of this benchmark are completions of raw text, and the file holds "
            "messages; give a file with 'prompt'"
        )
    texts = [prompt.text for prompt in shown]
    arms = _arms(arm or ())
    besides, arm_fields = _besides(beside or (), fields or (), arms)
    draw = plotting("monge.bench.serve_plots").write_plot if plots else None
    # Told to end, it ends its servers first.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    check_out_folder(out)
    with call_bar() as watch:
        watch.total(num_steps(arms, settings, besides))
        document = measure(
            arms, texts, settings, fields=arm_fields, besides=besides, watch=watch.step
        )
    files = [write_document(document, out, "serve.json")]
    files += [] if draw is None else [draw(document["cells"], out / "serve.png")]
    _report(document, files, markdown=markdown)
    if as_json:
        print(json.dumps(document))


def _arms(given: Sequence[str]) -> dict[str, Sequence[str]]:
    if not given:
        return dict(ARMS)
    return {
        name: tuple(shlex.split(text))
        for name, text in _named("--arm", "arguments of monge serve", given).items()
    }


def _besides(
    given: Sequence[str], fields: Sequence[str], arms: Mapping[str, Any]
) -> tuple[dict[str, Beside], dict[str, dict[str, Any]]]:
    """Servers of other engines, and the fields of the arms' requests."""
    servers = _named("--beside", "address or command", given)
    if twice := set(servers) & set(arms):
        raise OptionError(f"--beside {min(twice)!r}: an arm has this name; name every server once")
    words = {
        name: _fields(name, text)
        for name, text in _named("--fields", "JSON object", fields).items()
    }
    if unknown := set(words) - set(servers) - set(arms):
        raise OptionError(
            f"--fields {min(unknown)!r}: no server has this name; there are "
            f"{', '.join((*arms, *servers))}"
        )
    besides = {
        name: Beside(where=where, fields=words.get(name, {})) for name, where in servers.items()
    }
    return besides, {name: words[name] for name in arms if name in words}


def _fields(name: str, text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise OptionError(f"--fields {name!r}: a JSON object is expected; got {text!r}")
    return found


def _named(option: str, what: str, given: Sequence[str]) -> dict[str, str]:
    found = dict[str, str]()
    for text in given:
        name, colon, rest = map(str.strip, text.partition(":"))
        if not colon or not name or name in found:
            raise OptionError(f"{option} {text!r}: write `name: {what}`, each name once")
        found[name] = rest
    return found


def _report(document: dict[str, Any], files: Sequence[Path], *, markdown: bool) -> None:
    console = output()
    against = f"against {next(iter(document['arms']))}"
    speeds = ("tokens/s", against, f"all passes {against}", "tokens/processor s", against)
    title = (
        "throughput: median (lowest to highest), that of all passes together with its 95% "
        "interval; "
        "latency: p50 / p95 / p99 of the last repeat"
    )
    latencies = ("first token, ms", "per further token, ms")
    table = plain_table("", "clients, arm", (*speeds, *latencies, "accepted + 1", "failed"))
    table.caption, table.caption_justify = title, "left"
    for cell in document["cells"]:
        last, accepted = cell["runs"][-1], cell["runs"][-1]["mean_acceptance_length"]
        table.add_row(
            f"{cell['concurrency']}, {cell['arm']}",
            _range(cell["tokens_per_s"], 0),
            _range(cell["ratio"], 2),
            _range(cell["ratio_of_all"], 2, middle="mean"),
            _range(cell["tokens_per_processor_s"], 0),
            _range(cell["processor_ratio"], 2),
            _latency(last["first_token_s"]),
            _latency(last["per_token_s"]),
            "-" if accepted is None else f"{accepted:.2f}",
            str(sum(run["num_failed"] for run in cell["runs"])),
        )
    print_tables([table], markdown=markdown)
    for failure in sorted(
        {
            failure
            for cell in document["cells"]
            for run in cell["runs"]
            for failure in run["failures"]
        }
    ):
        console.print(f"failed: {failure}", style="red", markup=False, soft_wrap=True)
    for file in files:
        console.print(f"written to {file}", style="dim", markup=False)
    if (busy := busy_note()) is not None:
        notes().print(busy, style="yellow", markup=False)


def _range(values: Mapping[str, float] | None, digits: int, *, middle: str = "median") -> str:
    """The middle, and the range where there is one."""
    if values is None:
        return "-"
    number, low, high = (f"{values[name]:.{digits}f}" for name in (middle, "low", "high"))
    return number if low == high else f"{number} ({low} to {high})"


def _latency(values: dict[str, float] | None) -> str:
    return (
        "-"
        if values is None
        else " / ".join(_three_digits(values[name] * _MS) for name in ("p50", "p95", "p99"))
    )


def _three_digits(value: float) -> str:
    return f"{value:.1f}" if value < 10 else f"{value:.0f}"
