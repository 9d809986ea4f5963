"""The controllers by name."""

from typing import Final

from monge.control.base import AnyController
from monge.control.hedge import Hedge
from monge.control.linear_selection import LinearSelection
from monge.control.windows import WINDOWS
from monge.core.registry import Registry

CONTROLLERS: Final[Registry[AnyController]] = Registry(
    "controller",
    {**WINDOWS, "hedge": Hedge, "linear_selection": LinearSelection},
    group="monge.controllers",
)
