"""The networks of a comparison, in memory once for all arms."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from monge.api import drafts_of
from monge.backends.registry import Backend
from monge.core.errors import OptionError
from monge.core.model import SequenceModel
from monge.core.parts import built_in
from monge.draft.by_name import with_head
from monge.engine.models.hf_tree import make_model_programs
from monge.loading.networks import (
    as_draft_model,
    as_sequence_model,
    load_network,
    load_tokenizer,
    prepare,
)
from monge.loading.sources import ModelSource


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Two networks in memory, for all arms: as the host runs them, and as this library does.

    A head is the text of a drafter, with its folder; it stands in the draft model's place. Further
    draft models stand beside the first.
    """

    target: PreTrainedModel
    draft: PreTrainedModel | None
    target_model: SequenceModel
    draft_model: SequenceModel | None
    tokenizer: PreTrainedTokenizerBase
    names: Mapping[str, str | None]
    head: str | None = None
    backend: str | Backend = "eager"
    draft_backend: str | None = None
    draft_tokenizer: PreTrainedTokenizerBase | None = None
    further: tuple[SequenceModel, ...] = ()

    def drafter(self, text: str | None = None) -> str:
        """Return a drafter's text with the given head filled in; without a text, the default drafter."""
        if text is None:
            return self.head or ("ngram" if self.draft is None else "model")
        return with_head(text, self.head)


def load_pair(
    target: str | None = None,
    drafts: str | Sequence[str] | None = None,
    *,
    backend: str | None = None,
    draft_backend: str | None = None,
    useless_draft: bool = False,
    **loading: Any,
) -> Pair:
    """Load the networks; with no names the built-in pair.

    Args:
        target: Folder or name.
        drafts: Likewise, or the folder of a head for the target; `None` beside a named target means
            that there is none. Of several draft models all draft where an arm's drafter takes
            several, and the first one otherwise.
        backend: How this library's arms run them, `None` as `monge.load` does; the host's run the
            networks as they are.
        draft_backend: How they run the draft model, if otherwise.
        useless_draft: Shift the rows of the draft network's output matrix by half the vocabulary:
            it costs what it costs, and guesses nothing.
        **loading: As for `monge.loading.networks.load_network`.
    """
    source = ModelSource.of(target)
    if source.is_built_in and drafts is None:
        drafts = str(built_in("draft"))
    chosen = drafts_of(drafts, source, draft_backend)
    drafts = [drafts] if isinstance(drafts, str) else drafts or ()
    names = {"target": source.name, "draft": ", ".join(drafts) or None}
    if useless_draft:
        if not chosen.models:
            raise OptionError("a useless draft needs a draft model to spoil; give --draft")
        names["draft"] = f"{names['draft']}, output shifted"
    source = prepare(source, backend, **loading)
    network, tokenizer = load_network(source, **loading), load_tokenizer(source)
    target_model = as_sequence_model(network, backend=source.backend)
    networks = [load_network(draft, **loading) for draft in chosen.models]
    tokenizers = [load_tokenizer(draft) for draft in chosen.models]
    if useless_draft:
        _spoil(networks[0])
    for loaded in (network, *networks):
        loaded.generation_config = empty_settings(tokenizer)
    models = [
        as_draft_model(
            draft_network,
            target_model,
            tokenizer=draft_tokenizer,
            target_tokenizer=tokenizer,
            backend=draft_backend or source.backend,
        )
        for draft_network, draft_tokenizer in zip(networks, tokenizers, strict=True)
    ]
    if chosen.head is None:  # the step that a head needs is known when its drafter is made
        make_model_programs((target_model, *models))
    return Pair(
        target=network,
        draft=next(iter(networks), None),
        target_model=target_model,
        draft_model=next(iter(models), None),
        tokenizer=tokenizer,
        names=names,
        head=chosen.head_text,
        backend=source.backend,
        draft_backend=draft_backend,
        draft_tokenizer=next(iter(tokenizers), None),
        further=tuple(models[1:]),
    )


def empty_settings(tokenizer: PreTrainedTokenizerBase, **options: Any) -> GenerationConfig:
    """Return the host's settings for decoding a network's own law."""
    return GenerationConfig(pad_token_id=tokenizer.pad_token_id or 0, **options)


@torch.no_grad()
def _spoil(network: PreTrainedModel) -> None:
    """Give every token another token's row of the output matrix.

    Where input and output share it, both move.
    """
    output: Any = network.get_output_embeddings()
    output.weight.copy_(output.weight.roll(len(output.weight) // 2, dims=0))
