"""The published heads once more, from their formulas.

No cache, no tree, one path at a time, in plain torch.
"""

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

    def state(self, place: int, ids: Sequence[int]) -> Tensor:
        return torch.cat([self.states[place][one] for one in ids])


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
    return torch.tensor(
        [pair.real for pair in pairs] + [pair.imag for pair in pairs], dtype=torch.float64
    )


class Layer:
    """One layer under a name, for a list of places."""

    def __init__(self, made: Published, name: str, *, centred: bool = False) -> None:
        self.t = {
            key.removeprefix(f"{name}."): tensor
            for key, tensor in made.tensors.items()
            if key.startswith(f"{name}.")
        }
        self.centred = centred

    def norm(self, name: str, values: Tensor) -> Tensor:
        return rms(values, self.t[f"{name}.weight"], centred=self.centred)

    def key_value(self, values: Tensor, place: int) -> tuple[list[Tensor], list[Tensor]]:
        keys = (self.t["self_attn.k_proj.weight"] @ values).view(KV, DIM)
        found = (self.t["self_attn.v_proj.weight"] @ values).view(KV, DIM)
        if "self_attn.k_norm.weight" in self.t:
            keys = torch.stack([self.norm("self_attn.k_norm", key) for key in keys])
        return [turned(key, place) for key in keys], list(found)

    def attend(
        self, values: Tensor, place: int, seen: list[tuple[list[Tensor], list[Tensor]]]
    ) -> Tensor:
        raw = self.t["self_attn.q_proj.weight"] @ values
        gated = len(raw) == 2 * HEADS * DIM
        heads = raw.view(HEADS, -1)
        out, gates = [], []
        for number in range(HEADS):
            query = heads[number][:DIM]
            gates.append(heads[number][DIM:])
            if "self_attn.q_norm.weight" in self.t:
                query = self.norm("self_attn.q_norm", query)
            query, shared = turned(query, place), number // (HEADS // KV)
            scores = torch.stack([query @ keys[shared] for keys, _ in seen]) / DIM**0.5
            weights = torch.softmax(scores, dim=0)
            out.append(
                sum(
                    weight * values[shared]
                    for weight, (_, values) in zip(weights, seen, strict=True)
                )
            )
        mixed = torch.cat(out)
        if gated:
            mixed = mixed / (1 + torch.exp(-torch.cat(gates)))
        return self.t["self_attn.o_proj.weight"] @ mixed

    def network(self, values: Tensor) -> Tensor:
        assert self.t["mlp.gate_proj.weight"].shape[0] == INNER
        inner = silu(self.t["mlp.gate_proj.weight"] @ values) * (
            self.t["mlp.up_proj.weight"] @ values
        )
        return self.t["mlp.down_proj.weight"] @ inner

    def causal(self, read: list[Tensor], residual: list[Tensor], first: int = 0) -> list[Tensor]:
        """Every place sees itself and those before it."""
        seen = [self.key_value(values, first + place) for place, values in enumerate(read)]
        found = []
        for place, values in enumerate(read):
            after = residual[place] + self.attend(values, first + place, seen[: place + 1])
            found.append(after + self.network(self.norm("post_attention_layernorm", after)))
        return found


def res_blocks(
    made: Published, names: list[str], values: Tensor, skip: str | None = None
) -> Tensor:
    t = made.tensors
    for name in names:
        through = values if skip is None else t[f"{skip}.weight"] @ values + t[f"{skip}.bias"]
        values, skip = (
            through + silu(t[f"{name}.linear.weight"] @ values + t[f"{name}.linear.bias"]),
            None,
        )
    return values


def medusa(made: Published, case: Case) -> Law:
    last = case.states[len(case.tokens) - 2][1]
    return lambda path: (
        made.tensors[f"{len(path)}.1.weight"] @ res_blocks(made, [f"{len(path)}.0"], last)
    )


