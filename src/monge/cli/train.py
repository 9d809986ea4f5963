"""`monge train KIND`."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, Final

import torch
import typer
from transformers import PreTrainedModel

from monge.api import built_in
from monge.bench.provenance import versions
from monge.cli import options
from monge.cli.console import notes, quiet_host, reported
from monge.cli.out import check_out_folder
from monge.cli.progress import bars, working
from monge.core.errors import OptionError
from monge.engine.chat_format import TemplateFormat, chat_format
from monge.loading.networks import load_network, load_tokenizer
from monge.prompts import encode, read_prompts, shipped
from monge.training.chain import ChainQuality, Weights
from monge.training.eagle3 import DRAFT_VOCABULARY, faster_copy, train_eagle3
from monge.training.loop import Progress as TrainingProgress
from monge.training.loop import Recipe, Watch
from monge.training.own_text import (
    AnswerSettings,
    TextSettings,
    cut_rows,
    write_own_text,
    write_prompts,
)
from monge.training.published import train_published
from monge.training.shape import HeadSettings, make_head

TEXT: Final = "Text"
TRAINING: Final = "Training"
_KEPT: Final = "interrupted; what was done so far is saved, the same command goes on"
MIXED: Final = {"none": None, "bfloat16": torch.bfloat16, "float16": torch.float16}


def _text(name: str, help: str, default: object = None) -> Any:  # noqa: ANN401 (typer's own type is private)
    return options.option(name, help=help, panel=TEXT, default=default)


def _training(name: str, help: str, default: object = None) -> Any:  # noqa: ANN401
    return options.option(name, help=help, panel=TRAINING, default=default)


Out = Annotated[
    Path,
    options.option(
        "--out", help="Folder of the head; a rerun goes on there.", panel=options.OUTPUT
    ),
]
Data = Annotated[
    list[Path] | None,
    _text(
        "--data",
        "Text lines, or *.jsonl with `prompt`, `question` or `turns`; may be repeated.",
        "the shipped prompts",
    ),
]
Tokens = Annotated[int | None, _text("--tokens", "Tokens to fit.", TextSettings().num_tokens)]
Steps = Annotated[int | None, _training("--steps", "Most training steps.", Recipe().steps)]
Batch = Annotated[
    int | None, _training("--batch", "Positions of a training step.", Recipe().batch_size)
]
LearningRate = Annotated[
    float | None, _training("--learning-rate", "At its peak.", Recipe().learning_rate)
]
Seed = Annotated[int | None, _training("--seed", "Of text and training.", Recipe().seed)]


@reported
def shape(
    *,
    out: Out,
    target: options.Target = None,
    dtype: options.Dtype = None,
    device: options.Device = None,
    threads: options.Threads = None,
    data: Data = None,
    as_it_is: Annotated[
        bool, _text("--as-it-is", "Fit the data itself instead of what the target makes of it.")
    ] = False,
    tokens: Tokens = None,
    preset: Annotated[
        str | None,
        _training("--preset", "ridge (no training), paper, branch.", HeadSettings().preset),
    ] = None,
    alignment: Annotated[
        str | None,
        _training("--alignment", "none, gaussian, sinkhorn_anchors.", HeadSettings().alignment),
    ] = None,
    num_steps: Annotated[
        int | None, _training("--num-steps", "Steps that are predicted.", HeadSettings().num_steps)
    ] = None,
    width: Annotated[
        int | None,
        _training("--width", "Rank of a step's residual.", "the hidden size, at most 1024"),
    ] = None,
    steps: Steps = None,
    batch: Batch = None,
    learning_rate: LearningRate = None,
    sinkhorn: Annotated[
        float | None, _training("--sinkhorn", "Weight of the divergence.", Weights().sinkhorn)
    ] = None,
    mixed: Annotated[
        str | None, _training("--mixed", "Autocast: none, bfloat16, float16.", "bfloat16 on cuda")
    ] = None,
    seed: Seed = None,
) -> None:
    """Fit a SHAPE head to a target: it drafts from the target's own hidden states.

    The target continues the prompts of the data (or reads the data as it is), its hidden states are
    kept in memory, and the head is fitted to them: in closed form by `--preset ridge`, by gradient
    otherwise, until held-out text stops improving. Ctrl-C saves; the same command goes on from
    there.

    **Examples**

        monge train shape --out my-head --preset ridge --data my-prompts.jsonl
        monge train shape --out my-head --target ./my-target --data chats.jsonl --tokens 1000000 --device cuda
        monge generate "Once" --target ./my-target --draft my-head
    """
    if mixed is not None and mixed not in MIXED:
        raise OptionError(f"--mixed: {mixed!r} is none of {', '.join(MIXED)}")
    recipe = _recipe(steps, batch, learning_rate, seed)
    recipe = replace(recipe, weights=replace(Weights(), **options.given(sinkhorn=sinkhorn)))
    kind = options.given(preset=preset, alignment=alignment, num_steps=num_steps, width=width)
    settings = replace(HeadSettings(), recipe=recipe, **kind)

    def fit(
        network: PreTrainedModel, rows: torch.Tensor, **told: Any
    ) -> tuple[int, ChainQuality | None]:
        kind = MIXED[mixed or ("bfloat16" if network.device.type == "cuda" else "none")]
        outcome = make_head(network, rows, settings, out, mixed=kind, **told)
        return outcome.num_parameters, outcome.quality

    text = replace(TextSettings(), **options.given(num_tokens=tokens, seed=seed))
    given: dict[str, Any] = options.given(dtype=dtype, device=device) | {"as_it_is": as_it_is}
    _train(fit, out, target=target, data=data, text=text, recipe=recipe, threads=threads, **given)


def _published(kind: str, what: str) -> Callable[..., None]:
    """The command that trains heads of a published kind."""

    def command(
        *,
        out: Out,
        target: options.Target = None,
        dtype: options.Dtype = None,
        device: options.Device = None,
        threads: options.Threads = None,
        data: Data = None,
        tokens: Tokens = None,
        num_steps: Annotated[
            int, _training("--num-steps", "Medusa's heads; chains of EAGLE's training.", 3)
        ] = 3,
        steps: Steps = None,
        batch: Batch = None,
        learning_rate: LearningRate = None,
        seed: Seed = None,
    ) -> None:
        recipe = _recipe(steps, batch, learning_rate, seed)

        def fit(
            network: PreTrainedModel, rows: torch.Tensor, **told: Any
        ) -> tuple[int, ChainQuality | None]:
            outcome = train_published(
                kind, network, rows, out, recipe=recipe, num_steps=num_steps, **told
            )
            return outcome.num_parameters, outcome.quality

        text = replace(TextSettings(), **options.given(num_tokens=tokens, seed=seed))
        given: dict[str, Any] = options.given(dtype=dtype, device=device)
        _train(
            fit, out, target=target, data=data, text=text, recipe=recipe, threads=threads, **given
        )

    command.__doc__ = f"""Train {what} on text that the target writes, in the published format.

    Text, losses and loop are those of `monge train shape`, so the heads can be compared. Ctrl-C saves; the same command goes on
    from there.

    **Examples**

        monge train {kind} --out my-{kind}
        monge generate "Once" --draft my-{kind}
    """
    return reported(command)


medusa = _published("medusa", "Medusa heads")
eagle = _published("eagle", "an EAGLE head")


@reported
def eagle3(
    *,
    out: Out,
    target: options.Target = None,
    device: options.Device = None,
    threads: options.Threads = None,
    data: Data = None,
    system: options.System = None,
    own_prompts: Annotated[
        int | None,
        _text(
            "--own-prompts",
            "Also answer so many prompts that the target writes itself, by its chat template; "
            "without --data, only these.",
            "none",
        ),
    ] = None,
    answer_tokens: Annotated[
        int | None,
        _text("--answer-tokens", "Most tokens of an answer.", AnswerSettings().num_tokens),
    ] = None,
    draft_vocabulary: Annotated[
        int,
        _training(
            "--draft-vocabulary",
            "Tokens that the head drafts, the most frequent ones.",
            DRAFT_VOCABULARY,
        ),
    ] = DRAFT_VOCABULARY,
    num_steps: Annotated[
        int, _training("--num-steps", "Steps of the chains that it is trained on.", 4)
    ] = 4,
    steps: Steps = None,
    batch: Batch = None,
    learning_rate: LearningRate = None,
    seed: Seed = None,
) -> None:
    """Train an EAGLE-3 head on answers that the target writes, in the published format.

    The target answers the prompts of the data through its chat template, if it has one. The head
    reads states of three of its layers, and drafts from a reduced vocabulary. Ctrl-C saves; the
    same command goes on from there.

    **Examples**

        monge train eagle3 --target smollm2 --data questions.jsonl --out my-head
        monge train eagle3 --target ./my-target --own-prompts 5000 --device cuda --batch 8192 --out my-head
        monge chat --target smollm2 --draft my-head
    """
    quiet_host()
    options.set_threads(threads)
    options.check_positive(
        own_prompts=own_prompts,
        answer_tokens=answer_tokens,
        draft_vocabulary=draft_vocabulary,
        num_steps=num_steps,
    )
    check_out_folder(out)
    source = built_in("target") if target is None else target
    with working("loading the models"):
        network = load_network(source, **options.given(device=device))
        tokenizer = load_tokenizer(source)
    chat = chat_format(tokenizer, is_built_in=target is None)
    before = [] if system is None else [{"role": "system", "content": system}]
    texts = [prompt for path in data or () for prompt in read_prompts(path)]
    if not data and own_prompts is None:
        texts = list(shipped())
    prompts = [
        chat.encode([*before, *(one.messages or ({"role": "user", "content": one.text},))])
        for one in texts
    ]
    recipe = _recipe(steps, batch, learning_rate, seed)
    answers = replace(AnswerSettings(), **options.given(num_tokens=answer_tokens, seed=seed))
    about = {
        "target": "built-in" if target is None else Path(target).name,
        **versions("monge", "torch", "transformers"),
    }
    with bars() as bar, _interrupts(recipe) as interrupts:
        if own_prompts is not None:
            if not isinstance(chat, TemplateFormat):
                raise OptionError(
                    "--own-prompts: the target has no chat template to write prompts by; give "
                    "--data"
                )
            turns = write_prompts(
                faster_copy(network),
                tokenizer,
                chat.opening(before),
                own_prompts,
                out / "own_prompts",
                seed=recipe.seed,
                on_rows=bar("writing prompts", own_prompts),
            )
            prompts += [chat.encode([*before, {"role": "user", "content": one}]) for one in turns]
        on_read, on_step = (
            bar("reading answers", len(prompts)),
            interrupts.watched(bar("training steps", recipe.steps)),
        )
        outcome = train_eagle3(
            network,
            prompts,
            out,
            recipe=recipe,
            answers=answers,
            draft_vocabulary=draft_vocabulary,
            num_steps=num_steps,
            watch=Watch(on_read=on_read, on_step=on_step, should_stop=interrupts.is_wanted),
            on_answers=bar("writing answers", len(prompts)),
            about=about,
        )
    _say(out, outcome.num_parameters, outcome.quality)


def _recipe(
    steps: int | None, batch: int | None, learning_rate: float | None, seed: int | None
) -> Recipe:
    recipe = replace(
        Recipe(),
        **options.given(steps=steps, batch_size=batch, learning_rate=learning_rate, seed=seed),
    )
    # Twenty evaluations of a long training: more would see noise as the end of improvement.
    return replace(recipe, evaluate_every=max(recipe.evaluate_every, recipe.steps // 20))


def _train(
    fit: Callable[..., tuple[int, ChainQuality | None]],
    out: Path,
    *,
    target: str | None,
    data: list[Path] | None,
    text: TextSettings,
    recipe: Recipe,
    threads: int | None,
    as_it_is: bool = False,
    **loading: Any,
) -> None:
    """Let the target write rows of text, fit a head to them, and say how good it is."""
    quiet_host()
    options.set_threads(threads)
    check_out_folder(out)
    source = built_in("target") if target is None else target
    with working("loading the models"):
        network = load_network(source, **loading)
    prompts = _encoded(load_tokenizer(source), data)
    about = {
        "target": "built-in" if target is None else Path(target).name,
        **versions("monge", "torch", "transformers"),
    }
    with bars() as bar, _interrupts(recipe) as interrupts:
        rows = cut_rows(prompts, text.row_length)[: text.num_rows] if as_it_is else None
        if rows is None:
            rows = write_own_text(network, prompts, text, out, bar("writing rows", text.num_rows))
        on_read, on_step = (
            bar("reading rows", len(rows)),
            interrupts.watched(bar("training steps", recipe.steps)),
        )
        watch = Watch(on_read=on_read, on_step=on_step, should_stop=interrupts.is_wanted)
        num_parameters, quality = fit(network, rows, watch=watch, about=about)
    _say(out, num_parameters, quality)


def _encoded(tokenizer: Any, data: list[Path] | None) -> list[tuple[int, ...]]:  # noqa: ANN401 (the host's type)
    prompts = [prompt for path in data for prompt in read_prompts(path)] if data else shipped()
    chat = chat_format(tokenizer)
    found = (
        encode(tokenizer, one.text) if one.messages is None else chat.encode(one.messages)
        for one in prompts
    )
    return [ids for ids in found if ids]


def _say(out: Path, num_parameters: int, quality: ChainQuality | None) -> None:
    if quality is None:
        notes().print(_KEPT)
        raise typer.Exit(130)
    typer.echo(
        f"{out}: {num_parameters / 1e6:.2f}M parameters; on held-out text of the target a chain of "
        f"{len(quality.acceptance)} has block efficiency {quality.block_efficiency:.3f}, "
        "acceptance by step " + ", ".join(f"{value:.3f}" for value in quality.acceptance)
    )


class _Interrupts:
    """Ctrl-C in a training: it ends after the step, and everything else at once.

    Args:
        recipe: Settings of the training.
    """

    def __init__(self, recipe: Recipe) -> None:
        self._recipe, self._is_training, self._is_wanted = recipe, False, False

    def is_wanted(self) -> bool:
        """Whether training is to end after this step."""
        return self._is_wanted

    def watched(self, advance: Callable[[float], None]) -> Callable[[TrainingProgress], None]:
        """Show progress in steps, those of an earlier call included, and see when training ends."""
        done = 0

        def show(progress: TrainingProgress) -> None:
            nonlocal done
            advance(progress.step - done)
            done, recipe = progress.step, self._recipe
            self._is_training = done < recipe.steps and progress.looks_since_best < recipe.patience

        return show

    def note(self, number: int, frame: FrameType | None) -> None:
        """Handle the signal."""
        if self._is_wanted or not self._is_training:
            raise KeyboardInterrupt
        self._is_wanted = True
        notes().print("ending after this step, which is saved; Ctrl-C again ends at once")


@contextmanager
def _interrupts(recipe: Recipe) -> Iterator[_Interrupts]:
    interrupts = _Interrupts(recipe)
    before = signal.signal(signal.SIGINT, interrupts.note)
    try:
        yield interrupts
    except KeyboardInterrupt as error:
        notes().print(f"\n{_KEPT}")
        raise typer.Exit(130) from error
    finally:
        signal.signal(signal.SIGINT, before)
