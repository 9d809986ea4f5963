"""The application of `monge serve`, in replicas on many machines, by Ray Serve."""

from dataclasses import asdict
from typing import Annotated, Any, Final

import torch
from fastapi import FastAPI
from pydantic import AliasChoices, BeforeValidator, ConfigDict, Field, create_model

from monge.api import load as load_decoder
from monge.core.errors import OptionError
from monge.core.parts import Part
from monge.distributed.ray_cluster import require_ray
from monge.distributed.shared_metrics import SharedMetrics
from monge.options import (
    FORMER_KEYS,
    HERE_ONLY,
    LoadOptions,
    Option,
    ServeOptions,
    changed,
    options_of,
)
from monge.runtime.process import settle_objects
from monge.serve.http.app import create_app
from monge.serve.observe.metrics import Gather, ServerMetrics
from monge.serve.settings import checked_options

_NOT_OF_A_REPLICA: Final = (*HERE_ONLY, "host", "port", "use_ray", "address")
_Text: Any = Annotated[
    str, BeforeValidator(lambda given: repr(given) if isinstance(given, Part) else given)
]
"""A text. A part is sent to replicas as its text."""
_DEFAULTS: Final = asdict(LoadOptions()) | asdict(ServeOptions())


def _field(name: str, option: Option) -> Any:  # noqa: ANN401 (as pydantic takes it)
    """Return type and field of an option."""
    kind, default = option.kind, _DEFAULTS[name]
    kind = _Text if kind is str else kind
    if option.several:
        kind = tuple[kind, ...] if default == () else kind | tuple[kind, ...]
    former = [
        f"{key}{unit}"
        for key, present in FORMER_KEYS.items()
        for unit in ("", "_s")
        if f"{present}{unit}" == name
    ]
    aliases = AliasChoices(name, *former)
    described = {"description": option.help, "ge": option.least}
    return kind | None, Field(default, validation_alias=aliases, **described)


_FIELDS: Final = {
    name: _field(name, option)
    for name, option in options_of(LoadOptions, ServeOptions).items()
    if name not in _NOT_OF_A_REPLICA
}


class AppArgs(create_model("_AppArgs", __config__=ConfigDict(extra="forbid"), **_FIELDS)):
    """Arguments (`args`) of a Ray Serve configuration; what is absent is as in `monge serve`.

    Folders are those of the machines on which replicas run.
    """


def _split(args: AppArgs) -> tuple[LoadOptions, ServeOptions]:
    """Return the options of the decoder, and those of the server."""
    given = {name: getattr(args, name) for name in args.model_fields_set}
    given = {name: value for name, value in given.items() if value is not None}
    load = {name: value for name, value in given.items() if name in options_of(LoadOptions)}
    serve = {name: value for name, value in given.items() if name not in load}
    return LoadOptions(**load), ServeOptions(**serve)


def range_of(text: str) -> tuple[int, int]:
    """Return the fewest and the most replicas.

    Raises:
        OptionError: If the text is no number above 0, and no range of numbers.
    """
    fewest, dash, most = text.partition("-")
    numbers = [int(end) for end in (fewest, most if dash else fewest) if end.isdecimal()]
    if len(numbers) != 2 or numbers[0] > numbers[1] or numbers[1] < 1:
        raise OptionError(
            f"replicas must be a number, or the fewest and the most of them as in 1-4; got {text!r}"
        )
    return numbers[0], numbers[1]


class Replica:
    """A replica; Ray Serve calls its methods beside HTTP."""

    app: FastAPI  # the ingress makes it

    def check_health(self) -> None:
        """Raise if the decoding thread has ended, hangs or always fails: the replica is replaced."""
        now = self.app.state.snapshot()
        if not now.is_well:
            raise RuntimeError(f"not serving: {now.failure or 'shutting down'}")


def app_from(args: AppArgs) -> Any:  # noqa: ANN401 (the host's)
    """Return the Ray Serve application: `import_path: monge.distributed.ray_serve:app_from`.

    Args:
        args: The `args` of the configuration.

    Raises:
        OptionError: If Ray is not installed, or the numbers of replicas cannot be.
    """

    def build() -> FastAPI:  # Ray takes a function, and calls it in the replica's process
        return _build(args)

    serve = require_ray("serve").serve
    replica = serve.ingress(build)(Replica)
    return serve.deployment(replica, name="monge", **_deployment(args)).bind()


def _deployment(args: AppArgs) -> dict[str, Any]:
    """Ray's own options."""
    load, serve = _split(args)
    rows = load.max_batch_size
    options: dict[str, Any] = {
        "ray_actor_options": {
            "num_cpus": serve.cpus_per_replica,
            "num_gpus": serve.gpus_per_replica,
        },
        # A full batch, and as many that wait for a place: what is beyond that waits where another
        # replica can still take it.
        "max_ongoing_requests": 2 * rows,
        "max_queued_requests": serve.max_waiting,
        "graceful_shutdown_timeout_s": serve.graceful_timeout_s,
        "graceful_shutdown_wait_loop_s": 0.1,
    }
    fewest, most = range_of(str(serve.replicas))
    if fewest == most:
        return options | {"num_replicas": most}
    scaling = {"min_replicas": fewest, "max_replicas": most, "target_ongoing_requests": rows}
    return options | {"autoscaling_config": scaling}


def _build(args: AppArgs) -> FastAPI:
    """Make the application, in the replica's process."""
    if (threads := _split(args)[1].threads) is not None:
        torch.set_num_threads(threads)
    context = require_ray("serve").serve.get_replica_context()
    board = SharedMetrics(context.app_name, context.replica_id.unique_id)
    app, metrics = replica_app(args, engine=context.replica_id.unique_id, gather=board.gather)
    settle_objects()
    board.keep_publishing(metrics)
    return app


def replica_app(args: AppArgs, *, engine: str, gather: Gather) -> tuple[FastAPI, ServerMetrics]:
    """Return a replica's application and its metrics.

    Args:
        args: What was configured.
        engine: The replica's name, a label of its metrics.
        gather: Adds the other replicas' metrics.
    """
    load, serve = _split(args)
    serve = checked_options(serve, load.target)
    decoder = load_decoder(**changed(load))
    metrics = ServerMetrics(str(serve.served_model_name), engine=engine, gather=gather)
    return create_app(decoder, serve, metrics=metrics), metrics
