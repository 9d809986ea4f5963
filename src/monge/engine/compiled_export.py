"""A network's step over tree nodes, traced: what the compiled backend compiles."""

from typing import Any

import torch
from torch.export import Dim, ExportedProgram
from torch.fx.experimental import _config

from monge.engine.step import StepSpec
from monge.engine.step_module import Step

_tracing: Any = _config  # its `patch` is installed at run time, out of sight of type checkers


def export_step(step: Step, spec: StepSpec) -> ExportedProgram:
    """Trace a step; batch, nodes, their logits, visible columns and capacity stay variable: one program serves all sizes."""
    batch, nodes, logits, width, capacity = 2, 3, 5, 11, 16  # all different, so that no two of them are taken for one
    ids = torch.zeros(batch, nodes, dtype=torch.int64)
    columns = torch.arange(nodes).repeat(batch, 1)
    shown = torch.arange(logits) % nodes
    masks = [torch.ones(batch, 1, nodes, width).to(spec.mask_dtype) for _ in spec.kinds]
    kept = [torch.zeros(batch, heads, capacity, size, dtype=spec.dtype) for heads, size in spec.cache_shapes]
    varies = {0: Dim.DYNAMIC, 1: Dim.DYNAMIC}
    shapes = (
        varies,
        (varies, varies, {0: Dim.DYNAMIC}),
        [{0: Dim.DYNAMIC, 2: Dim.DYNAMIC, 3: Dim.DYNAMIC} for _ in masks],
        [{0: Dim.DYNAMIC, 2: Dim.DYNAMIC} for _ in kept],
    )
    # Size-oblivious: otherwise a size of one would be a program of its own.
    with torch.no_grad(), _tracing.patch(backed_size_oblivious=True):
        arguments = (ids, (columns, columns.clone(), shown), masks, kept)
        return torch.export.export(step, arguments, dynamic_shapes=shapes, strict=False)
