"""`python -m lab.heads.published`: Medusa and EAGLE-1 heads on text that the target writes, to compare kinds of heads.

Text and losses are those of `monge train shape`; files are in the published formats.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final

import torch
from jaxtyping import Int64
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel

from lab.command import run
from monge.api import built_in
from monge.cli import options
from monge.cli.console import quiet_host, reported
from monge.cli.progress import working
from monge.core.errors import unknown_name
from monge.heads.readers.eagle import EagleHead
from monge.heads.readers.medusa import MedusaHead
from monge.heads.readers.slots import CacheSlots
from monge.heads.readers.source import Source
from monge.loading.networks import load_network, load_tokenizer
from monge.prompts import encode, read_prompts, shipped
from monge.training.chain import ChainQuality, Step, Weights, chain_loss, chain_quality
from monge.training.eagle3 import initial_layer, layer_config, save_published
from monge.training.loop import NOBODY, Outcome, Recipe, Watch, train
from monge.training.own_text import TextSettings, write_own_text
from monge.training.texts import (
    HELD_OUT_ROWS,
    Ends,
    Texts,
    Windows,
    all_windows,
    feature_model,
    gradient_ends,
    num_windows,
    random_windows,
    read_texts,
    thirds,
    wide,
)

_ROWS: Final = 8  # rows of one measurement's forward


@dataclass(kw_only=True, eq=False)
class Trainee(ABC):
    """A head of a published kind, of the size of `layer` and with chains of `num_steps`."""

    file: ClassVar[str]

    fitted: Texts
    ends: Ends
    num_steps: int
    layer: Mapping[str, Any]
    parts: Weights = field(default_factory=Weights)
    seed: int = 0
    tensors: dict[str, Tensor] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        num_windows(self.fitted, self.num_steps)  # refuses rows that are too short
        device = self.fitted.states.device
        fresh = self.initial()
        self.tensors = {name: part.to(device).requires_grad_() for name, part in fresh.items()}

    @property
    def config(self) -> Mapping[str, Any]:
        """Configuration of the published format."""
        return self.layer

    @abstractmethod
    def initial(self) -> dict[str, Tensor]:
        """Initial weights under the names of the published format."""

    @abstractmethod
    def loss(self, batch_size: int, generator: torch.Generator) -> Tensor:
        """Loss of a random batch of about `batch_size` positions."""

    @abstractmethod
    def quality(self, texts: Texts) -> ChainQuality:
        """Acceptance on text."""


class MedusaTrainee(Trainee):
    """Medusa heads of one residual block each, initialised as the target's output layer on the unchanged state.

    Loss terms on states do not apply.

    Reference:
        Cai et al., arXiv 2401.10774; losses as for SHAPE heads.
    """

    file = "medusa_lm_head.safetensors"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.head = MedusaHead(Source.in_memory(self.tensors, {}), [1] * self.num_steps)

    def initial(self) -> dict[str, Tensor]:
        hidden, device = self.fitted.states.shape[-1], self.fitted.states.device
        zero, eye = torch.zeros(1, hidden, device=device), torch.eye(hidden, device=device)
        with torch.no_grad():
            # The output layer as a matrix, read off unit states, without a bias or a cap.
            output = (self.ends.unembed(eye) - self.ends.unembed(zero)).float().T
        tensors: dict[str, Tensor] = {}
        for step in range(self.num_steps):
            tensors[f"{step}.0.linear.weight"] = torch.zeros(hidden, hidden)
            tensors[f"{step}.0.linear.bias"] = torch.zeros(hidden)
            tensors[f"{step}.1.weight"] = output.clone().contiguous()
        return tensors

    @property
    def config(self) -> Mapping[str, Any]:
        sizes = {"medusa_num_heads": self.num_steps, "medusa_num_layers": 1}
        return {"architectures": ["MedusaModel"], **sizes}

    def loss(self, batch_size: int, generator: torch.Generator) -> Tensor:
        windows = random_windows(self.fitted, batch_size, self.num_steps, self.ends, generator)
        return chain_loss(self._steps(windows), self.parts)

    @torch.no_grad()
    def quality(self, texts: Texts) -> ChainQuality:
        return chain_quality(map(self._steps, all_windows(texts, self.num_steps, self.ends)))

    def _steps(self, windows: Windows) -> Iterator[Step]:
        for number in range(self.num_steps):
            with torch.no_grad():
                true = self.ends.unembed(windows.true[:, number]).float()
            drafted = self.head.step(number, windows.states)
            yield Step(drafted, true, windows.token_ids[:, number])


class EagleTrainee(Trainee):
    """An EAGLE head of one layer, initialised as the identity on the state.

    All steps of a chain are trained. From the second step on, the head reads its own predictions of
    the previous step, as in HASS and EAGLE-3. Attention then reads predictions at earlier positions
    too, where decoding reads the target's states, so figures of deeper steps are slightly
    pessimistic. The distance of predicted and true states is added to the loss with weight 1.

    Reference:
        Li et al., EAGLE, arXiv 2401.15077; training on own predictions: HASS, arXiv 2408.15766.
    """

    file = "model.safetensors"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.head = EagleHead(Source.in_memory(self.tensors, self.layer))

    def initial(self) -> dict[str, Tensor]:
        hidden, generator = self.layer["hidden_size"], torch.Generator().manual_seed(self.seed)
        return {
            "fc.weight": torch.cat([torch.zeros(hidden, hidden), torch.eye(hidden)], dim=1),
            **initial_layer("layers.0", self.layer, hidden, generator),
        }

    def loss(self, batch_size: int, generator: torch.Generator) -> Tensor:
        rows, length = self.fitted.token_ids.shape
        count = max(1, batch_size // length)
        which = torch.randint(rows, (count,), generator=generator)  # noqa: TID251 (a training batch)
        which = which.to(self.fitted.states.device)
        texts = Texts(token_ids=self.fitted.token_ids[which], states=self.fitted.states[which])
        steps = list(self._steps(texts))
        loss = chain_loss(steps, self.parts)
        for number, step in enumerate(steps):
            assert step.states is not None
            loss = loss + self.parts.decay**number * functional.smooth_l1_loss(*step.states)
        return loss

    @torch.no_grad()
    def quality(self, texts: Texts) -> ChainQuality:
        starts = range(0, len(texts.token_ids), _ROWS)
        return chain_quality(
            self._steps(texts.rows(slice(start, start + _ROWS))) for start in starts
        )

    def _steps(self, texts: Texts) -> Iterator[Step]:
        """The steps of chains that start at every position.

        Step n of the chain that starts with the pair at place t is the prediction at place t + n -
        1, about the token after.
        """
        rows, length = texts.token_ids.shape
        states, chains = wide(texts.states), length - 1 - self.num_steps
        embeddings = self.ends.embed(texts.token_ids[:, 1:]).to(states.dtype).flatten(0, 1)
        read = states[:, :-1]
        for number in range(self.num_steps):
            found = self.head.advance(embeddings, read.flatten(0, 1), self._slots(rows, length - 1))
            found = found.unflatten(0, (rows, -1))
            here, true = found[:, number:][:, :chains], states[:, number + 1 :][:, :chains]
            with torch.no_grad():
                logits = self.ends.unembed(true).float().flatten(0, 1)
            drafted = self.head.logits(here.flatten(0, 1), self.ends.unembed)
            tokens = texts.token_ids[:, number + 2 :][:, :chains].flatten()
            yield Step(drafted, logits, tokens, states=(here, true))
            read = torch.cat([states[:, :1], found[:, :-1]], dim=1)

    def _slots(self, rows: int, length: int) -> CacheSlots:
        """The slots of whole texts in an empty cache."""
        like, parts = self.head.fc.weight, self.head.attentions
        places = torch.arange(length, device=like.device)
        seen = places <= places[:, None]
        masks = {
            window: seen if window is None else seen & (places[:, None] - places < window)
            for window in {part.window for part in parts}
        }
        kept = [
            like.new_zeros(rows, heads, length, size)
            for part in parts
            for heads, size in part.cache_shapes
        ]
        places = places.repeat(rows, 1)
        return CacheSlots(places, places, masks, kept)


KINDS: Final[Mapping[str, type[Trainee]]] = {"medusa": MedusaTrainee, "eagle": EagleTrainee}


def train_published(
    kind: str,
    network: PreTrainedModel,
    rows: Int64[Tensor, "rows seq"],
    folder: Path,
    *,
    recipe: Recipe,
    num_steps: int = 3,
    watch: Watch = NOBODY,
) -> Outcome:
    """Read the rows with the target, train a head of `num_steps`, and save it in the published format.

    Raises:
        OptionError: If the kind is unknown, or there is too little text.
    """
    if kind not in KINDS:
        raise unknown_name("kind of head", kind, KINDS)
    target = feature_model(network)
    fitted, chosen, held_out = thirds(read_texts(target, rows, on_rows=watch.on_read))
    some = chosen.rows(slice(0, HELD_OUT_ROWS))
    trainee = KINDS[kind](
        fitted=fitted,
        ends=gradient_ends(network),
        num_steps=num_steps,
        layer=layer_config(network, target),
        parts=recipe.weights,
        seed=recipe.seed,
    )
    progress = train(
        trainee.tensors,
        lambda generator, _: trainee.loss(recipe.batch_size, generator),
        lambda: trainee.quality(some).block_efficiency,
        recipe=recipe,
        folder=folder,
        watch=watch,
    )
    outcome = Outcome(
        num_parameters=sum(tensor.numel() for tensor in trainee.tensors.values()),
        quality=None if watch.should_stop() else trainee.quality(held_out),
        progress=progress,
    )
    if outcome.quality is not None:
        config = {**trainee.config, "about": {"tokens": rows.numel(), **outcome.figures}}
        save_published(folder / trainee.file, trainee.tensors, config)
    return outcome


@reported
def main(
    *,
    kind: Annotated[str, options.option("--kind", options.MODELS, "medusa or eagle.")],
    out: Annotated[Path, options.option("--out", options.OUTPUT, "Folder of the head.")],
    target: options.Target = None,
    dtype: options.Dtype = None,
    device: options.Device = None,
    threads: options.Threads = None,
    data: Path | None = options.measuring(
        None, "Prompts that the target continues.", "the shipped"
    ),
    tokens: int = options.measuring(TextSettings().num_tokens, "Tokens that it writes."),
    steps: int = options.measuring(Recipe().steps, "Most training steps."),
    num_steps: int = options.measuring(3, "Medusa's heads; chains of EAGLE's training."),
    seed: int = options.measuring(0, "Of text and training."),
) -> None:
    """Train a Medusa or EAGLE head; the same command goes on where it was interrupted."""
    quiet_host()
    options.set_threads(threads)
    options.check_out_folder(out)
    source = built_in("target") if target is None else target
    network = load_network(source, **options.given(dtype=dtype, device=device))
    tokenizer = load_tokenizer(source)
    texts = shipped() if data is None else read_prompts(data)
    prompts = [encode(tokenizer, one.text) for one in texts]
    settings = replace(TextSettings(), num_tokens=tokens, seed=seed)
    with working() as work:
        work.stage("writing rows")
        rows = write_own_text(network, prompts, settings, out)
        trained = work.stage("training steps", steps)
        outcome = train_published(
            kind,
            network,
            rows,
            out,
            recipe=Recipe(steps=steps, seed=seed),
            num_steps=num_steps,
            watch=Watch(on_step=lambda _: trained.advance(1)),
        )
    assert outcome.quality is not None
    print(f"{out}: block efficiency {outcome.quality.block_efficiency:.3f} on held-out text")


if __name__ == "__main__":
    run(main)
