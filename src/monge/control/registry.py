"""The controllers by name."""

from typing import Final

from monge.control.base import AnyController, Controller
from monge.core.parts import PARTS
from monge.core.registry import Registry

DEPTH_CONTROLLERS: Final[Registry[AnyController]] = Registry(
    "controller", PARTS["depth controller"], base=Controller
)
"""Controllers that plan windows; controllers that choose drafters take such a controller as `inner`."""

CONTROLLERS: Final[Registry[AnyController]] = Registry(
    "controller", PARTS["controller"], base=Controller, group="monge.controllers"
)
