"""Ray, which is imported only when it is used."""

import logging
from importlib import import_module
from typing import Any

from monge.core.errors import OptionError
from monge.core.extras import require


def require_ray(*rooms: str) -> Any:  # noqa: ANN401 (the host's)
    """Import `ray` and these modules of it, and return the package.

    Raises:
        OptionError: If it is not installed.
    """
    require("distributed", "a cluster", "ray")
    for room in rooms:
        import_module(f"ray.{room}")
    return import_module("ray")


def connect(address: str | None) -> bool:
    """Connect to a cluster, and return whether this process was not connected before.

    Args:
        address: Address of a running cluster, or `auto` for the cluster of this machine; `None`
            starts a cluster of this machine alone, which ends with this process.

    Raises:
        OptionError: If there is no cluster at the address.
    """
    ray = require_ray()
    if ray.is_initialized():
        return False
    # Without an address, Ray would take one from the environment and join that cluster.
    options: dict[str, Any] = {"address": address or "local"}
    if address is None:
        options["include_dashboard"] = False
    try:
        ray.init(**options, logging_level=logging.ERROR, log_to_driver=False)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise OptionError(
            f"no Ray cluster answers at {address!r} ({error}); start one with `ray start --head`"
        ) from error
    return True
