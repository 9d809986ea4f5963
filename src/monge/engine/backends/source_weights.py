"""Changes to a network after a backend has copied its weights."""

from typing import Any

from torch import nn
from transformers import PreTrainedModel

from monge.core.errors import BackendError


class SourceWeights:
    """The network whose weights a backend runs in another form.

    Training, `load_state_dict`, assigned tensors, and replaced or added layers are seen; numbers
    that are written in place through `.data` are not, since torch does not count those.

    Args:
        network: The network.
        backend: What runs it, for the message.
        are_copied: Whether its numbers are copied; else only where they lie matters.
    """

    def __init__(self, network: PreTrainedModel, backend: str, *, are_copied: bool) -> None:
        self._name, self._backend, self._are_copied = type(network).__name__, backend, are_copied
        self._modules = tuple(network.modules())
        self._seen = self._state()

    def check(self) -> None:
        """Refuse to go on with copies of weights that were changed.

        Raises:
            BackendError: If the network has other weights or layers than when this was made.
        """
        if self._state() != self._seen:
            raise BackendError(
                f"{self._name} was changed after it was loaded: backend {self._backend!r} still "
                "has the weights of that time; load the model again, or use backend='eager'"
            )

    def _state(self) -> list[tuple[Any, ...]]:
        return [
            (*map(id, module._modules.values()), *map(self._place, module._parameters.values()))
            for module in self._modules
        ]

    def _place(self, weight: nn.Parameter | None) -> tuple[int, ...]:
        if weight is None:
            return ()
        version = weight._version if self._are_copied and not weight.is_inference() else 0
        return id(weight), weight.data_ptr(), version
