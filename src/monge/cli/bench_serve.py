"""`monge bench serve`."""

import json
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Final

from rich.console import Console
from rich.table import Table

from monge.bench.provenance import busy_note
from monge.bench.serve import ARMS, QUICK, LoadSettings, measure
from monge.bench.tasks import interleaved, read_prompts, shipped
from monge.cli import options
from monge.cli.console import notes, reported
from monge.core.errors import OptionError

OUT: Final = Path("bench-serve")
MEASURING: Final = "Measuring"
_DEFAULTS: Final = LoadSettings()
_MS: Final = 1000.0


def _asked(*names: str, help: str, default: object = None) -> Any:  # noqa: ANN401
    return options.option(*names, help=help, panel=MEASURING, default=default)


@reported
def bench_serve(
    *,
    quick: Annotated[bool, _asked("--quick", help="Two concurrencies, short completions, once.")] = False,
    concurrency: Annotated[
        list[int] | None, _asked("--concurrency", help="Clients; may be repeated.", default="1, 2, 4, ... 64")
    ] = None,
    per_client: Annotated[
        int | None, _asked("--requests", help="Requests of every client.", default=_DEFAULTS.per_client)
    ] = None,
    max_tokens: Annotated[
        int | None, _asked("--max-tokens", help="Length of every completion.", default=_DEFAULTS.max_tokens)
    ] = None,
    temperature: Annotated[
        float | None, _asked("--temperature", help="Of every request.", default=_DEFAULTS.temperature)
    ] = None,
    repeats: Annotated[
        int | None, _asked("--repeats", help="How often everything is measured.", default=_DEFAULTS.repeats)
    ] = None,
    prompts: Annotated[
        Path | None, _asked("--prompts", help="Text lines, or *.jsonl.", default="the shipped prompts, tasks in turns")
    ] = None,
    server: Annotated[
        str | None,
        _asked("--server", help="Arguments of every server, in one string.", default=" ".join(_DEFAULTS.server)),
    ] = None,
    arm: Annotated[
        list[str] | None,
        _asked(
            "--arm", help="Compare these instead, `name: arguments`; may be repeated.", default="speculation off, on, adaptive"
        ),
    ] = None,
    out: Annotated[Path, options.option("--out", help="Folder for JSON.", panel=options.OUTPUT, default=OUT)] = OUT,
    as_json: options.Json = False,
) -> None:
    """Load `monge serve` with 1 to 64 clients: throughput and latency with speculation off, on and adaptive.

    Every arm is a server process on this machine, and the clients take their processor time from it too. The first arm is the
    one that the others are compared with. The whole takes long; `--quick` is a first look.

    **Examples**

        monge bench serve --quick
        monge bench serve --concurrency 1 --concurrency 16 --temperature 0
        monge bench serve --server "./my-target ./my-draft --max-batch-size 32"
        monge bench serve --arm "plain: --drafter none" --arm "ngram: --drafter ngram"
    """
    given = options.given(per_client=per_client, max_tokens=max_tokens, temperature=temperature, repeats=repeats)
    lists = {"concurrency": tuple(concurrency or ()), "server": tuple(shlex.split(server or ""))}
    settings = replace(QUICK if quick else _DEFAULTS, **given, **{name: some for name, some in lists.items() if some})
    texts = [prompt.text for prompt in (interleaved(shipped()) if prompts is None else read_prompts(prompts))]
    out.mkdir(parents=True, exist_ok=True)
    console = notes()
    with console.status("") as status:
        document = measure(_arms(arm or ()), texts, settings, watch=status.update)
    (out / "serve.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    _report(document, out / "serve.json")
    if as_json:
        print(json.dumps(document))


def _arms(given: Sequence[str]) -> dict[str, Sequence[str]]:
    if not given:
        return dict(ARMS)
    arms: dict[str, Sequence[str]] = {}
    for text in given:
        name, colon, arguments = text.partition(":")
        if not colon or not name.strip() or name.strip() in arms:
            raise OptionError(f"--arm {text!r}: write `name: arguments of monge serve`, each name once")
        arms[name.strip()] = tuple(shlex.split(arguments))
    return arms


def _report(document: dict[str, Any], file: Path) -> None:
    console = Console(file=sys.stdout, highlight=False, width=None if sys.stdout.isatty() else 130)
    baseline = next(iter(document["arms"]))
    heads = (
        "clients",
        "arm",
        "tokens/s",
        f"against {baseline}",
        "first token, ms",
        "between chunks, ms",
        "accepted + 1",
        "failed",
    )
    table = Table(*heads, title="throughput: median (lowest to highest); latency: p50 / p95 / p99 of the last repeat")
    for cell in document["cells"]:
        speed, ratio, last = cell["tokens_per_s"], cell["ratio"], cell["runs"][-1]
        accepted = last["mean_acceptance_length"]
        table.add_row(
            str(cell["concurrency"]),
            cell["arm"],
            f"{speed['median']:.0f} ({speed['low']:.0f} to {speed['high']:.0f})",
            f"{ratio['median']:.2f} ({ratio['low']:.2f} to {ratio['high']:.2f})",
            _latency(last["first_token_s"]),
            _latency(last["between_chunks_s"]),
            "-" if accepted is None else f"{accepted:.2f}",
            str(sum(run["num_failed"] for run in cell["runs"])),
        )
    console.print(table)
    for failure in sorted({failure for cell in document["cells"] for run in cell["runs"] for failure in run["failures"]}):
        console.print(f"failed: {failure}", style="red", markup=False, soft_wrap=True)
    console.print(f"written to {file}", style="dim", markup=False)
    if (busy := busy_note()) is not None:
        notes().print(busy, style="yellow", markup=False)


def _latency(values: dict[str, float] | None) -> str:
    return "-" if values is None else " / ".join(f"{values[name] * _MS:.0f}" for name in ("p50", "p95", "p99"))
