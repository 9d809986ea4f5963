"""`monge certify`."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from monge.api import eos_ids_of, load
from monge.cli import options
from monge.cli.console import quiet_host, reported, show
from monge.cli.options import given, panel
from monge.cli.progress import working
from monge.core.errors import MongeError, OptionError
from monge.core.model import dtype_of
from monge.core.words import counted
from monge.loading.networks import as_sequence_model, load_network, load_tokenizer, prepare
from monge.loading.sources import BUILT_IN, ModelSource

if TYPE_CHECKING:
    from monge.audit.certificate import Certificate
    from monge.audit.certify_report import CertifyReport
    from monge.audit.redraft import Redrafter

_certify: Final = panel("Certify")
_COLORS: Final = {"exact": "green", "not exact": "red", "could not tell": "yellow"}


@reported
def certify(
    record: Annotated[
        Path,
        typer.Argument(
            help="The record of `monge generate --certificate`, or the field `certificate` of an "
            "answer of `monge serve --certificates`."
        ),
    ],
    *,
    target: options.Target = None,
    draft: options.Drafts = None,
    tolerance: float | None = _certify(
        None,
        "Largest difference of a logit to the float64 forward.",
        "0.001 for float32, 1 for bfloat16",
    ),
    nodes: int = _certify(256, "Nodes whose coupling is enumerated at most."),
    as_json: options.Json = False,
) -> None:
    """Replay the record of a run, and check that every round of it is exact.

    Draft laws, draws, target laws (in float64; those of rounded weights by the same backend),
    verdicts, couplings and the committed text are computed again. The exit status is 0 if the run
    is exact, 1 if it is not, and 2 if this could not be told. docs/audit.md says what that proves.

    **Examples**

        monge generate "Once" --temperature 1 --certificate run.json
        monge certify run.json
        monge certify run.json --target ./my-target --draft ./my-draft --json
    """
    quiet_host()
    from monge.audit.certificate import read_certificate
    from monge.audit.certify import certify as replayed
    from monge.audit.certify_report import EXIT
    from monge.audit.plain_forward import backend_forward, plain_forward
    from monge.engine.models.forward_program import rounded_weights_of

    options.check_positive(nodes=nodes)
    if tolerance is not None and not tolerance > 0:
        raise OptionError(f"--tolerance must be above 0; got {tolerance}")
    certificate = read_certificate(record)
    with working("loading the models"):
        _check_named(certificate, target)
        source = ModelSource.of(target)
        redrafter, reason = _redrafter(certificate, source, draft)
        model = _target(certificate, source, redrafter)
        stops = any(request.get("stop") for request in certificate.requests)
        tokenizer = load_tokenizer(source) if stops else None
    is_rounded = rounded_weights_of(model) is not None
    num_rounds = sum(len(request.get("rounds", ())) for request in certificate.requests)
    with working() as work:
        report = replayed(
            certificate,
            backend_forward(model) if is_rounded else plain_forward(model.network),
            vocab_size=model.vocab_size,
            dtype=str(dtype_of(model)).removeprefix("torch."),
            tokenizer=tokenizer,
            eos_ids=eos_ids_of(model.network),
            redrafter=redrafter,
            undrafted=reason,
            on_round=work.stage("replaying rounds", num_rounds).advance,
            num_nodes=nodes,
            **given(tolerance=tolerance),
        )
    if as_json:
        typer.echo(json.dumps(report.as_json()))
    else:
        _print(report)
    raise typer.Exit(EXIT[report.answer])


def _check_named(certificate: "Certificate", target: str | None) -> None:
    """Refuse a record whose target is not at hand before anything is loaded."""
    from monge.audit.certificate import CertificateError
    from monge.audit.recorder import processor_digest

    stated = _fields(certificate.header, "target")
    if target is None and stated.get("name") != BUILT_IN:
        raise OptionError(f"the record names the target {stated.get('name')!r}; give --target")
    weights = stated.get("weights", "exact")
    if weights != "exact" and certificate.header.get("processor") != processor_digest():
        raise CertificateError(
            f"the record was made on another kind of processor: logits of {weights} weights "
            "depend on its instructions, so they can be computed again on the same kind only"
        )


def _target(certificate: "Certificate", source: ModelSource, redrafter: "Redrafter | None") -> Any:  # noqa: ANN401 (a network's model)
    from monge.audit.certificate import CertificateError
    from monge.audit.recorder import weights_digest
    from monge.engine.models.forward_program import NetworkModel, rounded_weights_of

    stated = _fields(certificate.header, "target")
    weights = stated.get("weights", "exact")
    model = None if redrafter is None else redrafter.components.target
    # One with packed weights serves both: its program need not be compiled for another set of outputs.
    if weights == "exact" or model is None or rounded_weights_of(model) != weights:
        backend = "eager" if weights == "exact" else f"compiled(weights={weights!r})"
        network = load_network(prepare(source, backend), dtype=str(stated.get("dtype", "auto")))
        model = as_sequence_model(network, backend=backend)
    assert isinstance(model, NetworkModel)
    digest = weights_digest(model.network)
    if digest != stated.get("digest"):
        raise CertificateError(
            f"another target: the record was made with {stated.get('name')!r}, weights "
            f"{stated.get('digest')}; those of {BUILT_IN if source.is_built_in else source.name!r} are {digest}"
        )
    return model


def _redrafter(
    certificate: "Certificate", source: ModelSource, draft: list[str] | None
) -> tuple["Redrafter | None", str]:
    """Return the drafter, made again, or why there is none."""
    from monge.audit.recorder import processor_digest
    from monge.audit.redraft import TOLERANCES, Redrafter
    from monge.engine.models.forward_program import backend_of

    loading = dict(_fields(certificate.header, "loading"))
    is_here = certificate.header.get("processor") == processor_digest()
    recorded = str(certificate.header.get("backend"))
    # Those of the target and of a draft model.
    if {recorded, str(loading.get("backend", "eager"))} != {"eager"} and not is_here:
        return None, (
            "the drafter ran compiled on another kind of processor, where it can round otherwise"
        )
    if recorded == "eager":  # which files are not, unless it is said
        loading.setdefault("backend", recorded)
    stated = loading.pop("draft", None)
    if stated is not None and draft is None:
        return None, f"the record names the draft model {', '.join(stated)}; --draft checks it"
    try:
        decoder = load(source, draft, **loading)
    except MongeError as error:
        return None, f"the drafter could not be made again: {error}"
    backend = backend_of(decoder.components.target)
    if backend != recorded:
        return None, f"the drafter ran beside a target on {recorded}, which is {backend} here"
    dtype = str(_fields(certificate.header, "target").get("dtype"))
    return Redrafter(decoder.components, TOLERANCES.get(dtype, 0.0)), ""


def _fields(header: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    from monge.audit.certificate import CertificateError

    field = header.get(name)
    if not isinstance(field, Mapping):
        raise CertificateError(f"field 'header.{name}' is missing or malformed")
    return field  # pyright: ignore[reportUnknownVariableType]


def _print(report: "CertifyReport") -> None:
    for finding in report.findings:
        show(finding, "red")
    drafts = report.drafts
    if drafts.num_rounds:
        rounds, laws = counted(drafts.num_rounds, "round"), counted(drafts.num_laws, "draft law")
        distance = f"largest total variation {drafts.distance:.0e}"
        show(f"drafts: {rounds} drafted again, {laws} recomputed, {distance}", "dim")
    for note in report.notes:
        show(f"note: {note}", "dim")
    show(report.summary(), f"bold {_COLORS[report.answer]}")
