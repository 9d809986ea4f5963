"""The controllers by name."""

from typing import Final

from monge.control.base import AnyController
from monge.core.parts import PARTS
from monge.core.registry import Registry

DEPTH_CONTROLLERS: Final[Registry[AnyController]] = Registry(
    "controller", PARTS["depth controller"]
)
"""Controllers that plan windows; controllers that choose drafters take such a controller as `inner`."""

CONTROLLERS: Final[Registry[AnyController]] = Registry(
    "controller", PARTS["controller"], group="monge.controllers"
)
