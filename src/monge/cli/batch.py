"""`monge batch`."""

import time
from pathlib import Path
from typing import Annotated, Any

import typer

from monge.cli import options
from monge.cli.console import notes, quiet_host, reported
from monge.cli.progress import Stage, working
from monge.core.errors import OptionError
from monge.core.words import counted
from monge.distributed.batch import BatchJob, BatchReport, ThisProcess, Workers, run_batch
from monge.distributed.files import RowFile
from monge.distributed.ray_data import RayWorkers
from monge.options import OUTPUT, RAY, RUNNING, LoadOptions, SamplingOptions, ServeOptions, changed


def _field(name: str) -> object:
    """A default of the library, for `--help`."""
    return BatchJob.__dataclass_fields__[name].default


def _ray(*names: str, help: str, default: object = None) -> Any:  # noqa: ANN401
    return options.option(*names, help=help, panel=RAY, default=default)


Source = Annotated[
    Path,
    typer.Argument(
        metavar="IN", help="Rows: *.jsonl with an object a line, or *.parquet.", show_default=False
    ),
]
Output = Annotated[
    Path, typer.Argument(metavar="OUT", help="*.jsonl or *.parquet.", show_default=False)
]
PromptField = Annotated[
    str | None,
    options.option(
        "--prompt-field",
        help="Where prompts stand in a row.",
        panel=RUNNING,
        default="prompt",
    ),
]
ShardRows = Annotated[
    int | None,
    options.option(
        "--shard-rows",
        help="Rows that are decoded and kept together.",
        panel=RUNNING,
        default=_field("shard_rows"),
    ),
]
Overwrite = Annotated[bool, options.option("--overwrite", help="Replace OUT.", panel=OUTPUT)]
Restart = Annotated[
    bool,
    options.option(
        "--restart",
        help="Throw an unfinished run away instead of going on with it.",
        panel=OUTPUT,
    ),
]
UseRay = Annotated[
    bool,
    typer.Option(
        "--ray/--no-ray", help="Decode with Ray Data, on many machines.", rich_help_panel=RAY
    ),
]
NumWorkers = Annotated[int | None, _ray("--workers", help="Processes that decode.", default=1)]
Address = Annotated[str | None, options.entry(ServeOptions, "address")]
CpusPerWorker = Annotated[
    float | None, _ray("--cpus-per-worker", help="Cores of a worker.", default=1)
]
GpusPerWorker = Annotated[
    float | None, _ray("--gpus-per-worker", help="GPUs of a worker.", default=0)
]


@reported
@options.command(without=("chat_template",), one=("controller",))
def batch(
    source: Source,
    output: Output,
    *,
    prompt_field: PromptField = None,
    load: LoadOptions,
    sampling: SamplingOptions,
    shard_rows: ShardRows = None,
    overwrite: Overwrite = False,
    restart: Restart = False,
    use_ray: UseRay = False,
    workers: NumWorkers = None,
    address: Address = None,
    cpus_per_worker: CpusPerWorker = None,
    gpus_per_worker: GpusPerWorker = None,
) -> None:
    """Complete every row of a file.

    A row is an object with `prompt` (text or token ids), perhaps an `id`, and perhaps a `seed`,
    `temperature` or another option of its own. Row i of OUT is that of IN; one that cannot be
    decoded has its `error`, and the status is 1 if there is any. A run that was killed goes on
    where it was when it is started again. docs/scaling.md says more.

    **Examples**

        monge batch prompts.jsonl texts.jsonl --temperature 0.8 --seed 1
        monge batch prompts.parquet texts.parquet --target ./my-target --draft ./my-draft --batch-size 16
        monge batch questions.jsonl answers.jsonl --prompt-field question --drafter ngram
        monge batch prompts.jsonl texts.jsonl --ray --address auto --workers 8 --gpus-per-worker 1
    """
    quiet_host()
    ray = options.given(
        num_workers=workers, address=address, num_cpus=cpus_per_worker, num_gpus=gpus_per_worker
    )
    rows = RowFile(source, **options.given(prompt_field=prompt_field))
    wanted = changed(sampling)
    settings = options.given(
        seed=wanted.pop("seed", None),
        shard_rows=shard_rows,
        overwrite=overwrite,
        restart=restart,
    )
    job = BatchJob(source=rows, output=output, load=load, options=wanted, **settings)
    _run(job, _workers(ray, use_ray=use_ray))


def _run(job: BatchJob, workers: Workers) -> None:
    start = time.perf_counter()
    with working() as work:
        report = run_batch(job, workers, _Told(work.stage("loading the models")))
    _say(report, job.output, time.perf_counter() - start)


def _workers(settings: dict[str, Any], *, use_ray: bool) -> Workers:
    if not use_ray:
        if settings:
            raise OptionError(
                "--workers, --address, --cpus-per-worker and --gpus-per-worker need --ray"
            )
        return ThisProcess()
    return RayWorkers(**settings)


class _Told:
    """Shows rows, those of an earlier run included."""

    def __init__(self, stage: Stage) -> None:
        self._stage, self._is_first = stage, True

    def __call__(self, done: int, total: int) -> None:
        if not self._is_first:
            self._stage.reach(done)
            return
        self._is_first = False
        self._stage.restart("rows", total, done)
        if 0 < done < total:
            notes().print(f"going on after {done} of {counted(total, 'row')}", markup=False)


def _say(report: BatchReport, output: Path, seconds: float) -> None:
    text = f"{counted(report.num_rows, 'row')} in {str(output)!r} after {seconds:.1f} s"
    notes().print(text, style="cyan", markup=False, soft_wrap=True)
    if report.num_errors:
        text = f"{report.num_errors} of {counted(report.num_rows, 'row')} could not be decoded; see their `error`"
        notes().print(text, style="yellow", markup=False, soft_wrap=True)
        raise typer.Exit(1)
