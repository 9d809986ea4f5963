"""`model.generate(..., custom_generate=monge.speculate)`.

The loop of this library inside `transformers`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, cast
from weakref import WeakKeyDictionary

import torch
import transformers
from torch import Tensor
from transformers import (
    Cache,
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    StaticCache,
    StoppingCriteriaList,
)
from transformers.cache_utils import CacheLayerMixin
from transformers.generation.configuration_utils import GenerationMode
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria
from transformers.generation.utils import GenerateDecoderOnlyOutput
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled
from transformers.integrations.fsdp import is_fsdp_managed_module

from monge.api import make_components
from monge.control.base import SharedState
from monge.core.errors import OptionError
from monge.core.sampling_rules import SamplingRules
from monge.draft.base import AnyDrafter
from monge.draft.by_name import AnyHead, drafter_of
from monge.engine.batch import decode
from monge.engine.components import Components
from monge.engine.models.network_facts import forward_parameters
from monge.engine.processors import Processor, Stateless
from monge.engine.session import Request, Session, check_length
from monge.loading.networks import as_draft_model, as_sequence_model, load_network
from monge.options import PARTS, takes_parts
from monge.plugins.transformers_processors import draft_rules, row_processors
from monge.plugins.transformers_replay import Replay
from monge.plugins.transformers_rows import VisitedRows, column

_PREPARED: Final = frozenset({"attention_mask", "position_ids", "use_cache", "logits_to_keep"})
"""What `generate` itself prepares for every decoder-only model, beside a cache."""
_WITHOUT_EFFECT: Final = frozenset({"output_attentions", "output_hidden_states"})
"""What changes nothing, in plain decoding too, without `return_dict_in_generate`."""
CACHES: Final = ("cache", "past_key_values", "cache_params")
"""Names of a caller's cache."""
REFUSED_SETTINGS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "assistant_confidence_threshold": "controller='confidence_threshold' takes its place",
        "assistant_ensemble_weight": "it changes the law of the text",
        "assistant_lookbehind": "it belongs to other tokenizers",
        "cache_config": "the cache is this library's own",
        "compile_config": "the network is compiled here, if it can be",
        "max_matching_ngram_size": "give drafter='ngram(...)' instead",
        "num_assistant_tokens_schedule": "a controller takes its place, as controller='fsm'",
        "prefill_chunk_size": "prompts are read whole here",
        "speculation_type": "give a head as draft instead",
        "target_lookbehind": "it belongs to other tokenizers",
        "token_healing": "give the prompt that model.heal_tokens(input_ids, tokenizer) returns",
    }
)
"""Settings of `GenerationConfig` that would be ignored, and what to do instead."""
_NUMBERS: Final = frozenset(
    {
        "encoder_no_repeat_ngram_size",
        "encoder_repetition_penalty",
        "epsilon_cutoff",
        "eta_cutoff",
        "max_length",
        "max_new_tokens",
        "max_time",
        "min_length",
        "min_new_tokens",
        "min_p",
        "no_repeat_ngram_size",
        "num_assistant_tokens",
        "num_return_sequences",
        "repetition_penalty",
        "temperature",
        "top_h",
        "top_k",
        "top_p",
        "typical_p",
    }
)
"""Settings of `GenerationConfig` that are numbers; the host takes a truth value for one."""
_TEXT_MARKS: Final = frozenset({"mm_token_type_ids", "token_type_ids"})
"""What processors of vision-language models give beside the text: the kind of every token, 0 for text."""
_LEARNED: Final[WeakKeyDictionary[Any, dict[str, SharedState]]] = WeakKeyDictionary()
"""What controllers know of a model, by the options of the call: a call has no decoder
that outlives it. The call takes it out and puts it back, so that threads share nothing."""


