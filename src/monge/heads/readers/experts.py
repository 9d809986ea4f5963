"""Mixtures of experts, for the multi-token-prediction modules of mixture models."""

import re

import torch
from torch import Tensor, nn
from torch.nn import functional

from monge.heads.readers.layers import Activation, GatedMlp, Nodes, activation
from monge.heads.readers.tensors import Settings, Tensors


class Experts(nn.Module):
    """A mixture of routed experts, and experts shared by all tokens.

    With `gate.e_score_correction_bias` the routing is that of DeepSeek-V3: sigmoid scores, experts
    from the best groups, and a bias that affects only the choice. Without it the experts of the
    largest softmax scores are used.

    Args:
        tensors: Tensors of the checkpoint; experts one by one, or all in one tensor.

    Reference:
        DeepSeek-V3, arXiv 2412.19437, section 2.1.2.
    """

    gate: Tensor
    correction: Tensor | None
    shared_gate: Tensor | None

    def __init__(self, tensors: Tensors, name: str, settings: Settings) -> None:
        super().__init__()
        hidden, inner = settings.hidden, settings.number("moe_intermediate_size")
        count = settings.number("n_routed_experts", "num_experts", "num_local_experts")
        act = activation(settings)
        bias = tensors.maybe(f"{name}.gate.e_score_correction_bias", count)
        self.register_buffer("gate", tensors.take(f"{name}.gate.weight", count, hidden))
        self.register_buffer("correction", bias)
        self.inner: nn.ModuleList
        if f"{name}.experts.gate_up_proj" in tensors:
            both = tensors.take(f"{name}.experts.gate_up_proj", count, 2 * inner, hidden)
            down = tensors.take(f"{name}.experts.down_proj", count, hidden, inner)
            pairs = zip(both, down, strict=True)
            self.inner = nn.ModuleList(_FusedExpert(*pair, act) for pair in pairs)
        else:
            names = (f"{name}.experts.{one}" for one in range(count))
            self.inner = nn.ModuleList(
                GatedMlp(tensors, one, hidden, inner, act=act) for one in names
            )
        self.shared, gate = _shared(tensors, name, settings, act)
        self.register_buffer("shared_gate", gate)
        self.most = settings.number("num_experts_per_tok")
        self.groups = settings.number("n_group", default=1)
        self.best_groups = settings.number("topk_group", default=1)
        self.normed = settings.flag("norm_topk_prob", default=True)
        self.factor = settings.real("routed_scaling_factor", 1.0)

    def forward(self, values: Nodes) -> Nodes:
        weights, chosen = self._route(values)
        total = torch.zeros_like(values)
        for number in chosen.unique().tolist():
            rows, places = torch.where(chosen == number)
            part = self.inner[number](values[rows]) * weights[rows, places, None].to(values.dtype)
            total = total.index_add(0, rows, part.to(total.dtype))
        if self.shared is None:
            return total
        shared = self.shared(values)
        if self.shared_gate is not None:
            shared = torch.sigmoid(functional.linear(values, self.shared_gate)) * shared
        return total + shared

    def _route(self, values: Nodes) -> tuple[Tensor, Tensor]:
        """Weights and numbers of the chosen experts, `[nodes, most]`."""
        wide = torch.float64 if values.dtype == torch.float64 else torch.float32
        scores = functional.linear(values.to(wide), self.gate.to(wide))
        if self.correction is None:
            weights, chosen = scores.softmax(dim=-1).topk(self.most, dim=-1)
            return weights / weights.sum(dim=-1, keepdim=True) if self.normed else weights, chosen
        scores = scores.sigmoid()
        choice = (scores + self.correction.to(wide)).unflatten(-1, (self.groups, -1))
        group_scores = choice.topk(min(2, choice.shape[-1]), dim=-1).values.sum(dim=-1)
        best = group_scores.topk(self.best_groups, dim=-1).indices
        closed = torch.ones_like(choice[..., 0], dtype=torch.bool).scatter(1, best, value=False)
        choice = choice.masked_fill(closed[..., None], -torch.inf).flatten(1)
        chosen = choice.topk(self.most, dim=-1).indices
        weights = scores.gather(1, chosen)
        if self.normed:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return weights * self.factor, chosen


class _FusedExpert(nn.Module):
    """One expert of a stacked tensor."""

    gate_up: Tensor
    down: Tensor

    def __init__(self, gate_up: Tensor, down: Tensor, act: Activation) -> None:
        super().__init__()
        self.register_buffer("gate_up", gate_up)
        self.register_buffer("down", down)
        self.act = act

    def forward(self, values: Nodes) -> Nodes:
        gate, up = functional.linear(values, self.gate_up).chunk(2, dim=-1)
        return functional.linear(self.act(gate) * up, self.down)


def _shared(
    tensors: Tensors, name: str, settings: Settings, act: Activation
) -> tuple[GatedMlp | None, Tensor | None]:
    hidden, inner = settings.hidden, settings.number("moe_intermediate_size")
    pattern = re.compile(rf"{re.escape(name)}\.(shared_experts?)\.")
    names = {found[1] for one in tensors.names if (found := pattern.match(one))}
    if not names:
        return None, None
    (part,) = names
    if part == "shared_experts":
        width = settings.number("n_shared_experts", default=1) * inner
    else:
        width = settings.number("shared_expert_intermediate_size", default=inner)
    gate = tensors.maybe(f"{name}.shared_expert_gate.weight", 1, hidden)
    return GatedMlp(tensors, f"{name}.{part}", hidden, width, act=act), gate
