"""The controllers by name."""

from typing import Final

from monge.control.base import AnyController
from monge.core.parts import PARTS
from monge.core.registry import Registry

DEPTH_CONTROLLERS: Final[Registry[AnyController]] = Registry(
    "controller", PARTS["depth controller"]
)
"""Those that decide how much to draft, and for which drafter-choosing ones have room inside."""

CONTROLLERS: Final[Registry[AnyController]] = Registry(
    "controller", PARTS["controller"], group="monge.controllers"
)
