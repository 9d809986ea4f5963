"""Forwards over the time that reading the weights takes."""

from statistics import median
from typing import Any, Final

import torch
from transformers import PreTrainedModel

from lab.gpu.figures import Figure
from lab.gpu.machine import Machine
from monge.bench.runner import in_turns
from monge.bench.statistics import paired_ratios

_GOALS: Final = {1: 1.4, 8: 1.45, 64: 1.5}
_COPIES: Final = 4


def forwards(machine: Machine, until: float) -> list[Figure]:
    """Return the bandwidth of copies, the floor of a forward, and forwards over it."""
    size, pair = machine.size, machine.pair
    block = torch.zeros(size.copied, dtype=torch.uint8, device=machine.device)
    other = torch.empty_like(block)

    def copy_s() -> float:
        return machine.seconds(lambda: [other.copy_(block) for _ in range(_COPIES)])

    works = {
        str(nodes): machine.forward(pair.target_model, size.context, nodes) for nodes in _GOALS
    }
    found = in_turns({"copy": copy_s, **works}, size.repeats, until)
    speeds, read = (
        [2e-12 * _COPIES * size.copied / one for one in found["copy"]],
        read_bytes(pair.target),
    )
    floors = [1e-12 * read / speed for speed in speeds]
    ms, detail = tuple(1e3 * floor for floor in floors), f"{read / 1e9:.2f} GB of weights"
    return [
        Figure(name="bandwidth of copies", values=tuple(speeds), unit="TB/s"),
        Figure(name="floor of a forward", values=ms, unit="ms", detail=detail),
        *(
            Figure(
                name=f"forward of {nodes} node{'s'[: nodes - 1]} over the floor",
                values=paired_ratios(found[str(nodes)], floors),
                goal=goal,
                detail=f"{1e3 * median(found[str(nodes)]):.2f} ms",
            )
            for nodes, goal in _GOALS.items()
        ),
    ]


def read_bytes(network: PreTrainedModel) -> int:
    """Return the bytes of the weights that a forward reads: all but a table that only embeds tokens."""
    tables: Any = network.get_input_embeddings(), network.get_output_embeddings()
    embedding, output = (table.weight for table in tables)
    return sum(
        weight.numel() * weight.element_size()
        for weight in network.parameters()
        if weight is output or weight is not embedding
    )
