"""`monge batch`."""

import time
from pathlib import Path
from typing import Annotated

import typer

from monge.cli import options
from monge.cli.console import say
from monge.cli.options import entry, given, option, panel, switch
from monge.cli.progress import working
from monge.core.errors import OptionError
from monge.core.words import counted
from monge.distributed.batch import BatchJob, decode_here, run_batch
from monge.distributed.files import RowFile
from monge.distributed.ray_data import ray_decoding
from monge.options import OUTPUT, RAY, RUNNING, LoadOptions, SamplingOptions, ServeOptions, changed

_SHARD_ROWS = BatchJob.__dataclass_fields__["shard_rows"].default
_ray = panel(RAY)
_ROWS = "*.jsonl with an object a line, or *.parquet."


@options.command(without=("chat_template",), one=("controller",))
def batch(
    source: Annotated[
        Path, typer.Argument(metavar="IN", help=f"Rows: {_ROWS}", show_default=False)
    ],
    output: Annotated[Path, typer.Argument(metavar="OUT", help=_ROWS, show_default=False)],
    *,
    prompt_field: str | None = option(
        None, RUNNING, "The field of a row that holds its prompt.", "prompt"
    ),
    load: LoadOptions,
    sampling: SamplingOptions,
    shard_rows: int = option(_SHARD_ROWS, RUNNING, "Rows that are decoded and kept together."),
    overwrite: bool = switch("--overwrite", OUTPUT, "Replace OUT."),
    restart: bool = switch(
        "--restart", OUTPUT, "Throw an unfinished run away instead of going on with it."
    ),
    use_ray: bool = switch("--ray/--no-ray", RAY, "Decode with Ray Data, on many machines."),
    workers: int | None = _ray(None, "Processes that decode.", 1),
    address: Annotated[str | None, entry(ServeOptions, "address")] = None,
    cpus_per_worker: float | None = _ray(None, "Cores of a worker.", 1),
    gpus_per_worker: float | None = _ray(None, "GPUs of a worker.", 0),
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
    ray = given(
        num_workers=workers, address=address, num_cpus=cpus_per_worker, num_gpus=gpus_per_worker
    )
    if ray and not use_ray:
        raise OptionError(
            "--workers, --address, --cpus-per-worker and --gpus-per-worker need --ray"
        )
    decode = ray_decoding(**ray) if use_ray else decode_here
    rows = RowFile(source, **given(prompt_field=prompt_field))
    job = BatchJob(
        source=rows,
        output=output,
        load=load,
        options=changed(sampling),
        shard_rows=shard_rows,
        overwrite=overwrite,
        restart=restart,
    )
    start = time.perf_counter()
    with working() as work:
        stage, is_first = work.stage("loading the models"), True

        def on_rows(done: int, total: int) -> None:
            nonlocal is_first
            if not is_first:
                stage.reach(done)
                return
            is_first = False
            stage.restart("rows", total, done)
            if 0 < done < total:
                say(f"going on after {done} of {counted(total, 'row')}")

        num_rows, num_errors = run_batch(job, decode, on_rows)
    rows_said, seconds = counted(num_rows, "row"), time.perf_counter() - start
    say(f"{rows_said} in {str(output)!r} after {seconds:.1f} s", "cyan")
    if num_errors:
        say(f"{num_errors} of {rows_said} could not be decoded; see their `error`", "yellow")
        raise typer.Exit(1)
