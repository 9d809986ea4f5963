"""The application of `monge serve`, in replicas on many machines, by Ray Serve."""

from collections.abc import Callable
from typing import Any

import torch
from fastapi import FastAPI
from pydantic import BaseModel, ConfigDict, Field

from monge.audit.recorder import Recorder, loading_of
from monge.core.errors import OptionError
from monge.distributed.ray_cluster import require_ray
from monge.distributed.shared_metrics import SharedMetrics
from monge.distributed.spec import DecoderSpec
from monge.engine.chat_format import chat_format
from monge.engine.decoder import Decoder
from monge.engine.garbage import settle_objects
from monge.engine.logprobs import LogprobSource
from monge.serve.app import create_app
from monge.serve.metrics import Gather, ServerMetrics
from monge.serve.settings import ServerSettings, served_name

_LOADING = (
    *("drafter", "tree", "verifier", "controller", "draft_temperature", "draft_top_k"),
    *("dtype", "device", "attention", "backend", "draft_backend", "max_batch_size"),
    *("cross_tokenizer", "exact_numerics"),
)
_SETTINGS = (
    *("logprobs_of", "max_choices", "max_request_bytes", "max_certificate_bytes"),
    *("max_logprobs", "request_timeout_s"),
)
_SCALING = ("upscale_delay_s", "downscale_delay_s")
_SCHEDULING = ("max_waiting", "kv_budget_tokens", "prefill_chunk", "round_timeout_s")


class AppArgs(BaseModel):
    """`args` of a Ray Serve configuration; defaults are those of `monge serve`.

    Folders are those of the machines on which replicas run.
    """

    model_config = ConfigDict(extra="forbid")

    target: str | None = None
    draft: str | tuple[str, ...] | None = None
    drafter: str | None = None
    tree: str | None = None
    verifier: str | None = None
    controller: str | tuple[str, ...] | None = Field(
        default=None, description="One, or those that a request may name."
    )
    draft_temperature: float | None = None
    draft_top_k: int | None = None
    dtype: str | None = None
    device: str | None = None
    attention: str | None = None
    backend: str | None = None
    draft_backend: str | None = None
    max_batch_size: int | None = Field(default=None, ge=1)
    cross_tokenizer: bool = False
    exact_numerics: bool = False
    served_model_name: str | None = None
    api_keys: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = Field(
        default=(), description="Names that requests may be sent to; none for any."
    )
    chat_template: str | None = None
    logprobs_of: LogprobSource | None = None
    certificates: bool = Field(
        default=False, description="Whether requests may ask for their record."
    )
    max_choices: int | None = None
    max_logprobs: int | None = None
    max_request_bytes: int | None = None
    max_certificate_bytes: int | None = None
    request_timeout_s: float | None = Field(default=None, description="Seconds; 0 for no limit.")
    round_timeout_s: float | None = Field(default=None, description="Seconds; 0 for no limit.")
    max_waiting: int | None = Field(default=None, ge=1)
    kv_budget_tokens: int | None = None
    prefill_chunk: int | None = None
    threads: int | None = Field(default=None, ge=1)
    num_replicas: int = Field(default=1, ge=1)
    autoscale: tuple[int, int] | None = Field(
        default=None, description="Fewest and most replicas, in place of a number."
    )
    upscale_delay_s: float | None = Field(
        default=None, ge=0, description="Seconds of load before a replica is added; Ray has 30."
    )
    downscale_delay_s: float | None = Field(
        default=None, ge=0, description="And before one is taken away; Ray has 600."
    )
    cpus_per_replica: float = Field(default=1, ge=0)
    gpus_per_replica: float = Field(default=0, ge=0)
    drain_s: int = Field(
        default=30, ge=0, description="Seconds that running requests get when a replica leaves."
    )

    def given(self, names: tuple[str, ...]) -> dict[str, Any]:
        """Those of these fields that were given."""
        return {name: value for name in names if (value := getattr(self, name)) is not None}


