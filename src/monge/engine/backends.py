"""Ways of running a network: by `transformers` as it is, or its steps over few nodes by something faster."""

import logging
import warnings
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Final

from transformers import PreTrainedModel

from monge.core.errors import BackendError, OptionError
from monge.core.model import SequenceModel
from monge.core.registry import Registry
from monge.engine.graphs import GraphRecorder
from monge.engine.hf import HfTreeModel
from monge.engine.hf_chain import HfChainModel
from monge.engine.network_facts import tree_obstacle

_LOG: Final = logging.getLogger(__name__)


class Backend(ABC):
    """What runs a network.

    Attributes:
        reads_shards: Whether it runs networks whose weights lie in several processes.
    """

    reads_shards: ClassVar[bool] = False

    @abstractmethod
    def sequence_model(self, network: PreTrainedModel) -> SequenceModel:
        """The network behind the interface of the loop: trees where it can read them, chains otherwise.

        Args:
            network: A causal language model in evaluation mode.
        """


@dataclass(frozen=True, slots=True)
class Eager(Backend):
    """The network as `transformers` runs it, on any device."""

    def sequence_model(self, network: PreTrainedModel) -> SequenceModel:
        return HfTreeModel(network) if tree_obstacle(network) is None else HfChainModel(network)


@dataclass(frozen=True, slots=True)
class Compiled(Backend):
    """Steps compiled to machine code, once for this machine; on CUDA devices recorded as graphs.

    What can be neither runs eagerly, with a warning.
    """

    def sequence_model(self, network: PreTrainedModel) -> SequenceModel:
        try:
            return self._on_cpu(network) if network.device.type == "cpu" else self._on_device(network)
        except BackendError as error:
            return _eager_after_all("compiled", network, error)

    def _on_cpu(self, network: PreTrainedModel) -> SequenceModel:
        from monge.engine.compiled import compile_step  # the compiler is slow to import
        from monge.engine.compiled_module import compile_module

        step_with = partial(compile_step, network, _LOG.info)
        return HfTreeModel(network, step_with(), step_with, partial(compile_module, _LOG.info))

    def _on_device(self, network: PreTrainedModel) -> SequenceModel:
        from monge.engine.recorded import record_step

        step_with = partial(record_step, network, GraphRecorder(network.device), _LOG.info)
        return HfTreeModel(network, step_with(), step_with)


@dataclass(frozen=True, slots=True)
class OpenVino(Backend):
    """Steps run by OpenVINO, exported once. What it cannot run is run eagerly, with a warning, if the law is the same.

    Args:
        weights: How weights of linear maps are held. `same`: as the network has them. `bf16`, `int8`: rounded to bfloat16, or
            to 8-bit integers with one scale a row; the law is then that of the network with the rounded weights, and prompts
            are read by that network too.
    """

    weights: str = "same"

    def __post_init__(self) -> None:
        from monge.engine.openvino_weights import WEIGHTS

        if self.weights not in WEIGHTS:
            raise OptionError(f"backend openvino: weights must be one of {', '.join(WEIGHTS)}; got {self.weights!r}")

    def sequence_model(self, network: PreTrainedModel) -> SequenceModel:
        from monge.engine.openvino import openvino_step, require_openvino
        from monge.engine.openvino_module import openvino_module
        from monge.engine.openvino_weights import with_weights

        require_openvino()
        try:
            held = with_weights(network, self.weights)
            step_with = partial(openvino_step, held, self.weights, _LOG.info)
            return HfTreeModel(held, step_with(), step_with, partial(openvino_module, _LOG.info))
        except BackendError as error:
            if self.weights != "same":
                raise
            return _eager_after_all("openvino", network, error)


BACKENDS: Final[Registry[Backend]] = Registry("backend", {"eager": Eager, "compiled": Compiled, "openvino": OpenVino})


def _eager_after_all(name: str, network: PreTrainedModel, error: BackendError) -> SequenceModel:
    warnings.warn(f"backend {name!r} is not used, the network runs eagerly: {error}", stacklevel=5)
    return Eager().sequence_model(network)
