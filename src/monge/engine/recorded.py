"""The compiled backend on a GPU: a network's steps, recorded once and replayed without Python or launches in between."""

import warnings
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol, runtime_checkable

import torch
from torch import Tensor
from transformers import PreTrainedModel

from monge.core.errors import BackendError
from monge.engine.cache import TreeCache
from monge.engine.step import Notify, StepOutput, StepSpec
from monge.engine.step_check import largest_difference, refusing, require_agreement, step_obstacle, step_spec
from monge.engine.step_module import Step

WIDTHS: Final = (1, 2, 4, 8, 16, 32, 64)
"""Nodes a row that are recorded."""
_MOST: Final = 64  # recordings that are kept: batches come in many sizes, and those of long ago may not come back

Outputs = tuple[Tensor, ...]


@runtime_checkable
class Recorder(Protocol):
    """Records work on a device."""

    def record(self, work: Callable[[], Outputs]) -> tuple[Callable[[], None], Outputs]:
        """Record work that always reads and writes the same memory.

        Returns:
            What repeats it, and the tensors that hold its results after every repetition.

        Raises:
            RuntimeError: If the work asks for a number while it is recorded, or the memory is used up.
        """
        ...


@dataclass(frozen=True, slots=True)
class Recording:
    """Recorded work: where its inputs are put, what repeats it, where its outputs are then."""

    inputs: tuple[Tensor, ...]
    masks: tuple[Tensor, ...]
    repeat: Callable[[], None]
    outputs: Outputs

    def run(self, inputs: Sequence[Tensor], masks: Sequence[Tensor] = ()) -> Outputs:
        """The results for these inputs."""
        for held, given in zip(self.inputs, inputs, strict=True):
            held.copy_(given, non_blocking=True)
        for held, mask in zip(self.masks, masks, strict=True):
            held.fill_(False if held.dtype == torch.bool else torch.finfo(held.dtype).min)
            held[..., : mask.shape[-1]] = mask
        self.repeat()
        # Copies: the next repetition writes its own to the same place.
        return tuple(output.clone() for output in self.outputs)


class RecordedStep:
    """A step that is recorded for every number of rows and nodes when it first comes, and repeated from then on; a `SizedStep`.

    It attends to all columns that the cache has, since their number must not change; the mask hides those without text. When
    the cache moves to other memory, steps are recorded anew.

    Args:
        step: The step as a module.
        spec: What it reads and gives.
        recorder: Records it.
    """

    name = "recorded"
    widths = WIDTHS

    def __init__(self, step: Step, spec: StepSpec, recorder: Recorder) -> None:
        self.module, self.spec, self._recorder = step, spec, recorder
        self.layers = spec.layers
        self._layout: object = None
        self._recordings: OrderedDict[tuple[int, int, int], Recording] = OrderedDict()
        self._has_room = True

    def __call__(self, token_ids: Tensor, positions: Tensor, masks: Sequence[Tensor], cache: TreeCache) -> StepOutput:
        if cache.layout is not self._layout:
            self.forget()
            self._layout = cache.layout
        inputs = token_ids, positions, cache.columns(token_ids.shape[1])
        key = cache.rows.start, cache.rows.stop, token_ids.shape[1]
        if key not in self._recordings and self._has_room:
            self._add(key, inputs, cache)
        if (recording := self._recordings.get(key)) is None:
            logits, *states = self.module(inputs[0], (*inputs[1:], _all(inputs[0])), masks, cache.kept())
        else:
            self._recordings.move_to_end(key)
            logits, *states = recording.run(inputs, masks)
        return StepOutput(logits=logits, states=tuple(states))

    def forget(self) -> None:
        """Give back what was recorded."""
        self._recordings.clear()

    def _add(self, key: tuple[int, int, int], inputs: tuple[Tensor, Tensor, Tensor], cache: TreeCache) -> None:
        """Record a step of this size; where memory runs out, sizes that are not recorded yet run as they are from now on."""
        try:
            self._recordings[key] = self._recorded(inputs, cache)
        except torch.OutOfMemoryError as error:
            self._has_room = False
            (rows, nodes), mebibytes = inputs[0].shape, cache.num_bytes / 2**20
            warnings.warn(
                f"no memory to record a step of {rows} requests by {nodes} nodes with {mebibytes:.0f} MiB of keys and values, "
                f"{len(self._recordings)} steps are recorded; others run eagerly from here on: {error}",
                stacklevel=6,
            )
        if len(self._recordings) > _MOST:
            self._recordings.popitem(last=False)

    def _recorded(self, inputs: tuple[Tensor, Tensor, Tensor], cache: TreeCache) -> Recording:
        token_ids, positions, columns = (tensor.clone() for tensor in inputs)
        rows, nodes = token_ids.shape
        # What the nodes see meanwhile does not matter, but a query that sees nothing has no attention weights.
        mask = torch.ones(rows, 1, nodes, cache.capacity, dtype=self.spec.mask_dtype, device=token_ids.device)
        masks = tuple(mask.clone() for _ in self.spec.kinds)
        places, kept = (positions, columns, _all(token_ids)), cache.kept()
        repeat, outputs = self._recorder.record(lambda: self.module(token_ids, places, masks, kept))
        return Recording((token_ids, positions, columns), masks, repeat, outputs)


def record_step(network: PreTrainedModel, recorder: Recorder, notify: Notify, layers: tuple[int, ...] = ()) -> RecordedStep:
    """A network's step, to be recorded on the device where the network lies; checked against the network.

    Args:
        network: A network in evaluation mode.
        recorder: Records on that device.
        notify: Told what takes long.
        layers: Hidden states that come with the logits.

    Raises:
        BackendError: If the network cannot be recorded; the message says why.
    """
    if (reason := step_obstacle(network, "recorded")) is not None:
        raise BackendError(reason)
    name = type(network).__name__
    notify(f"recording steps of {name}; every size is recorded when it first comes")
    with refusing(f"{name} cannot be recorded"):
        spec = step_spec(network, layers)
        step = RecordedStep(Step(network, spec), spec, recorder)
        difference = largest_difference(network, step)
        step.forget()  # what was recorded for a cache that nobody has any more
    require_agreement(network, step, "recorded", difference)
    return step


def _all(token_ids: Tensor) -> Tensor:
    """All nodes have logits."""
    return torch.arange(token_ids.shape[1], device=token_ids.device)
