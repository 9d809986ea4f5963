"""The loop of this library inside `transformers`: `speculate`, `accelerate` and `generate`."""

import inspect
import warnings
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MethodType
from typing import Any, Final, cast

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteriaList,
)
from transformers.generation.configuration_utils import GenerationMode
from transformers.generation.stopping_criteria import (
    EosTokenCriteria,
    MaxLengthCriteria,
    StopStringCriteria,
)
from transformers.generation.utils import GenerateDecoderOnlyOutput, GenerationMixin

from monge.backends.registry import Backend
from monge.core.errors import OptionError
from monge.core.sampling_rules import SamplingRules
from monge.draft.by_name import AnyHead, read_head
from monge.engine.batch import decode
from monge.engine.session import Request, Session, check_length
from monge.loading.networks import as_sequence_model, load_network
from monge.options import PARTS, takes_parts
from monge.plugins.transformers_compiled import (
    CompiledComponents,
    GenerateCall,
    eager_components,
    forget,
)
from monge.plugins.transformers_outputs import DrawnOutput, Replay, VisitedRows
from monge.plugins.transformers_processors import draft_rules, num_truncating, row_processors
from monge.plugins.transformers_refusals import (
    TAKEN,
    check_arguments,
    check_settings,
    decoding_method,
    given,
)
from monge.plugins.transformers_training import in_evaluation
from monge.requests.logprobs import LogprobOptions, TokenLogprob
from monge.requests.processors import Processor, Stateless

_OPTIONS: Final = frozenset({*PARTS, "seed", "output_logprobs"})
_HOST: Final = inspect.signature(cast("Any", GenerationMixin).generate)
"""Arguments of transformers' `generate`."""
_A_MODEL: Final = "a model of transformers (for a pipeline: pipe.model)"

Draft = PreTrainedModel | AnyHead | str | Path | None


