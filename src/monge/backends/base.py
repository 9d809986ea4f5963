"""The interface of backends."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar

from transformers import PreTrainedModel

from monge.core.model import SequenceModel

Notify = Callable[[str], None]
"""Receives a message about work that takes long."""


class Backend(ABC):
    """Runs networks.

    Attributes:
        reads_shards: True if it runs networks whose weights lie in several processes.
    """

    reads_shards: ClassVar[bool] = False

    @abstractmethod
    def sequence_model(self, network: PreTrainedModel) -> SequenceModel:
        """Return the model of a network: one that reads trees if it can, chains otherwise.

        Args:
            network: A causal language model in evaluation mode.
        """
