# pyright: basic, reportMissingImports=false, reportIndexIssue=false, reportArgumentType=false
"""Recursive rejection in one kernel.

The tests of `verify/fast/recursive.py` with nothing written back between them.

One program a node, its columns in registers; the torch form launches a dozen kernels a candidate.
"""

import torch
import triton
import triton.language as tl

from monge.verify.fast.trials import Outcome, Trials


def recursive(trials: Trials, *, is_shrinking: bool) -> Outcome:
    """As `recursive` (or `recursive_without_replacement`, where q shrinks) in `verify/fast/recursive.py`."""
    num_nodes, num_columns = trials.p.shape
    winners, left = torch.empty_like(trials.columns[:, 0]), torch.empty_like(trials.p)
    _kernel[(num_nodes,)](
        trials.p.contiguous(),
        trials.q.contiguous(),
        trials.beyond.contiguous(),
        trials.columns.contiguous(),
        trials.is_fixed.to(torch.int8),
        trials.uniforms.contiguous(),
        winners,
        left,
        num_columns,
        trials.columns.shape[1],
        IS_SHRINKING=is_shrinking,
        BLOCK=triton.next_power_of_2(num_columns),
    )
    return Outcome(winners=winners, left=left)


@triton.jit
def _kernel(  # noqa: ANN202, PLR0917
    p,  # noqa: ANN001
    q,  # noqa: ANN001
    beyond,  # noqa: ANN001
    columns,  # noqa: ANN001
    is_fixed,  # noqa: ANN001
    uniforms,  # noqa: ANN001
    winners,  # noqa: ANN001
    remainders,  # noqa: ANN001
    num_columns,  # noqa: ANN001
    num_tries,  # noqa: ANN001
    IS_SHRINKING: tl.constexpr,
    BLOCK: tl.constexpr,
):
    node = tl.program_id(0)
    lanes = tl.arange(0, BLOCK)
    is_column = lanes < num_columns
    left = tl.load(p + node * num_columns + lanes, is_column, 0.0)
    draft = tl.load(q + node * num_columns + lanes, is_column, 0.0)
    outside = tl.load(beyond + node)
    total = outside * 0.0 + 1.0
    drawn_total = outside * 0.0 + 1.0
    winner = tl.full((), -1, tl.int64)
    for place in range(num_tries):
        column = tl.load(columns + node * num_tries + place)
        fixed = tl.load(is_fixed + node * num_tries + place) > 0
        uniform = tl.load(uniforms + node * num_tries + place)
        is_tried = column >= 0
        is_here = lanes == column
        own = tl.sum(tl.where(is_here, left, 0.0))
        drawn = tl.sum(tl.where(is_here, draft, 0.0))
        against = tl.where(fixed, total, total * drawn / drawn_total)
        winner = tl.where(is_tried & (winner < 0) & (uniform < own / against), place, winner)
        after_fixed = tl.where(is_here, 0.0, left)
        after_draw = tl.maximum(left - total * draft / drawn_total, 0.0)
        rest = tl.where(fixed, after_fixed, after_draw)
        rest_total = tl.sum(rest) + outside
        is_step = is_tried & (rest_total > 0.0)
        left = tl.where(is_step, rest, left)
        total = tl.where(is_step, rest_total, total)
        if IS_SHRINKING:
            draft = tl.where(is_tried & is_here, 0.0, draft)
            drawn_total = tl.sum(draft)
    tl.store(winners + node, winner)
    tl.store(remainders + node * num_columns + lanes, left, is_column)
