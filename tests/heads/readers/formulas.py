"""The published heads once more, from their formulas: no cache, no tree, one path at a time, in plain torch."""

import cmath
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tests.heads.readers.published import DIM, HEADS, INNER, KV, LAYOUTS, Published

Law = Callable[[Sequence[int]], Tensor]
"""Tokens drafted so far -> logits of the next."""


@dataclass
class Case:
    """A target's text and states, and what the target's two ends do.

    Args:
        tokens: The committed text.
        states: For every token but the last the target's states, by index.
    """

    tokens: tuple[int, ...]
    states: list[list[Tensor]]
    embed: Tensor
    unembed: Tensor


def rms(values: Tensor, weight: Tensor, *, centred: bool = False, eps: float = 1e-5) -> Tensor:
    return values / (values.square().mean() + eps).sqrt() * (weight + centred)


def silu(values: Tensor) -> Tensor:
    return values / (1 + torch.exp(-values))


def turned(vector: Tensor, place: int, base: float = 50.0) -> Tensor:
    """Rotation of one head's vector as complex numbers."""
    half = len(vector) // 2
    pairs = [
        complex(vector[one], vector[half + one]) * cmath.exp(1j * place * base ** (-one / half))
        for one in range(half)
    ]
    parts = [pair.real for pair in pairs] + [pair.imag for pair in pairs]
    return torch.tensor(parts, dtype=torch.float64)


class Layer:
    """One layer under a name, for a list of places."""

    def __init__(self, made: Published, name: str, *, centred: bool = False) -> None:
        own = (key for key in made.tensors if key.startswith(f"{name}."))
        self.t = {key.removeprefix(f"{name}."): made.tensors[key] for key in own}
        self.centred = centred

    def norm(self, name: str, values: Tensor) -> Tensor:
        return rms(values, self.t[f"{name}.weight"], centred=self.centred)

    def map(self, name: str, values: Tensor) -> Tensor:
        return self.t[f"{name}_proj.weight"] @ values

    def key_value(self, values: Tensor, place: int) -> tuple[list[Tensor], list[Tensor]]:
        keys, found = (self.map(f"self_attn.{part}", values).view(KV, DIM) for part in ("k", "v"))
        if "self_attn.k_norm.weight" in self.t:
            keys = torch.stack([self.norm("self_attn.k_norm", key) for key in keys])
        return [turned(key, place) for key in keys], list(found)

    def attend(
        self, values: Tensor, place: int, seen: list[tuple[list[Tensor], list[Tensor]]]
    ) -> Tensor:
        raw = self.map("self_attn.q", values)
        mixed, gates = [], []
        for number, head in enumerate(raw.view(HEADS, -1)):
            query, shared = head[:DIM], number // (HEADS // KV)
            gates.append(head[DIM:])
            if "self_attn.q_norm.weight" in self.t:
                query = self.norm("self_attn.q_norm", query)
            query = turned(query, place)
            scores = torch.stack([query @ keys[shared] for keys, _ in seen]) / DIM**0.5
            shares = torch.softmax(scores, dim=0)
            parts = zip(shares, (found[shared] for _, found in seen), strict=True)
            mixed.append(sum(share * found for share, found in parts))
        out = torch.cat(mixed)
        if len(raw) == 2 * HEADS * DIM:
            out = out / (1 + torch.exp(-torch.cat(gates)))
        return self.map("self_attn.o", out)

    def network(self, values: Tensor) -> Tensor:
        assert self.t["mlp.gate_proj.weight"].shape[0] == INNER
        return self.map("mlp.down", silu(self.map("mlp.gate", values)) * self.map("mlp.up", values))

    def causal(self, read: list[Tensor], residual: list[Tensor]) -> list[Tensor]:
        """Every place sees itself and those before it."""
        seen = [self.key_value(values, place) for place, values in enumerate(read)]
        found = []
        for place, values in enumerate(read):
            after = residual[place] + self.attend(values, place, seen[: place + 1])
            found.append(after + self.network(self.norm("post_attention_layernorm", after)))
        return found


