"""`monge batch`."""

import time
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from monge.cli import options
from monge.cli.console import notes, quiet_host, reported
from monge.cli.progress import Stage, working
from monge.core.errors import OptionError
from monge.core.words import counted
from monge.distributed.batch import BatchJob, BatchReport, ThisProcess, Workers, run_batch
from monge.distributed.files import RowFile
from monge.distributed.ray_data import RayWorkers
from monge.distributed.spec import DecoderSpec

RAY: Final = "Ray"


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
        panel=options.RUNNING,
        default="prompt",
    ),
]
ShardRows = Annotated[
    int | None,
    options.option(
        "--shard-rows",
        help="Rows that are decoded and kept together.",
        panel=options.RUNNING,
        default=_field("shard_rows"),
    ),
]
Overwrite = Annotated[
    bool, options.option("--overwrite", help="Replace OUT.", panel=options.OUTPUT)
]
Restart = Annotated[
    bool,
    options.option(
        "--restart",
        help="Throw an unfinished run away instead of going on with it.",
        panel=options.OUTPUT,
    ),
]
UseRay = Annotated[
    bool,
    typer.Option(
        "--ray/--no-ray", help="Decode with Ray Data, on many machines.", rich_help_panel=RAY
    ),
]
NumWorkers = Annotated[int | None, _ray("--workers", help="Processes that decode.", default=1)]
Address = Annotated[
    str | None,
    _ray(
        "--address",
        help="Address of a running cluster, or `auto`.",
        default="a cluster of this machine alone",
    ),
]
CpusPerWorker = Annotated[
    float | None, _ray("--cpus-per-worker", help="Cores of a worker.", default=1)
]
GpusPerWorker = Annotated[
    float | None, _ray("--gpus-per-worker", help="GPUs of a worker.", default=0)
]


@reported
@options.configured
def batch(
    source: Source,
    output: Output,
    *,
    prompt_field: PromptField = None,
    config: options.Config = None,
    target: options.Target = None,
    draft: options.Drafts = None,
    cross_tokenizer: options.CrossTokenizer = False,
    exact_numerics: options.ExactNumerics = False,
    dtype: options.Dtype = None,
    device: options.Device = None,
    attention: options.Attention = None,
    backend: options.Backend = None,
    draft_backend: options.DraftBackend = None,
    drafter: options.Drafter = None,
    tree: options.Tree = None,
    verifier: options.Verifier = None,
    controller: options.Controller = None,
    draft_temperature: options.DraftTemperature = None,
    draft_top_k: options.DraftTopK = None,
    max_new_tokens: options.MaxNewTokens = None,
    temperature: options.Temperature = None,
    top_k: options.TopK = None,
    top_p: options.TopP = None,
    min_p: options.MinP = None,
    min_tokens: options.MinTokens = None,
    repetition_penalty: options.RepetitionPenalty = None,
    presence_penalty: options.PresencePenalty = None,
    frequency_penalty: options.FrequencyPenalty = None,
    seed: options.Seed = None,
    stop: options.Stop = None,
    stop_token_id: options.StopTokenIds = None,
    ignore_eos: options.IgnoreEos = False,
    batch_size: options.BatchSize = None,
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
    parts = options.given(drafter=drafter, tree=tree, verifier=verifier, controller=controller)
    parts |= options.given(draft_temperature=draft_temperature, draft_top_k=draft_top_k)
    loading = options.given(
        dtype=dtype, device=device, attention=attention, backend=backend, max_batch_size=batch_size
    )
    loading |= options.given(draft_backend=draft_backend, cross_tokenizer=cross_tokenizer or None)
    loading |= options.given(exact_numerics=exact_numerics or None)
    wanted = options.given(
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
    )
    wanted |= options.given(stop=stop, ignore_eos=ignore_eos or None)
    wanted |= options.given(
        min_tokens=min_tokens,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        stop_token_ids=stop_token_id,
    )
    ray = options.given(
        num_workers=workers, address=address, num_cpus=cpus_per_worker, num_gpus=gpus_per_worker
    )
    spec = DecoderSpec(
        target=target, draft=tuple(draft) if draft else None, options=parts | loading
    )
    rows = RowFile(source, **options.given(prompt_field=prompt_field))
    settings = options.given(seed=seed, shard_rows=shard_rows, overwrite=overwrite, restart=restart)
    _run(
        BatchJob(source=rows, output=output, spec=spec, options=wanted, **settings),
        _workers(ray, use_ray=use_ray),
    )


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
