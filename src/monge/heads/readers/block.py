"""Block drafters: DFlash, DSpark and DFlash 2."""

from collections.abc import Callable
from functools import partial
from typing import ClassVar

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor, nn
from torch.nn import functional

from monge.heads.readers.attention import GroupedAttention
from monge.heads.readers.base import PublishedHead, Unembed, plain_names
from monge.heads.readers.decoder import feed_forward, windows
from monge.heads.readers.files import Checkpoint
from monge.heads.readers.layers import HeadOutputLayer, Nodes, Norm, Projection
from monge.heads.readers.slots import CacheSlots
from monge.heads.readers.source import Source

Tokens = Int64[Tensor, " nodes"]
Mask = Callable[[Int64[Tensor, "texts rows"], int], Bool[Tensor, "texts one rows seq"]]
"""Maps positions of rows, and a number of columns, to the columns that each row attends to."""


class DFlashHead(PublishedHead):
    """Layers that read the target's fused states as context and predict a block of masked tokens in one pass.

    The configuration lists the fused states as indices of the hidden states of `transformers`.
    Which token a row predicts follows from `sample_from_anchor`, else from `shift_label`, else from
    the format.

    Args:
        source: `fc.weight`, `hidden_norm.weight`, `layers.{i}.*`, `norm.weight`, and the method's
            own tensors; a Qwen3-like configuration with `block_size` and `mask_token_id`.
        ids: Indices of the fused hidden states; `None` spreads as many as the head has layers over
            the target's layers.
        is_shifted: Whether row k is about token k + 1 of the block, the anchor being token 0;
            otherwise it is about token k, and the anchor's own row about nothing.
        is_speculators: Whether sliding windows follow the convention of the `speculators` library.

    Reference:
        DFlash, arXiv 2602.06036; DSpark, arXiv 2607.05147.
    """

    family: ClassVar[str] = "dflash"

    def __init__(
        self,
        source: Source,
        ids: tuple[int, ...] | None,
        *,
        is_shifted: bool,
        is_speculators: bool,
    ) -> None:
        hidden, vocab = source.hidden, source.number("vocab_size")
        target = source.number("target_hidden_size", default=hidden)
        is_sized = source.config.get("num_target_layers") is not None
        super().__init__(target, vocab, source.number("num_target_layers") if is_sized else None)
        block, count = source.number("block_size"), source.number("num_hidden_layers")
        self.block_size, self.is_shifted, self.num_layers = block, is_shifted, count
        if block < (1 if is_shifted else 2) or count < 1:
            raise source.refuse(f"a block of {block} tokens and {count} layers draft nothing")
        self.mask_token, self.ids = source.number("mask_token_id"), ids
        if self.mask_token >= vocab:
            raise source.refuse(
                f"mask_token_id {self.mask_token} is outside the vocabulary of {vocab}"
            )
        if source.real("input_embedding_scale", 1.0) != 1.0:
            raise source.refuse("input_embedding_scale is set, which is not supported")
        self.fc = Projection(source, "fc", hidden, target * (count if ids is None else len(ids)))
        self.context_norm = Norm(source, "hidden_norm", hidden)
        self.norm = Norm(source, "norm", hidden)
        self.decoder = nn.ModuleList(
            BlockLayer(source, f"layers.{layer}", mask)
            for layer, mask in enumerate(_masks(source, count, from_anchor=is_speculators))
        )
        self.embedding = source.maybe("embed_tokens.weight", vocab, hidden)
        self.output = HeadOutputLayer.maybe(source, hidden, vocab)
        drafted = vocab if self.output is None else self.output.size
        self.edges: MarkovEdges | SelectorEdges | None = None
        if "markov_head.markov_w1.weight" in source:
            self.edges = MarkovEdges(source, hidden, (vocab, drafted))
        elif "candidate_selector.hidden_projection.weight" in source:
            self.edges = SelectorEdges(source, hidden, drafted)
        elif source.number("markov_rank", default=0):
            raise source.refuse(
                "markov_rank is set, and there is no markov_head.markov_w1.weight; fetch the file "
                "again"
            )
        # What a confidence head says about a drawn token may not decide whether it is offered, so
        # it is not used here.
        source.leave("confidence_head.", "verifier_norm.", "verifier_lm_head.")

    @property
    def max_depth(self) -> int | None:
        return self.block_size if self.is_shifted else self.block_size - 1

    @property
    def memory(self) -> int:
        """Width of a path's recurrent state."""
        return 0 if self.edges is None else self.edges.memory

    def layers(self, num_layers: int) -> tuple[int, ...]:
        if self.ids is not None:
            return self.ids
        if self.num_layers == 1:
            return (num_layers // 2 + 1,)
        gap = (num_layers - 4) / (self.num_layers - 1)
        return tuple(round(1 + index * gap) + 1 for index in range(self.num_layers))

    def read(self, features: Nodes, slots: CacheSlots) -> None:
        """Read the target's states of committed tokens into the cache."""
        # The product leaves the range of float16 with some published weights.
        if features.dtype == torch.float16:
            fused = functional.linear(features.float(), self.fc.weight.float())
        else:
            fused = self.fc(features)
        states = self.context_norm(fused).to(features.dtype)
        for number, layer in enumerate(self.decoder):
            assert isinstance(layer, BlockLayer)
            layer.read(states, slots, number)

    def predict(
        self, values: Float[Tensor, "texts rows hidden"], slots: CacheSlots
    ) -> Float[Tensor, "texts rows hidden"]:
        """Return the states of all rows of every block, from the embeddings of anchor and masks."""
        for number, layer in enumerate(self.decoder):
            values = layer(values, slots, number)
        return self.norm(values)

    def logits(self, states: Nodes, unembed: Unembed) -> Nodes:
        """Return the logits of rows over the draft vocabulary, before the correction by `follow`."""
        return unembed(states) if self.output is None else self.output.layer(states)

    def follow(
        self, token_ids: Tokens, states: Nodes, memory: Nodes, logits: Nodes
    ) -> tuple[Float[Tensor, "nodes vocab"], Nodes]:
        """Correct the logits of rows given the tokens before them.

        Args:
            token_ids: Tokens of the parent nodes; the rows predict the tokens after them.
            states: States of the rows.
            memory: Recurrent states of the paths, from the parent nodes; zeros at the anchor.
            logits: Logits of the rows over the draft vocabulary.

        Returns:
            Logits over the target's vocabulary, and the paths' next recurrent states.
        """
        if self.edges is not None:
            logits, memory = self.edges(token_ids, states, memory, logits)
        return logits if self.output is None else self.output.widen(logits), memory


class BlockLayer(nn.Module):
    """Attention from a block to context and block, and a feed-forward network.

    The same projections make the keys and values of the context, from the target's fused states, and
    those of the block.

    Args:
        mask: Maps positions of the rows of blocks to the columns that they attend to.
    """

    def __init__(self, source: Source, name: str, mask: Mask) -> None:
        super().__init__()
        hidden = source.hidden
        self.first, self.second = (
            Norm(source, f"{name}.{part}_layernorm", hidden) for part in ("input", "post_attention")
        )
        self.attention = GroupedAttention(source, f"{name}.self_attn")
        self.mlp = feed_forward(source, f"{name}.mlp")
        self.mask = mask
        self.convs = nn.ModuleList(
            DynamicConv(source, f"{name}.{part}_conv")
            for part in ("attention", "mlp")
            if f"{name}.{part}_conv.base_kernel" in source
        )

    def read(self, states: Nodes, slots: CacheSlots, layer: int) -> None:
        """Append the context's keys and values to the cache."""
        keys, values = self.attention.keys_values(states)
        rotary = self.attention.rotary
        keys = rotary.turn(keys, rotary.angles(slots.positions.flatten(), states))
        slots.write(layer, keys, values)

    def forward(
        self, values: Float[Tensor, "texts rows hidden"], slots: CacheSlots, layer: int
    ) -> Float[Tensor, "texts rows hidden"]:
        mask = self.mask(slots.positions, slots.masks[None].shape[-1])

        def attend(inner: Tensor) -> Tensor:
            return self.attention(inner.flatten(0, 1), slots, layer, mask)

        values = values + self._around(0, self.first(values), attend)
        return values + self._around(1, self.second(values), lambda x: self.mlp(x.flatten(0, 1)))

    def _around(self, place: int, values: Tensor, part: Callable[[Tensor], Tensor]) -> Tensor:
        if not self.convs:
            return part(values).view_as(values)
        conv = self.convs[place]
        assert isinstance(conv, DynamicConv)
        before, kernels = conv.before(values)
        return conv.after(part(before).view_as(values), kernels)


def _masks(source: Source, count: int, *, from_anchor: bool) -> list[Mask]:
    """The attention mask of every layer.

    With a sliding window, rows are causal unless the settings say otherwise. The window is counted
    from each row in both directions; `from_anchor`, as in `speculators`, counts it from the anchor
    for all rows and leaves it open within the block.
    """
    masks: list[Mask] = []
    for window in windows(source, count):
        usual = window is not None and not source.flag("sliding_window_non_causal")
        is_causal = source.flag("is_causal", default=usual)
        masks.append(partial(_visible, window=window, is_causal=is_causal, from_anchor=from_anchor))
    return masks


def _visible(
    positions: Int64[Tensor, "texts rows"],
    width: int,
    *,
    window: int | None,
    is_causal: bool,
    from_anchor: bool,
) -> Bool[Tensor, "texts one rows seq"]:
    rows, columns = positions[:, None, :, None], torch.arange(width, device=positions.device)
    seen = columns <= (rows if is_causal else rows[:, :, -1:].expand_as(rows))
    if window is None:
        return seen
    if from_anchor:
        return seen & (columns >= rows[:, :, :1] - window)
    return seen & (rows - columns < window) & (columns - rows < window)


class DynamicConv(nn.Module):
    """Convolution over the rows of a block, with kernels computed from each row, before and after a sub-layer.

    Args:
        source: `base_kernel`, `kernel_projection.weight`; `conv_kernel_size`, `conv_group_size`.

    Reference:
        DFlash 2, weights published by z-lab; read from its reference code.
    """

    base: Tensor

    def __init__(self, source: Source, name: str) -> None:
        super().__init__()
        hidden = source.hidden
        self.taps = source.number("conv_kernel_size")
        self.group = source.number("conv_group_size")
        if self.group < 1 or hidden % self.group:
            raise source.refuse(
                f"conv_group_size {self.group} does not divide the hidden size {hidden}"
            )
        self.register_buffer("base", source.take(f"{name}.base_kernel", 2, self.taps, hidden))
        rows = 2 * self.taps * hidden // self.group
        self.kernels = Projection(source, f"{name}.kernel_projection", rows, hidden)

    def before(self, values: Float[Tensor, "texts rows hidden"]) -> tuple[Tensor, Tensor]:
        """Return the sub-layer's input, and the kernels for its output."""
        kernels = self.kernels(values).unflatten(-1, (2, self.taps, -1))
        return self._convolved(values, kernels[..., 0, :, :], self.base[0]), kernels[..., 1, :, :]

    def after(
        self, values: Float[Tensor, "texts rows hidden"], kernels: Tensor
    ) -> Float[Tensor, "texts rows hidden"]:
        """Return the sub-layer's output after the convolution."""
        return self._convolved(values, kernels, self.base[1])

    def _convolved(self, values: Tensor, kernels: Tensor, base: Tensor) -> Tensor:
        total = torch.zeros_like(values)
        for tap in range(self.taps):
            moved = functional.pad(values[:, : values.shape[1] - tap], (0, 0, tap, 0))
            kernel = base[tap] + kernels[..., tap, :].repeat_interleave(self.group, dim=-1)
            total = total + kernel * moved
        return total


class MarkovEdges(nn.Module):
    """DSpark's bias W2 W1[x], plain, gated by the row's state, or with a recurrent state of the path.

    Args:
        source: `markov_head.*`; `markov_rank`, `markov_head_type`.
        hidden: Width of a row's state.
        sizes: Number of previous tokens, and of tokens that can be drafted.

    Raises:
        ModelLoadError: If the type is unknown.

    Reference:
        DSpark, arXiv 2607.05147.
    """

    before: Tensor

    def __init__(self, source: Source, hidden: int, sizes: tuple[int, int]) -> None:
        super().__init__()
        rank, (vocab, drafted) = source.number("markov_rank"), sizes
        self.kind, self.memory = str(source.config.get("markov_head_type", "vanilla")), 0
        self.register_buffer("before", source.take("markov_head.markov_w1.weight", vocab, rank))
        self.after = Projection(source, "markov_head.markov_w2", drafted, rank)
        if self.kind == "gated":
            self.gate = Projection(source, "markov_head.gate_proj", rank, hidden + rank)
        elif self.kind == "rnn":
            self.memory, read = rank, 2 * rank + hidden
            self.joint = Projection(source, "markov_head.joint_proj", 3 * rank, read)
        elif self.kind != "vanilla":
            raise source.refuse(
                f"markov_head_type {self.kind!r} is not known here; known: vanilla, gated, rnn"
            )

    def forward(
        self, token_ids: Tokens, states: Nodes, memory: Nodes, logits: Nodes
    ) -> tuple[Nodes, Nodes]:
        known = functional.embedding(token_ids.to(self.before.device), self.before)
        if self.kind == "gated":
            known = torch.sigmoid(self.gate(torch.cat([states, known], dim=-1))) * known
        elif self.kind == "rnn":
            joint = self.joint(torch.cat([memory, known, states], dim=-1))
            gate, new, out = joint.chunk(3, dim=-1)
            gate = torch.sigmoid(gate)
            memory, known = gate * memory + (1.0 - gate) * torch.tanh(new), torch.tanh(out)
        return logits + self.after(known), memory


class SelectorEdges(nn.Module):
    """DFlash 2's selector: the row's best candidates, each with the score <A[x] * H s, B[candidate]> added.

    Other tokens get no mass, and the declared draft law is the law after this restriction.

    Args:
        source: `candidate_selector.*`; `selector_rank`, `selector_top_k`.
        hidden: Width of a row's state s.
        vocab: Number of tokens.

    Reference:
        DFlash 2, weights published by z-lab; read from its reference code.
    """

    before: Tensor
    after: Tensor
    memory: ClassVar[int] = 0

    def __init__(self, source: Source, hidden: int, vocab: int) -> None:
        super().__init__()
        rank, self.top_k = source.number("selector_rank"), source.number("selector_top_k")
        if not 1 <= self.top_k <= vocab:
            raise source.refuse(f"selector_top_k must lie in 1..{vocab}; got {self.top_k}")
        for part, name in (("before", "predecessor"), ("after", "successor")):
            key = f"candidate_selector.{name}_codebook"
            key = key if key in source else f"{key}.weight"
            self.register_buffer(part, source.take(key, vocab, rank))
        self.project = Projection(source, "candidate_selector.hidden_projection", rank, hidden)

    def forward(
        self, token_ids: Tokens, states: Nodes, memory: Nodes, logits: Nodes
    ) -> tuple[Nodes, Nodes]:
        scores, candidates = logits.topk(self.top_k, dim=-1)
        known = functional.embedding(token_ids.to(self.before.device), self.before)
        known = known * self.project(states)
        scores = scores + (functional.embedding(candidates, self.after) @ known[..., None])[..., 0]
        return torch.full_like(logits, -torch.inf).scatter(1, candidates, scores), memory


def recognises(checkpoint: Checkpoint) -> bool:
    """Return whether this is a block drafter: it has layers and a norm for the fused states."""
    needed = {"hidden_norm.weight", "fc.weight", "layers.0.self_attn.q_proj.weight"}
    return needed <= plain_names(checkpoint).keys()


def read(checkpoint: Checkpoint) -> DFlashHead:
    """Read a head in z-lab's or DeepSpec's format; Domino is refused."""
    config = {**checkpoint.config, **(checkpoint.config.get("dflash_config") or {})}
    source = Source.of(checkpoint, plain_names(checkpoint), config)
    architecture = str((config.get("architectures") or ["?"])[0])
    if "Domino" in architecture or config.get("projector_type") == "domino":
        raise source.refuse(
            "Domino's recurrent correction is not read here; DFlash, DFlash 2 and DSpark are"
        )
    is_shifted = config.get("shift_label", "DSpark" in architecture or "num_anchors" in config)
    ids = source.numbers("target_layer_ids")
    if ids is not None:
        ids = tuple(layer + 1 for layer in ids)  # named by their outputs, and the embedding by -1
    return build(source, ids, is_shifted=bool(is_shifted))


def build(
    source: Source,
    ids: tuple[int, ...] | None,
    *,
    is_shifted: bool,
    is_speculators: bool = False,
) -> DFlashHead:
    """Build a head; for the arguments see `DFlashHead`."""
    head = DFlashHead(source, ids, is_shifted=is_shifted, is_speculators=is_speculators)
    source.finish()
    return head