def affine(made: Published, name: str, values: Tensor) -> Tensor:
    return made.tensors[f"{name}.weight"] @ values + made.tensors[f"{name}.bias"]


def last_states(case: Case) -> list[Tensor]:
    return [states[1] for states in case.states]


def chain(case: Case, states: list[Tensor], advance: Callable, logits: Callable) -> Law:
    """Pairs of state and next token; every drafted token is paired with the last prediction."""

    def law(path: Sequence[int]) -> Tensor:
        own, tokens = list(states), list(case.tokens[1:])
        found = advance(own, tokens)
        for token in path:
            own.append(found[-1])
            tokens.append(token)
            found = advance(own, tokens)
        return logits(found[-1])

    return law


def widened(made: Published, logits: Tensor, vocab: int) -> Tensor:
    """Draft logits at the target's tokens."""
    if "d2t" not in made.tensors:
        return logits
    full = torch.full((vocab,), -torch.inf, dtype=torch.float64)
    for draft, offset in enumerate(made.tensors["d2t"].tolist()):
        full[draft + offset] = logits[draft]
    return full


def eagle3(made: Published, case: Case) -> Law:
    t, config = made.tensors, made.config
    layer = Layer(made, "midlayer" if "midlayer.hidden_norm.weight" in t else "layers.0")
    embed, returns_normed = t.get("embed_tokens.weight", case.embed), config.get("norm_output")
    states = []
    for known in case.states:
        parts = [known[one] for one in config["eagle_aux_hidden_state_layer_ids"]]
        if config.get("fc_norm"):
            parts = [rms(part, t[f"fc_norm.{one}.weight"]) for one, part in enumerate(parts)]
        states.append(t["fc.weight"] @ torch.cat(parts))

    def last_norm(state: Tensor) -> Tensor:
        return rms(state, t["norm.weight"])

    def advance(own: list[Tensor], tokens: list[int]) -> list[Tensor]:
        normed = [layer.norm("hidden_norm", state) for state in own]
        known = [layer.norm("input_layernorm", embed[token]) for token in tokens]
        read = [torch.cat(pair) for pair in zip(known, normed, strict=True)]
        found = layer.causal(read, normed if config.get("norm_before_residual") else own)
        return [last_norm(one) for one in found] if returns_normed else found

    def logits(state: Tensor) -> Tensor:
        normed = state if returns_normed else last_norm(state)
        return widened(made, t["lm_head.weight"] @ normed, len(case.embed))

    return chain(case, states, advance, logits)


def mtp(made: Published, case: Case) -> Law:
    t = made.tensors
    prefix, names = next(one for one in LAYOUTS.items() if f"{one[1][2]}.weight" in t)
    # The order of MiMo, and the norms of Qwen's two layouts.
    is_mimo, centred = prefix == "model.mtp_layers.0", prefix.startswith("mtp")
    layer = Layer(made, names[4], centred=centred)

    def norm(place: int, values: Tensor) -> Tensor:
        return rms(values, t[f"{names[place]}.weight"], centred=centred)

    def advance(states: list[Tensor], tokens: list[int]) -> list[Tensor]:
        values = []
        for state, token in zip(states, tokens, strict=True):
            pair = [norm(0, case.embed[token]), norm(1, state)]
            values.append(t[f"{names[2]}.weight"] @ torch.cat(pair[::-1] if is_mimo else pair))
        found = layer.causal([layer.norm("input_layernorm", one) for one in values], values)
        return [norm(3, one) for one in found]

    return chain(case, last_states(case), advance, lambda state: case.unembed @ state)


def convolved(
    made: Published, name: str, side: int, values: list[Tensor], own: list[Tensor]
) -> list[Tensor]:
    """Two taps, groups of one; the kernels are those of the sub-layer's argument."""
    base, weight = (
        made.tensors[f"{name}.{part}"] for part in ("base_kernel", "kernel_projection.weight")
    )
    before = [torch.zeros_like(values[0]), *values[:-1]]
    found = []
    for here, last, argument in zip(values, before, own, strict=True):
        now, then = base[side] + (weight @ argument).view(2, 2, -1)[side]
        found.append(now * here + then * last)
    return found


