"""Arms of `monge bench decode`: `transformers` in its three ways of decoding, and this library.

Every arm has the same two networks in memory, takes and returns token ids, and decodes the same
law. So the networks' generation settings are replaced by empty settings: no end-of-text token, so
that all completions have the same length; no default top-k, so that temperature 1 means the
network's own law.
"""

import ast
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import torch
from transformers import set_seed

from monge.api import make_components
from monge.backends.registry import BACKENDS
from monge.bench.pair import Pair, draft_model_by, empty_settings
from monge.control.base import Reads, SharedState
from monge.control.registry import CONTROLLERS
from monge.core.errors import OptionError, unknown_name
from monge.core.registry import Registry
from monge.core.verdict import StepRecord
from monge.defaults import ADAPTIVE, STEADY
from monge.draft.by_name import settings_of
from monge.draft.registry import DRAFTERS
from monge.draft.tree.registry import TREES
from monge.engine.components import Components
from monge.engine.decoder import Decoder
from monge.networks.attention_masks import left_padded
from monge.networks.base import SequenceModel
from monge.verify.registry import VERIFIERS

PLAIN: Final = "transformers"
DEFAULT: Final = "monge"
NONE: Final = "monge none"
NO_DRAFTS: Final = f"{NONE}: drafter=none"
"""This library without speculation."""
USUAL: Final = (f"{DEFAULT}:", "monge ngram: drafter=ngram", NO_DRAFTS)
"""This library with its defaults, with prompt lookup, and without speculation."""
LOOKUP_TOKENS: Final = 8
ASSISTANT_TOKENS: Final = (2, 3, 5, 8)
QUICK_ASSISTANT_TOKENS: Final = (2, 5)
_ROOMS: Final[Mapping[str, Registry[Any]]] = {
    "drafter": DRAFTERS,
    "tree": TREES,
    "verifier": VERIFIERS,
    "controller": CONTROLLERS,
    "draft_backend": BACKENDS,
}
_FORM: Final = (
    "write 'name: part=value, ...', e.g. 'deep: tree=chain(8), controller=goodput, verifier=block', "
    "or 'name:' for the default parts"
)
TokenIds = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A call of an arm."""

    prompt_ids: TokenIds
    max_new_tokens: int
    temperature: float
    seed: int
    truncation: Mapping[str, Any] = field(default_factory=dict)
    """Top-k, top-p and min-p, where they are set."""
    eos_ids: frozenset[int] = frozenset()
    """Tokens that end a text of this library; transformers' arms have none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodedCall:
    """New tokens of every row of a call, and the engine's round records."""

    token_ids: TokenIds
    records: tuple[StepRecord, ...] = ()


@dataclass(slots=True, kw_only=True, eq=False)
class Arm(ABC):
    """A way of decoding.

    Args:
        name: Name in tables.
        family: `plain`, `assisted`, `prompt_lookup` (all of `transformers`) or `monge`.
        settings: Plain values that say how it is set, for the report.
        max_batch_size: Most rows it can decode together, if bounded.
    """

    name: str
    family: str = "monge"
    settings: Mapping[str, Any] = field(default_factory=dict)
    max_batch_size: int | None = None

    def prepare(self, pair: Pair) -> None:  # noqa: B027  most arms have nothing to prepare
        """Do what is done once, before anything is timed."""

    @abstractmethod
    def decode(self, pair: Pair, call: Call) -> DecodedCall:
        """Decode; everything that happens here is timed."""


@dataclass(slots=True, kw_only=True, eq=False)
class HostArm(Arm):
    """`transformers.generate`, whose options are `settings`; all families but `plain` decode single rows.

    Args:
        assistant: Options of the assistant by temperature; `None` for an arm without an assistant.
    """

    assistant: Mapping[float, Mapping[str, Any]] | None = None

    def decode(self, pair: Pair, call: Call) -> DecodedCall:
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
                **call.truncation,
            }
            set_seed(call.seed)  # the host draws from the global generators
        else:
            options["do_sample"] = False
        pad = pair.tokenizer.pad_token_id or 0
        input_ids, mask = left_padded(call.prompt_ids, pair.target.device, pad)
        generate: Any = pair.target.generate
        output = generate(
            input_ids, attention_mask=mask, max_new_tokens=call.max_new_tokens, **options
        )
        return DecodedCall(token_ids=tuple(map(tuple, output[:, input_ids.shape[1] :].tolist())))


