"""What is compared.

`transformers` in its three ways of decoding, and this library with its components.

Every arm has the same two networks in memory, takes token ids and gives token ids, and decodes the
same law: the networks' generation settings are replaced by empty ones (no end-of-text token, so
that all completions have one length; no default top-k, so that temperature 1 means the network's
own law).
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from transformers import set_seed

from monge.api import make_components
from monge.bench.pair import Pair, draft_model_by, empty_settings
from monge.control.base import Reads, SharedState
from monge.control.registry import CONTROLLERS
from monge.core.errors import OptionError
from monge.core.model import SequenceModel
from monge.core.verdict import StepRecord
from monge.defaults import ADAPTIVE, STEADY
from monge.draft.by_name import drafters_in, options_of, takes_target
from monge.engine.components import Components
from monge.engine.decoder import Decoder
from monge.loading.networks import as_sequence_model

TokenIds = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call of an arm."""

    prompt_ids: TokenIds
    max_new_tokens: int
    temperature: float
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """The result of a call.

    Args:
        token_ids: New tokens of every row.
        records: The engine's round records.
    """

    token_ids: TokenIds
    records: tuple[StepRecord, ...] = ()


class Arm(ABC):
    """One way of decoding.

    Attributes:
        name: Name in tables.
        family: `plain`, `assisted`, `prompt_lookup` (all of `transformers`) or `monge`.
        settings: Plain values that say how it is set, for the report.
        max_batch_size: Most rows it can decode together, if bounded.
    """

    name: str
    family: str
    settings: Mapping[str, Any]
    max_batch_size: int | None

    def prepare(self, pair: Pair) -> None:  # noqa: B027  most arms have nothing to prepare
        """Do what is done once, before anything is timed."""

    @abstractmethod
    def decode(self, pair: Pair, call: Call) -> Output:
        """Decode; everything that happens here is timed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostArm(Arm):
    """`transformers.generate`.

    Args:
        name: Name in tables.
        family: `plain`, `assisted` or `prompt_lookup`.
        settings: Options of `generate`.
        assistant: For every temperature the options of the assistant; `None` for an arm without
            one.
        max_batch_size: 1 for all families but `plain`: the host refuses more wherever candidates
            are checked.
    """

    name: str
    family: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    assistant: Mapping[float, Mapping[str, Any]] | None = None
    max_batch_size: int | None = None

    def decode(self, pair: Pair, call: Call) -> Output:
        options: dict[str, Any] = dict(self.settings)
        if self.assistant is not None:
            if pair.draft is None:
                raise OptionError("assisted generation needs a draft model")
            # Set anew for every call: the host carries what it learns from one call to the next.
            pair.draft.generation_config = empty_settings(
                pair.tokenizer, **self.assistant.get(call.temperature, {})
            )
            options["assistant_model"] = pair.draft
        if call.temperature > 0:
            options |= {
                "do_sample": True,
                "temperature": call.temperature,
                "top_k": 0,
                "top_p": 1.0,
            }
            set_seed(call.seed)  # the host draws from the global generators
        else:
            options["do_sample"] = False
        input_ids, mask = _left_padded(call.prompt_ids, pair)
        generate: Any = pair.target.generate
        output = generate(
            input_ids, attention_mask=mask, max_new_tokens=call.max_new_tokens, **options
        )
        return Output(token_ids=tuple(map(tuple, output[:, input_ids.shape[1] :].tolist())))


@dataclass(slots=True)
class ArmCache:
    """Keeps parts of an arm between calls.

    Every temperature and batch size has its own shared state, as if a server did nothing else.

    Attributes:
        shared_states: By temperature and batch size.
        components: With a target of their own, of a drafter that reads the target's hidden states
            or runs its layers: made once, as a head is read once, and away from the other arms,
            which have no use for hidden states.
        draft: The draft model of an arm that runs it in its own way.
    """

    components: Components | None = None
    draft: SequenceModel | None = None
    shared_states: dict[tuple[float, int], SharedState] = field(
        default_factory=dict[tuple[float, int], SharedState]
    )

    def forget(self) -> None:
        """Forget what belongs to a pair: its networks, and what was learnt with them."""
        self.components = self.draft = None
        self.shared_states.clear()

    def shared_state(self, call: Call) -> SharedState:
        """Return the state that calls like this one share."""
        return self.shared_states.setdefault(
            (call.temperature, len(call.prompt_ids)), SharedState()
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class MongeArm(Arm):
    """This library, with one pair of networks.

    Drafters start anew in every call; what controllers share lasts.

    Args:
        name: Name in tables.
        settings: Components by name, and `draft_backend`, as `monge.load` takes them; what is
            missing is the library's default, and the pair's backend.
        family: Always `monge`.
        max_batch_size: Unbounded.
        cache: What outlives a call.
    """

    name: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    family: str = "monge"
    max_batch_size: int | None = None
    cache: ArmCache = field(default_factory=ArmCache, repr=False, compare=False)

    @property
    def reads(self) -> frozenset[Reads]:
        """Inputs of its controller's plans."""
        usual = STEADY if self.settings.get("drafter") == "none" else ADAPTIVE
        controller = self.settings.get("controller", usual)
        return (CONTROLLERS.parse(controller) if isinstance(controller, str) else controller).reads

    def prepare(self, pair: Pair) -> None:
        self.cache.forget()  # an arm may have run another pair before
        self._components(pair)

    def decode(self, pair: Pair, call: Call) -> Output:
        components = replace(self._components(pair), shared=self.cache.shared_state(call))
        decoder = Decoder(components, max_batch_size=len(call.prompt_ids))
        options = {
            "max_new_tokens": call.max_new_tokens,
            "temperature": call.temperature,
            "seed": call.seed,
        }
        # Named, lest a seed decide who plans: it is that of the benchmark, and users of the
        # defaults need not have one.
        results = decoder.generate(
            call.prompt_ids, **options, controller=next(iter(components.controllers), None)
        )
        failed = [result.error for result in results if result.error is not None]
        if failed:
            raise OptionError(f"a request failed: {failed[0]}")
        return Output(
            token_ids=tuple(result.token_ids for result in results),
            records=tuple(record for result in results for record in result.records),
        )

    def _components(self, pair: Pair) -> Components:
        named = self.settings.get("drafter")
        drafter = None if named is None and pair.head is None else pair.drafter(named)
        taken = (
            {"model", "models"}
            if drafter is None
            else {key for one in drafters_in(drafter) for key in options_of(one)}
        )
        draft = (
            self._draft(pair, several="models" in taken)
            if pair.draft is not None and taken & {"model", "models"}
            else None
        )
        settings = {
            "controller": None,
            **self.settings,
            "drafter": drafter,
        }
        if settings.pop("draft_backend", None) is not None and draft is None:
            raise OptionError(
                f"arm {self.name!r}: draft_backend says how a draft model runs, and "
                f"{drafter!r} has none"
            )
        if drafter is None or not takes_target(drafter):
            return make_components(pair.target_model, draft, **settings)
        if self.cache.components is None:
            target = as_sequence_model(pair.target, backend=pair.backend)
            self.cache.components = make_components(target, draft, **settings)
        return self.cache.components

    def _draft(
        self, pair: Pair, *, several: bool
    ) -> SequenceModel | tuple[SequenceModel, ...] | None:
        backend = self.settings.get("draft_backend")
        if several and pair.draft_model is not None and pair.further:
            if backend is not None:
                raise OptionError(
                    f"arm {self.name!r}: draft_backend is for arms with one draft "
                    "model; give --draft-backend"
                )
            return (pair.draft_model, *pair.further)
        if backend is None:
            return pair.draft_model
        if self.cache.draft is None:
            self.cache.draft = draft_model_by(pair, backend)
        return self.cache.draft


def synchronize(pair: Pair) -> None:
    """Wait for the device, so that a clock sees the work that was queued."""
    if pair.target.device.type == "cuda":
        torch.cuda.synchronize(pair.target.device)


def _left_padded(prompt_ids: TokenIds, pair: Pair) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and attention mask as the host wants rows of different length."""
    length = max(map(len, prompt_ids))
    pad = pair.tokenizer.pad_token_id or 0
    rows = [[pad] * (length - len(row)) + list(row) for row in prompt_ids]
    mask = [[0] * (length - len(row)) + [1] * len(row) for row in prompt_ids]
    device = pair.target.device
    return torch.tensor(rows, device=device), torch.tensor(mask, device=device)