def block_layer(
    made: Published, name: str, context: list[Tensor], values: list[Tensor]
) -> list[Tensor]:
    layer, end = Layer(made, name), len(context)

    def attention(read: list[Tensor]) -> list[Tensor]:
        seen = [layer.key_value(one, place) for place, one in enumerate([*context, *read])]
        return [layer.attend(one, end + row, seen) for row, one in enumerate(read)]

    def network(read: list[Tensor]) -> list[Tensor]:
        return [layer.network(one) for one in read]

    for norm, part, call in (
        ("input_layernorm", "attention_conv", attention),
        ("post_attention_layernorm", "mlp_conv", network),
    ):
        own = [layer.norm(norm, one) for one in values]
        if f"{part}.base_kernel" in layer.t:
            conv = f"{name}.{part}"
            added = convolved(made, conv, 1, call(convolved(made, conv, 0, own, own)), own)
        else:
            added = call(own)
        values = [value + one for value, one in zip(values, added, strict=True)]
    return values


def block_states(made: Published, case: Case, size: int) -> list[Tensor]:
    t = made.tensors
    embed = t.get("embed_tokens.weight", case.embed)
    fused = [t["fc.weight"] @ torch.cat(states) for states in case.states]
    context = [rms(one, t["hidden_norm.weight"]) for one in fused]
    values = [embed[case.tokens[-1]]] + [embed[2]] * (size - 1)
    for name in ("layers.0", "layers.1"):
        values = block_layer(made, name, context, values)
    return [rms(one, t["norm.weight"]) for one in values]


def block(made: Published, case: Case) -> Law:
    t, config = made.tensors, made.config
    name = config.get("speculators_model_type")
    first = 0 if (name or config["architectures"][0]) in ("dspark", "DSparkDraftModel") else 1
    states = block_states(made, case, 4)
    output = case.unembed if name is None else t["lm_head.weight"]

    def selected(token: int, state: Tensor, logits: Tensor) -> Tensor:
        best = logits.topk(len(logits) - 1).indices
        known = t["candidate_selector.predecessor_codebook"][token]
        known = known * (t["candidate_selector.hidden_projection.weight"] @ state)
        full = torch.full_like(logits, -torch.inf)
        full[best] = logits[best] + t["candidate_selector.successor_codebook"][best] @ known
        return full

    def law(path: Sequence[int]) -> Tensor:
        memory, logits = torch.zeros(2, dtype=torch.float64), torch.empty(0)
        for depth, token in enumerate((case.tokens[-1], *path)):
            state = states[first + depth]
            logits = output @ state
            if "candidate_selector.predecessor_codebook" in t:
                logits = selected(token, state, logits)
            elif "markov_head.markov_w1.weight" in t:
                known, kind = t["markov_head.markov_w1.weight"][token], config["markov_head_type"]
                if kind == "gated":
                    pair = torch.cat([state, known])
                    known = torch.sigmoid(affine(made, "markov_head.gate_proj", pair)) * known
                elif kind == "rnn":
                    joint = torch.cat([memory, known, state])
                    gate, new, out = affine(made, "markov_head.joint_proj", joint).view(3, 2)
                    gate = torch.sigmoid(gate)
                    memory, known = gate * memory + (1 - gate) * torch.tanh(new), torch.tanh(out)
                logits = logits + t["markov_head.markov_w2.weight"] @ known
        return widened(made, logits, len(case.embed))

    return law


FORMULAS: dict[str, Callable[[Published, Case], Law]] = {"eagle3": eagle3, "mtp": mtp}
FORMULAS |= {"dflash": block, "dspark": block}


def formula(kind: str, made: Published, case: Case) -> Law:
    """The law of a kind's head on a text."""
    name = kind.removeprefix("speculators-")
    key = max((one for one in FORMULAS if name.startswith(one)), key=len)
    return FORMULAS[key](made, case)