@takes_parts
def speculate(
    model: Any,
    input_ids: Tensor,
    *,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    draft_model: PreTrainedModel | AnyHead | str | Path | None = None,
    token_streamer: Any = None,
    seed: int | None = None,
    **model_kwargs: Any,
) -> Tensor | GenerateDecoderOnlyOutput:
    """Decode speculatively inside `generate`.

    Pass this function as `custom_generate=`, and its keywords beside it.

    The output is that of plain `generate`: the same tokens when greedy (up to rounding, where two
    logits are equal within it), tokens of the same law when sampling. Each row is decoded with its
    own padding stripped, its own cache row and draws.

    * *Processors* are applied to every node in order, with the row's padded text and the node's own
      path. Your own may keep state: every row has a copy, and copies follow every path, so they are
      asked once a token, in order. What they note is in the copies. One that cannot be copied is
      decoded without speculation, and a warning says so. A batch that they are given has the shape of
      plain decoding, and all its rows hold the text of one: they may not mix rows.
    * *Stopping criteria* see the batch grow by one column a call, as in plain decoding.
    * *Draft law*: temperature, top-k, top-p and min-p as requested; other processors change
      the target's law only.

    `generate` drops some of its own keywords before a callable sees them; `accelerate` keeps them.
    For `assistant_model` give `draft_model`; for `streamer` give `token_streamer`, which gets the
    prompt, every column and the end. `stop_strings` is refused by `generate`: put a
    `StopStringCriteria` into `stopping_criteria`. Tensor parallelism is not supported.

    Args:
        model: The target, in evaluation mode; passed by `generate`, and so are the next four.
        input_ids: Prompts, padded on the left.
        logits_processor: Processors of the generation settings and of the caller.
        stopping_criteria: Criteria of the generation settings and of the caller.
        generation_config: Greedy or sampling, without attentions or hidden states.
        draft_model: A loaded model, folder or name, with the target's tokenizer, put into
            evaluation mode; or a head for the target, loaded or its folder. A folder is read again
            in every call. Without it, n-grams.
        token_streamer: A streamer of `transformers`.
        seed: Seed of the draws. Without it, torch's default generator gives one, so
            `set_seed` makes a run reproducible.
        **model_kwargs: Model inputs from `generate`, and `PARTS` of `monge.options`, as for
            `monge.load`. Models that cannot take tokens back need the drafter `none`. Every sampled
            call has a seed, torch's or its own, so the default controller plans it with `fixed`, and
            greedy calls with `goodput`. What a controller learns about a model is kept for later
            calls with the same options.

    Returns:
        `[batch, seq]`, prompts included and stopped rows padded, or `GenerateDecoderOnlyOutput`
        with these as `sequences`, and `scores` and `logits` if requested: one `[batch,
        vocab]` per generated token, zero in rows that had stopped before it.

    Raises:
        MongeError: A subclass of it, for settings that cannot be honoured and for logits that
            are not finite.
    """
    parts = {name: model_kwargs.pop(name) for name in PARTS if name in model_kwargs}
    _check_settings(model, generation_config, model_kwargs)
    prompts = _Prompts.of(input_ids, model_kwargs)
    call = _Call(model, prompts, logits_processor, stopping_criteria, generation_config)
    replay = Replay(
        input_ids,
        stopping_criteria,
        pad_token_id=call.pad_token_id,
        streamer=token_streamer,
        scores=call.score_column if call.keeps_scores else None,
    )
    count = _given(model, generation_config, "num_assistant_tokens")
    if count and parts.get("tree") is None:
        parts["tree"] = f"chain({count})"
    parts = {"controller": None} | parts
    learned, key = _LEARNED.setdefault(model, {}), _key(model, draft_model, parts)
    components = _parts(call, draft_model, **parts)
    if (shared := learned.pop(key, None)) is not None:
        components = replace(components, shared=shared)
    sessions = call.sessions(components, replay, seed)
    if token_streamer is not None:
        token_streamer.put(input_ids.cpu())
    try:
        for session in decode(sessions, components, max_batch_size=len(sessions)):
            if session.error is not None:
                raise session.error
            replay.grow(session.context.request_id, session.completion_ids)
            if call.rows:
                call.rows[session.context.request_id].grow(session.completion_ids)
    finally:
        learned[key] = components.shared
    if token_streamer is not None:
        token_streamer.end()
    text: Any = replay.text
    if not generation_config.return_dict_in_generate:
        return text
    count = text.shape[1] - input_ids.shape[1]
    kept: Any = {
        name: tuple(column(call.rows, index, which) for index in range(count))
        for which, name in enumerate(("logits", "scores"))
        if getattr(generation_config, f"output_{name}")
    }
    return GenerateDecoderOnlyOutput(sequences=text, **kept)