@dataclass(slots=True, kw_only=True, eq=False)
class MongeArm(Arm):
    """This library, with a pair of networks.

    `settings` are components by name, and `draft_backend`, as `monge.load` takes them; by default the
    library's, and the pair's backend. Drafters start anew in every call; what controllers share lasts.

    Attributes:
        shared_states: By temperature and batch size, as if a server did nothing else.
        components: With a target of their own, of a drafter that reads the target's hidden states
            or runs its layers: made once, and away from the other arms. Compiled code that shows states
            takes plain decoding of SmolLM2 1.2 % longer.
        draft: The draft model of an arm that runs it in its own way.
    """

    shared_states: dict[tuple[float, int], SharedState] = field(init=False, default_factory=dict)
    components: Components | None = field(init=False, default=None)
    draft: SequenceModel | None = field(init=False, default=None)

    @property
    def reads(self) -> frozenset[Reads]:
        """Inputs of its controller's plans."""
        usual = STEADY if self.settings.get("drafter") == "none" else ADAPTIVE
        return CONTROLLERS.parse(self.settings.get("controller", usual)).reads

    def prepare(self, pair: Pair) -> None:
        self.components = self.draft = None  # an arm may have run another pair before
        self.shared_states.clear()
        self._components(pair)

    def decode(self, pair: Pair, call: Call) -> DecodedCall:
        place = (call.temperature, len(call.prompt_ids))
        components = self._components(pair)
        shared = self.shared_states.setdefault(place, components.shared.fresh())
        components = replace(components, shared=shared)
        decoder = Decoder(components, eos_ids=call.eos_ids, max_batch_size=len(call.prompt_ids))
        results = decoder.generate(
            call.prompt_ids,
            max_new_tokens=call.max_new_tokens,
            temperature=call.temperature,
            **call.truncation,
            seed=call.seed,
            # Named, lest a seed decide who plans: it is that of the benchmark, and users of the
            # defaults need not have one.
            controller=next(iter(components.controllers), None),
        )
        failed = [result.error for result in results if result.error is not None]
        if failed:
            raise OptionError(f"a request failed: {failed[0]}")
        return DecodedCall(
            token_ids=tuple(result.token_ids for result in results),
            records=tuple(record for result in results for record in result.records),
        )

    def _components(self, pair: Pair) -> Components:
        named = self.settings.get("drafter")
        drafter = None if named is None and pair.head is None else pair.drafter(named)
        taken = {"model"} if drafter is None else settings_of(drafter)
        draft = None
        if taken & {"model", "models"} and pair.draft is not None:
            several = drafter is None or "models" in taken
            draft = self._draft(pair, several=several)
        settings = {"controller": None, **self.settings, "drafter": drafter}
        if settings.pop("draft_backend", None) is not None and draft is None:
            raise OptionError(
                f"arm {self.name!r}: draft_backend says how a draft model runs, and "
                f"{drafter!r} has none"
            )
        if drafter is None or "target" not in taken:
            return make_components(pair.target_model, draft, **settings)
        if self.components is None:
            self.components = make_components(pair.target_again(), draft, **settings)
        return self.components

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
        if self.draft is None:
            self.draft = draft_model_by(pair, backend)
        return self.draft


def synchronize(pair: Pair) -> None:
    """Wait for the device, so that a clock sees the work that was queued."""
    if pair.target.device.type == "cuda":
        torch.cuda.synchronize(pair.target.device)


def host_arms(pair: Pair, tuned: Mapping[float, Mapping[str, Any]]) -> list[Arm]:
    """Return `transformers` plain, assisted (default and tuned) and with prompt lookup."""
    arms = [HostArm(name=PLAIN, family="plain")]
    shared: dict[str, Any] = {"family": "assisted", "max_batch_size": 1}
    if pair.draft is not None:
        arms.append(HostArm(name="transformers assisted", assistant={}, **shared))
    if tuned:
        arms.append(HostArm(name="transformers assisted tuned", assistant=tuned, **shared))
    lookup = {"prompt_lookup_num_tokens": LOOKUP_TOKENS}
    name, shared = "transformers prompt lookup", shared | {"family": "prompt_lookup"}
    return [*arms, HostArm(name=name, settings=lookup, **shared)]


def assistant_options(num_tokens: int) -> dict[str, Any]:
    """Return options for a constant number of drafted tokens, whatever the draft model's confidence."""
    return {
        "num_assistant_tokens": num_tokens,
        "num_assistant_tokens_schedule": "constant",
        "assistant_confidence_threshold": 0.0,
    }


def named_arm(text: str) -> MongeArm:
    """Return an arm from its name and the parts that differ from the defaults.

    Args:
        text: `name: part=value, ..`; parts are written as on the command line (`drafter`, `tree`,
            `verifier`, `controller`, `draft_backend`). `name:` is an arm with the default parts. Parts
            without a name are called by their values.

    Raises:
        OptionError: If it cannot be read, or names a part, setting or value that does not exist, or
            a part twice.
    """
    name, parts = "", _parts(text)
    if parts is None:
        name, _, rest = text.partition(":")
        parts = _parts(rest) if name.strip() and name != text else None
    if parts is None:
        raise OptionError(f"cannot read arm {text!r}; {_FORM}")
    settings = dict[str, Any]()
    for key, value in parts:
        if key in settings:
            raise OptionError(f"arm {text!r}: {key} is given twice; leave one out")
        settings[key] = _checked(text, key, value)
    label = " ".join(map(str, settings.values())) or "the defaults"
    return MongeArm(name=name.strip() or label, settings=settings)


def arms_of(texts: Sequence[str]) -> list[MongeArm]:
    """Return the arms of texts.

    Raises:
        OptionError: As `named_arm`, or if two arms have the same name.
    """
    arms = list(map(named_arm, texts))
    for name, count in Counter(arm.name for arm in arms).items():
        if count > 1:
            raise OptionError(f"two arms are called {name!r}; give the new one another name")
    return arms


def _parts(text: str) -> list[tuple[str, str]] | None:
    """Return the names and the values of `part=value, ..` as they are written; `None` of another form."""
    source = f"f({text.strip()})"
    try:
        call = ast.parse(source, mode="eval").body
    except (SyntaxError, ValueError):
        return None
    if not isinstance(call, ast.Call) or call.args:
        return None
    if not all(word.arg for word in call.keywords):
        return None
    return [
        (str(word.arg), ast.get_source_segment(source, word.value) or "") for word in call.keywords
    ]


def _checked(text: str, key: str, value: str) -> str:
    if key not in _ROOMS:
        raise unknown_name(f"part of arm {text!r}:", key, _ROOMS)
    _ROOMS[key].parse(value)
    return value
