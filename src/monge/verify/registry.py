"""The verifiers by name."""

from typing import Final

from monge.core.parts import PARTS
from monge.core.registry import Registry
from monge.verify.base import Rule

VERIFIERS: Final[Registry[Rule]] = Registry(
    "verifier", PARTS["verifier"], base=Rule, group="monge.verifiers"
)