@dataclass(frozen=True, slots=True, eq=False)
class _Prompts:
    """The input rows and the ends of their padding."""

    input_ids: Tensor
    starts: tuple[int, ...]

    @classmethod
    def of(cls, input_ids: Tensor, model_kwargs: dict[str, Any]) -> "_Prompts":
        batch_size, length = input_ids.shape
        mask = model_kwargs.get("attention_mask")
        if mask is None:
            starts = (0,) * batch_size
        else:
            starts = tuple(int(length - count) for count in mask.sum(dim=1))
            expected = (
                torch.arange(length, device=mask.device)
                >= torch.tensor(starts, device=mask.device)[:, None]
            )
            if not torch.equal(mask.bool(), expected):
                raise OptionError(
                    "speculate: attention_mask must be zeros on the left and ones "
                    "after them; pad on the left"
                )
        positions = model_kwargs.get("position_ids")
        if positions is not None:
            # Some vision-language models count in several dimensions, `[dimensions, batch, seq]`,
            # which are equal for text.
            first = torch.tensor(starts, device=positions.device)[:, None]
            usual = torch.arange(length, device=positions.device) - first
            if bool(((positions != usual) & (usual >= 0)).any()):
                raise OptionError(
                    "speculate: position_ids other than 0, 1, 2, ... after the "
                    "padding are not supported"
                )
        return cls(input_ids, starts)


@dataclass(frozen=True, slots=True, eq=False)
class _Call:
    """The arguments of `generate`."""

    model: Any
    prompts: _Prompts
    processors: LogitsProcessorList
    criteria: StoppingCriteriaList
    config: GenerationConfig
    rows: list[VisitedRows] = field(default_factory=list)

    @property
    def keeps_rows(self) -> bool:
        """Return whether the caller requests the logits or scores of every token."""
        config = self.config
        return bool(
            config.return_dict_in_generate and (config.output_scores or config.output_logits)
        )

    @property
    def keeps_scores(self) -> bool:
        """Return whether criteria are shown scores, as in plain decoding."""
        return bool(self.config.return_dict_in_generate and self.config.output_scores)

    def score_column(self, index: int) -> Tensor:
        """Scores of a generated column, zero in rows that have stopped."""
        return column(self.rows, index, 1)

    @property
    def pad_token_id(self) -> int | None:
        pad = self.config._pad_token_tensor  # type: ignore[attr-defined]  # what plain decoding pads with
        return None if pad is None else int(pad)

    @property
    def rules(self) -> SamplingRules:
        # The processors hold the temperature already: what is left is the softmax, or the largest
        # score.
        return SamplingRules(temperature=1 if self.config.do_sample else 0)

    @property
    def draft_rules(self) -> SamplingRules | None:
        return draft_rules(self.processors) if self.config.do_sample else None

    def sessions(self, components: Components, replay: Replay, seed: int | None) -> list[Session]:
        """One session per row; the row index is the request id."""
        if seed is None:
            seed = _drawn_seed() if self.config.do_sample else 0
        controller = components.named_for(None, self.rules, is_seeded=True)
        batch_size, length = self.prompts.input_ids.shape
        longest = min(
            criterion.max_length
            for criterion in self.criteria
            if isinstance(criterion, MaxLengthCriteria)
        )
        eos_ids = frozenset(
            int(token)
            for criterion in self.criteria
            if isinstance(criterion, EosTokenCriteria)
            for token in criterion.eos_token_id
        )
        sessions: list[Session] = []
        for row, start in enumerate(self.prompts.starts):
            prompt_ids, padding = (
                self.prompts.input_ids[row, start:],
                self.prompts.input_ids[row : row + 1, :start],
            )
            processors: tuple[Processor, ...] = row_processors(
                self.processors, row, batch_size, padding
            )
            visited: VisitedRows | None = None
            if self.keeps_rows:
                visited = VisitedRows(len(prompt_ids))
                self.rows.append(visited)
                processors = (Stateless(visited.note), *processors, Stateless(visited.note))
            request = Request(
                prompt_ids=tuple(prompt_ids.tolist()),
                max_new_tokens=longest - length,
                rules=self.rules,
                seed=seed,
                row=row,
                eos_ids=eos_ids,
                processors=processors,
                controller=controller,
                stop_check=_StopCheck(replay, row, len(prompt_ids), visited),
            )
            check_length(request, components.target.max_length, "target")
            sessions.append(Session(request, request_id=row))
        return sessions


