"""`monge serve --ray`."""

import signal
import threading
from typing import Final

from monge.cli.console import notes
from monge.core.errors import OptionError
from monge.options import RAY, LoadOptions, ServeOptions, changed, flag_of, options_of

_HERE_ONLY: Final = ("access_log", "verbose", "lame_duck_s")
_APPLICATION: Final = "monge"


def check_without_ray(settings: ServeOptions) -> None:
    """Refuse options of Ray where it was not asked for.

    Raises:
        OptionError: If one was given.
    """
    for name in changed(settings):
        option = options_of(ServeOptions)[name]
        if option.panel == RAY:
            raise OptionError(f"{flag_of(name, option)} needs --ray")


def serve_with_ray(load: LoadOptions, settings: ServeOptions) -> None:
    """Serve from replicas until told to stop.

    Raises:
        OptionError: If options contradict each other, or there is no Ray.
    """
    if settings.tensor_parallel:
        raise OptionError(
            "--tensor-parallel is not for --ray: start the replicas of a sharded target with "
            "torchrun, one by one"
        )
    given = changed(settings)
    for name in _HERE_ONLY:
        if name in given:
            raise OptionError(
                f"{flag_of(name, options_of(ServeOptions)[name])} is not for --ray: Ray keeps the "
                "replicas' logs, and moves requests to other replicas before one leaves"
            )
    if "autoscale" in given and "num_replicas" in given:
        raise OptionError("give --replicas or --autoscale, not both")
    delays = [name for name in ("upscale_delay_s", "downscale_delay_s") if name in given]
    if delays and "autoscale" not in given:
        raise OptionError(
            f"{flag_of(delays[0], options_of(ServeOptions)[delays[0]])} needs --autoscale"
        )
    if settings.port == 0:
        raise OptionError("--ray needs a port; got 0")
    _serve(load, settings)


def _serve(load: LoadOptions, settings: ServeOptions) -> None:
    from monge.distributed.ray_cluster import connect, require_ray
    from monge.distributed.ray_serve import AppArgs, app_from, range_of
    from monge.distributed.retry_proxy import CONTROLLER_OPTIONS
    from monge.serve.settings import hosts_to_accept

    hosts = hosts_to_accept(settings.host, settings.api_keys, settings.allowed_hosts)
    given = changed(load) | changed(settings) | {"allowed_hosts": hosts}
    if settings.autoscale is not None:
        given["autoscale"] = range_of(settings.autoscale)
    args = AppArgs(**{name: one for name, one in given.items() if name in AppArgs.model_fields})
    ray = require_ray("serve")
    application, serve = app_from(args), ray.serve
    is_ours, told = connect(settings.address), threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: told.set())
    try:
        serve.start(
            http_options={"host": settings.host, "port": settings.port},
            controller_options=CONTROLLER_OPTIONS,
        )
        serve.run(application, name=_APPLICATION, route_prefix="/")
        notes().print(
            f"serving at http://{settings.host}:{settings.port}/v1", markup=False, soft_wrap=True
        )
        told.wait()
    finally:
        serve.delete(_APPLICATION)
        if is_ours:
            serve.shutdown()
            ray.shutdown()
