"""Options of `monge batch`."""

from pathlib import Path
from typing import Annotated, Any, Final

import typer

from monge.cli.options import OUTPUT, RUNNING, option
from monge.scale.batch import BatchJob

RAY: Final = "Ray"


def _field(name: str) -> object:
    """A default of the library, for `--help`."""
    return BatchJob.__dataclass_fields__[name].default


def _ray(*names: str, help: str, default: object = None) -> Any:  # noqa: ANN401
    return option(*names, help=help, panel=RAY, default=default)


Source = Annotated[
    Path, typer.Argument(metavar="IN", help="Rows: *.jsonl with an object a line, or *.parquet.", show_default=False)
]
Output = Annotated[Path, typer.Argument(metavar="OUT", help="*.jsonl or *.parquet.", show_default=False)]
PromptField = Annotated[
    str | None, option("--prompt-field", help="Where prompts stand in a row.", panel=RUNNING, default="prompt")
]
ShardRows = Annotated[
    int | None,
    option("--shard-rows", help="Rows that are decoded and kept together.", panel=RUNNING, default=_field("shard_rows")),
]
Overwrite = Annotated[bool, option("--overwrite", help="Replace OUT.", panel=OUTPUT)]
Restart = Annotated[bool, option("--restart", help="Throw an unfinished run away instead of going on with it.", panel=OUTPUT)]
UseRay = Annotated[bool, typer.Option("--ray/--no-ray", help="Decode with Ray Data, on many machines.", rich_help_panel=RAY)]
Workers = Annotated[int | None, _ray("--workers", help="Processes that decode.", default=1)]
Address = Annotated[
    str | None, _ray("--address", help="Address of a running cluster, or `auto`.", default="a cluster of this machine alone")
]
CpusPerWorker = Annotated[float | None, _ray("--cpus-per-worker", help="Cores of a worker.", default=1)]
GpusPerWorker = Annotated[float | None, _ray("--gpus-per-worker", help="GPUs of a worker.", default=0)]
