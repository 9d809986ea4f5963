"""The places where vLLM calls this library, and what must hold before it does.

`register` only listens. vLLM's functions are replaced where an engine asks for it.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import cache, wraps
from importlib import import_module
from inspect import signature
from types import SimpleNamespace
from typing import Any, Final

import torch

from monge.core.errors import MongeError, OptionError
from monge.plugins.vllm.grammar import mend
from monge.plugins.vllm.settings import SECTION, EngineSettings, settings_of
from monge.plugins.vllm.verify import (
    DraftedBatch,
    draw_draft,
    expand_batch_to_tokens,
    rejection_sample,
)

TRIED: Final = ("0.32.0",)
"""Versions of vLLM with which `make test-vllm` passes."""
DRAWN_BY: Final = ("draft_model", "eagle", "eagle3")
"""Methods of vLLM that draw drafts where `draw_draft` stands, each from its declared law."""
_SAMPLER: Final = "vllm.v1.sample.rejection_sampler"
_TOP_K: Final = "vllm.v1.sample.ops.topk_topp_sampler:apply_top_k_only"
_DRAFT: Final = "vllm.v1.spec_decode.llm_base_proposer:compute_probs_and_sample_next_token"
_MANAGER: Final = "vllm.v1.structured_output:StructuredOutputManager"
SEAMS: Final[Mapping[str, Sequence[str]]] = {
    f"{_SAMPLER}:rejection_sample": DraftedBatch._fields,
    f"{_SAMPLER}:expand_batch_to_tokens": (
        *("x", "cu_num_tokens", "num_tokens", "replace_from", "replace_to"),
    ),
    _TOP_K: ("logits", "k"),
    _DRAFT: ("logits", "sampling_metadata", "use_fp64_gumbel"),
    f"{_MANAGER}.validate_tokens": ("self", "request", "spec_tokens"),
    f"{_MANAGER}.grammar_bitmask": (
        *("self", "requests", "structured_output_request_ids", "scheduled_spec_decode_tokens"),
    ),
}
"""Functions of vLLM that are replaced, and their arguments."""
_IN_USE: Final[list[EngineSettings]] = []
"""Settings of the engines in this process."""
_log = logging.getLogger("vllm.monge")


@cache
def register() -> None:
    """Have vLLM read our settings where it makes an engine, a worker and a manager of grammars.

    Entry point of `vllm.general_plugins`, which vLLM may call more than once in a process.
    """
    _after("vllm.engine.arg_utils:EngineArgs.create_engine_config", lambda _, config: check(config))
    _after(f"{_SAMPLER}:RejectionSampler.__init__", _use_in_worker)
    _after(f"{_MANAGER}.__init__", _use_in_scheduler)


def check(vllm_config: Any) -> EngineSettings:
    """Return the settings of an engine, if they can be honoured.

    Args:
        vllm_config: vLLM's configuration.

    Raises:
        OptionError: If a setting is unknown, or asks for what was not tried or would not be exact.
        MongeError: If a function that would be replaced is missing or takes other arguments.
    """
    settings = settings_of(vllm_config)
    if not settings.changes_vllm:
        return settings
    if reason := _why_not(settings, vllm_config):
        raise OptionError(
            f"vllm: additional_config[{SECTION!r}] asks for verifier={settings.verifier!r} and "
            f"draft_law={settings.draft_law!r}, but {reason}"
        )
    for path, expected in SEAMS.items():
        function = getattr(*_place(path), None)
        arguments = tuple(signature(function).parameters) if function else None
        if arguments != tuple(expected):
            raise MongeError(
                f"vllm: {path} takes {arguments}; expected {tuple(expected)}. Install vLLM "
                f"{' or '.join(TRIED)}"
            )
    return settings


def use(settings: EngineSettings, device: torch.device) -> None:
    """Replace vLLM's functions in this process.

    Raises:
        MongeError: If vLLM's rule and ours differ on greedy requests.
    """
    if settings.verifies:
        _compare(import_module(_SAMPLER).rejection_sample, settings.verifier, device)
        _replace(
            f"{_SAMPLER}:rejection_sample",
            lambda _, *args, **kwargs: rejection_sample(
                settings.verifier, DraftedBatch(*args, **kwargs)
            ),
        )
        _replace(
            f"{_SAMPLER}:expand_batch_to_tokens",
            lambda _, *args, **kwargs: expand_batch_to_tokens(*args, **kwargs),
        )
        # In a step without drafts there are no rows, which the function for CPUs does not take.
        _replace(_TOP_K, lambda theirs, logits, k: theirs(logits, k) if len(k) else logits)
        if device.type == "cpu":
            from monge.backends.cpu.law_masses import load_law_masses

            try:
                load_law_masses()
            except (RuntimeError, OSError) as error:
                _log.warning("monge: verdicts take longer without machine code: %s", error)
    if settings.draws:
        _replace(_DRAFT, lambda _, *args, **kwargs: draw_draft(*args, **kwargs))
    if settings.changes_vllm:
        _log.info("monge: verifier=%s, draft_law=%s", settings.verifier, settings.draft_law)


def _why_not(settings: EngineSettings, vllm_config: Any) -> str | None:
    """Return why the drafts of an engine cannot be verified or drawn here."""
    version, spec = import_module("vllm").__version__.split("+")[0], vllm_config.speculative_config
    if version not in TRIED:
        return f"this is vLLM {version}; install {' or '.join(TRIED)}, which was tried"
    if spec is None:
        return "no --speculative-config asks for drafts"
    is_drawn = spec.draft_sample_method == "probabilistic"
    reasons = {
        "this is Model Runner V2. It has block verification itself, as "
        '"rejection_sample_method": "block" in --speculative-config; for ours, set '
        "VLLM_USE_V2_MODEL_RUNNER=0": vllm_config.use_v2_model_runner,
        f"rejection_sample_method is {spec.rejection_sample_method!r}; with any but standard vLLM "
        "keeps no draft laws": spec.rejection_sample_method != "standard",
        f"method {spec.method!r} may draw drafts elsewhere; {', '.join(DRAWN_BY)} do not, and any "
        'method works with "draft_sample_method": "greedy"': is_drawn
        and spec.method not in DRAWN_BY,
        'parallel drafting was not tried with "draft_sample_method": "probabilistic"': is_drawn
        and spec.parallel_drafting,
    }
    return next((reason for reason, applies in reasons.items() if applies), None)


def _use_in_worker(_sampler: Any, _: None) -> None:
    config = import_module("vllm.config").get_current_vllm_config()
    settings = check(config)
    if _IN_USE and settings not in _IN_USE:
        raise OptionError(
            f"vllm: an engine with {_IN_USE[0]} was made in this process; got {settings}. Make the "
            "other engine in a process of its own"
        )
    if not _IN_USE:
        use(settings, config.device_config.device)
        _IN_USE.append(settings)


def _use_in_scheduler(manager: Any, _: None) -> None:
    if check(manager.vllm_config).verifies:
        mend(manager)


def _compare(theirs: Callable[..., Any], verifier: str, device: torch.device) -> None:
    """Raise `MongeError` unless a rejected and an accepted greedy request get the same tokens."""
    logits = torch.eye(4, device=device)[[1, 2, 3, 0, 1]]
    batch = DraftedBatch(
        draft_token_ids=torch.tensor([1, 0, 3, 0, 1], dtype=torch.int32, device=device),
        num_draft_tokens=[2, 3],
        max_spec_len=3,
        cu_num_draft_tokens=torch.tensor([2, 5], dtype=torch.int32, device=device),
        draft_probs=None,
        target_logits=logits,
        bonus_token_ids=torch.tensor([[3], [2]], device=device),
        sampling_metadata=SimpleNamespace(
            all_greedy=True, all_random=False, temperature=None, generators={}
        ),
    )
    expected, output = theirs(*batch), rejection_sample(verifier, batch)
    if expected.dtype != output.dtype or not torch.equal(expected, output):
        raise MongeError(
            f"vllm: rejection_sample gives {expected.tolist()} for a greedy batch, but {verifier} "
            f"gives {output.tolist()}; this build of vLLM is not supported"
        )


def _place(path: str) -> tuple[Any, str]:
    """Return what holds an attribute, and its name: of `module:name` or `module:Class.name`."""
    module, _, names = path.partition(":")
    kind, _, name = names.rpartition(".")
    owner = import_module(module)
    return (getattr(owner, kind) if kind else owner), name


def _replace(path: str, ours: Callable[..., Any]) -> None:
    """Replace a function; ours gets vLLM's, then its arguments."""
    owner, name = _place(path)
    theirs = getattr(owner, name)

    @wraps(theirs)
    def call(*args: Any, **kwargs: Any) -> Any:
        return ours(theirs, *args, **kwargs)

    setattr(owner, name, call)


def _after(path: str, action: Callable[[Any, Any], object]) -> None:
    """Call an action with the object and the result of a method, each time that it returns."""
    try:
        owner, name = _place(path)
        method = getattr(owner, name)
    except (ImportError, AttributeError):
        _log.warning("monge: this vLLM has no %s, so `additional_config` has no effect", path)
        return

    @wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = method(self, *args, **kwargs)
        action(self, result)
        return result

    setattr(owner, name, call)
