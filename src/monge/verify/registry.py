"""The verifiers by name."""

from typing import Final

from monge.core.registry import Registry
from monge.verify.base import Rule
from monge.verify.block import Block
from monge.verify.gumbel import Gumbel
from monge.verify.layer import FLOW_RULES, Layer
from monge.verify.multipath_block import MultipathBlock
from monge.verify.traversal import Traversal

VERIFIERS: Final[Registry[Rule]] = Registry(
    "verifier",
    {
        **FLOW_RULES,
        "gumbel": Gumbel,
        "block": Block,
        "multipath_block": MultipathBlock,
        "traversal": Traversal,
        "layer": Layer,
    },
    group="monge.verifiers",
)
