"""The interface of backends, and the backends by name."""

import warnings
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import partial
from typing import Final

from transformers import PreTrainedModel

from monge.core.errors import BackendError
from monge.core.parts import PARTS, Part
from monge.core.registry import Registry
from monge.networks.base import SequenceModel
from monge.networks.forward import SourceWeights
from monge.networks.hf_chain import HfChainModel
from monge.networks.hf_tree import HfTreeModel
from monge.networks.network_facts import why_no_tree


class Backend(Part, ABC):
    """Runs networks."""

    @property
    def keeps_file_types(self) -> bool:
        """True if it runs networks of GGUF files whose matrices keep the types of the file."""
        return False

    @property
    def keeps_numbers(self) -> bool:
        """True if what it runs has the network's weights as they are."""
        return True

    @abstractmethod
    def sequence_model(self, network: PreTrainedModel) -> SequenceModel:
        """Return the model of a network: it reads trees if the network can, else chains.

        Args:
            network: A causal language model in evaluation mode.
        """


@dataclass(frozen=True, slots=True)
class Eager(Backend):
    """The network as `transformers` runs it, on any device."""

    def sequence_model(self, network: PreTrainedModel) -> HfTreeModel | HfChainModel:
        return HfTreeModel(network) if why_no_tree(network) is None else HfChainModel(network)


@dataclass(frozen=True, slots=True)
class Compiled(Backend):
    """Forwards compiled to machine code on CPUs and kept for the next start, or captured as CUDA graphs on GPUs.

    A network that supports neither runs eagerly, with a warning.

    Args:
        weights: Storage of linear layers' weights on a CPU: `exact`; `file`, the types of a GGUF
            file, with inputs of quantised layers rounded to 8 bits; or rounded to `bfloat16`, `int8`
            or `int4`. Decoding keeps the distribution of that network.

    Raises:
        OptionError: If there is no such kind of weights.
    """

    weights: str = "exact"

    def __post_init__(self) -> None:
        from monge.backends.cpu.rounded_weights import check_weights

        check_weights(self.weights)

    @property
    def keeps_file_types(self) -> bool:
        """See `Backend`."""
        return self.weights == "file"

    @property
    def keeps_numbers(self) -> bool:
        """See `Backend`."""
        return self.weights in {"exact", "file"}

    def sequence_model(self, network: PreTrainedModel) -> SequenceModel:
        name = "compiled" if self.weights == "exact" else f"compiled(weights={self.weights!r})"
        is_on_cpu, given, copy = network.device.type == "cpu", network, None
        # Matrices of files are packed when they are read.
        if not self.keeps_numbers:
            from monge.backends.cpu.rounded_weights import round_weights

            # What cannot be rounded is refused: other weights are another distribution.
            copy = partial(round_weights, weights=self.weights)
            network = copy(network)
        try:
            model = self._on_cpu(network) if is_on_cpu else self._on_gpu(network)
        except BackendError as error:
            warnings.warn(
                f"backend 'compiled' is not used, the network runs eagerly: {error}", stacklevel=4
            )
            model = Eager().sequence_model(network)
            if self.weights == "exact":
                return model
        # After compiled layers of a GPU have moved weights beside each other.
        model.source = SourceWeights(given, name, are_copied=is_on_cpu, copy=copy)
        return model

    def _on_cpu(self, network: PreTrainedModel) -> HfTreeModel:
        # The compiler is slow to import.
        from monge.backends.cpu.compiled import pending_forward, pending_module
        from monge.backends.cpu.packed_linear import pack_draft_module

        return HfTreeModel(network, pending_forward, pending_module, pack_draft_module)

    def _on_gpu(self, network: PreTrainedModel) -> HfTreeModel:
        from monge.backends.cuda import GraphCapture, capture_forward
        from monge.backends.fused_layers import compiler_for
        from monge.backends.module_graphs import capture_module

        capture, compiler = GraphCapture(network.device), compiler_for(network.device)
        return HfTreeModel(
            network,
            partial(capture_forward, capture=capture, compiler=compiler),
            partial(capture_module, capture=capture),
        )


BACKENDS: Final[Registry[Backend]] = Registry("backend", PARTS["backend"], base=Backend)
