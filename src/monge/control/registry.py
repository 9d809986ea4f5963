"""The controllers by name."""

from typing import Final

from monge.control.base import AnyController
from monge.control.fixed import Fixed
from monge.core.registry import Registry

CONTROLLERS: Final[Registry[AnyController]] = Registry("controller", {"fixed": Fixed})
