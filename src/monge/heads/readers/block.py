"""Block drafters: DFlash, DSpark and DFlash 2."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from monge.heads.readers.base import Embedding, OutputLayer, PublishedHead, Unembed
from monge.heads.readers.block_edges import BlockPath, Edges, MarkovEdges, NoEdges, SelectorEdges
from monge.heads.readers.block_layer import BlockLayer, Sight
from monge.heads.readers.decoder import windows
from monge.heads.readers.eagle import plain_names
from monge.heads.readers.files import Checkpoint
from monge.heads.readers.layers import Nodes, Norm, Projection
from monge.heads.readers.reading import Segment
from monge.heads.readers.tensors import Settings, Tensors


class DFlashHead(PublishedHead):
    """Layers that read the target's fused states as context and predict a block of masked tokens in one pass.

    The configuration lists the fused states as indices of the host's hidden states. Which token a
    row predicts follows from `sample_from_anchor`, else from `shift_label`, else from the format.

    Args:
        tensors: `fc.weight`, `hidden_norm.weight`, `layers.{i}.*`, `norm.weight`, and the
            method's own tensors.
        settings: A Qwen3-like configuration with `block_size` and `mask_token_id`.
        ids: Indices of the fused hidden states; `None` spreads one per layer of the head over the
            target's layers.
        is_shifted: Whether row k is about token k + 1 of the block, the anchor being token 0;
            otherwise it is about token k, and the anchor's own row about nothing.
        is_speculators: Whether sliding windows follow the convention of the `speculators` library.

    Reference:
        DFlash, arXiv 2602.06036; DSpark, arXiv 2607.05147.
    """

    family: ClassVar[str] = "dflash"

    def __init__(
        self,
        tensors: Tensors,
        settings: Settings,
        ids: tuple[int, ...] | None,
        *,
        is_shifted: bool,
        is_speculators: bool,
    ) -> None:
        hidden, vocab = settings.number("hidden_size"), settings.number("vocab_size")
        target = settings.number("target_hidden_size", default=hidden)
        layers = (
            None
            if settings.config.get("num_target_layers") is None
            else settings.number("num_target_layers")
        )
        block, count = settings.number("block_size"), settings.number("num_hidden_layers")
        super().__init__(target, vocab, layers)
        self.block_size, self.is_shifted = block, is_shifted
        if block < (1 if is_shifted else 2) or count < 1:
            raise settings.refuse(f"a block of {block} tokens and {count} layers draft nothing")
        self.mask_token, self.ids = settings.number("mask_token_id"), ids
        if self.mask_token >= vocab:
            raise settings.refuse(
                f"mask_token_id {self.mask_token} is outside the vocabulary of {vocab}"
            )
        if settings.real("input_embedding_scale", 1.0) != 1.0:
            raise settings.refuse("input_embedding_scale is set, which is not supported")
        eps, self.num_layers = settings.real("rms_norm_eps", 1e-6), count
        self.fc = Projection(tensors, "fc", hidden, target * (count if ids is None else len(ids)))
        self.context_norm, self.norm = (
            Norm(tensors, name, hidden, eps) for name in ("hidden_norm", "norm")
        )
        sights = _sights(settings, count, is_speculators=is_speculators)
        self.decoder = nn.ModuleList(
            BlockLayer(tensors, f"layers.{one}", settings, sights[one]) for one in range(count)
        )
        self.embedding = (
            Embedding(tensors, "embed_tokens", vocab, hidden)
            if "embed_tokens.weight" in tensors
            else None
        )
        self.output = OutputLayer(tensors, hidden, vocab) if "lm_head.weight" in tensors else None
        self.edges = _edges(
            tensors, settings, hidden, vocab if self.output is None else self.output.size
        )
        # What a confidence head says about a drawn token may not decide whether it is offered, so
        # it is not used here.
        tensors.leave("confidence_head.", "verifier_norm.", "verifier_lm_head.")

    @property
    def max_depth(self) -> int | None:
        return self.block_size if self.is_shifted else self.block_size - 1

    @property
    def memory(self) -> int:
        """Width of a path's recurrent state."""
        return self.edges.memory

    def layers(self, num_layers: int) -> tuple[int, ...]:
        if self.ids is not None:
            return self.ids
        if self.num_layers == 1:
            return (num_layers // 2 + 1,)
        spread = (
            round(1 + one * (num_layers - 4) / (self.num_layers - 1))
            for one in range(self.num_layers)
        )
        return tuple(one + 1 for one in spread)

    def read(self, features: Nodes, segments: Sequence[Segment]) -> None:
        """Read the target's states of committed tokens into the cache."""
        # The product leaves the range of float16 with some published weights.
        is_narrow = features.dtype == torch.float16
        fused = (
            functional.linear(features.float(), self.fc.weight.float())
            if is_narrow
            else self.fc(features)
        )
        states = self.context_norm(fused).to(features.dtype)
        for number, layer in enumerate(self.decoder):
            assert isinstance(layer, BlockLayer)
            layer.read(states, segments, number)

    def predict(self, embeddings: Nodes, segments: Sequence[Segment]) -> Nodes:
        """Return the states of all rows of every block, from the embeddings of anchor and masks.

        The cache does not change.
        """
        values = embeddings.unflatten(0, (len(segments), -1))
        for number, layer in enumerate(self.decoder):
            values = layer(values, segments, number)
        return self.norm(values).flatten(0, 1)

    def logits(self, states: Nodes, unembed: Unembed) -> Nodes:
        """Return the logits of rows over the draft vocabulary, before the correction by `follow`."""
        return unembed(states) if self.output is None else self.output.layer(states)

    def follow(self, path: BlockPath, logits: Nodes) -> tuple[Float[Tensor, "nodes vocab"], Nodes]:
        """Return logits over the target's vocabulary given the previous token, and the path's next recurrent state."""
        changed, memory = self.edges(path, logits)
        return changed if self.output is None else self.output.widen(changed), memory


def recognises(checkpoint: Checkpoint) -> bool:
    """Return whether this is a block drafter: it has layers and a norm for the fused states."""
    names = plain_names(checkpoint)
    return all(
        name in names
        for name in ("hidden_norm.weight", "fc.weight", "layers.0.self_attn.q_proj.weight")
    )


def read(checkpoint: Checkpoint) -> DFlashHead:
    """Read one in z-lab's or DeepSpec's format.

    Raises:
        ModelLoadError: If settings or tensors are missing, unexpected, misshapen or inconsistent,
            or the method is Domino.
    """
    config = {**checkpoint.config, **(checkpoint.config.get("dflash_config") or {})}
    settings = Settings(config, str(checkpoint.path))
    architecture = str((config.get("architectures") or ["?"])[0])
    if "Domino" in architecture or config.get("projector_type") == "domino":
        raise settings.refuse(
            "Domino's recurrent correction is not read here; DFlash, DFlash 2 and DSpark are"
        )
    is_shifted = config.get("shift_label", "DSpark" in architecture or "num_anchors" in config)
    ids = settings.numbers("target_layer_ids")
    # These formats name layers by their outputs, and the embedding by -1.
    return read_with(
        checkpoint,
        config,
        None if ids is None else tuple(one + 1 for one in ids),
        is_shifted=bool(is_shifted),
    )


def read_with(
    checkpoint: Checkpoint,
    config: Mapping[str, Any],
    ids: tuple[int, ...] | None,
    *,
    is_shifted: bool,
    is_speculators: bool = False,
) -> DFlashHead:
    """Read one with these settings.

    Raises:
        ModelLoadError: As for `read`.
    """
    tensors = Tensors(checkpoint, plain_names(checkpoint))
    settings = Settings(config, str(checkpoint.path))
    head = DFlashHead(tensors, settings, ids, is_shifted=is_shifted, is_speculators=is_speculators)
    tensors.finish()
    return head


def _sights(settings: Settings, count: int, *, is_speculators: bool) -> list[Sight]:
    sights: list[Sight] = []
    for window in windows(settings, count):
        usual = window is not None and not settings.flag("sliding_window_non_causal")
        causal = settings.flag("is_causal", default=usual)
        sights.append(Sight(window=window, is_causal=causal, from_anchor=is_speculators))
    return sights


def _edges(tensors: Tensors, settings: Settings, hidden: int, drafted: int) -> Edges:
    if "markov_head.markov_w1.weight" in tensors:
        return MarkovEdges(tensors, settings, hidden, (settings.number("vocab_size"), drafted))
    if "candidate_selector.hidden_projection.weight" in tensors:
        return SelectorEdges(tensors, settings, hidden, drafted)
    if settings.number("markov_rank", default=0):
        raise settings.refuse(
            "markov_rank is set, and there is no markov_head.markov_w1.weight; fetch the file again"
        )
    return NoEdges()
