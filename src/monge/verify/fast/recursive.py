"""Recursive rejection at many nodes at once. The plain twins are the rules' own `emit`.

p = target law, q = draft law. Masses are not normalised between two trials: with P the part of p
that the rejections so far have left, and M its total, a test of x against `P / M` is one of `P_x`
against `M q_x`.
"""

from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Final

import torch

from monge.verify.fast.trials import Outcome, Trials

MAX_KERNEL_COLUMNS: Final = 16384
"""Columns that one program of the kernel holds; wider draft laws are left to torch."""


def recursive(trials: Trials, *, is_shrinking: bool = False) -> Outcome:
    """Recursive rejection: q is the same for every draw, or loses every refused candidate (`is_shrinking`)."""
    fits = trials.p.is_cuda and trials.p.shape[1] <= MAX_KERNEL_COLUMNS
    if fits and find_spec("triton") is not None:
        kernel = import_module("monge.verify.fast.triton_recursive").recursive
        return kernel(trials, is_shrinking=is_shrinking)
    return in_torch(trials, is_shrinking=is_shrinking)


recursive_without_replacement: Final = partial(recursive, is_shrinking=True)


def in_torch(trials: Trials, *, is_shrinking: bool) -> Outcome:
    """The tests with torch alone, on any device."""
    left, q = trials.p, trials.q
    total, drawn_total = torch.ones_like(trials.beyond), torch.ones_like(trials.beyond)
    winners = torch.full_like(trials.columns[:, 0], -1)
    for place in range(trials.columns.shape[1]):
        column = trials.columns[:, place, None]
        is_tried, is_fixed = column >= 0, trials.is_fixed[:, place, None]
        at = column.clamp_min(0)
        own = left.gather(1, at)
        against = torch.where(is_fixed, total, total * q.gather(1, at) / drawn_total)
        is_hit = (
            is_tried & (trials.uniforms[:, place, None] < own / against) & (winners[:, None] < 0)
        )
        winners = torch.where(is_hit[:, 0], place, winners)
        without = left.scatter(1, at, 0.0)
        rest = torch.where(is_fixed, without, (left - total * q / drawn_total).clamp_min(0.0))
        rest_total = rest.sum(1, keepdim=True) + trials.beyond
        # Nothing is left only where x was certain to be accepted.
        is_step = is_tried & (rest_total > 0.0)
        left, total = torch.where(is_step, rest, left), torch.where(is_step, rest_total, total)
        if is_shrinking:
            q = torch.where(is_tried, q.scatter(1, at, 0.0), q)
            drawn_total = q.sum(1, keepdim=True)
    return Outcome(winners=winners, left=left)
