"""The drafters by name."""

from typing import Final

from monge.core.registry import Registry
from monge.draft.base import AnyDrafter, NoDrafter
from monge.draft.ensemble import EnsembleDrafter
from monge.draft.jacobi import JacobiDrafter
from monge.draft.layer_skip import LayerSkipDrafter
from monge.draft.lookahead import LookaheadDrafter
from monge.draft.model import ModelDrafter
from monge.draft.ngram import NgramDrafter
from monge.draft.pool import PoolDrafter
from monge.draft.published_heads import HeadDrafter
from monge.draft.retokenize import RetokenizeDrafter
from monge.draft.shape import ShapeDrafter
from monge.draft.suffix import SuffixDrafter
from monge.draft.token_recycling import TokenRecyclingDrafter

DRAFTERS: Final[Registry[AnyDrafter]] = Registry(
    "drafter",
    {
        "model": ModelDrafter,
        "ensemble": EnsembleDrafter,
        "shape": ShapeDrafter,
        "retokenize": RetokenizeDrafter,
        "layer_skip": LayerSkipDrafter,
        "head": HeadDrafter,
        "ngram": NgramDrafter,
        "suffix": SuffixDrafter,
        "token_recycling": TokenRecyclingDrafter,
        "lookahead": LookaheadDrafter,
        "jacobi": JacobiDrafter,
        "pool": PoolDrafter,
        "none": NoDrafter,
    },
    group="monge.drafters",
    provided=("model", "models", "target", "tree", "rules"),
)
