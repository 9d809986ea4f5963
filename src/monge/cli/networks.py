"""Networks for commands that need more of them than a decoder shows: who they are, and the draft model by itself."""

from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel

from monge.api import built_in, eos_ids_of
from monge.core.model import SequenceModel
from monge.engine.decoder import Decoder
from monge.engine.loading import as_draft_model, as_sequence_model, load_network, load_tokenizer
from monge.replay.configuration import Configuration
from monge.replay.log import LawLog, ModelIdentity
from monge.replay.record import identity_of, tokenizer_digest
from monge.replay.text import ReplayTarget

BUILT_IN = "built-in"


@dataclass(frozen=True, slots=True, kw_only=True)
class Networks:
    """A target and what drafts for it, in memory."""

    network: PreTrainedModel
    target: SequenceModel
    draft: SequenceModel | None
    tokenizer: Any
    identity: ModelIdentity

    def decoder(self, configuration: Configuration) -> Decoder:
        """A decoder with some parts."""
        parts = configuration.parts(self.target, self.draft)
        return Decoder(parts, tokenizer=self.tokenizer, eos_ids=eos_ids_of(self.network), max_batch_size=1)


def load_networks(target: str | None, draft: str | None, **loading: Any) -> Networks:
    """Load target and draft model; without names the built-in pair."""
    name = BUILT_IN if target is None else target
    if target is None:
        target, draft = str(built_in("target")), str(built_in("draft")) if draft is None else draft
    network, tokenizer = load_network(target, **loading), load_tokenizer(target)
    model = as_sequence_model(network)
    drafting = None
    if draft is not None:
        drafting = as_draft_model(
            load_network(draft, **loading), model, tokenizer=load_tokenizer(draft), target_tokenizer=tokenizer
        )
    identity = identity_of(network, tokenizer, name)
    return Networks(network=network, target=model, draft=drafting, tokenizer=tokenizer, identity=identity)


def load_draft(log: LawLog, draft: str | None, **loading: Any) -> SequenceModel | None:
    """The draft model for a log; without a name the built-in one, where the log is the built-in target's.

    Raises:
        ForeignLogError: If its tokenizer or vocabulary is another than the log's.
    """
    if draft is None and log.model.name != BUILT_IN:
        return None
    source = str(built_in("draft")) if draft is None else draft
    network, tokenizer = load_network(source, **loading), load_tokenizer(source)
    size = int(network.config.get_text_config().vocab_size)
    log.check_model(ModelIdentity(name=source, vocab_size=size, tokenizer=tokenizer_digest(tokenizer)), "the draft model")
    return as_draft_model(network, ReplayTarget(log.model.vocab_size))
