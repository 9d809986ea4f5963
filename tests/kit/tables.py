"""Tabular models, decoders on them, and the law of the text that the loop writes with them."""

from collections.abc import Callable, Sequence

from monge.api import make_components
from monge.engine.decoder import Decoder
from monge.oracle.decoding import Case, output_law, target_law
from monge.oracle.exact_law import law_error
from monge.oracle.tabular import RandomTable, Style, TabularModel


def table(
    seed: int = 1, vocab: int = 5, max_length: int | None = None, style: Style = "positive"
) -> TabularModel:
    """A model of a random table; the target has the seed 1, the draft model 2."""
    return TabularModel(RandomTable(vocab, seed, style), vocab, max_length)


def loop_error(models: Callable[[], Sequence[TabularModel]], case: Case, **parts: object) -> float:
    """Law error of the text of the loop, with a target, draft models and other parts.

    Args:
        models: Makes the target and the draft models afresh.
        case: The request.
        parts: Arguments of `make_components`.
    """
    output = output_law(lambda: make_components(*models(), **parts), case)  # type: ignore[arg-type]
    return law_error(output, target_law(models()[0], case))


def table_decoder(*, vocab: int = 5, max_length: int | None = None, **parts: object) -> Decoder:
    """A decoder of a target and a draft model with tables."""
    return Decoder(make_components(table(1, vocab, max_length), table(2, vocab), **parts))  # type: ignore[arg-type]
