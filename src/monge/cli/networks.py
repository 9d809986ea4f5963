"""Networks for commands that need more of them than a decoder shows.

Who they are, and the draft model by itself.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from transformers import PreTrainedModel

from monge.api import built_in, eos_ids_of
from monge.bench.provenance import provenance
from monge.cli.progress import working
from monge.core.errors import OptionError
from monge.core.model import SequenceModel
from monge.draft.by_name import drafters_in, head_drafter, with_head
from monge.engine.chat_format import chat_format
from monge.engine.decoder import Decoder
from monge.loading.networks import as_draft_model, as_sequence_model, load_network, load_tokenizer
from monge.replay.configuration import Configuration
from monge.replay.log import LawLog, ModelIdentity
from monge.replay.measure import TIMED, measured_costs
from monge.replay.record import identity_of, tokenizer_digest
from monge.replay.text import ReplayTarget

BUILT_IN = "built-in"


@dataclass(frozen=True, slots=True, kw_only=True)
class Networks:
    """A target and what drafts for it, in memory.

    Args:
        network: The target as its host runs it.
        target: As this library does.
        draft: The draft model, if there is one.
        tokenizer: Of the target.
        identity: Who the target is.
        backend: How both run.
        head: The drafter of a head that stands in the draft model's place, with its folder.
    """

    network: PreTrainedModel
    target: SequenceModel
    draft: SequenceModel | None
    tokenizer: Any
    identity: ModelIdentity
    backend: str
    head: str | None = None

    def chosen(self, configuration: Configuration) -> Configuration:
        """A configuration with the given head where it drafts by default, or is named without a folder."""
        text = configuration.drafter
        return replace(
            configuration, drafter=self.head if text is None else with_head(text, self.head)
        )

    def decoder(self, configuration: Configuration) -> Decoder:
        """A decoder with some parts."""
        chosen = self.chosen(configuration)
        parts = chosen.components(
            self.own_target() if chosen.takes_target else self.target, self.draft
        )
        return Decoder(
            parts,
            tokenizer=self.tokenizer,
            eos_ids=eos_ids_of(self.network),
            max_batch_size=1,
            chat=chat_format(self.tokenizer, is_built_in=self.identity.name == BUILT_IN),
        )

    def own_target(self) -> SequenceModel:
        """The target once more, same weights.

        A drafter may have it keep hidden states, which others need not pay for.
        """
        return as_sequence_model(self.network, backend=self.backend)

    def about(self) -> dict[str, Any]:
        """What a log says about the machine, and about what ran on it."""
        return provenance(self.network.device) | {"backend": self.backend}

    def further(self, drafters: Sequence[str]) -> list[str]:
        """The drafter of the given head, and those that were asked for, with that head filled in."""
        given = [] if self.head is None else [self.head]
        return [
            *given,
            *(one for one in (with_head(text, self.head) for text in drafters) if one not in given),
        ]

    def costs(self, drafters: Sequence[str]) -> dict[str, Any]:
        """Measured times of rounds, of the usual drafters and further ones.

        Of those that are made of others, by part.
        """
        singles = {
            one: Configuration(drafter=one) for text in drafters for one in drafters_in(text)
        }
        more = [one for text, one in singles.items() if text not in TIMED]
        targets = [self.own_target() if one.takes_target else self.target for one in more]
        return measured_costs(self.target, self.draft, list(zip(more, targets, strict=True)))


def load_networks(
    target: str | None = None,
    draft: str | None = None,
    *,
    backend: str = "eager",
    **loading: Any,
) -> Networks:
    """Load target and draft model, or target and head; without names the built-in pair.

    Args:
        target: Folder or name.
        draft: Likewise, or the folder of a head.
        backend: How both run, one of `BACKENDS`.
        **loading: For `load_network`.
    """
    with working("loading the models"):
        return _load(target, draft, backend, loading)


def _load(target: str | None, draft: str | None, backend: str, loading: dict[str, Any]) -> Networks:
    name = BUILT_IN if target is None else target
    if target is None:
        target, draft = str(built_in("target")), str(built_in("draft")) if draft is None else draft
    network, tokenizer = load_network(target, **loading), load_tokenizer(target)
    model = as_sequence_model(network, backend=backend)
    drafting, head = None, None if draft is None else head_drafter(draft, target)
    if draft is not None and head is None:
        drafting = as_draft_model(
            load_network(draft, **loading),
            model,
            tokenizer=load_tokenizer(draft),
            target_tokenizer=tokenizer,
            backend=backend,
        )
    return Networks(
        network=network,
        target=model,
        draft=drafting,
        tokenizer=tokenizer,
        identity=identity_of(network, tokenizer, name),
        backend=backend,
        head=head,
    )


def load_draft(log: LawLog, draft: str | None, **loading: Any) -> SequenceModel | None:
    """The draft model for a log; without a name the built-in one, where the log is the built-in target's.

    Raises:
        ForeignLogError: If its tokenizer or vocabulary is another than the log's.
        OptionError: If it is a head.
    """
    if draft is None and log.model.name != BUILT_IN:
        return None
    source = str(built_in("draft")) if draft is None else draft
    if head_drafter(source, None) is not None:
        raise OptionError(
            f"--draft: {source!r} is a head, which reads hidden states of the target, and a log "
            "holds none; use `monge "
            "tune` or `monge bench decode`, where the target runs"
        )
    network, tokenizer = load_network(source, **loading), load_tokenizer(source)
    size = int(network.config.get_text_config().vocab_size)
    log.check_model(
        ModelIdentity(name=source, vocab_size=size, tokenizer=tokenizer_digest(tokenizer)),
        "the draft model",
    )
    return as_draft_model(network, ReplayTarget(log.model.vocab_size))