@takes_parts
def speculate(
    model: Any,
    input_ids: Tensor,
    *,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    draft_model: Draft = None,
    token_streamer: Any = None,
    seed: int | None = None,
    output_logprobs: bool = False,
    compiled: CompiledComponents | None = None,
    **model_kwargs: Any,
) -> Tensor | GenerateDecoderOnlyOutput:
    """Decode speculatively inside `generate`.

    Pass this function as `custom_generate=`, and its keywords beside it.

    The output is that of plain `generate`: the same tokens when greedy (up to rounding, where two
    logits are equal within it), tokens of the same distribution when sampling. Each row is decoded with its
    own padding stripped, its own cache row and draws.

    * *Processors* are applied to every node in order, with the row's padded text and the node's own
      path. Your own may keep state: every row has a copy, and copies follow every path, so they are
      called once a token, in order, and their state is in the copies. A processor that cannot be
      copied is decoded without speculation, with a warning. Processors get a batch in the shape of
      plain decoding, whose rows all hold the text of a single row: they may not mix rows.
    * *Stopping criteria* see the batch grow by one column a call, as in plain decoding.
    * *Draft distribution*: temperature, top-k, top-p and min-p as requested; other processors change
      the target's distribution only.

    `generate` drops some of its own keywords before a callable sees them; `accelerate` keeps them.
    For `assistant_model` give `draft_model`; for `streamer` give `token_streamer`, which gets the
    prompt, every column and the end. `stop_strings` is refused by `generate`: put a
    `StopStringCriteria` into `stopping_criteria`. Tensor parallelism is not supported.

    Args:
        model: The target; passed by `generate`, and so are the next four. In training mode, as
            inside a trainer, only if nothing acts there alone, such as dropout.
        input_ids: Prompts, padded on the left.
        logits_processor: Processors of the generation settings and of the caller.
        stopping_criteria: Criteria of the generation settings and of the caller.
        generation_config: Greedy or sampling, without attentions or hidden states.
        draft_model: A loaded model, folder or name, with the target's tokenizer, put into
            evaluation mode; or a head for the target, loaded or its folder. A folder is read again
            in every call. Without it, n-grams.
        token_streamer: A streamer of `transformers`.
        seed: Seed of the draws, which makes a sampled text reproducible. Without it, torch's
            default generator draws the seed. `set_seed` then reproduces texts only with torch's
            deterministic algorithms, as by `set_seed(0, deterministic=True)`.
        output_logprobs: Whether the output says how each token was drawn, as `DrawnOutput`; only
            with `return_dict_in_generate`.
        compiled: Those of `accelerate`; `None` runs the networks as `transformers` does.
        **model_kwargs: Model inputs from `generate`, and `PARTS` of `monge.options`, as for
            `monge.load`. Models that cannot take tokens back need the drafter `none`. The default
            controller is `goodput`, which follows measured times, and `fixed` for sampled calls
            that are to be reproducible. What a controller learns about a model is kept for later
            calls with the same options, and so are texts that a drafter reads again, as with
            `drafter="suffix(max_history=200_000)"`.

    Returns:
        `[batch, seq]`, prompts included and stopped rows padded, or `GenerateDecoderOnlyOutput`
        with these as `sequences`, and `scores` and `logits` if requested: a tensor `[batch, vocab]`
        for each generated token, zero in rows that had stopped before it; or `DrawnOutput`.

    Raises:
        MongeError: A subclass of it, for settings that cannot be honoured and for logits that
            are not finite.
    """
    config = generation_config
    parts = {name: model_kwargs.pop(name) for name in PARTS if name in model_kwargs}
    parts = {"controller": None} | parts
    check_settings(model, config, model_kwargs)
    if output_logprobs and not config.return_dict_in_generate:
        raise OptionError("generate: output_logprobs needs return_dict_in_generate=True")
    count = given(model, config, "num_assistant_tokens")
    if count and parts.get("tree") is None:
        parts["tree"] = f"chain({count})"
    starts = _row_starts(input_ids, model_kwargs)
    keeps_rows = config.return_dict_in_generate and (config.output_scores or config.output_logits)
    pad: Tensor | None = config._pad_token_tensor  # type: ignore[attr-defined]  # what plain decoding pads with
    replay = Replay(
        input_ids,
        stopping_criteria,
        pad_token_id=None if pad is None else int(pad),
        streamer=token_streamer,
        visited=[VisitedRows(input_ids.shape[1] - start) for start in starts] if keeps_rows else (),
        shows_scores=bool(keeps_rows and config.output_scores),
    )
    drafts_by = draft_rules(logits_processor) if config.do_sample else None
    call = GenerateCall(model=model, draft=draft_model, options=parts, draft_rules=drafts_by)
    is_seeded = seed is not None or torch.are_deterministic_algorithms_enabled()
    if seed is None:
        # The host's users seed torch's global generator, and expect `generate` to draw from it.
        seed = int(torch.randint(2**63 - 1, (1,))) if config.do_sample else 0  # noqa: TID251
    # The processors hold the temperature already: what is left is the softmax, or the argmax.
    rules = SamplingRules(temperature=1 if config.do_sample else 0)
    num_rows = len(starts)
    entries: list[list[TokenLogprob]] = [[] for _ in starts]
    parts_of = eager_components(call) if compiled is None else compiled.components(call, num_rows)
    with in_evaluation(model), parts_of as components:
        usual = {
            "rules": rules,
            "seed": seed,
            "controller": components.controller_name_for(None, rules, is_seeded=is_seeded),
            "logprobs": LogprobOptions(num_top=0, drawn=True) if output_logprobs else None,
            "num_truncating": num_truncating(logits_processor) + bool(replay.visited),
        }
        sessions: list[Session] = []
        for row, start in enumerate(starts):
            request = _request(row, start, logits_processor, stopping_criteria, replay, **usual)
            check_length(request, components.target.max_length, "target")
            sessions.append(Session(request, request_id=row))
        if token_streamer is not None:
            token_streamer.put(input_ids.cpu())
        for session in decode(sessions, components, max_batch_size=len(sessions)):
            if session.error is not None:
                raise session.error
            replay.grow(session.context.request_id, session.completion_ids)
            entries[session.context.request_id] += session.logprobs
    if token_streamer is not None:
        token_streamer.end()
    text: Any = replay.text
    if not config.return_dict_in_generate:
        return text
    kept: Any = {
        name: tuple(replay.column(index, which) for index in range(replay.num_settled))
        for which, name in enumerate(("logits", "scores"))
        if getattr(config, f"output_{name}")
    }
    if output_logprobs:
        kept |= replay.drawn(entries)
    return (DrawnOutput if output_logprobs else GenerateDecoderOnlyOutput)(sequences=text, **kept)


