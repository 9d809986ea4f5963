"""The alignments by name."""

from typing import Final

from monge.core.registry import Registry
from monge.heads.shape.alignment.anchors import SinkhornAnchors
from monge.heads.shape.alignment.base import Alignment
from monge.heads.shape.alignment.diagonal import DiagonalMap
from monge.heads.shape.alignment.gaussian import GaussianMap
from monge.heads.shape.alignment.none import NoMap

ALIGNMENTS: Final[Registry[Alignment]] = Registry(
    "alignment",
    {
        "none": NoMap,
        "gaussian": GaussianMap,
        "diagonal": DiagonalMap,
        "sinkhorn_anchors": SinkhornAnchors,
    },
)
