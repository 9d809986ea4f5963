"""`monge serve`, in this process or on Ray."""

import signal
import threading
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Final

import typer

from monge.cli import options
from monge.cli.console import say
from monge.cli.options import set_threads
from monge.core.errors import OptionError
from monge.options import HERE_ONLY, RAY, LoadOptions, ServeOptions, changed, flag_of, options_of

if TYPE_CHECKING:  # its import takes seconds, which the help and a wrong option do not need
    from monge.engine.decoder import Decoder

_APPLICATION: Final = "monge"
_LARGEST_PORT: Final = 65535


@options.command
def serve(
    models: Annotated[
        list[str] | None,
        typer.Argument(
            help="The target and its draft models, by place: as --target and --draft.",
            metavar="TARGET DRAFT",
        ),
    ] = None,
    *,
    load: LoadOptions,
    settings: ServeOptions,
    verbose: options.Verbose = False,
) -> None:
    """Serve a model over HTTP, as the OpenAI API does.

    Completions and chat, whole or as streams, `/v1/models`, `/health`, and `/metrics` for
    Prometheus. On SIGTERM no more requests are taken, and those that run are finished.
    docs/serving.md has recipes for clients.

    **Examples**

        monge serve
        monge serve --target smollm2 --backend compiled
        monge serve ./my-target ./my-draft --tree "chain(6)" --max-batch-size 16
        monge serve ./my-target --drafter ngram --controller goodput --port 8080
        monge serve --controller goodput --controller fixed
        MONGE_API_KEY=secret monge serve ./my-target --host 0.0.0.0
        monge serve ./my-target --ray --address auto --replicas 1-8 --gpus-per-replica 1
    """
    _check_ray(settings)
    if not 0 <= settings.port <= _LARGEST_PORT:  # the resolver would take it modulo 65536
        raise OptionError(f"--port must lie in 0..{_LARGEST_PORT}; got {settings.port}")
    import monge.serve  # noqa: F401 (it says which packages it lacks)

    if settings.use_ray:
        _serve_with_ray(load, settings)
    else:
        _serve_here(load, settings, verbose=verbose)


def _serve_here(load: LoadOptions, options: ServeOptions, *, verbose: bool) -> None:
    from monge.cli.generation import loaded
    from monge.serve import run
    from monge.serve.http.app import create_app
    from monge.serve.settings import (
        checked_options,
        default_sampling,
        hosts_to_accept,
        is_loopback,
    )

    is_open = not (options.has_keys or is_loopback(options.host))
    options = replace(options, allowed_hosts=hosts_to_accept(options))
    options = checked_options(options, load.target)
    set_threads(options.threads)
    with run.listen(options.host, options.port) as listener:
        decoder = loaded(load)
        app = create_app(decoder, options)
        url = run.url_of(listener, is_secure=options.ssl_certfile is not None)
        where = f"serving {options.served_model_name} at {url}/v1; in a browser: {url}/"
        _say(decoder, where, verbose=verbose, is_open=is_open)
        if sampling := default_sampling(options):
            told = ", ".join(f"{name} {value}" for name, value in sampling.items())
            say(f"requests without settings get {told}; --generation-config none for temperature 1")
        run.serve_until_signal(app, listener, options)


def _say(decoder: "Decoder", where: str, *, verbose: bool, is_open: bool) -> None:
    """Print the components and the address; programs that start a server wait for its line."""
    from monge.cli.generation import say_memory, say_parts

    say_memory(decoder)
    if verbose:
        say_parts(decoder)
    say(where)
    if (dtype := decoder.components.coarse_dtype) is not None:
        text = f"{dtype} depends on the other rows of a batch: a seed does not give its text again, and answers have seed null"
        say(f"{text}; --dtype float32 makes texts repeatable", "yellow")
    if is_open:
        say("anyone who reaches this address may use it; --api-key asks for a key", "yellow")


def _check_ray(settings: ServeOptions) -> None:
    """Refuse options of Ray without it, and options that Ray does not take."""
    flags = {name: flag_of(name, option) for name, option in options_of(ServeOptions).items()}
    given = changed(settings)
    if not settings.use_ray:
        for name in given:
            if options_of(ServeOptions)[name].panel == RAY:
                raise OptionError(f"{flags[name]} needs --ray")
        return
    for name in HERE_ONLY:
        if name in given:
            raise OptionError(
                f"{flags[name]} is not for --ray: Ray has its own proxy and logs, and moves "
                "requests to other replicas before one leaves"
            )
    if settings.port == 0:
        raise OptionError("--ray needs a port; got 0")


def _serve_with_ray(load: LoadOptions, settings: ServeOptions) -> None:
    """Serve from replicas until told to stop."""
    from monge.distributed.ray_cluster import connect, require_ray
    from monge.distributed.ray_serve import AppArgs, app_from, range_of
    from monge.distributed.retry_proxy import CONTROLLER_OPTIONS
    from monge.serve.settings import hosts_to_accept

    hosts = {"allowed_hosts": hosts_to_accept(settings)}
    given = changed(load) | changed(settings) | hosts
    range_of(str(settings.replicas))
    args = AppArgs(**{name: value for name, value in given.items() if name in AppArgs.model_fields})
    ray = require_ray("serve")
    application, serve = app_from(args), ray.serve
    is_ours, stop = connect(settings.address), threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    try:
        serve.start(
            http_options={"host": settings.host, "port": settings.port},
            controller_options=CONTROLLER_OPTIONS,
        )
        serve.run(application, name=_APPLICATION, route_prefix="/")
        say(f"serving at http://{settings.host}:{settings.port}/v1")
        stop.wait()
    finally:
        serve.delete(_APPLICATION)
        if is_ours:
            serve.shutdown()
            ray.shutdown()
