"""Ray, which is imported only when it is asked for."""

import logging
from importlib import import_module
from typing import Any

from monge.core.errors import OptionError
from monge.core.extras import require


def require_ray(*rooms: str) -> Any:  # noqa: ANN401 (the host's)
    """The package `ray`, with these rooms of it loaded.

    Raises:
        OptionError: If it is not installed.
    """
    require("scale", "a cluster", "ray")
    for room in rooms:
        import_module(f"ray.{room}")
    return import_module("ray")


def connect(address: str | None) -> bool:
    """Connect to a cluster, or make one of this machine; whether there was no connection before.

    Args:
        address: Of a running cluster, `auto` for the one that this machine belongs to; `None` makes
            one of this machine alone, for as long as this process lives.

    Raises:
        OptionError: If there is no cluster at the address.
    """
    ray = require_ray()
    if ray.is_initialized():
        return False
    quiet: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": False}
    # Without an address, Ray would take one from the environment and join that cluster.
    where = (
        {"address": "local", "include_dashboard": False}
        if address is None
        else {"address": address}
    )
    try:
        ray.init(**where, **quiet)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise OptionError(
            f"no Ray cluster answers at {address!r} ({error}); start one with `ray start --head`"
        ) from error
    return True