def _row_starts(input_ids: Tensor, model_kwargs: dict[str, Any]) -> list[int]:
    """Return where the prompt of every row begins, after its padding."""
    batch_size, length = input_ids.shape
    mask, positions = model_kwargs.get("attention_mask"), model_kwargs.get("position_ids")
    columns = torch.arange(length, device=input_ids.device)
    starts = torch.zeros(batch_size, dtype=torch.long, device=input_ids.device)
    if mask is not None:
        starts = length - mask.sum(dim=1)
        if not torch.equal(mask.bool(), columns >= starts[:, None]):
            raise OptionError(
                "speculate: attention_mask must be zeros on the left and ones after them; pad on "
                "the left"
            )
    # Some vision-language models count in several dimensions, `[dimensions, batch, seq]`, which are
    # equal for text.
    usual = columns - starts[:, None]
    if positions is not None and bool(((positions != usual) & (usual >= 0)).any()):
        raise OptionError(
            "speculate: position_ids other than 0, 1, 2, ... after the padding are not supported"
        )
    return starts.tolist()


def _request(
    row: int,
    start: int,
    processors: LogitsProcessorList,
    criteria: StoppingCriteriaList,
    replay: Replay,
    **usual: Any,
) -> Request:
    """Return the request of a row, whose prompt begins at `start`, from arguments of `generate`."""
    batch_size, length = replay.text.shape
    lengths = [
        criterion.max_length for criterion in criteria if isinstance(criterion, MaxLengthCriteria)
    ]
    ends = [
        criterion.eos_token_id for criterion in criteria if isinstance(criterion, EosTokenCriteria)
    ]
    padding = replay.text[row : row + 1, :start]
    processors_of_row: tuple[Processor, ...] = row_processors(processors, row, batch_size, padding)
    if replay.visited:
        note = Stateless(replay.visited[row].note)
        processors_of_row = (note, *processors_of_row, note)

    def stopping_criteria(token_ids: Sequence[int]) -> bool:
        replay.grow(row, token_ids[length - start :])
        return not replay.needs(row)

    return Request(
        prompt_ids=tuple(replay.text[row, start:].tolist()),
        max_new_tokens=min(lengths) - length,
        row=row,
        eos_ids=frozenset(int(token) for tokens in ends for token in tokens),
        processors=processors_of_row,
        stopping_criteria=stopping_criteria,
        **usual,
    )


def accelerate(
    model: Any, draft: Draft = None, *, backend: str | Backend | None = None, **options: Any
) -> Any:
    """Let `model.generate(...)` decode speculatively; also in a `pipeline` that holds the model.

    The output is that of plain `generate`, as for `speculate`. Every argument of `generate` is
    honoured or raises: `assistant_model` drafts in that call, `num_assistant_tokens` gives the
    length of its longest chain, and `streamer`, `stop_strings` with `tokenizer`, `output_scores`
    and `output_logits` work. Beam search and transformers' other decoding methods run as they are,
    without drafts, and a warning says so. `restore` undoes it.

    Args:
        model: A decoder-only model of `transformers`, or such a model wrapped by PEFT. It may be in
            training mode, as for `speculate`, and its weights may change between calls.
        draft: A draft model with the target's tokenizer, loaded, a folder or a name; or a head for
            the target, loaded or its folder. It is read once, here. Without it, n-grams draft.
        backend: `compiled` compiles the networks for this machine, or captures CUDA graphs: in
            another process beside the first calls, and for later processes too. Each call
            decodes with the weights of that moment, and runs eagerly where compiled code would give
            other numbers, with a message. Copies of the weights on a CPU take as much memory as
            float32 weights do. `compiled(weights='int8')` decodes a faster network with rounded
            weights. `None` runs the networks as `transformers` does.
        **options: `PARTS` of `monge.options`, `seed` and `output_logprobs`, as for `speculate`, for
            all calls; a call may give its own.

    Returns:
        The model.

    Raises:
        OptionError: If an option or the backend is unknown, or the model has no `generate`.
        UnsupportedModelError: If it is an encoder-decoder, or another network that cannot be
            decoded here.
        ModelLoadError: If the draft cannot be read.
    """
    _check_model("accelerate", model)
    if unknown := sorted(options.keys() - _OPTIONS):
        raise OptionError(
            f"accelerate: unknown options {', '.join(unknown)}; expected some of "
            f"{', '.join(sorted(_OPTIONS))}"
        )
    if isinstance(draft, str | Path):
        draft = read_head(draft, getattr(model, "name_or_path", "")) or load_network(draft)
    compiled = None if backend in {None, "eager"} else CompiledComponents(cast(Any, backend))
    model.generate = _Generate(model, draft, options, compiled)
    return model


def restore(model: Any) -> Any:
    """Undo `accelerate`, and drop what its calls have kept; another model stays as it is.

    Args:
        model: The model, or a wrapper around it, such as that of PEFT.

    Returns:
        The model.

    Raises:
        OptionError: If `model` is no model.
    """
    for module in _accelerated("restore", model):
        del module.generate
        for inner in module.modules():  # an adapter's calls are those of the model inside
            forget(inner)
    return model


