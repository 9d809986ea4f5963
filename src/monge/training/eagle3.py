"""Training of EAGLE-3 heads: states of three layers, a reduced vocabulary, and chains that read their own predictions.

In the maths p = target, q = draft.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Final

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence

from monge.training.chain import ChainQuality, Step, chain_quality
from monge.training.loop import Trainee, rounded

_ROWS: Final = 4  # rows of one measurement's forward
_LOGITS: Final = 512  # rows of logits at a time while states are read
_LAYER: Final = "midlayer"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """A batch of conversations, padded on the right.

    Args:
        token_ids: Tokens.
        is_learnt: Mask of the tokens that the target wrote, whose laws are learnt.
        features: Concatenated hidden states of the fused layers.
        last: Inputs of the target's output layer.
        log_z: Log-sum-exp of the logits at every token.
    """

    token_ids: Int64[Tensor, "rows seq"]
    is_learnt: Bool[Tensor, "rows seq"]
    features: Float[Tensor, "rows seq fused"]
    last: Float[Tensor, "rows seq hidden"]
    log_z: Float[Tensor, "rows seq"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversations:
    """Conversations with the target's states at every token, concatenated, shortest first.

    Args:
        starts: Start of each conversation, and the end of the last.
        token_ids: As `Rows`, without padding.
        is_learnt: As `Rows`.
        features: As `Rows`, of any float type.
        last: As `Rows`.
        log_z: As `Rows`.
    """

    starts: tuple[int, ...]
    token_ids: Int64[Tensor, " tokens"]
    is_learnt: Bool[Tensor, " tokens"]
    features: Float[Tensor, "tokens fused"]
    last: Float[Tensor, "tokens hidden"]
    log_z: Float[Tensor, " tokens"]

    def __len__(self) -> int:
        return len(self.starts) - 1

    def rows(self, first: int, count: int, device: torch.device | str = "cpu") -> Rows:
        """Select conversations as a padded batch on a device."""
        ends = list(zip(self.starts, self.starts[1:], strict=False))[first : first + count]

        def padded(tensor: Tensor) -> Tensor:
            cut = [tensor[start:end] for start, end in ends]
            return pad_sequence(cut, batch_first=True).to(device)

        return Rows(
            token_ids=padded(self.token_ids),
            is_learnt=padded(self.is_learnt),
            features=padded(self.features),
            last=padded(self.last),
            log_z=padded(self.log_z),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The frozen parts of the target that training needs.

    Args:
        embeddings: Embeddings of all tokens.
        output: Rows of the output layer for the draft vocabulary.
        norm: Weight of the norm before the output layer.
        draft_ids: The draft vocabulary, ascending.
    """

    embeddings: Float[Tensor, "vocab hidden"]
    output: Float[Tensor, "draft hidden"]
    norm: Float[Tensor, " hidden"]
    draft_ids: Int64[Tensor, " draft"]


def frequent_tokens(
    token_ids: Int64[Tensor, " tokens"], vocab_size: int, count: int
) -> Int64[Tensor, " draft"]:
    """The most frequent tokens of a text, ascending; ties prefer smaller ids."""
    counts = torch.bincount(token_ids.flatten(), minlength=vocab_size)
    return torch.sort(torch.sort(counts, descending=True, stable=True).indices[:count]).values


