"""`monge serve`."""

from collections.abc import Mapping
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING, Any

from monge.cli import options
from monge.cli import serve_options as asked
from monge.cli.console import notes, quiet_host, reported
from monge.cli.generate import say_memory, say_parts
from monge.cli.loading import follow, is_led, loaded
from monge.cli.serve_ray import serves_with_ray
from monge.core.errors import OptionError
from monge.engine.decoder import Decoder

if TYPE_CHECKING:
    from monge.audit.recorder import Recorder


@reported
@partial(options.configured, takes_own=True)
def serve(
    models: asked.Models = None,
    *,
    target: options.Target = None,
    draft: options.Drafts = None,
    config: options.Config = None,
    host: asked.Host = None,
    port: asked.Port = None,
    api_key: asked.ApiKey = None,
    allowed_host: asked.AllowedHosts = None,
    served_model_name: asked.ServedModelName = None,
    chat_template: asked.ChatTemplate = None,
    logprobs_of: asked.LogprobsOf = None,
    certificates: asked.Certificates = False,
    drain: asked.Drain = None,
    lame_duck: asked.LameDuck = None,
    access_log: asked.AccessLog = False,
    max_batch_size: asked.MaxBatchSize = None,
    max_waiting: asked.MaxWaiting = None,
    kv_budget: asked.KvBudget = None,
    prefill_chunk: asked.PrefillChunk = None,
    max_choices: asked.MaxChoices = None,
    max_logprobs: asked.MaxLogprobs = None,
    max_request_bytes: asked.MaxRequestBytes = None,
    max_certificate_bytes: asked.MaxCertificateBytes = None,
    request_timeout: asked.RequestTimeout = None,
    round_timeout: asked.RoundTimeout = None,
    dtype: options.Dtype = None,
    device: options.Device = None,
    attention: options.Attention = None,
    backend: options.Backend = None,
    draft_backend: options.DraftBackend = None,
    cross_tokenizer: options.CrossTokenizer = False,
    exact_numerics: options.ExactNumerics = False,
    tensor_parallel: options.TensorParallel = False,
    drafter: options.Drafter = None,
    tree: options.Tree = None,
    verifier: options.Verifier = None,
    controller: asked.Controllers = None,
    draft_temperature: options.DraftTemperature = None,
    draft_top_k: options.DraftTopK = None,
    threads: options.Threads = None,
    verbose: options.Verbose = False,
    use_ray: asked.UseRay = False,
    replicas: asked.Replicas = None,
    autoscale: asked.Autoscale = None,
    upscale_delay: asked.UpscaleDelay = None,
    downscale_delay: asked.DownscaleDelay = None,
    address: asked.Address = None,
    cpus_per_replica: asked.CpusPerReplica = None,
    gpus_per_replica: asked.GpusPerReplica = None,
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
        monge serve --certificates
        MONGE_API_KEY=secret monge serve ./my-target --host 0.0.0.0
        torchrun --nproc-per-node 2 -m monge serve ./my-target ./my-draft --tensor-parallel
        monge serve ./my-target --ray --address auto --autoscale 1:8 --gpus-per-replica 1
    """
    given = {**asked.DEFAULTS, **asked.with_models(options.given(**locals()))}  # every parameter
    _server_room()
    if not serves_with_ray(given):
        _serve_here(given)


def _serve_here(given: Mapping[str, Any]) -> None:
    server, target, host = _server_room(), given.get("target"), given["host"]

    def chosen(*names: str) -> dict[str, Any]:
        return {name: given[name] for name in names if name in given}

    for name in ("drain", "lame_duck", "round_timeout"):
        if given.get(name, 0) < 0:
            option = name.replace("_", "-")
            raise OptionError(f"--{option} must be at least 0 seconds; got {given[name]}")
    limits = _limits(
        given.get("request_timeout"),
        **chosen("max_choices", "max_logprobs", "max_request_bytes", "max_certificate_bytes"),
        **chosen("logprobs_of"),
    )
    name = (
        given["served_model_name"] if "served_model_name" in given else server.served_name(target)
    )
    keys = tuple(given.get("api_key", ()))
    hosts = server.hosts_to_accept(host, keys, given.get("allowed_host", ()))
    settings = server.ServerSettings(model_name=name, api_keys=keys, allowed_hosts=hosts, **limits)
    options.set_threads(given.get("threads"))
    loading = chosen(
        "dtype",
        "device",
        "attention",
        "backend",
        "draft_backend",
        "cross_tokenizer",
        "exact_numerics",
        "max_batch_size",
        "tensor_parallel",
    )
    parts = chosen("drafter", "tree", "verifier", "controller", "draft_temperature", "draft_top_k")
    if given["tensor_parallel"] and is_led():
        follow(target, given.get("draft"), **parts, **loading)
        return
    with (
        server.listen(host, given["port"]) as listener,
        loaded(target, given.get("draft"), **parts, **loading) as decoder,
    ):
        chat = server.chat_format(
            decoder.tokenizer, given.get("chat_template"), is_built_in=target is None
        )
        budget = {"kv_budget_tokens": given["kv_budget"]} if "kv_budget" in given else {}
        if "round_timeout" in given:
            budget["round_timeout_s"] = given["round_timeout"] or None
        recorder = _recorder(decoder, given) if given["certificates"] else None
        app = server.create_app(
            decoder,
            settings,
            chat,
            recorder=recorder,
            **chosen("max_waiting", "prefill_chunk"),
            **budget,
        )
        is_open = not (keys or server.is_loopback(host))
        where = f"serving {name} at {server.url_of(listener)}/v1"
        _say(decoder, where, verbose=given["verbose"], is_open=is_open)
        server.serve_until_signal(
            app,
            listener,
            drain_s=given["drain"],
            lame_duck_s=given.get("lame_duck", asked.LAME_DUCK_S),
            access_log=given["access_log"],
        )


def _recorder(decoder: Decoder, given: Mapping[str, Any]) -> "Recorder":
    """A recorder whose certificates name the models without their folders, as clients know them."""
    from monge.audit.recorder import Recorder, loading_of

    named = _server_room().served_name
    drafts = [named(one) for one in given["draft"]] if "draft" in given else None
    return Recorder(decoder, target=named(given.get("target")), loading=loading_of(drafts, given))


def _server_room() -> ModuleType:
    quiet_host()
    from monge.serve import launch

    return launch


def _limits(request_timeout: float | None, **others: Any) -> dict[str, Any]:
    """Limits that were given; zero seconds are no limit."""
    timeout = {} if request_timeout is None else {"request_timeout_s": request_timeout or None}
    return options.given(**others) | timeout


def _say(decoder: Decoder, where: str, *, verbose: bool, is_open: bool) -> None:
    """Say what runs and where; programs that start a server wait for the line that says where."""
    say_memory(decoder)
    if verbose:
        say_parts(decoder)
    notes().print(where, markup=False, soft_wrap=True)
    if (dtype := decoder.components.coarse_dtype) is not None:
        text = f"{dtype} depends on the other rows of a batch: a seed does not give its text again, and answers have seed null"
        notes().print(
            f"{text}; --dtype float32 makes texts repeatable", style="yellow", markup=False
        )
    if is_open:
        notes().print(
            "anyone who reaches this address may use it; --api-key asks for a key",
            style="yellow",
            markup=False,
        )
