"""The networks of a comparison, in memory once for all arms."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from monge.api import built_in, check_draft_backend, one_or_several
from monge.core.errors import OptionError
from monge.core.model import SequenceModel
from monge.draft.by_name import head_drafter, with_head
from monge.engine.models.hf_tree import make_programs
from monge.loading.networks import as_draft_model, as_sequence_model, load_network, load_tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Two networks in memory, for all arms.

    Args:
        target: As the host runs it.
        draft: Likewise, if there is a draft model.
        target_model: As this library runs it.
        draft_model: Likewise.
        tokenizer: Of the target.
        names: Where they come from.
        head: The drafter of a head that stands in the draft model's place, with its folder.
        backend: How this library's arms run the networks.
        draft_backend: How they run the draft model, if otherwise.
        draft_tokenizer: Of the draft model.
        further: Draft models beside the first, as this library runs them.
    """

    target: PreTrainedModel
    draft: PreTrainedModel | None
    target_model: SequenceModel
    draft_model: SequenceModel | None
    tokenizer: PreTrainedTokenizerBase
    names: Mapping[str, str | None]
    head: str | None = None
    backend: str = "eager"
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
    backend: str = "eager",
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
        backend: How this library's arms run them; the host's arms always run the networks as they
            are.
        draft_backend: How they run the draft model, if otherwise.
        useless_draft: Shift the rows of the draft network's output matrix by half the vocabulary:
            it costs what it costs, and guesses nothing.
        **loading: As for `monge.loading.networks.load_network`.
    """
    named: Any = one_or_several(drafts)
    draft, *others = named if isinstance(named, tuple) else (named,)
    if target is None:
        target, draft = str(built_in("target")), str(built_in("draft")) if draft is None else draft
    network, tokenizer = load_network(target, **loading), load_tokenizer(target)
    names = None if draft is None else ", ".join((draft, *others))
    head, further = None if draft is None else head_drafter(draft, target), []
    check_draft_backend(draft_backend, draft if head is None else None)
    target_model = as_sequence_model(network, backend=backend)
    draft_network = draft_model = draft_tokenizer = None

    def drafting(network: PreTrainedModel, own: PreTrainedTokenizerBase) -> SequenceModel:
        return as_draft_model(
            network,
            target_model,
            tokenizer=own,
            target_tokenizer=tokenizer,
            backend=draft_backend or backend,
        )

    if draft is not None and head is None:
        draft_network, draft_tokenizer = load_network(draft, **loading), load_tokenizer(draft)
        if useless_draft:
            _spoil(draft_network)
        draft_network.generation_config = empty_settings(tokenizer)
        draft_model = drafting(draft_network, draft_tokenizer)
        further = [drafting(load_network(one, **loading), load_tokenizer(one)) for one in others]
    elif useless_draft:
        raise OptionError("a useless draft needs a draft model to spoil; give --draft")
    network.generation_config = empty_settings(tokenizer)
    if head is None:  # the step that a head needs is known when its drafter is made
        make_programs((target_model, draft_model, *further))
    return Pair(
        target=network,
        draft=draft_network,
        target_model=target_model,
        draft_model=draft_model,
        tokenizer=tokenizer,
        names={"target": target, "draft": f"{names}, output shifted" if useless_draft else names},
        head=head,
        backend=backend,
        draft_backend=draft_backend,
        draft_tokenizer=draft_tokenizer,
        further=tuple(further),
    )


def draft_model_by(pair: Pair, backend: str) -> SequenceModel:
    """Return the draft model of a pair, run in another way.

    Raises:
        OptionError: If there is none.
    """
    check_draft_backend(backend, pair.draft)
    assert pair.draft is not None
    tokenizers = {"tokenizer": pair.draft_tokenizer, "target_tokenizer": pair.tokenizer}
    return as_draft_model(pair.draft, pair.target_model, **tokenizers, backend=backend)


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