@dataclass(frozen=True, slots=True)
class _StopCheck:
    """Passes a row's committed tokens to the stopping criteria."""

    replay: Replay
    row: int
    num_prompt_tokens: int
    visited: VisitedRows | None

    def __call__(self, token_ids: Sequence[int]) -> bool:
        if self.visited is not None:
            self.visited.grow(token_ids[self.num_prompt_tokens :])
        self.replay.grow(self.row, token_ids[self.num_prompt_tokens :])
        return not self.replay.needs(self.row)


def _key(model: Any, draft: Any, named: dict[str, Any]) -> str:
    """Return the key of what a controller has learned, beside the model."""
    drafted = draft if isinstance(draft, str | Path | None) else (type(draft), id(draft))
    place = model.device, model.dtype, torch.get_num_threads()
    return repr((drafted, named, place))


def _parts(
    call: _Call,
    draft: PreTrainedModel | AnyHead | str | Path | None,
    *,
    drafter: str | AnyDrafter | None = None,
    **named: Any,
) -> Components:
    target, given = as_sequence_model(call.model), {**named, "draft_rules": call.draft_rules}
    if (found := drafter_of(draft, call.model.name_or_path)) is not None:
        return make_components(
            target, drafter=drafter or found, head=cast(AnyHead | str | Path, draft), **given
        )
    draft_model = (
        None
        if draft is None
        else as_draft_model(load_network(cast(PreTrainedModel | str | Path, draft)), target)
    )
    return make_components(target, draft_model, drafter=drafter, **given)


def check_numbers(settings: Mapping[str, Any]) -> None:
    """Refuse truth values where the host expects numbers."""
    for name in _NUMBERS & settings.keys():
        if isinstance(value := settings[name], bool):
            raise OptionError(f"generate: {name} must be a number; got {value}")


def _given(model: Any, config: GenerationConfig, name: str) -> Any:
    """A setting of the call; `None` where it is the host's or the checkpoint's, and no wish of the caller."""
    value = getattr(config, name, None)
    usual = (
        config._get_default_generation_params().get(name),
        getattr(model.generation_config, name, None),
    )
    return None if value is False or value in usual else value