def hydra(made: Published, case: Case) -> Law:
    t, places = made.tensors, range(len(case.tokens) - 1)
    prefix, grounded = made.config["hydra_head_arch"] == "prefix-mlp", made.config["grounded_heads"]
    states = [case.states[place][1] for place in places]
    if prefix:
        layer = Layer(made, "prefix_embeding_layer.layers.0")
        states = layer.causal([layer.norm("input_layernorm", one) for one in states], states)
        states = [rms(one, t["prefix_embeding_layer.norm.weight"]) for one in states]

    def law(path: Sequence[int]) -> Tensor:
        head = len(path)
        known = [case.embed[token] for token in (case.tokens[-1], *path)] if grounded else []
        blocks = [f"hydra_mlp.{head}.{one}" for one in ((1, 3) if prefix else (0, 1))]
        skip = f"{blocks[0]}.res_connection" if grounded else None
        output = f"hydra_lm_head.{head}" + (".1" if prefix else "")
        found = res_blocks(made, blocks, torch.cat([states[-1], *known]), skip)
        return t[f"{output}.weight"] @ found + t[f"{output}.bias"]

    return law


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


def eagle(made: Published, case: Case) -> Law:
    t, is_hydra = made.tensors, "hydra_head_arch" in made.config
    layer, embed = (
        Layer(made, "attn" if is_hydra else "layers.0"),
        t.get("embed_tokens.weight", case.embed),
    )

    def advance(states: list[Tensor], tokens: list[int]) -> list[Tensor]:
        values = [
            t["fc.weight"] @ torch.cat([embed[token], state]) + t["fc.bias"]
            for state, token in zip(states, tokens, strict=True)
        ]
        read = [layer.norm("input_layernorm", one) for one in values] if is_hydra else values
        return layer.causal(read, values)

    states = [case.states[place][1] for place in range(len(case.tokens) - 1)]
    return chain(case, states, advance, lambda state: case.unembed @ state)


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
    embed, ids = (
        t.get("embed_tokens.weight", case.embed),
        config["eagle_aux_hidden_state_layer_ids"],
    )
    states = []
    for place in range(len(case.tokens) - 1):
        parts = [case.states[place][one] for one in ids]
        if config.get("fc_norm"):
            parts = [rms(part, t[f"fc_norm.{one}.weight"]) for one, part in enumerate(parts)]
        states.append(t["fc.weight"] @ torch.cat(parts))

    def advance(own: list[Tensor], tokens: list[int]) -> list[Tensor]:
        normed = [layer.norm("hidden_norm", state) for state in own]
        pairs = zip(tokens, normed, strict=True)
        read = [
            torch.cat([layer.norm("input_layernorm", embed[token]), state])
            for token, state in pairs
        ]
        found = layer.causal(read, normed if config.get("norm_before_residual") else own)
        return [rms(one, t["norm.weight"]) for one in found] if config.get("norm_output") else found

    def logits(state: Tensor) -> Tensor:
        normed = state if config.get("norm_output") else rms(state, t["norm.weight"])
        return widened(made, t["lm_head.weight"] @ normed, len(case.embed))

    return chain(case, states, advance, logits)


def mtp(made: Published, case: Case) -> Law:
    t = made.tensors
    prefix, names = next(
        (prefix, names) for prefix, names in LAYOUTS.items() if f"{names[2]}.weight" in t
    )
    # The order of MiMo, and the norms of Qwen's two layouts.
    is_mimo, centred = prefix == "model.mtp_layers.0", prefix.startswith("mtp")
    layer = Layer(made, names[4], centred=centred)

    def advance(states: list[Tensor], tokens: list[int]) -> list[Tensor]:
        values = []
        for state, token in zip(states, tokens, strict=True):
            pair = [rms(case.embed[token], t[f"{names[0]}.weight"], centred=centred)]
            pair.append(rms(state, t[f"{names[1]}.weight"], centred=centred))
            values.append(t[f"{names[2]}.weight"] @ torch.cat(pair[::-1] if is_mimo else pair))
        found = layer.causal([layer.norm("input_layernorm", one) for one in values], values)
        return [rms(one, t[f"{names[3]}.weight"], centred=centred) for one in found]

    states = [case.states[place][1] for place in range(len(case.tokens) - 1)]
    return chain(case, states, advance, lambda state: case.unembed @ state)


def convolved(
    made: Published, name: str, side: int, values: list[Tensor], own: list[Tensor]
) -> list[Tensor]:
    """Two taps, groups of one; the kernels are those of the sub-layer's argument."""
    base, width = made.tensors[f"{name}.base_kernel"], len(values[0])
    kernels = [
        (made.tensors[f"{name}.kernel_projection.weight"] @ one).view(2, 2, width)[side]
        for one in own
    ]
    found = []
    for row in range(len(values)):
        before = values[row - 1] if row else torch.zeros_like(values[0])
        found.append(
            (base[side, 0] + kernels[row][0]) * values[row]
            + (base[side, 1] + kernels[row][1]) * before
        )
    return found


