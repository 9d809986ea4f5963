"""Small modules beside a network, run by its backend: its output layer, and the steps of a head."""

import warnings
from collections.abc import Callable, Sequence
from typing import Final

import torch
from torch import Tensor
from transformers import PreTrainedModel

from monge.core.errors import BackendError
from monge.core.model import Forward
from monge.engine.models.network_facts import OutputLayer

ModuleMaker = Callable[[torch.nn.Module, Sequence[Tensor]], Forward]
"""Makes a program of a module, for inputs of these widths and types.

Raises `BackendError` where there is none.
"""

# As of a step: with more rows arithmetic counts, and the module itself does as well.
_ROWS: Final = 64


class ModuleRunner:
    """Runs modules by a backend, where there is one.

    Args:
        network: The network beside which they run.
        maker: The backend's; `None` runs every module as it is.
    """

    def __init__(self, network: PreTrainedModel, maker: ModuleMaker | None) -> None:
        self._network, self._maker = network, maker
        self._output: Forward | None = None

    def run(self, module: torch.nn.Module, like: Sequence[Tensor]) -> Forward:
        """See `ModuleHost.module_program`."""
        if self._maker is None:
            return module
        try:
            program = self._maker(module, like)
        except BackendError as error:
            warnings.warn(f"part of a head runs eagerly: {error}", stacklevel=4)
            return module
        return lambda *inputs: (program if len(inputs[0]) <= _ROWS else module)(*inputs)

    def logits(self, states: Tensor) -> Tensor:
        """The network's logits of last hidden states."""
        if self._output is None:
            self._output = self.run(OutputLayer(self._network), (states[:1],))
        return self._output(states)[0]
