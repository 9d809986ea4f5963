"""`monge train`."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, Final

import torch
import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from monge.api import built_in
from monge.bench.arms import encode
from monge.bench.head_training import HeadSettings, Watch, make_head
from monge.bench.own_text import TextSettings, cut_rows, write_own_text
from monge.bench.provenance import versions
from monge.bench.published_training import KINDS, train_published
from monge.bench.tasks import read_prompts, shipped
from monge.cli import options
from monge.cli.console import notes, quiet_host, reported
from monge.cli.out import check_out_folder
from monge.core.errors import OptionError
from monge.engine.loading import load_network, load_tokenizer
from monge.heads.shape.measure import Quality
from monge.heads.training.chain import ChainQuality
from monge.heads.training.loop import Progress as TrainingProgress
from monge.heads.training.loop import Recipe
from monge.heads.training.losses import Weights

TEXT: Final = "Text"
TRAINING: Final = "Training"
MIXED: Final = {"none": None, "bfloat16": torch.bfloat16, "float16": torch.float16}

train = typer.Typer(no_args_is_help=True, help="Train what drafts.", rich_markup_mode="markdown")


@train.callback()
def root() -> None:
    """Train what drafts."""


def _text(name: str, help: str, default: object = None) -> Any:  # noqa: ANN401 (typer's own type is private)
    return options.option(name, help=help, panel=TEXT, default=default)


def _training(name: str, help: str, default: object = None) -> Any:  # noqa: ANN401
    return options.option(name, help=help, panel=TRAINING, default=default)


@train.command("shape")
@reported
def shape(
    *,
    out: Annotated[Path, options.option("--out", help="Folder of the head; a rerun goes on there.", panel=options.OUTPUT)],
    target: options.Target = None,
    dtype: options.Dtype = None,
    device: options.Device = None,
    threads: options.Threads = None,
    data: Annotated[
        list[Path] | None,
        _text("--data", "Text lines, or *.jsonl with `prompt`, `question` or `turns`; may be repeated.", "the shipped prompts"),
    ] = None,
    as_it_is: Annotated[bool, _text("--as-it-is", "Fit the data itself instead of what the target makes of it.")] = False,
    tokens: Annotated[int | None, _text("--tokens", "Tokens to fit.", TextSettings().num_tokens)] = None,
    preset: Annotated[str | None, _training("--preset", "ridge (no training), paper, branch.", HeadSettings().preset)] = None,
    alignment: Annotated[
        str | None, _training("--alignment", "none, gaussian, diagonal, sinkhorn_anchors.", HeadSettings().alignment)
    ] = None,
    num_steps: Annotated[int | None, _training("--num-steps", "Steps that are predicted.", HeadSettings().num_steps)] = None,
    width: Annotated[int | None, _training("--width", "Rank of a step's residual.", "the hidden size, at most 1024")] = None,
    steps: Annotated[int | None, _training("--steps", "Most training steps.", Recipe().steps)] = None,
    batch: Annotated[int | None, _training("--batch", "Positions of a training step.", Recipe().batch_size)] = None,
    learning_rate: Annotated[float | None, _training("--learning-rate", "At its peak.", Recipe().learning_rate)] = None,
    sinkhorn: Annotated[float | None, _training("--sinkhorn", "Weight of the divergence.", Weights().sinkhorn)] = None,
    mixed: Annotated[str | None, _training("--mixed", "Autocast: none, bfloat16, float16.", "bfloat16 on cuda")] = None,
    seed: Annotated[int | None, _training("--seed", "Of text and training.", Recipe().seed)] = None,
) -> None:
    """Fit a SHAPE head to a target: it drafts from the target's own hidden states.

    The target continues the prompts of the data (or reads the data as it is), its hidden states are kept in memory, and the
    head is fitted to them: in closed form by `--preset ridge`, by gradient otherwise, until held-out text stops improving.
    Ctrl-C saves; the same command goes on from there.

    **Examples**

        monge train shape --out my-head --preset ridge --data my-prompts.jsonl
        monge train shape --out my-head --target ./my-target --data chats.jsonl --tokens 1000000 --device cuda
        monge generate "Once" --target ./my-target --drafter "shape(head='my-head')"
    """
    _begin(threads, out)
    text = replace(TextSettings(), **options.given(num_tokens=tokens, seed=seed))
    changes = options.given(steps=steps, batch_size=batch, learning_rate=learning_rate, seed=seed)
    recipe = replace(Recipe(), weights=replace(Weights(), **options.given(sinkhorn=sinkhorn)), **changes)
    kind = options.given(preset=preset, alignment=alignment, num_steps=num_steps, width=width)
    settings = replace(HeadSettings(), recipe=recipe, **kind)
    source = built_in("target") if target is None else target
    network = load_network(source, **options.given(dtype=dtype, device=device))
    autocast = _mixed(mixed, network.device)
    prompts = _encoded(load_tokenizer(source), data)
    about = {"target": "built-in" if target is None else Path(target).name, **versions("monge", "torch", "transformers")}
    with bars() as bar:
        rows = cut_rows(prompts, text.row_length)[: text.num_rows] if as_it_is else None
        if rows is None:
            rows = write_own_text(network, prompts, text, out, bar("writing rows", text.num_rows))
        with _interrupts() as interrupted:
            watch = Watch(
                on_read=bar("reading rows", len(rows)),
                on_step=_shown(bar("training steps", recipe.steps)),
                should_stop=interrupted,
            )
            outcome = make_head(network, rows, settings, out, watch=watch, mixed=autocast, about=about)
    _say(out, outcome.head.num_parameters, outcome.quality)


def _begin(threads: int | None, out: Path) -> None:
    quiet_host()
    options.set_threads(threads)
    check_out_folder(out)


def _published(kind: str) -> Callable[..., None]:
    """The command that trains heads of a published kind."""

    @reported
    def command(
        *,
        out: Annotated[Path, options.option("--out", help="Folder of the head; a rerun goes on there.", panel=options.OUTPUT)],
        target: options.Target = None,
        dtype: options.Dtype = None,
        device: options.Device = None,
        threads: options.Threads = None,
        data: Annotated[list[Path] | None, _text("--data", "As for `monge train shape`.", "the shipped prompts")] = None,
        tokens: Annotated[int | None, _text("--tokens", "Tokens to fit.", TextSettings().num_tokens)] = None,
        num_steps: Annotated[int, _training("--num-steps", "Medusa's heads; chains of EAGLE's training.", 3)] = 3,
        steps: Annotated[int | None, _training("--steps", "Most training steps.", Recipe().steps)] = None,
        batch: Annotated[int | None, _training("--batch", "Positions of a training step.", Recipe().batch_size)] = None,
        learning_rate: Annotated[float | None, _training("--learning-rate", "At its peak.", Recipe().learning_rate)] = None,
        seed: Annotated[int | None, _training("--seed", "Of text and training.", Recipe().seed)] = None,
    ) -> None:
        _begin(threads, out)
        text = replace(TextSettings(), **options.given(num_tokens=tokens, seed=seed))
        changes = options.given(steps=steps, batch_size=batch, learning_rate=learning_rate, seed=seed)
        recipe = replace(Recipe(), **changes)
        source = built_in("target") if target is None else target
        network = load_network(source, **options.given(dtype=dtype, device=device))
        prompts = _encoded(load_tokenizer(source), data)
        about = {"target": "built-in" if target is None else Path(target).name, **versions("monge", "torch", "transformers")}
        with bars() as bar:
            rows = write_own_text(network, prompts, text, out, bar("writing rows", text.num_rows))
            with _interrupts() as stop:
                read, shown = bar("reading rows", len(rows)), _shown(bar("training steps", recipe.steps))
                watch = Watch(on_read=read, on_step=shown, should_stop=stop)
                given: Any = {"recipe": recipe, "num_steps": num_steps, "watch": watch, "about": about}
                outcome = train_published(kind, network, rows, out, **given)
        _say(out, outcome.num_parameters, outcome.quality)

    command.__doc__ = f"""Train {kind.capitalize()} heads on text that the target writes, in the published format.

    Same text, losses and loop as `monge train shape`, so that the heads can be compared. Ctrl-C saves; the same command goes on
    from there.

    **Examples**

        monge train {kind} --out my-{kind}
        monge generate "Once" --draft my-{kind}
        monge bench heads --head my-{kind} --head my-shape
    """
    return command


for _kind in KINDS:
    train.command(_kind)(_published(_kind))


def _encoded(tokenizer: Any, data: list[Path] | None) -> list[tuple[int, ...]]:  # noqa: ANN401 (the host's type)
    prompts = [prompt for path in data for prompt in read_prompts(path)] if data else shipped()
    return [ids for ids in (encode(tokenizer, prompt.text) for prompt in prompts) if ids]


def _say(out: Path, num_parameters: int, quality: Quality | ChainQuality | None) -> None:
    if quality is None:
        notes().print("interrupted; everything is saved, the same command goes on")
        raise typer.Exit(130)
    typer.echo(
        f"{out}: {num_parameters / 1e6:.2f}M parameters; on held-out text of the target a chain of "
        f"{len(quality.acceptance)} has block efficiency {quality.block_efficiency:.3f}, acceptance by step "
        + ", ".join(f"{value:.3f}" for value in quality.acceptance)
    )


def _mixed(name: str | None, device: torch.device) -> torch.dtype | None:
    if name is None:
        return torch.bfloat16 if device.type == "cuda" else None
    if name not in MIXED:
        raise OptionError(f"--mixed: {name!r} is none of {', '.join(MIXED)}")
    return MIXED[name]


def _shown(advance: Callable[[int], None]) -> Callable[[TrainingProgress], None]:
    """Progress in steps, those of an earlier call included."""
    done = 0

    def show(progress: TrainingProgress) -> None:
        nonlocal done
        advance(progress.step - done)
        done = progress.step

    return show


@contextmanager
def bars() -> Iterator[Callable[[str, int], Callable[[int], None]]]:
    """Makes progress bars on standard error: of a name and a total, what advances it."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    console = notes()
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:

        def bar(name: str, total: int) -> Callable[[int], None]:
            task = progress.add_task(name, total=total, start=False)

            def advance(count: int) -> None:
                progress.start_task(task)
                progress.advance(task, count)

            return advance

        yield bar


@contextmanager
def _interrupts() -> Iterator[Callable[[], bool]]:
    """Whether Ctrl-C was pressed during training; a second one interrupts at once."""
    received: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        if received:
            raise KeyboardInterrupt
        received.append(number)

    before = signal.signal(signal.SIGINT, note)
    try:
        yield lambda: bool(received)
    finally:
        signal.signal(signal.SIGINT, before)
