"""The verifiers by name."""

from typing import Final

from monge.core.registry import Registry
from monge.verify.base import Rule
from monge.verify.block import Block
from monge.verify.canonical import Canonical
from monge.verify.greedy import Greedy
from monge.verify.gumbel import Gumbel
from monge.verify.k_seq import KSeq
from monge.verify.layer import Layer
from monge.verify.multipath_block import MultipathBlock
from monge.verify.naive_tree import NaiveTree
from monge.verify.optimal import Optimal
from monge.verify.rrs import Rrs
from monge.verify.rrs_without_replacement import RrsWithoutReplacement
from monge.verify.single_draft import SingleDraft
from monge.verify.spechub import SpecHub
from monge.verify.systematic import EarliestDeadline
from monge.verify.target_walk import TargetWalk
from monge.verify.traversal import Traversal

VERIFIERS: Final[Registry[Rule]] = Registry(
    "verifier",
    {
        "target_walk": TargetWalk,
        "single_draft": SingleDraft,
        "rrs": Rrs,
        "rrs_without_replacement": RrsWithoutReplacement,
        "naive_tree": NaiveTree,
        "k_seq": KSeq,
        "greedy": Greedy,
        "canonical": Canonical,
        "spechub": SpecHub,
        "systematic": EarliestDeadline,
        "gumbel": Gumbel,
        "block": Block,
        "multipath_block": MultipathBlock,
        "traversal": Traversal,
        "layer": Layer,
        "optimal": Optimal,
    },
    group="monge.verifiers",
)
