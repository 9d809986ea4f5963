"""Components of a call of `generate`; compiled components are kept and follow the weights."""

import contextlib
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from threading import Lock
from types import MethodType
from typing import Any, Final
from weakref import WeakKeyDictionary

import torch

from monge.api import compile_decoder, drafts_of, make_components
from monge.backends.registry import BACKENDS, Backend
from monge.control.base import SharedState
from monge.core.errors import BackendError, OptionError
from monge.core.sampling_rules import SamplingRules
from monge.draft.by_name import members_of
from monge.draft.text_history import TextHistory
from monge.engine.components import Components
from monge.loading.networks import as_draft_model, as_sequence_model, load_network
from monge.loading.sources import ModelSource
from monge.networks.background_compiler import BackgroundCompiler, compiled_by
from monge.networks.base import SequenceModel
from monge.networks.forward import NetworkForward
from monge.networks.network_state import NetworkVersion, is_harmless
from monge.runtime.clock import now
from monge.runtime.notices import notify

_LEARNED: Final[WeakKeyDictionary[Any, dict[str, tuple[SharedState | None, TextHistory]]]] = (
    WeakKeyDictionary()
)
"""State of controllers and texts for drafts, by model and options, since no decoder outlives a call.
A call takes it out and puts it back, so that threads share nothing."""
_MOST_KEPT: Final = 4
"""Components of calls with different options that are kept for a model."""
_SPEED: Final = 2
"""Assumed speed of compiled forwards over eager forwards."""
_REPLACED: Final = (
    "its forward was replaced and gives other numbers, as mixed precision does (bf16=True)"
)
_TRIAL: Final = 8  # tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateCall:
    """The model, draft and options of a call of `generate`.

    Args:
        model: The target.
        draft: Draft model or head, loaded or its folder or name; `None` for none.
        options: `PARTS` of `monge.options`.
        draft_rules: Sampling rules of the draft distribution.
    """

    model: Any
    draft: Any
    options: Mapping[str, Any]
    draft_rules: SamplingRules | None

    @property
    def key(self) -> str:
        """The name under which calls keep what they learn; it differs for embeddings of another size."""
        size = getattr(self.model.config.get_text_config(), "vocab_size", None)
        placed = self.model.device, self.model.dtype, torch.get_num_threads()
        return repr((self._draft_key, dict(self.options), self._networks, size, *placed))

    @property
    def _draft_key(self) -> object:
        is_named = isinstance(self.draft, str | Path | None)
        return self.draft if is_named else (type(self.draft), id(self.draft))

    @property
    def _networks(self) -> list[int]:
        """The networks that a drafter object brings; its text does not name them."""
        drafter = self.options.get("drafter")
        parts = () if isinstance(drafter, str | None) else members_of(drafter)
        settings = [(part, item) for part in parts if is_dataclass(part) for item in fields(part)]
        values = [getattr(part, item.name) for part, item in settings if not item.repr]
        return [id(value) for value in values if value is not None]

    def components(
        self,
        target: SequenceModel,
        backend: str | Backend = "eager",
        models: dict[object, list[SequenceModel]] | None = None,
        history: TextHistory | None = None,
    ) -> Components:
        """Make the components of the call.

        Args:
            target: The target.
            backend: That of draft models.
            models: Models that were made before, by draft; new models are added.
            history: Texts of earlier calls, for drafters that read them; `None` for none.
        """
        drafts = drafts_of(self.draft, ModelSource.of(self.model))
        by_draft = {} if models is None else models
        if self._draft_key not in by_draft:
            by_draft[self._draft_key] = [
                as_draft_model(load_network(source), target, backend=backend)
                for source in drafts.models
            ]
        options = {**self.options, "drafter": self.options.get("drafter") or drafts.drafter}
        return make_components(
            target,
            by_draft[self._draft_key],
            head=drafts.head,
            draft_rules=self.draft_rules,
            history=history,
            **options,
        )


