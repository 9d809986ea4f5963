"""The controllers that decide how much to draft, by name."""

from typing import Final

from monge.control.base import AnyController
from monge.control.confidence_threshold import ConfidenceThreshold
from monge.control.fixed import Fixed
from monge.control.fsm import CachedFsm, Fsm
from monge.control.goodput import Goodput
from monge.control.on_the_fly import OnTheFly
from monge.control.q_learning import QLearning
from monge.control.transformers_heuristic import TransformersHeuristic
from monge.core.registry import Registry

WINDOWS: Final[Registry[AnyController]] = Registry(
    "controller",
    {
        "fixed": Fixed,
        "goodput": Goodput,
        "on_the_fly": OnTheFly,
        "fsm": Fsm,
        "cached_fsm": CachedFsm,
        "q_learning": QLearning,
        "transformers_heuristic": TransformersHeuristic,
        "confidence_threshold": ConfidenceThreshold,
    },
)
