"""`monge train KIND`."""

import signal
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, Final

import torch
import typer
from transformers import PreTrainedModel

from monge.bench.provenance import versions
from monge.cli import options
from monge.cli.console import say
from monge.cli.progress import Stage, working
from monge.core.errors import OptionError
from monge.loading.networks import load_network, load_tokenizer, prepare
from monge.loading.sources import ModelSource
from monge.options import OUTPUT, RUNNING, LoadOptions, changed, option
from monge.prompts import Prompt, as_message, encode, read_prompts, shipped
from monge.requests.chat_format import ChatFormat, TemplateFormat, chat_format
from monge.training.chain import Weights
from monge.training.eagle3 import DRAFT_VOCABULARY, faster_copy, train_eagle3
from monge.training.loop import TRAINING, Outcome, Progress, Recipe, Watch
from monge.training.own_text import (
    AnswerSettings,
    TextSettings,
    cut_rows,
    write_own_text,
    write_prompts,
)
from monge.training.shape import HeadSettings, make_head

TEXT: Final = "Text"
MIXED: Final = {"none": None, "bfloat16": torch.bfloat16, "float16": torch.float16}
_training: Final = options.panel(TRAINING)
_text: Final = options.panel(TEXT)
_KEPT: Final = "interrupted; what was done so far is saved, the same command goes on"
Out = Annotated[Path, options.option("--out", OUTPUT, "Folder of the head; a rerun goes on there.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainOptions:
    """Options of all kinds of heads."""

    threads: int | None = option(None, RUNNING, "Threads of torch.", "torch's own", kind=int)
    data: Sequence[Path] = option(
        (),
        TEXT,
        "Text lines, or *.jsonl with `prompt`, `question` or `turns`; may be repeated.",
        "the shipped prompts",
        kind=Path,
    )
    tokens: int = option(TextSettings().num_tokens, TEXT, "Tokens to fit.")

    @property
    def prompts(self) -> Sequence[Prompt]:
        """The prompts of the data, or the shipped prompts."""
        return [prompt for path in self.data for prompt in read_prompts(path)] or shipped()


@options.command(only=options.NETWORK)
def shape(
    *,
    out: Out,
    load: LoadOptions,
    common: TrainOptions,
    as_it_is: bool = options.switch(
        "--as-it-is", TEXT, "Fit the data itself instead of what the target makes of it."
    ),
    recipe: Recipe,
    settings: HeadSettings,
    sinkhorn: float = _training(Weights().sinkhorn, "Weight of the divergence."),
    mixed: str | None = _training(None, "Autocast: none, bfloat16, float16.", "bfloat16 on cuda"),
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
    recipe = replace(_looking(recipe), weights=replace(Weights(), sinkhorn=sinkhorn))
    settings = replace(settings, recipe=recipe)
    text = replace(TextSettings(), num_tokens=common.tokens, seed=recipe.seed)
    network, tokenizer, chat = _opened(out, load, common)
    encoded = (
        encode(tokenizer, prompt.text) if prompt.messages is None else chat.encode(prompt.messages)
        for prompt in common.prompts
    )
    prompts = [ids for ids in encoded if ids]
    with working() as work, Interrupts(recipe) as interrupts:
        if as_it_is:
            rows = cut_rows(prompts, text.row_length)[: text.num_rows]
        else:
            writing = work.stage("writing rows", text.num_rows, is_begun=False)
            rows = write_own_text(network, prompts, text, out, writing.advance)
        read = work.stage("reading rows", len(rows), is_begun=False)
        trained = work.stage("training steps", recipe.steps, is_begun=False)
        outcome = make_head(
            network,
            rows,
            settings,
            out,
            mixed=MIXED[mixed or ("bfloat16" if network.device.type == "cuda" else "none")],
            watch=interrupts.watch(read, trained),
            about=_about(load),
        )
    _say(out, outcome)


@options.command(only=("target", "device"), without=("tokens",))
def eagle3(
    *,
    out: Out,
    load: LoadOptions,
    common: TrainOptions,
    system: options.System = None,
    own_prompts: int | None = _text(
        None,
        "Also answer so many prompts that the target writes itself, by its chat template; without "
        "--data, only these.",
        "none",
    ),
    answer_tokens: int = _text(AnswerSettings().num_tokens, "Most tokens of an answer."),
    recipe: Recipe,
    draft_vocabulary: int = _training(
        DRAFT_VOCABULARY, "Tokens that the head drafts, the most frequent ones."
    ),
    num_steps: int = _training(4, "Steps of the chains that it is trained on."),
) -> None:
    """Train an EAGLE-3 head on answers that the target writes, in the published format.

    The target answers the prompts of the data through its chat template, if any. The head reads
    states of three of its layers, and drafts from a reduced vocabulary. Ctrl-C saves; the same
    command goes on from there.

    **Examples**

        monge train eagle3 --target smollm2 --data questions.jsonl --out my-head
        monge train eagle3 --target ./my-target --own-prompts 5000 --device cuda --batch 8192 --out my-head
        monge chat --target smollm2 --draft my-head
    """
    options.check_positive(
        own_prompts=own_prompts,
        answer_tokens=answer_tokens,
        draft_vocabulary=draft_vocabulary,
        num_steps=num_steps,
    )
    network, tokenizer, chat = _opened(out, load, common)
    shown = [] if own_prompts is not None and not common.data else common.prompts
    prompts = [chat.encode(as_message(prompt, system).messages or ()) for prompt in shown]
    recipe = _looking(recipe)
    with working() as work, Interrupts(recipe) as interrupts:
        if own_prompts is not None:
            if not isinstance(chat, TemplateFormat):
                raise OptionError(
                    "--own-prompts: the target has no chat template to write prompts by; give "
                    "--data"
                )
            before = [] if system is None else [{"role": "system", "content": system}]
            turns = write_prompts(
                faster_copy(network),
                tokenizer,
                chat.opening(before),
                own_prompts,
                out / "own_prompts",
                seed=recipe.seed,
                on_rows=work.stage("writing prompts", own_prompts, is_begun=False).advance,
            )
            prompts += [chat.encode([*before, {"role": "user", "content": turn}]) for turn in turns]
        read, writing, trained = (
            work.stage(name, total, is_begun=False)
            for name, total in (
                ("reading answers", len(prompts)),
                ("writing answers", len(prompts)),
                ("training steps", recipe.steps),
            )
        )
        outcome = train_eagle3(
            network,
            prompts,
            out,
            recipe=recipe,
            answers=replace(AnswerSettings(), num_tokens=answer_tokens, seed=recipe.seed),
            draft_vocabulary=draft_vocabulary,
            num_steps=num_steps,
            watch=interrupts.watch(read, trained),
            on_answers=writing.advance,
            about=_about(load),
        )
    _say(out, outcome)


def _opened(
    out: Path, load: LoadOptions, common: TrainOptions
) -> tuple[PreTrainedModel, Any, ChatFormat]:
    """Load the target with its tokenizer and its way of writing messages."""
    options.set_threads(common.threads)
    options.check_out_folder(out)
    loading = changed(load)
    source = prepare(ModelSource.of(loading.pop("target", None)), "eager")
    with working("loading the models"):
        network, tokenizer = load_network(source, **loading), load_tokenizer(source)
    return network, tokenizer, chat_format(tokenizer, is_built_in=source.is_built_in)


def _looking(recipe: Recipe) -> Recipe:
    """Return a recipe with twenty evaluations of a long training: more would be noise."""
    return replace(recipe, evaluate_every=max(recipe.evaluate_every, recipe.steps // 20))


def _about(load: LoadOptions) -> dict[str, Any]:
    target = "built-in" if load.target is None else Path(load.target).name
    return {"target": target, **versions("monge", "torch", "transformers")}


def _say(out: Path, outcome: Outcome) -> None:
    quality = outcome.quality
    if quality is None:
        say(_KEPT)
        raise typer.Exit(130)
    typer.echo(
        f"{out}: {outcome.num_parameters / 1e6:.2f}M parameters; on held-out text of the target a chain of "
        f"{len(quality.acceptance)} has block efficiency {quality.block_efficiency:.3f}, "
        "acceptance by step " + ", ".join(f"{value:.3f}" for value in quality.acceptance)
    )


class Interrupts:
    """Ctrl-C in a training: it ends after the step, and everything else at once."""

    def __init__(self, recipe: Recipe) -> None:
        self._recipe, self._is_training, self._is_wanted = recipe, False, False

    def __enter__(self) -> "Interrupts":
        self._before = signal.signal(signal.SIGINT, self._pressed)
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        signal.signal(signal.SIGINT, self._before)
        if kind is KeyboardInterrupt:
            say(f"\n{_KEPT}")
            raise typer.Exit(130)

    def watch(self, read: Stage, trained: Stage) -> Watch:
        """Return callbacks that show progress, steps of an earlier call included, and end the training."""

        def on_step(progress: Progress) -> None:
            trained.advance(progress.step - trained.task.completed)
            recipe, looks = self._recipe, progress.looks_since_best
            self._is_training = progress.step < recipe.steps and looks < recipe.patience

        return Watch(on_read=read.advance, on_step=on_step, should_stop=lambda: self._is_wanted)

    def _pressed(self, number: int, frame: FrameType | None) -> None:
        if self._is_wanted or not self._is_training:
            raise KeyboardInterrupt
        self._is_wanted = True
        say("ending after this step, which is saved; Ctrl-C again ends at once")
