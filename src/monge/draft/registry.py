"""The drafters by name."""

from typing import Final

from monge.core.parts import PARTS
from monge.core.registry import Registry
from monge.draft.base import AnyDrafter

DRAFTERS: Final[Registry[AnyDrafter]] = Registry(
    "drafter",
    PARTS["drafter"],
    group="monge.drafters",
    provided=("model", "models", "target", "tree", "rules", "history"),
)