def _check_settings(model: Any, config: GenerationConfig, model_kwargs: dict[str, Any]) -> None:
    """Refuse settings that would be ignored."""
    check_numbers(vars(config))
    for name, instead in REFUSED_SETTINGS.items():
        if _given(model, config, name) is not None:
            raise OptionError(f"generate: {name} is not supported: {instead}")
    mode = config.get_generation_mode()
    outputs = ("output_attentions", "output_hidden_states")
    asked = (
        [name for name in outputs if getattr(config, name)]
        if config.return_dict_in_generate
        else []
    )
    caches = [value for value in model_kwargs.values() if isinstance(value, Cache)]
    own = [name for name in CACHES if getattr(model_kwargs.get(name), "_is_user_defined", False)]
    unknown = _other_inputs(model, model_kwargs)
    sharded = is_deepspeed_zero3_enabled() or is_fsdp_managed_module(model)
    refusals = {
        "encoder-decoder models; a decoder-only model is needed": model.config.is_encoder_decoder,
        "a model in training mode, whose law changes from call to call; call model.eval()": model.training,
        f"the decoding method {mode.value!r}; leave out num_beams, penalty_alpha, constraints, "
        "dola_layers, use_mtp, "
        "prompt_lookup_num_tokens and assistant_early_exit": mode
        not in {GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE},
        f"{', '.join(asked)}; leave it out": bool(asked),
        f"cache_implementation={config.cache_implementation!r}; leave it out, the cache is this "
        "library's own": config.cache_implementation not in {None, "dynamic"},
        # Some checkpoints have it in their settings, from training or by habit; there it is no wish
        # of the caller.
        "use_cache=False; leave it out": config.use_cache is False
        and model.generation_config.use_cache is not False,
        "a cache that holds text already; give the whole text as input_ids": any(
            map(_holds_text, caches)
        ),
        # Empty ones are what the host hands over, which marks those of the caller since 5.24.
        f"a cache of the caller's ({', '.join(own)}); leave it out, it would not be filled": bool(
            own
        ),
        "a static cache; leave it out, the cache is this library's own": any(
            isinstance(cache, StaticCache) for cache in caches
        ),
        f"model inputs beside the text: {', '.join(unknown)}; leave them out, since only text is "
        "read here, and give prompts with images, video or audio to plain `generate`; where you "
        "gave none, report this with "
        f"'transformers {transformers.__version__}'": bool(unknown),
        "weights sharded by FSDP or ZeRO-3, whose ranks must step together": sharded
        and torch.distributed.is_initialized(),
    }
    for what, is_asked in refusals.items():
        if is_asked:
            raise OptionError(f"speculate does not support {what}")


def _other_inputs(model: Any, model_kwargs: dict[str, Any]) -> list[str]:
    """Names of inputs that the model's forward would need.

    Caches are recognised by type, because the host renames their keyword. `None`, an empty mapping,
    inputs that the forward receives anyway, and marks that say "text" of every token are harmless.
    """
    parameters = forward_parameters(model)
    marks = _TEXT_MARKS if "pixel_values" in parameters else frozenset[str]()
    found: list[str] = []
    for name, value in model_kwargs.items():
        usual = parameters[name].default if name in parameters else None
        changes_nothing = (
            value is None
            or value is usual
            or (isinstance(value, bool | int | float | str) and value == usual)
            or (isinstance(value, Mapping) and not value)
            or (name in marks and isinstance(value, Tensor) and not value.any())
        )
        if (
            name not in _PREPARED | _WITHOUT_EFFECT
            and not isinstance(value, Cache)
            and not changes_nothing
        ):
            # What the host has encoded already is named by what it was: an image, a video.
            what = f" ({', '.join(map(str, value))})" if isinstance(value, Mapping) else ""
            found.append(name + what)
    return sorted(found)


def _holds_text(cache: Cache) -> bool:
    layers = getattr(cache, "layers", ())
    if layers and not any(isinstance(layer, CacheLayerMixin) for layer in layers):
        # Recurrent state alone, which does not say how much it has read.
        return cache.has_previous_state()
    return cache.get_seq_length() > 0


def _drawn_seed() -> int:
    # The one place that may look at torch's global generator: the host's users seed it, and expect
    # `generate` to follow.
    return int(torch.randint(2**63 - 1, (1,)))  # noqa: TID251
