"""The drafters by name."""

from typing import Final

from monge.core.parts import PARTS
from monge.core.registry import Registry
from monge.draft.base import AnyDrafter, Drafter
from monge.draft.tree.registry import TREES

DRAFTERS: Final[Registry[AnyDrafter]] = Registry(
    "drafter",
    PARTS["drafter"],
    base=Drafter,
    group="monge.drafters",
    provided=("model", "models", "target", "rules", "history"),
    inside={"tree": TREES},
)
