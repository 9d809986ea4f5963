"""Self-speculation: the target itself drafts, with some of its layers left out."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from monge.core.context import Context
from monge.core.errors import OptionError
from monge.core.model import LayeredModel, SequenceModel
from monge.core.sampling_rules import SamplingRules
from monge.draft.base import DelegatingDrafter, PieceReader
from monge.draft.model import ModelDrafter, ReadPaths
from monge.draft.tree.base import TreeBuilder


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSkipDrafter(DelegatingDrafter[ReadPaths], PieceReader[ReadPaths]):
    """Draft with the target's own layers, some left out, under its own embeddings and output layer.

    The layer subset shares every weight with the target and keeps a cache of its own. It drafts as
    a draft model does, so its laws are declared, and every tree and verifier that suits a draft
    model suits it.

    Args:
        target: The target, which must be made of layers.
        tree: Shape of the tree and how children are drawn.
        layers: Layers to keep, increasing.
        num_layers: Keep so many of the first layers (early exit). Where neither is given, the first
            and the last quarter stay: a network that was not trained for early exits loses less
            without its middle than without its end.
        rules: See `ModelDrafter`.
        top_k: See `ModelDrafter`.

    Raises:
        OptionError: If the target is not made of layers, has not those, or both ways of choosing
            are used.
        UnsupportedModelError: If none of its layers can be left out.

    Reference:
        Draft & Verify (Zhang et al., arXiv 2309.08168): layers to skip; LayerSkip (Elhoushi et al.,
        arXiv 2404.16710): early exit. Nothing is searched for, and the cache is not the target's.
    """

    target: SequenceModel
    tree: TreeBuilder
    layers: tuple[int, ...] | None = None
    num_layers: int | None = None
    rules: SamplingRules | None = None
    top_k: int | None = None
    _drafter: ModelDrafter = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not isinstance(self.target, LayeredModel):
            raise OptionError(
                "drafter 'layer_skip' needs a target that can leave layers out; "
                f"{type(self.target).__name__} cannot; use "
                "drafter='model' or 'ngram'"
            )
        if self.layers is not None and self.num_layers is not None:
            raise OptionError("layer_skip: give layers or num_layers, not both")
        if self.num_layers is not None and not 1 <= self.num_layers <= self.target.num_layers:
            raise OptionError(
                "layer_skip: num_layers must lie between 1 and the target's "
                f"{self.target.num_layers}; got {self.num_layers}"
            )
        model = self.target.layer_subset(self._kept(self.target.num_layers))
        object.__setattr__(
            self,
            "_drafter",
            ModelDrafter(model=model, tree=self.tree, rules=self.rules, top_k=self.top_k),
        )

    def _kept(self, total: int) -> tuple[int, ...]:
        if self.layers is not None:
            return self.layers
        if self.num_layers is not None:
            return tuple(range(self.num_layers))
        quarter = max(1, total // 4)
        return tuple(sorted({*range(quarter), *range(total - quarter, total)}))

    def read(self, contexts: Sequence[Context]) -> None:
        self._drafter.read(contexts)