def is_accelerated(model: Any) -> bool:
    """Return whether `accelerate` was called for a model, or a model inside it, and not undone.

    Raises:
        OptionError: If `model` is no model.
    """
    return bool(_accelerated("is_accelerated", model))


def _accelerated(where: str, model: Any) -> list[Any]:
    if not isinstance(model, torch.nn.Module):
        raise OptionError(f"{where}: got {type(model).__name__}; expected {_A_MODEL}")
    return [
        module for module in model.modules() if isinstance(vars(module).get("generate"), _Generate)
    ]


def generate(model: Any, *arguments: Any, **settings: Any) -> Tensor | GenerateDecoderOnlyOutput:
    """Call `model.generate(...)` and decode speculatively in this call only.

    Args:
        model: As for `accelerate`.
        *arguments: As for the `generate` of `transformers`.
        **settings: As for the `generate` of `transformers`, `draft` and the options of
            `accelerate`.

    Returns:
        The output of plain `generate`.

    Raises:
        MongeError: As for `accelerate` and `speculate`.
    """
    _check_model("generate", model)
    return _Generate(model, settings.pop("draft", None))(*arguments, **settings)


@dataclass(frozen=True, slots=True)
class _Generate:
    """Replaces a model's `generate`; a copied model holds a copy, which decodes with its weights."""

    model: Any
    draft: Any
    options: dict[str, Any] = field(default_factory=dict)
    compiled: CompiledComponents | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Generate":
        # Drafts do not change.
        return replace(
            self, model=deepcopy(self.model, memo), compiled=deepcopy(self.compiled, memo)
        )

    def __call__(self, *arguments: Any, **settings: Any) -> Any:
        try:
            named = _HOST.bind(self.model, *arguments, **settings).arguments
        except TypeError as error:
            raise TypeError(f"generate: {error}") from None
        settings = named.pop("kwargs", {}) | named
        del settings["self"]
        options = self.options | {name: settings.pop(name) for name in _OPTIONS & settings.keys()}
        # The class has the `generate` that this one hides.
        plain: Callable[..., Any] = MethodType(type(self.model).generate, self.model)
        method = decoding_method(self.model, settings)
        if method in {*TAKEN, GenerationMode.ASSISTED_GENERATION}:
            check_arguments(settings)
        if method not in TAKEN:
            warnings.warn(
                f"generate: {method.value} is left to transformers: this call decodes without "
                "drafts of monge, and monge's options (seed, drafter, ...) have no effect on it",
                stacklevel=2,
            )
            return plain(**settings)
        config = settings.get("generation_config")
        count = settings.pop("num_assistant_tokens", None)
        count = getattr(config, "num_assistant_tokens", None) if count is None else count
        if count is not None:
            options.setdefault("tree", f"chain({count})")
        _move_stop_strings(settings, settings.pop("tokenizer", None))
        assistant = settings.pop("assistant_model", None)
        return plain(
            custom_generate=speculate,
            draft_model=self.draft if assistant is None else assistant,
            token_streamer=settings.pop("streamer", None),
            compiled=self.compiled,
            **options,
            **settings,
        )


def _check_model(where: str, model: Any) -> None:
    if not callable(getattr(type(model), "generate", None)):
        # A compiled model lends the method of the model inside.
        hint = (
            "the model itself, `model._orig_mod`, since the engine compiles what it runs"
            if hasattr(model, "_orig_mod")
            else _A_MODEL
        )
        raise OptionError(
            f"{where}: got {type(model).__name__}, which has no generate; expected {hint}"
        )
    base = getattr(model, "get_base_model", lambda: model)  # of an adapter
    as_sequence_model(base())  # refuses networks that cannot be decoded


def _move_stop_strings(settings: dict[str, Any], tokenizer: Any) -> None:
    """Turn `stop_strings` into a stopping criterion, since transformers passes no tokenizer on."""
    config: GenerationConfig | None = settings.get("generation_config")
    strings = settings.pop("stop_strings", None)
    if strings is None and config is not None:
        strings = config.stop_strings
    if strings is None:
        return
    if tokenizer is None:
        raise OptionError("generate: stop_strings need the tokenizer; give tokenizer= as well")
    if config is not None:
        settings["generation_config"] = config = deepcopy(config)
        config.stop_strings = None
    criteria = settings.get("stopping_criteria") or ()
    stop_strings = StopStringCriteria(tokenizer, strings)
    settings["stopping_criteria"] = StoppingCriteriaList([*criteria, stop_strings])