@dataclass(frozen=True, slots=True, kw_only=True)
class Eagle3Trainee(Trainee):
    """An EAGLE-3 head of one layer.

    Chains start at every position. Step n of a chain reads the prediction of step n - 1. Attention
    reads the true states up to the start of the chain and the chain's own predictions after it, as
    in decoding ("training-time test").

    The loss of a step moves from the cross entropy to the total variation, which equals the rejection
    probability:

        (1 - a) (-sum_v p_v log q_v) + a (1 - sum_v min(p_v, q_v)),    v in the draft vocabulary,

    where a rises from 0 to 1 between two shares of the training.

    Args:
        fitted: Training conversations.
        held_out: Held-out conversations, for early stopping.
        target: The frozen parts of the target.
        config: Llama-like configuration of the layer.
        num_steps: Length of a chain.
        decay: Weight of a step relative to the previous one.
        anneal: The shares of the training between which the loss moves; by `share`.
        share: Returns the share of the training that is done.
        seed: Seed of the initial weights.
        dtype: Type of the matrix products.

    Reference:
        Li et al., EAGLE-3, arXiv 2503.01840, section 3.
    """

    fitted: Conversations
    held_out: Conversations
    target: Target
    config: Mapping[str, Any]
    num_steps: int = 4
    decay: float = 0.8
    anneal: tuple[float, float] = (0.3, 0.7)
    seed: int = 0
    dtype: torch.dtype = torch.float32
    tensors: dict[str, Tensor] = field(init=False, repr=False)
    share: Callable[[], float] = field(default=lambda: 1.0, repr=False)

    def __post_init__(self) -> None:
        fresh = initial(self.config, self.target, torch.Generator().manual_seed(self.seed))
        trained = {name: tensor.to(self._device).requires_grad_() for name, tensor in fresh.items()}
        object.__setattr__(self, "tensors", trained)

    @property
    def weights(self) -> Mapping[str, Tensor]:
        return self.tensors

    def loss(self, batch_size: int, generator: torch.Generator) -> Tensor:
        # Neighbours have about the same length.
        first = int(torch.randint(len(self.fitted), (1,), generator=generator))
        length = self.fitted.starts[first + 1] - self.fitted.starts[first]
        texts = self.fitted.rows(
            min(first, max(0, len(self.fitted) - batch_size // length)),
            max(1, batch_size // length),
            self._device,
        )
        low, high = self.anneal
        variation = min(1.0, max(0.0, (self.share() - low) / (high - low)))
        total = torch.zeros((), device=self._device)
        for number, step in enumerate(self._steps(texts)):
            assert step.log_z is not None
            p = (step.true - step.log_z[:, None]).exp()
            total = total + self.decay**number * _Loss.apply(step.drafted.float(), p, variation)
        return total

    def look(self) -> float:
        return self.quality(self.held_out).block_efficiency

    @torch.no_grad()
    def quality(self, texts: Conversations) -> ChainQuality:
        """Acceptance of chains that start at tokens of the target."""
        return chain_quality(
            self._steps(texts.rows(start, _ROWS, self._device))
            for start in range(0, len(texts), _ROWS)
        )

    def _steps(self, texts: Rows) -> Iterator[Step]:
        """Steps of the chains that count, over the draft vocabulary.

        The chain at position t is given x_0 .. x_{t+1}. Its step n (from 0) reads the embedding of
        x_{t+1+n} and predicts the law of x_{t+2+n}.
        """
        rows, length = texts.token_ids.shape
        places = length - 1 - self.num_steps
        # A chain counts if the target wrote all the tokens that it is about.
        learnt = (
            texts.is_learnt.unfold(1, self.num_steps, 1).all(dim=2)[:, 2 : 2 + places].flatten()
        )
        embeddings = functional.embedding(texts.token_ids, self.target.embeddings)
        weights, ids = self.tensors, self.target.draft_ids
        states = self._product(texts.features[:, :places].float(), weights["fc.weight"])
        keys: list[Tensor] = []
        values: list[Tensor] = []
        with torch.no_grad():  # neighbouring steps share most places
            is_read = torch.zeros(rows, length, dtype=torch.bool, device=learnt.device)
            for number in range(self.num_steps):
                is_read[:, 1 + number : 1 + number + places] |= learnt.view(rows, places)
            read_at = is_read.flatten().cumsum(0).view(rows, length) - 1
            all_true = self._product(texts.last[is_read], self.target.output).float()
        for number in range(self.num_steps):
            read = embeddings[:, 1 + number : 1 + number + places]
            states = self._layer(read, states, number, keys, values)
            at = slice(1 + number, 1 + number + places)
            wanted = states.flatten(0, 1)[learnt]
            drafted = self._product(
                _normed(wanted, weights["norm.weight"], self._eps), weights["lm_head.weight"]
            )
            tokens = texts.token_ids[:, 2 + number : 2 + number + places].flatten()[learnt]
            place = torch.searchsorted(ids, tokens).clamp_max(len(ids) - 1)
            yield Step(
                drafted=drafted,
                true=all_true[read_at[:, at].flatten()[learnt]],
                token_ids=torch.where(ids[place] == tokens, place, -1),
                log_z=texts.log_z[:, at].flatten()[learnt].float(),
            )

    def _layer(
        self, read: Tensor, states: Tensor, number: int, keys: list[Tensor], values: list[Tensor]
    ) -> Tensor:
        """One step of all chains through the layer; this step's are appended to `keys` and `values`."""
        weights, config = self.tensors, self.config
        heads, kv_heads, dim = (
            config[name] for name in ("num_attention_heads", "num_key_value_heads", "head_dim")
        )
        beside = torch.cat(
            [
                _normed(read, weights[f"{_LAYER}.input_layernorm.weight"], self._eps),
                _normed(states, weights[f"{_LAYER}.hidden_norm.weight"], self._eps),
            ],
            dim=-1,
        )
        queries, key, value = (
            self._product(beside, weights[f"{_LAYER}.self_attn.{part}_proj.weight"])
            .unflatten(-1, (count, dim))
            .transpose(1, 2)
            for part, count in (("q", heads), ("k", kv_heads), ("v", kv_heads))
        )
        places = torch.arange(number, number + read.shape[1], device=read.device)
        queries, key = (
            _turned(part, places, float(config["rope_theta"])) for part in (queries, key)
        )
        keys.append(key.repeat_interleave(heads // kv_heads, dim=1))
        values.append(value.repeat_interleave(heads // kv_heads, dim=1))
        mixed = self._attention(queries, keys, values).transpose(1, 2).flatten(2)
        states = states + self._product(mixed, weights[f"{_LAYER}.self_attn.o_proj.weight"])
        normed = _normed(states, weights[f"{_LAYER}.post_attention_layernorm.weight"], self._eps)
        gate, up = (
            self._product(normed, weights[f"{_LAYER}.mlp.{part}_proj.weight"])
            for part in ("gate", "up")
        )
        return states + self._product(
            functional.silu(gate) * up, weights[f"{_LAYER}.mlp.down_proj.weight"]
        )

    def _attention(
        self, queries: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor]
    ) -> Tensor:
        """The first step's keys up to a chain's start, and the chain's own keys of the later steps."""
        if len(keys) == 1:
            return functional.scaled_dot_product_attention(
                queries, keys[0], values[0], is_causal=True
            )
        length = queries.shape[2]
        hidden = torch.ones(length, length, dtype=torch.bool, device=queries.device).triu(1)
        scores = (queries @ keys[0].transpose(2, 3)).masked_fill(hidden, -math.inf)
        own = torch.stack([(queries * key).sum(dim=-1) for key in keys[1:]], dim=-1)
        shares = (
            (torch.cat([scores, own], dim=-1).float() / queries.shape[-1] ** 0.5)
            .softmax(dim=-1)
            .to(queries.dtype)
        )
        later = (
            shares[..., length + number, None] * value for number, value in enumerate(values[1:])
        )
        return shares[..., :length] @ values[0] + sum(later)

    def _product(self, read: Tensor, weight: Tensor) -> Tensor:
        return functional.linear(read.to(self.dtype), weight.to(self.dtype)).float()

    @property
    def _device(self) -> torch.device:
        return self.target.output.device

    @property
    def _eps(self) -> float:
        return float(self.config["rms_norm_eps"])


class _Loss(torch.autograd.Function):
    """(1 - a) cross entropy + a total variation, with their gradient: autograd would keep eight tables of logits."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, p: Tensor, variation: float) -> Tensor:
        q, mass = logits.softmax(dim=1), p.sum(dim=1)
        entropy = mass * logits.logsumexp(dim=1) - torch.linalg.vecdot(p, logits)
        overlap = torch.minimum(p, q).sum(dim=1)
        # d entropy = q mass - p;  d overlap = q (1[q < p] - sum_v q_v 1[q_v < p_v]).
        below = (q < p).to(q.dtype)
        inside = torch.linalg.vecdot(below, q)
        slope = q * ((1 - variation) * mass + variation * inside)[:, None]
        slope -= (1 - variation) * p
        slope.addcmul_(below, q, value=-variation)
        ctx.save_for_backward(slope.div_(len(logits)))
        return ((1 - variation) * entropy + variation * (1 - overlap)).mean()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None]:
        (slope,) = ctx.saved_tensors
        return slope * grad_outputs[0], None, None


def initial(
    config: Mapping[str, Any], target: Target, generator: torch.Generator
) -> dict[str, Tensor]:
    """Weights under the names of the published format.

    Output projections are zero, so the last fused state passes unchanged into the target's norm and
    the rows of its output layer.
    """
    hidden, inner, heads = (
        config["hidden_size"],
        config["intermediate_size"],
        config["num_attention_heads"],
    )
    dim, kv_heads = config["head_dim"], config["num_key_value_heads"]

    def drawn(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=generator) / columns**0.5

    return {
        "fc.weight": torch.cat([torch.zeros(hidden, 2 * hidden), torch.eye(hidden)], dim=1),
        f"{_LAYER}.hidden_norm.weight": torch.ones(hidden),
        f"{_LAYER}.input_layernorm.weight": torch.ones(hidden),
        f"{_LAYER}.self_attn.q_proj.weight": drawn(heads * dim, 2 * hidden),
        f"{_LAYER}.self_attn.k_proj.weight": drawn(kv_heads * dim, 2 * hidden),
        f"{_LAYER}.self_attn.v_proj.weight": drawn(kv_heads * dim, 2 * hidden),
        f"{_LAYER}.self_attn.o_proj.weight": torch.zeros(hidden, heads * dim),
        f"{_LAYER}.mlp.gate_proj.weight": drawn(inner, hidden),
        f"{_LAYER}.mlp.up_proj.weight": drawn(inner, hidden),
        f"{_LAYER}.mlp.down_proj.weight": torch.zeros(hidden, inner),
        f"{_LAYER}.post_attention_layernorm.weight": torch.ones(hidden),
        "norm.weight": target.norm.detach().float().cpu().clone(),
        "lm_head.weight": target.output.detach().float().cpu().clone(),
    }


def published(trainee: Eagle3Trainee, vocab_size: int) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and configuration of the trained head in the published format.

    Rounding to bfloat16 changes the draft law slightly.
    """
    ids = trainee.target.draft_ids.cpu()
    tensors = rounded(trainee.weights)
    tensors["d2t"] = ids - torch.arange(len(ids))
    tensors["t2d"] = torch.zeros(vocab_size, dtype=torch.bool).index_fill(0, ids, value=True)
    config = {
        **trainee.config,
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": len(ids),
    }
    return tensors, config


def _normed(values: Tensor, weight: Tensor, eps: float) -> Tensor:
    return functional.rms_norm(values.float(), (values.shape[-1],), weight, eps)


def _turned(heads: Tensor, positions: Tensor, theta: float) -> Tensor:
    """Rotary positions of `[rows, heads, places, dim]`."""
    half = heads.shape[-1] // 2
    angles = positions[:, None].float() * theta ** (-torch.arange(half, device=heads.device) / half)
    cos, sin = angles.cos(), angles.sin()
    first, second = heads[..., :half], heads[..., half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def read_conversations(
    network: Any,
    conversations: Sequence[tuple[Sequence[int], Sequence[int]]],
    layers: Sequence[int],
    *,
    longest: int = 384,
    least: int = 1,
    batch_size: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    on_rows: Callable[[int], None] = lambda count: None,
) -> Conversations:
    """Let the target read conversations and keep the states that training needs.

    Args:
        network: The target, a network of `transformers`.
        conversations: Prompts and answers, cut to `longest` tokens.
        layers: Indices of the fused hidden states.
        longest: Maximum tokens per conversation.
        least: Minimum tokens written by the target; shorter conversations are left out.
        batch_size: Conversations per forward; `None` chooses by the device.
        dtype: Type of the stored states; they take a few kilobytes per token. They stay on a CUDA
            device that has room for twice their size, and else on the host.
        on_rows: Receives the number of conversations read.
    """
    cut = [((*prompt, *answer)[:longest], len(prompt)) for prompt, answer in conversations]
    cut = sorted((one for one in cut if len(one[0]) - one[1] >= least), key=lambda one: len(one[0]))
    starts = [0, *accumulate(len(tokens) for tokens, _ in cut)]
    total, output = starts[-1], network.get_output_embeddings()
    width, device = network.config.get_text_config().hidden_size, network.device
    if batch_size is None:
        batch_size = 64 if device.type == "cuda" else 8
    size = total * ((len(layers) + 1) * width * dtype.itemsize + 16)
    on = device if device.type == "cuda" and 2 * size < torch.cuda.mem_get_info(device)[0] else None
    # Allocated at once: small tensors that stay, between large ones that go, leave holes of gigabytes.
    read = Conversations(
        starts=tuple(starts),
        token_ids=torch.empty(total, dtype=torch.long, device=on),
        is_learnt=torch.empty(total, dtype=torch.bool, device=on),
        features=torch.empty(total, len(layers) * width, dtype=dtype, device=on),
        last=torch.empty(total, width, dtype=dtype, device=on),
        log_z=torch.empty(total, device=on),
    )
    for first in range(0, len(cut), batch_size):
        batch = cut[first : first + batch_size]
        rows = [torch.tensor(tokens) for tokens, _ in batch]
        ids = pad_sequence(rows, batch_first=True).to(device)
        places = torch.arange(ids.shape[1], device=device)
        sizes = torch.tensor([len(tokens) for tokens, _ in batch], device=device)
        given = torch.tensor([num_given for _, num_given in batch], device=device)
        is_text = places < sizes[:, None]
        with torch.inference_mode():
            # Padding is on the right: nothing that counts sees it.
            states = network.model(ids, use_cache=False, output_hidden_states=True).hidden_states
            last = states[-1][is_text]
            log_z = [output(part).float().logsumexp(dim=-1) for part in last.split(_LOGITS)]
        at = slice(starts[first], starts[first + len(batch)])
        read.token_ids[at] = ids[is_text]
        read.is_learnt[at] = (places >= given[:, None])[is_text]
        read.features[at] = torch.cat([states[layer][is_text] for layer in layers], dim=-1)
        read.last[at] = last
        read.log_z[at] = torch.cat(log_z)
        on_rows(len(batch))
    return read