class Replica:
    """A replica; Ray Serve calls its methods beside HTTP."""

    app: FastAPI  # the ingress makes it

    def check_health(self) -> None:
        """Raise if the decoding thread has ended, hangs or always fails: the replica is replaced."""
        now = self.app.state.snapshot()
        if not now.is_open or now.failure is not None:
            raise RuntimeError(f"not serving: {now.failure or 'shutting down'}")


def app_from(args: AppArgs) -> Any:  # noqa: ANN401 (the host's)
    """The Ray Serve application: `import_path: monge.distributed.ray_serve:app_from`.

    Args:
        args: The `args` of the configuration.

    Raises:
        OptionError: If Ray is not installed, or the numbers of replicas cannot be.
    """
    serve = require_ray("serve").serve
    return serve.deployment(
        serve.ingress(_builder(args))(Replica), name="monge", **_deployment(args)
    ).bind()


def _deployment(args: AppArgs) -> dict[str, Any]:
    """Ray's own options."""
    rows = args.max_batch_size or 8
    options: dict[str, Any] = {
        "ray_actor_options": {"num_cpus": args.cpus_per_replica, "num_gpus": args.gpus_per_replica},
        # A full batch, and as many that wait for a place: what is beyond that waits where another
        # replica can still take it.
        "max_ongoing_requests": 2 * rows,
        "max_queued_requests": args.max_waiting or 256,
        "graceful_shutdown_timeout_s": args.drain_s,
        "graceful_shutdown_wait_loop_s": 0.1,
    }
    delays = args.given(_SCALING)
    if args.autoscale is None:
        if delays:
            raise OptionError(
                f"{next(iter(delays))} needs autoscale: the number of replicas is fixed"
            )
        return options | {"num_replicas": args.num_replicas}
    fewest, most = args.autoscale
    if not 0 <= fewest <= most or most < 1:
        raise OptionError(
            f"autoscale needs the fewest and the most replicas, as in 1:4; got {fewest}:{most}"
        )
    scaling = {"min_replicas": fewest, "max_replicas": most, "target_ongoing_requests": rows}
    return options | {"autoscaling_config": scaling | delays}


def _builder(args: AppArgs) -> Callable[[], FastAPI]:
    """Makes the application, in the replica's process."""

    def build() -> FastAPI:
        if args.threads is not None:
            torch.set_num_threads(args.threads)
        context = require_ray("serve").serve.get_replica_context()
        board = SharedMetrics(context.app_name, context.replica_id.unique_id)
        app, metrics = replica_app(args, engine=context.replica_id.unique_id, gather=board.gather)
        settle_objects()
        board.keep_publishing(metrics)
        return app

    return build


def replica_app(args: AppArgs, *, engine: str, gather: Gather) -> tuple[FastAPI, ServerMetrics]:
    """A replica's application and its metrics.

    Args:
        args: What was configured.
        engine: The replica's name, a label of its metrics.
        gather: Adds the other replicas' metrics.
    """
    name = served_name(args.target) if args.served_model_name is None else args.served_model_name
    limits = args.given(_SETTINGS)
    scheduling = args.given(_SCHEDULING)
    for given, seconds in ((limits, "request_timeout_s"), (scheduling, "round_timeout_s")):
        if seconds in given:
            given[seconds] = given[seconds] or None
    settings = ServerSettings(
        model_name=name, api_keys=args.api_keys, allowed_hosts=args.allowed_hosts, **limits
    )
    decoder = DecoderSpec(target=args.target, draft=args.draft, options=args.given(_LOADING)).load()
    chat = chat_format(decoder.tokenizer, args.chat_template, is_built_in=args.target is None)
    metrics = ServerMetrics(name, engine=engine, gather=gather)
    recorder = _recorder(decoder, args) if args.certificates else None
    app = create_app(decoder, settings, chat, metrics=metrics, recorder=recorder, **scheduling)
    return app, metrics


def _recorder(decoder: Decoder, args: AppArgs) -> Recorder:
    """A recorder whose certificates name the models without their folders."""
    given = (args.draft,) if isinstance(args.draft, str) else args.draft
    drafts = None if given is None else [served_name(one) for one in given]
    loading = loading_of(drafts, args.given(_LOADING))
    return Recorder(decoder, target=served_name(args.target), loading=loading)
