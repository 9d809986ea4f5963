"""Options of `monge bench serve`."""

from pathlib import Path
from typing import Annotated, Any, Final

from monge.bench.serve import LoadSettings
from monge.cli.options import OUTPUT, option

MEASURING: Final = "Measuring"
OUT: Final = Path("bench-serve")
_DEFAULTS: Final = LoadSettings()


def _asked(*names: str, help: str, default: object = None) -> Any:  # noqa: ANN401
    return option(*names, help=help, panel=MEASURING, default=default)


Quick = Annotated[bool, _asked("--quick", help="Two concurrencies, short completions, once.")]
Concurrency = Annotated[list[int] | None, _asked("--concurrency", help="Clients; may be repeated.", default="1, 2, 4, ... 64")]
PerClient = Annotated[int | None, _asked("--requests", help="Requests of every client.", default=_DEFAULTS.per_client)]
MaxTokens = Annotated[int | None, _asked("--max-tokens", help="Length of every completion.", default=_DEFAULTS.max_tokens)]
Temperature = Annotated[float | None, _asked("--temperature", help="Of every request.", default=_DEFAULTS.temperature)]
Repeats = Annotated[int | None, _asked("--repeats", help="How often everything is measured.", default=_DEFAULTS.repeats)]
Prompts = Annotated[
    Path | None, _asked("--prompts", help="Text lines, or *.jsonl.", default="the shipped prompts, tasks in turns")
]
Server = Annotated[
    str | None, _asked("--server", help="Arguments of every server, in one string.", default=" ".join(_DEFAULTS.server))
]
Arm = Annotated[
    list[str] | None,
    _asked("--arm", help="Compare these instead, `name: arguments`; may be repeated.", default="speculation off, on, adaptive"),
]
Besides = Annotated[
    list[str] | None,
    _asked(
        "--beside",
        help="Another engine's server: `name: http://host:port`, or `name: command` with {port} and {target} in it; may be "
        "repeated.",
        default="none",
    ),
]
Fields = Annotated[
    list[str] | None,
    _asked(
        "--fields",
        help="Fields of the requests to an arm or another engine, in place of ours, `name: JSON object`; null leaves one out.",
        default="ours",
    ),
]
Out = Annotated[Path, option("--out", help="Folder for JSON and the plot.", panel=OUTPUT, default=OUT)]
Plots = Annotated[bool, option("--plots/--no-plots", help="Draw a PNG plot.", panel=OUTPUT)]
