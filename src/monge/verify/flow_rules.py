"""The node rules that can be lifted to whole trees, by name."""

from typing import Final

from monge.core.registry import Registry
from monge.verify.canonical import Canonical
from monge.verify.flow import FlowRule
from monge.verify.greedy import Greedy
from monge.verify.k_seq import KSeq
from monge.verify.naive_tree import NaiveTree
from monge.verify.optimal import Optimal
from monge.verify.rrs import Rrs
from monge.verify.rrs_without_replacement import RrsWithoutReplacement
from monge.verify.single_draft import SingleDraft
from monge.verify.spechub import SpecHub
from monge.verify.systematic import EarliestDeadline
from monge.verify.target_walk import TargetWalk

FLOW_RULES: Final[Registry[FlowRule]] = Registry(
    "node rule",
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
        "optimal": Optimal,
    },
)
