"""Options of `monge serve`."""

from collections.abc import Mapping
from typing import Annotated, Any, Final

import typer

from monge.api import load
from monge.cli.options import CONTROLLERS, SPECULATION, default_of, option
from monge.core.errors import OptionError
from monge.engine.logprobs import LogprobSource

SERVER: Final = "Server"
LIMITS: Final = "Limits"
RAY: Final = "Ray"
DEFAULTS: Final[Mapping[str, Any]] = {
    "host": "127.0.0.1",
    "port": 8000,
    "drain": 30,
}
LAME_DUCK_S: Final = 5


def _server(*names: str, help: str, default: object = None) -> Any:  # noqa: ANN401
    return option(*names, help=help, panel=SERVER, default=default)


def _limit(*names: str, help: str, default: object = None) -> Any:  # noqa: ANN401
    return option(*names, help=help, panel=LIMITS, default=default)


def _ray(*names: str, help: str, default: object = None) -> Any:  # noqa: ANN401
    return option(*names, help=help, panel=RAY, default=default)


Models = Annotated[
    list[str] | None,
    typer.Argument(
        help="The target and its draft models, by place: as --target and --draft.",
        metavar="TARGET DRAFT",
    ),
]
Host = Annotated[
    str | None,
    _server(
        "--host",
        help="Address to listen on; 0.0.0.0 is open to the network.",
        default=DEFAULTS["host"],
    ),
]
Port = Annotated[
    int | None, _server("--port", help="Port; 0 takes a free one.", default=DEFAULTS["port"])
]
ApiKey = Annotated[
    list[str] | None,
    typer.Option(
        "--api-key",
        envvar="MONGE_API_KEY",
        help="Ask for this key; may be repeated. Default: none.",
        show_default=False,
        rich_help_panel=SERVER,
    ),
]
AllowedHosts = Annotated[
    list[str] | None,
    _server(
        "--allowed-host",
        help="Another name or address, without a port, that requests may be sent to; may be "
        "repeated.",
        default="on loopback without a key: its own names; else any",
    ),
]
ServedModelName = Annotated[
    str | None,
    _server("--served-model-name", help="Name that clients ask for.", default="the target's own"),
]
ChatTemplate = Annotated[
    str | None,
    _server(
        "--chat-template",
        help="`instruction`, or a file with a Jinja template.",
        default="the tokenizer's own, if any",
    ),
]
LogprobsOf = Annotated[
    LogprobSource | None,
    _server(
        "--logprobs-of",
        help="raw: the target's own law; processed: the law that tokens are drawn from.",
        default="raw",
    ),
]
Certificates = Annotated[
    bool,
    _server(
        "--certificates",
        help="Record requests that send `certificate: true`; the answer has the record, for "
        "`monge certify`.",
    ),
]
Controllers = Annotated[
    list[str] | None,
    option(
        "--controller",
        help="How much to draft, e.g. `fixed(max_depth=2)`; may be repeated: a request may name "
        "one, the others get the first.",
        panel=SPECULATION,
        default=CONTROLLERS,
    ),
]
Drain = Annotated[
    int | None,
    _server(
        "--drain",
        help="Seconds that running requests get after SIGTERM.",
        default=DEFAULTS["drain"],
    ),
]
LameDuck = Annotated[
    int | None,
    _server(
        "--lame-duck",
        help="Seconds after SIGTERM in which requests are still taken, while /ready gives a 503.",
        default=LAME_DUCK_S,
    ),
]
AccessLog = Annotated[bool, _server("--access-log", help="Log every request.")]
MaxBatchSize = Annotated[
    int | None,
    _limit(
        "--max-batch-size",
        help="Requests decoded together.",
        default=default_of(load, "max_batch_size"),
    ),
]
MaxWaiting = Annotated[
    int | None,
    _limit("--max-waiting", help="Requests that may wait; one more gets a 429.", default=256),
]
KvBudget = Annotated[
    int | None,
    _limit("--kv-budget", help="Tokens of room in the caches.", default="batch size times context"),
]
PrefillChunk = Annotated[
    int | None,
    _limit("--prefill-chunk", help="Prompt tokens that are read between two rounds.", default=512),
]
MaxChoices = Annotated[
    int | None,
    _limit("--max-choices", help="Completions of one request: prompts times n.", default=32),
]
MaxCertificateBytes = Annotated[
    int | None,
    _limit(
        "--max-certificate-bytes",
        help="Memory for the record of one request; one that needs more gets a 400.",
        default=256 * 1024 * 1024,
    ),
]
MaxRequestBytes = Annotated[
    int | None, _limit("--max-request-bytes", help="Largest body.", default=4 * 1024 * 1024)
]
RequestTimeout = Annotated[
    float | None,
    _limit(
        "--request-timeout",
        help="Seconds after which a request is ended; 0 for never.",
        default=600,
    ),
]
RoundTimeout = Annotated[
    float | None,
    _limit(
        "--round-timeout",
        help="Seconds after which a round is taken to hang and /health gives a 503; 0 for never.",
        default=120,
    ),
]
MaxLogprobs = Annotated[
    int | None,
    _limit(
        "--max-logprobs",
        help="Log-probabilities of one answer: choices x tokens x (1 + top ones).",
        default=1 << 19,
    ),
]
UseRay = Annotated[
    bool, typer.Option("--ray", help="Serve from replicas, on many machines.", rich_help_panel=RAY)
]
Replicas = Annotated[int | None, _ray("--replicas", help="Replicas.", default=1)]
Autoscale = Annotated[
    str | None,
    _ray(
        "--autoscale",
        help="Fewest and most replicas, as `1:4`, in place of --replicas.",
        default="off",
    ),
]
UpscaleDelay = Annotated[
    float | None,
    _ray("--upscale-delay", help="Seconds of load before a replica is added.", default=30),
]
DownscaleDelay = Annotated[
    float | None,
    _ray(
        "--downscale-delay", help="Seconds without it before a replica is taken away.", default=600
    ),
]
Address = Annotated[
    str | None,
    _ray(
        "--address",
        help="Address of a running cluster, or `auto`.",
        default="a cluster of this machine alone",
    ),
]
CpusPerReplica = Annotated[
    float | None, _ray("--cpus-per-replica", help="Cores of a replica.", default=1)
]
GpusPerReplica = Annotated[
    float | None, _ray("--gpus-per-replica", help="GPUs of a replica.", default=0)
]


def with_models(given: Mapping[str, Any]) -> dict[str, Any]:
    """Options in which models given by place have their names.

    Raises:
        OptionError: If a model is given in both ways.
    """
    named = {name: value for name, value in given.items() if name != "models"}
    target, *drafts = given.get("models") or (None,)
    for name, by_place in (("target", target), ("draft", drafts)):
        if not by_place:
            continue
        if name in named:
            raise OptionError(
                f"--{name} {named[name]!r} is given as {by_place!r} too; give it once"
            )
        named[name] = by_place
    return named
