"""Small heads for tables, with weights that make every law different."""

import torch

from monge.heads.shape.head import ShapeHead, TargetSizes, make_predictor
from monge.testing.tabular import TabularModel


def random_head(
    target: TabularModel,
    kind: str = "gated",
    *,
    num_steps: int = 2,
    is_branched: bool = True,
    alignment: str = "none",
    seed: int = 0,
) -> ShapeHead:
    """A head whose every number is drawn, so that no law it makes is that of another node."""
    sizes = TargetSizes.of(target)
    settings = {"width": 4, "gate_rank": 2} if kind == "gated" else {}
    head = ShapeHead(
        make_predictor(kind, sizes, num_steps=num_steps, is_branched=is_branched, **settings),
        sizes,
        alignment,
    )
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in [*head.predictor.parameters(), *head.alignments.buffers()]:
            tensor.copy_(torch.randn(tensor.shape, generator=generator))
        head.temperatures.copy_(0.5 + torch.rand(num_steps, generator=generator))
        for name, tensor in head.alignments.named_buffers():
            if name.endswith("masses"):
                tensor.copy_(torch.full_like(tensor, 1 / len(tensor)))
    head.remember(target)
    return head
