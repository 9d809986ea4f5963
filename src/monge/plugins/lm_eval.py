"""The `hf` model of lm-eval with speculative decoding, in Python and as a command."""

from importlib import import_module
from pathlib import Path
from typing import Any, Final

import torch
from transformers import PreTrainedModel

from monge.api import make_components
from monge.core.errors import OptionError
from monge.core.extras import require
from monge.loading.networks import as_draft_model, as_sequence_model, load_network
from monge.options import PARTS, takes_parts
from monge.plugins.transformers_generate import speculate

NAME: Final = "monge"
"""Name of the model: `--model monge`."""

require("lm-eval", "the lm-eval model")
_Hf: Any = import_module("lm_eval.models.huggingface").HFLM


class MongeLM(_Hf):
    """`hf` with speculative generation.

    Prompts, batches, left padding, stops and likelihoods are those of `hf`.

    Greedy texts equal those of `hf` up to rounding; sampled ones have the same law. Likelihood tasks
    do not decode and run unchanged. Stopping criteria of lm-eval run token by token, as in plain
    decoding.

    Args:
        pretrained: The target, as for `hf`.
        draft_model: Folder or name of a draft model with the target's tokenizer, or a loaded one;
            in the target's type and on its device. Without it, n-grams.
        seed: Seed of the draws of every batch; without it they follow lm-eval's own seed for torch.
        **settings: Settings of `hf`, and `PARTS` of `monge.options`, as for `speculate`.

    Raises:
        MongeError: A subclass of it, if a part is unknown or incompatible, the target is an
            encoder-decoder, or mixed precision is requested.
    """

    @takes_parts
    def __init__(
        self,
        pretrained: str | PreTrainedModel,
        *,
        draft_model: str | Path | PreTrainedModel | None = None,
        seed: int | None = None,
        **settings: Any,
    ) -> None:
        parts = {name: settings.pop(name) for name in PARTS if name in settings}
        if settings.get("mixed_precision_dtype") is not None:
            raise OptionError(
                "model 'monge' does not support mixed_precision_dtype; give dtype=, "
                "which holds for all passes"
            )
        super().__init__(pretrained, **settings)
        if self.backend != "causal":
            raise OptionError(
                f"model 'monge' decodes decoder-only models; lm-eval took {str(pretrained)!r} for "
                f"{self.backend!r}"
            )
        draft = None
        if draft_model is not None:
            trust = bool(settings.get("trust_remote_code", False))
            draft = load_network(
                draft_model, dtype=self.model.dtype, device=self.device, trust_remote_code=trust
            )
        self._speculation = parts | {
            "custom_generate": speculate,
            "draft_model": draft,
            "seed": seed,
        }
        # Incompatible parts are refused before the first batch.
        target = as_sequence_model(self.model)
        drafts = () if draft is None else (as_draft_model(draft, target),)
        make_components(target, *drafts, **{"controller": None} | parts)

    def _model_generate(
        self, context: torch.Tensor, max_length: int, stop: list[str], **settings: Any
    ) -> torch.Tensor:
        """Called by lm-eval for every batch of prompts."""
        speculation = self._speculation
        if speculation["seed"] is None:
            # An evaluation is to repeat: a seed of its own gives every batch a plan that does.
            speculation = speculation | {"seed": int(torch.randint(2**63 - 1, (1,)))}  # noqa: TID251
        return super()._model_generate(
            context=context, max_length=max_length, stop=stop, **settings, **speculation
        )


def register() -> None:
    """Register the model with lm-eval, which reads no entry points."""
    registry = import_module("lm_eval.api.registry").model_registry
    import_module("lm_eval.models")  # fills the registry, but only an empty one
    if NAME not in registry:
        registry.register(NAME, target=MongeLM)


def main() -> None:
    """Run `lm_eval` with our model registered."""
    register()
    import_module("lm_eval.__main__").cli_evaluate()


if __name__ == "__main__":
    main()
