"""Training of Medusa heads, with the text and losses of SHAPE heads."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from monge.heads.readers.files import InMemory
from monge.heads.readers.medusa import MedusaHead
from monge.heads.readers.tensors import Tensors
from monge.training.chain import ChainQuality, Step, chain_quality
from monge.training.loop import Trainee
from monge.training.losses import Weights, law_losses
from monge.training.texts import Ends, Texts, Windows, all_windows, random_windows


@dataclass(frozen=True, slots=True, kw_only=True)
class MedusaTrainee(Trainee):
    """Medusa heads of one residual block each, initialised as the target's output layer on the unchanged state.

    Args:
        fitted: Training text and states.
        held_out: Held-out text and states, for early stopping.
        ends: The target's embedding and output layer.
        parts: Weights of the loss terms; terms on states do not apply.
        num_steps: Number of heads.

    Reference:
        Cai et al., arXiv 2401.10774; losses as for SHAPE heads.
    """

    fitted: Texts
    held_out: Texts
    ends: Ends
    parts: Weights
    num_steps: int
    tensors: dict[str, Tensor] = field(init=False, repr=False)
    head: MedusaHead = field(init=False, repr=False)

    def __post_init__(self) -> None:
        states, hidden = self.fitted.states, self.fitted.states.shape[-1]
        zero, eye = (
            torch.zeros(1, hidden, device=states.device),
            torch.eye(hidden, device=states.device),
        )
        with torch.no_grad():
            # The output layer as a matrix, read off unit states; a bias or a cap would be no part
            # of it.
            output = (self.ends.unembed(eye) - self.ends.unembed(zero)).float().T
        tensors: dict[str, Tensor] = {}
        for step in range(self.num_steps):
            tensors[f"{step}.0.linear.weight"] = torch.zeros(hidden, hidden, device=states.device)
            tensors[f"{step}.0.linear.bias"] = torch.zeros(hidden, device=states.device)
            tensors[f"{step}.1.weight"] = output.clone()
        trained = {name: tensor.contiguous().requires_grad_() for name, tensor in tensors.items()}
        object.__setattr__(self, "tensors", trained)
        object.__setattr__(
            self,
            "head",
            MedusaHead(
                Tensors(InMemory(trained), {name: name for name in trained}), [1] * self.num_steps
            ),
        )

    @property
    def weights(self) -> Mapping[str, Tensor]:
        return self.tensors

    @property
    def config(self) -> dict[str, Any]:
        """Configuration of the published format."""
        return {
            "architectures": ["MedusaModel"],
            "medusa_num_heads": self.num_steps,
            "medusa_num_layers": 1,
        }

    def loss(self, batch_size: int, generator: torch.Generator) -> Tensor:
        windows = random_windows(self.fitted, batch_size, self.num_steps, self.ends, generator)
        total = torch.zeros((), device=windows.states.device)
        for number, step in enumerate(self._steps(windows)):
            kl, tv = law_losses(step.true, step.drafted.float())
            total = total + self.parts.decay**number * (kl + self.parts.tv * tv)
        return total

    def look(self) -> float:
        return self.quality(self.held_out).block_efficiency

    def quality(self, texts: Texts) -> ChainQuality:
        """Acceptance on text."""
        with torch.no_grad():
            return chain_quality(
                self._steps(windows) for windows in all_windows(texts, self.num_steps, self.ends)
            )

    def _steps(self, windows: Windows) -> Iterator[Step]:
        for number in range(self.num_steps):
            with torch.no_grad():
                true = self.ends.unembed(windows.true[:, number]).float()
            yield Step(
                self.head.step(number, windows.states, self.ends.unembed),
                true,
                windows.token_ids[:, number],
            )
