"""Audits of servers: does this engine sample from the distribution of its target model?"""

import typing
from importlib import import_module as _import_module

from monge.core.extras import require as _require

if typing.TYPE_CHECKING:
    from monge.audit.gate import InconclusiveError, assert_lossless

__all__ = ["InconclusiveError", "assert_lossless"]


def __getattr__(name: str) -> object:
    # Imported late: it needs httpx, which the command's help does not.
    if name in __all__:
        _require("audit", f"monge.audit.{name}")
        return getattr(_import_module("monge.audit.gate"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
