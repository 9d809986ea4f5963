"""Networks whose weights lie in several processes."""

from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel


def is_sharded(network: PreTrainedModel) -> bool:
    """Whether some weights are spread over processes, so that a forward takes all of these."""
    return any(isinstance(weight, DTensor) for weight in network.parameters())