def forget(model: Any) -> None:
    """Forget what calls have learned about a model."""
    _LEARNED.pop(model, None)


@contextlib.contextmanager
def eager_components(call: GenerateCall, texts: TextHistory | None = None) -> Iterator[Components]:
    """Make components that run as `transformers` does, for a call.

    Args:
        call: The call.
        texts: Texts of earlier calls; without it, those of earlier eager calls.
    """
    learned = _LEARNED.setdefault(call.model, {})
    shared, history = learned.pop(call.key, (None, TextHistory()))
    target = as_sequence_model(call.model)
    components = call.components(target, history=history if texts is None else texts)
    if shared is not None:
        components = replace(components, shared=shared)
    try:
        yield components
    finally:
        learned[call.key] = components.shared, history


class CompiledComponents:
    """Compiled components of a model.

    If the model cannot be compiled, a call runs eagerly, and a message says why. With rounded
    weights that is an error, since exact weights give another distribution.

    Args:
        backend: A member of `BACKENDS`, which may not be for files.

    Raises:
        OptionError: If there is no such backend, or it is for files.
    """

    def __init__(self, backend: str | Backend) -> None:
        self.backend = BACKENDS.of(backend)
        if self.backend.keeps_file_types:
            raise OptionError(
                "accelerate: weights='file' keeps the types of a GGUF file, and a loaded model has "
                "none; use weights='exact', 'int8' or 'int4', or give the file to monge.load"
            )
        self._lock, self._said = Lock(), set[str]()
        self._version, self._judged = NetworkVersion(), tuple[int, str | None]((0, None))
        self._forget()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.backend,)  # a copied model has weights of its own

    def _forget(self) -> None:
        self._place: object = None
        self._target: SequenceModel | None = None
        self._drafts = dict[object, list[SequenceModel]]()
        self._components = dict[str, Components]()
        self._texts = defaultdict[str, TextHistory](TextHistory)
        self._compilers = dict[str, BackgroundCompiler]()
        self._gain, self._states = _Gain(), list[object]()

    @contextlib.contextmanager
    def components(self, call: GenerateCall, num_rows: int) -> Iterator[Components]:
        """Give the components of a call, which are its own until the block ends.

        Raises:
            BackendError: If rounded weights are requested and cannot be run.
        """
        reason, is_exact = self._why_no_compiled_call(call.model), self.backend.keeps_numbers
        if reason is not None and not is_exact:
            raise BackendError(f"accelerate: rounded weights cannot be run here: {reason}")
        if reason is not None or not self._lock.acquire(blocking=False):
            if reason is not None:
                self._say(f"{type(call.model).__name__} runs eagerly: {reason}")
            if is_exact:
                with eager_components(call) as components:
                    yield components
            else:  # beside a call in another thread
                yield call.components(
                    as_sequence_model(call.model, backend=self.backend), self.backend
                )
            return
        try:
            place = id(call.model), call.model.device, call.model.dtype
            if place != self._place:
                self._forget()
                self._place = place
            arguments = {"target": call.model, "draft": call.draft, "backend": self.backend}
            compiler = BackgroundCompiler(compile_decoder, {**call.options, **arguments})
            with compiled_by(self._compilers.setdefault(call.key, compiler)):
                components, start = self._current(call), now()
                try:
                    if components is None:
                        with eager_components(call, self._texts[call.key]) as components:
                            yield components
                    else:
                        components.prepare(1 << (num_rows - 1).bit_length())
                        yield components
                        self._say_memory(call)
                finally:
                    speed = 1 if components is None else _SPEED
                    self._gain.seconds += speed * (now() - start)
        finally:
            self._lock.release()

    def _why_no_compiled_call(self, model: Any) -> str | None:
        reason = why_no_compiled_call(model)
        if reason is None and "forward" in vars(model):
            version = self._version.of(model)  # of its forward, and of weights that it may read
            if version != self._judged[0]:
                self._judged = version, None if gives_usual_numbers(model) else _REPLACED
            reason = self._judged[1]
        return reason

    def _current(self, call: GenerateCall) -> Components | None:
        """Return kept or new components with the weights of now; `None` where following them would cost too much."""
        key = repr((call.key, call.draft_rules))
        if len(self._components) == _MOST_KEPT and key not in self._components:
            for kept in (self._components, self._drafts, self._texts):
                kept.clear()
        if self._target is None:
            self._target = as_sequence_model(call.model, backend=self.backend)
        if key not in self._components:
            self._components[key] = call.components(
                self._target, self.backend, self._drafts, self._texts[call.key]
            )
        components = self._components[key]
        sources = [model.source for model in components.copying_models if model.source]
        states = [source.state() for source in sources]
        if states != self._states:
            self._states = states
            self._gain.turn()
        if not any(
            source.has_changed(state) for source, state in zip(sources, states, strict=True)
        ):
            return components
        if self.backend.keeps_numbers and not self._gain.pays():
            self._say(
                f"{type(call.model).__name__} runs eagerly while its weights change after every "
                f"{self._gain.longest_s:.2g} s of decoding: following them takes {self._gain.cost_s:.2g} s"
            )
            return None
        start = now()
        try:
            components.update_weights()
        except BaseException:
            self._forget()
            raise
        self._gain.cost_s = now() - start
        return components

    def _say(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            notify(text)

    def _say_memory(self, call: GenerateCall) -> None:
        forward: NetworkForward | None = getattr(self._target, "forward", None)
        if forward is not None and forward.copied_bytes:
            self._say(
                f"{type(call.model).__name__} is compiled: copies of its weights take "
                f"{forward.copied_bytes / 1e6:.0f} MB beside them"
            )


@dataclass(slots=True)
class _Gain:
    """Judges whether it pays to make copies of weights again after a change.

    It expects as much decoding before the next change as between the last two changes, or as since
    the last change if that is more.

    Attributes:
        seconds: Seconds of decoding since the last change; compiled decoding counts as long as
            eager decoding takes.
        before_s: The same between the last two changes.
        cost_s: Seconds that the last copies took; 0 before there were any.
    """

    seconds: float = 0.0
    before_s: float = 0.0
    cost_s: float = 0.0

    @property
    def longest_s(self) -> float:
        return max(self.seconds, self.before_s)

    def turn(self) -> None:
        """Note a change of weights."""
        self.before_s, self.seconds = self.seconds, 0.0

    def pays(self) -> bool:
        return self.longest_s * (1 - 1 / _SPEED) >= self.cost_s


@torch.inference_mode()
def gives_usual_numbers(network: Any) -> bool:
    """Return whether a network whose forward was replaced gives the numbers of its class's, to the last bit.

    Trainers add arguments to it, which change nothing here; mixed precision changes all numbers.
    """
    token_ids = torch.arange(_TRIAL, device=network.device).reshape(2, -1)
    ours, usual = (
        forward(input_ids=token_ids, use_cache=False).logits
        for forward in (network, MethodType(type(network).forward, network))
    )
    return ours.dtype == usual.dtype and torch.equal(ours, usual)


def why_no_compiled_call(network: torch.nn.Module) -> str | None:
    """Return why compiled code would give other numbers than a network, or `None`.

    These are changes from outside that compiled code does not see: autocast, replaced forwards of
    layers, and hooks. For the forward of the network itself see `gives_usual_numbers`.
    """
    device: Any = getattr(network, "device", None)
    if torch.is_autocast_enabled(device.type):
        return f"autocast is on for {device.type}"
    for name, module in network.named_modules():
        if name and "forward" in vars(module):
            return f"the forward of {name} is replaced"
        hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
        if not all(map(is_harmless, hooks)):
            return f"{name or 'the model'} has hooks"
    return None