def block_states(made: Published, case: Case, ids: list[int], size: int) -> list[Tensor]:
    t, embed, end = (
        made.tensors,
        made.tensors.get("embed_tokens.weight", case.embed),
        len(case.tokens) - 1,
    )
    context = [
        rms(t["fc.weight"] @ case.state(place, ids), t["hidden_norm.weight"])
        for place in range(end)
    ]
    values = [embed[case.tokens[-1]]] + [embed[2]] * (size - 1)
    for number in range(2):
        layer, name = Layer(made, f"layers.{number}"), f"layers.{number}"
        has_conv = f"{name}.mlp_conv.base_kernel" in t
        own = [layer.norm("input_layernorm", one) for one in values]
        read = convolved(made, f"{name}.attention_conv", 0, own, own) if has_conv else own
        seen = [layer.key_value(one, place) for place, one in enumerate(context)]
        seen += [layer.key_value(one, end + row) for row, one in enumerate(read)]
        mixed = [layer.attend(one, end + row, seen) for row, one in enumerate(read)]
        mixed = convolved(made, f"{name}.attention_conv", 1, mixed, own) if has_conv else mixed
        values = [value + one for value, one in zip(values, mixed, strict=True)]
        own = [layer.norm("post_attention_layernorm", one) for one in values]
        read = convolved(made, f"{name}.mlp_conv", 0, own, own) if has_conv else own
        inner = [layer.network(one) for one in read]
        inner = convolved(made, f"{name}.mlp_conv", 1, inner, own) if has_conv else inner
        values = [value + one for value, one in zip(values, inner, strict=True)]
    return [rms(one, t["norm.weight"]) for one in values]


def block(made: Published, case: Case) -> Law:
    t, config = made.tensors, made.config
    is_speculators = "speculators_model_type" in config
    size = 4
    kind = config.get("speculators_model_type") or config["architectures"][0]
    first = 0 if kind in ("dspark", "DSparkDraftModel") else 1
    states = block_states(made, case, [0, 1], size)
    output = t["lm_head.weight"] if is_speculators else case.unembed

    def law(path: Sequence[int]) -> Tensor:
        memory = torch.zeros(2, dtype=torch.float64)
        logits = torch.empty(0)
        for depth, token in enumerate((case.tokens[-1], *path)):
            state = states[first + depth]
            logits = output @ state
            if "candidate_selector.predecessor_codebook" in t:
                best = logits.topk(len(logits) - 1).indices.tolist()
                known = t["candidate_selector.predecessor_codebook"][token] * (
                    t["candidate_selector.hidden_projection.weight"] @ state
                )
                full = torch.full_like(logits, -torch.inf)
                for one in best:
                    full[one] = (
                        logits[one] + known @ t["candidate_selector.successor_codebook"][one]
                    )
                logits = full
            elif "markov_head.markov_w1.weight" in t:
                known, kind = t["markov_head.markov_w1.weight"][token], config["markov_head_type"]
                if kind == "gated":
                    pair = torch.cat([state, known])
                    known = (
                        torch.sigmoid(
                            t["markov_head.gate_proj.weight"] @ pair
                            + t["markov_head.gate_proj.bias"]
                        )
                        * known
                    )
                elif kind == "rnn":
                    joint = t["markov_head.joint_proj.weight"] @ torch.cat([memory, known, state])
                    gate, new, out = (joint + t["markov_head.joint_proj.bias"]).view(3, 2)
                    memory = torch.sigmoid(gate) * memory + (1 - torch.sigmoid(gate)) * torch.tanh(
                        new
                    )
                    known = torch.tanh(out)
                logits = logits + t["markov_head.markov_w2.weight"] @ known
        return widened(made, logits, len(case.embed))

    return law


FORMULAS: dict[str, Callable[[Published, Case], Law]] = {
    "medusa": medusa,
    "hydra": hydra,
    "hydra-eagle": eagle,
    "eagle": eagle,
    "eagle3": eagle3,
    "mtp": mtp,
    "dflash": block,
    "dspark": block,
}


def formula(kind: str, made: Published, case: Case) -> Law:
    """The law of a kind's head on a text."""
    name = kind.removeprefix("speculators-")
    key = max((one for one in FORMULAS if name.startswith(one)), key=len)
    return FORMULAS[key](made, case)
