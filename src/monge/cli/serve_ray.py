"""`monge serve --ray`."""

import signal
import threading
from collections.abc import Mapping
from typing import Any, Final

from monge.cli.console import notes
from monge.core.errors import OptionError

_RAY_ONLY: Final = (
    *("replicas", "autoscale", "upscale_delay", "downscale_delay"),
    *("address", "cpus_per_replica", "gpus_per_replica"),
)
_HERE_ONLY: Final = ("access_log", "verbose", "lame_duck")
_NAMES: Final = {
    "api_key": "api_keys",
    "kv_budget": "kv_budget_tokens",
    "request_timeout": "request_timeout_s",
    "round_timeout": "round_timeout_s",
    "drain": "drain_s",
    "replicas": "num_replicas",
    "upscale_delay": "upscale_delay_s",
    "downscale_delay": "downscale_delay_s",
}
_APPLICATION: Final = "monge"


def serves_with_ray(given: Mapping[str, Any]) -> bool:
    """Serve from replicas until told to stop, if that is what the options say; whether it was.

    Args:
        given: Options of `monge serve` that have a value, by name.

    Raises:
        OptionError: If options contradict each other, or there is no Ray.
    """
    if not given["use_ray"]:
        wrong = [name for name in _RAY_ONLY if name in given]
        if wrong:
            raise OptionError(f"--{wrong[0].replace('_', '-')} needs --ray")
        return False
    if given["tensor_parallel"]:
        raise OptionError(
            "--tensor-parallel is not for --ray: start the replicas of a sharded target with "
            "torchrun, one by one"
        )
    wrong = [name for name in _HERE_ONLY if given.get(name)]
    if wrong:
        raise OptionError(
            f"--{wrong[0].replace('_', '-')} is not for --ray: Ray keeps the replicas' logs, and "
            "moves requests to other replicas before one leaves"
        )
    if "autoscale" in given and "replicas" in given:
        raise OptionError("give --replicas or --autoscale, not both")
    delays = [name for name in ("upscale_delay", "downscale_delay") if name in given]
    if delays and "autoscale" not in given:
        raise OptionError(f"--{delays[0].replace('_', '-')} needs --autoscale")
    if given["port"] == 0:
        raise OptionError("--ray needs a port; got 0")
    _serve(given)
    return True


def range_of(text: str) -> tuple[int, int]:
    """Two numbers with a colon between them.

    Raises:
        OptionError: If they are not.
    """
    fewest, colon, most = text.partition(":")
    if not (colon and fewest.isdecimal() and most.isdecimal()):
        raise OptionError(
            f"--autoscale takes the fewest and the most replicas, as in 1:4; got {text!r}"
        )
    return int(fewest), int(most)


def _serve(given: Mapping[str, Any]) -> None:
    from pydantic import ValidationError

    from monge.scale.ray_cluster import connect, require_ray
    from monge.scale.ray_serve import AppArgs, app_from
    from monge.scale.retry_proxy import CONTROLLER_OPTIONS
    from monge.serve.settings import hosts_to_accept

    hosts = hosts_to_accept(given["host"], given.get("api_key", ()), given.get("allowed_host", ()))
    known: dict[str, Any] = {_NAMES.get(name, name): value for name, value in given.items()}
    known["allowed_hosts"] = hosts
    if "autoscale" in known:
        known["autoscale"] = range_of(known["autoscale"])
    try:
        args = AppArgs(
            **{name: value for name, value in known.items() if name in AppArgs.model_fields}
        )
    except ValidationError as error:
        wrong = error.errors()[0]
        field = str(wrong["loc"][0])
        option = next((ours for ours, theirs in _NAMES.items() if theirs == field), field).replace(
            "_", "-"
        )
        raise OptionError(f"--{option}: {wrong['msg']}; got {wrong['input']!r}") from error
    ray = require_ray("serve")
    application, serve = app_from(args), ray.serve
    is_ours, told = connect(given.get("address")), threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: told.set())
    try:
        serve.start(
            http_options={"host": given["host"], "port": given["port"]},
            controller_options=CONTROLLER_OPTIONS,
        )
        serve.run(application, name=_APPLICATION, route_prefix="/")
        notes().print(
            f"serving at http://{given['host']}:{given['port']}/v1", markup=False, soft_wrap=True
        )
        told.wait()
    finally:
        serve.delete(_APPLICATION)
        if is_ours:
            serve.shutdown()
            ray.shutdown()
