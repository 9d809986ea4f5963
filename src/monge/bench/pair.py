"""The networks of a comparison, in memory once for all arms."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel

from monge.api import drafts_of, load
from monge.backends.registry import Backend
from monge.core.errors import OptionError
from monge.core.parts import built_in
from monge.draft.by_name import with_head
from monge.engine.decoder import Decoder
from monge.loading.networks import as_draft_model, as_sequence_model, prepare
from monge.loading.sources import ModelSource
from monge.networks.base import SequenceModel
from monge.prompts import Prompt, written


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Two networks in memory, for all arms: as transformers runs them, and as this library does.

    A head is the text of a drafter, with its folder; it stands in the draft model's place. Further
    draft models stand beside the first. `decoder` runs the target and the draft models, without the
    head.
    """

    target: PreTrainedModel
    draft: PreTrainedModel | None
    target_model: SequenceModel
    draft_model: SequenceModel | None
    tokenizer: Any
    names: Mapping[str, str | None]
    head: str | None = None
    backend: str | Backend = "eager"
    draft_backend: str | None = None
    further: tuple[SequenceModel, ...] = ()
    decoder: Decoder

    def drafter(self, text: str | None = None) -> str:
        """Return a drafter's text with the given head filled in; without a text, the default drafter."""
        if text is None:
            return self.head or ("ngram" if self.draft is None else "model")
        return with_head(text, self.head)

    def encode(self, prompt: Prompt) -> tuple[int, ...]:
        """Return the token ids of a prompt; the target's template writes its messages."""
        return self.decoder.encode(written(prompt, self.decoder.encode_chat))

    def target_again(self) -> SequenceModel:
        """Return another model of the target's network.

        A drafter may have it keep hidden states, for which plain decoding need not pay.
        """
        return as_sequence_model(self.target, backend=self.backend)


def load_pair(
    target: str | None = None,
    draft: str | Sequence[str] | None = None,
    *,
    backend: str | None = None,
    draft_backend: str | None = None,
    useless_draft: bool = False,
    **loading: Any,
) -> Pair:
    """Load the networks; with no names the built-in pair.

    Args:
        target: Folder or name.
        draft: Likewise, or the folder of a head for the target; `None` beside a named target means
            that there is none. If there are several draft models, all draft where an arm's drafter
            takes several, else the first.
        backend: How this library's arms run them, `None` as `monge.load` does; arms of transformers
            run the networks as they are.
        draft_backend: How they run the draft model, if otherwise.
        useless_draft: Shift the rows of the draft network's output matrix by half the vocabulary:
            it costs what it costs, and guesses nothing.
        **loading: As for `monge.load`.
    """
    source = ModelSource.of(target)
    if source.is_built_in and draft is None:
        draft = str(built_in("draft"))
    drafts = drafts_of(draft, source, draft_backend)
    texts = [draft] if isinstance(draft, str) else draft or ()
    names = {"target": source.name, "draft": ", ".join(texts) or None}
    if useless_draft:
        if not drafts.models:
            raise OptionError("a useless draft needs a draft model to spoil; give --draft")
        names["draft"] = f"{names['draft']}, output shifted"
    source = prepare(source, backend, **loading)
    options = {"draft_backend": draft_backend, "max_batch_size": 1, **loading}
    drafter = None if drafts.models else "none"
    decoder = load(source, drafts.models or None, drafter=drafter, **options)
    model, models = decoder.components.target, decoder.components.draft_models
    loaded: Any = (model, *models)
    network, *networks = (getattr(part, "resized", part).network for part in loaded)
    for host in (network, *networks):
        host.generation_config = empty_settings(decoder.tokenizer)
    pair = Pair(
        target=network,
        draft=next(iter(networks), None),
        target_model=model,
        draft_model=next(iter(models), None),
        tokenizer=decoder.tokenizer,
        names=names,
        head=drafts.head_text,
        backend=source.backend,
        draft_backend=draft_backend,
        further=models[1:],
        decoder=decoder,
    )
    if not useless_draft:
        return pair
    _spoil(networks[0])
    return replace(pair, draft_model=draft_model_by(pair, draft_backend or source.backend))


def draft_model_by(pair: Pair, backend: str | Backend) -> SequenceModel:
    """Return the first draft model of a pair, run in another way."""
    assert pair.draft is not None
    # Their vocabularies were compared when they were loaded.
    tokenizers = {"tokenizer": pair.tokenizer, "target_tokenizer": pair.tokenizer}
    return as_draft_model(pair.draft, pair.target_model, **tokenizers, backend=backend)


def empty_settings(tokenizer: Any, **options: Any) -> GenerationConfig:  # noqa: ANN401 (the host's tokenizers share no type)
    """Return transformers' settings for decoding a network's own law."""
    return GenerationConfig(pad_token_id=tokenizer.pad_token_id or 0, **options)


@torch.no_grad()
def _spoil(network: PreTrainedModel) -> None:
    """Give every token another token's row of the output matrix.

    Where input and output share it, both move.
    """
    output: Any = network.get_output_embeddings()
    output.weight.copy_(output.weight.roll(len(output.weight) // 2, dims=0))
