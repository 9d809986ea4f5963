"""Tabular models and decoders on them."""

from monge.api import make_components
from monge.engine.decoder import Decoder
from monge.testing.tabular import RandomTable, TabularModel


def table(seed: int = 1, vocab: int = 5, max_length: int | None = None) -> TabularModel:
    """A model of a random table; the target has the seed 1, the draft model 2."""
    return TabularModel(RandomTable(vocab, seed), vocab, max_length)


def table_decoder(*, vocab: int = 5, max_length: int | None = None, **parts: object) -> Decoder:
    """A decoder of a target and a draft model with tables."""
    return Decoder(make_components(table(1, vocab, max_length), table(2, vocab), **parts))  # type: ignore[arg-type]
