"""`accelerate(model)`: `model.generate(...)` decodes through this library."""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from types import MethodType
from typing import Any, Final

from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel, StoppingCriteriaList
from transformers.generation.stopping_criteria import StopStringCriteria
from transformers.generation.utils import GenerateDecoderOnlyOutput

from monge.core.errors import OptionError
from monge.draft.by_name import AnyHead, read_head
from monge.loading.networks import load_network
from monge.options import PARTS
from monge.plugins.transformers_generate import CACHES, REFUSED_SETTINGS, check_numbers, speculate

_OPTIONS: Final = frozenset({*PARTS, "seed"})
_POSITIONAL: Final = (
    "inputs",
    "generation_config",
    "logits_processor",
    "stopping_criteria",
    "prefix_allowed_tokens_fn",
    "synced_gpus",
    "assistant_model",
    "streamer",
    "negative_prompt_ids",
    "negative_prompt_attention_mask",
    "custom_generate",
)
"""Arguments of the host's `generate`, in its order."""
_REFUSED: Final = {
    **REFUSED_SETTINGS,
    **dict.fromkeys(
        CACHES,
        "give the whole text without a cache; it would not be filled, the cache is this library's own",
    ),
    "assistant_tokenizer": "the draft model must have the target's tokenizer here; `monge.load` "
    "takes another one",
    "assistant_early_exit": "give drafter='layer_skip' instead",
    "prompt_lookup_num_tokens": "give drafter='ngram(num_draft_tokens=N)' instead",
    "custom_generate": "the model is accelerated; call it without, or undo with `del model.generate`",
    "synced_gpus": "ranks that must step together are not supported",
}


def accelerate(
    model: Any,
    draft: PreTrainedModel | AnyHead | str | Path | None = None,
    **options: Any,
) -> Any:
    """Let `model.generate(...)` decode speculatively; also in a `pipeline` that holds the model.

    The output is that of plain `generate`, as for `speculate`. Every argument of `generate` is
    honoured or raises: `assistant_model` drafts in that call, `num_assistant_tokens` gives the
    length of its longest chain, and `streamer`, `stop_strings` with `tokenizer`, `output_scores` and
    `output_logits` work. `del model.generate` restores the model.

    Args:
        model: A decoder-only model of `transformers`, or one wrapped by PEFT, in evaluation mode.
        draft: A draft model with the target's tokenizer, loaded, a folder or a name; or a head for
            the target, loaded or its folder. It is read once, here. Without it, n-grams draft.
        **options: `PARTS` of `monge.options` and `seed`, as for `speculate`, for all calls; a call
            may give its own.

    Returns:
        The model.

    Raises:
        OptionError: If an option is unknown, or the model has no `generate`.
        ModelLoadError: If the draft cannot be read.
    """
    _check_model("accelerate", model)
    _check_names("accelerate", options)
    if isinstance(draft, str | Path):
        draft = read_head(draft, getattr(model, "name_or_path", "")) or load_network(draft)
    model.generate = _Generate(model, draft, options)
    return model


def generate(model: Any, *arguments: Any, **settings: Any) -> Tensor | GenerateDecoderOnlyOutput:
    """`model.generate(...)`, decoded speculatively in this call only.

    Args:
        model: As for `accelerate`.
        *arguments: As for the `generate` of `transformers`.
        **settings: As for the `generate` of `transformers`, `draft` and the options of
            `accelerate`.

    Returns:
        What plain `generate` returns.

    Raises:
        MongeError: As for `accelerate` and `speculate`.
    """
    _check_model("generate", model)
    draft = settings.pop("draft", None)
    return _Generate(model, draft)(*arguments, **settings)


@dataclass(frozen=True, slots=True)
class _Generate:
    """Replaces a model's `generate`.

    Args:
        model: The model; a copy of it holds a copy of this that decodes with the copied weights.
        draft: Draft of calls without `assistant_model`.
        options: Default options of `speculate`.
    """

    model: Any
    draft: Any
    options: dict[str, Any] = field(default_factory=dict)

    def __call__(self, *arguments: Any, **settings: Any) -> Any:
        settings = _named(arguments, settings)
        plain = _plain_generate(self.model)
        check_numbers(settings)
        config = settings.get("generation_config")
        for name, instead in _REFUSED.items():
            value = settings.pop(name, None)
            if value is None:
                value = getattr(config, name, None)
            if value is not None and value is not False:
                raise OptionError(f"generate: {name} is not supported: {instead}")
        options = self.options | {name: settings.pop(name) for name in _OPTIONS & set(settings)}
        count = settings.pop("num_assistant_tokens", None)
        if count is None:
            count = getattr(config, "num_assistant_tokens", None)
        if count is not None:
            options.setdefault("tree", f"chain({count})")
        assistant = settings.pop("assistant_model", None)
        tokenizer = settings.pop("tokenizer", None)
        _move_stop_strings(settings, tokenizer)
        return plain(
            custom_generate=speculate,
            draft_model=self.draft if assistant is None else assistant,
            token_streamer=settings.pop("streamer", None),
            **options,
            **settings,
        )


def _named(arguments: tuple[Any, ...], settings: dict[str, Any]) -> dict[str, Any]:
    """All arguments of a call by name."""
    if len(arguments) > len(_POSITIONAL):
        raise TypeError(
            f"generate: {len(arguments)} positional arguments, at most {len(_POSITIONAL)}"
        )
    given = dict(zip(_POSITIONAL, arguments, strict=False))
    if twice := sorted(given.keys() & settings.keys()):
        raise TypeError(f"generate: got several values for {', '.join(twice)}")
    return given | settings


def _plain_generate(model: Any) -> Callable[..., Any]:
    """The `generate` of the model's class, which an accelerated model hides."""
    return MethodType(type(model).generate, model)


def _check_model(where: str, model: Any) -> None:
    if not callable(getattr(type(model), "generate", None)):
        # The model inside the wrapper has the method, and lends it.
        hint = (
            "the model itself, `model._orig_mod`, since the engine compiles what it runs"
            if hasattr(model, "_orig_mod")
            else "a model of transformers (for a pipeline: pipe.model)"
        )
        raise OptionError(
            f"{where}: got {type(model).__name__}, which has no generate; expected {hint}"
        )


def _check_names(where: str, options: dict[str, Any]) -> None:
    if unknown := sorted(options.keys() - _OPTIONS):
        raise OptionError(
            f"{where}: unknown options {', '.join(unknown)}; expected some of {', '.join(sorted(_OPTIONS))}"
        )


def _move_stop_strings(settings: dict[str, Any], tokenizer: Any) -> None:
    """Turn `stop_strings` into a stopping criterion, since the host passes no tokenizer on."""
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
    own = StopStringCriteria(tokenizer, strings)
    settings["stopping_criteria"] = StoppingCriteriaList(
        [*(settings.get("stopping_criteria") or ()), own]
    )
