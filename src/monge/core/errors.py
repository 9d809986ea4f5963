"""The errors of the library. Each says what is wrong, where, what was expected, and what to do."""

import difflib
from collections.abc import Iterable


class MongeError(Exception):
    """Base class of every error raised on purpose by this library."""


class OptionError(MongeError, ValueError):
    """An option, name or argument that cannot be honoured."""


class LawError(MongeError, ValueError):
    """A vector that is not a probability law, or laws that do not fit together."""


class RequestError(MongeError):
    """An error of a single request; requests that share its rounds are not affected."""


class NonFiniteLogitsError(RequestError, LawError):
    """A model returned NaN or +inf logits, so no law can be made of them."""


class ProcessorError(RequestError):
    """A logits processor of the request raised; that exception is the `__cause__` of this error."""


class GrammarError(RequestError, ValueError):
    """A grammar that no token of the vocabulary can continue, or that takes too long to follow."""


class ProposalMismatchError(MongeError, ValueError):
    """The candidates were drawn in a way for which the verifier is not exact."""


class VocabularyMismatchError(MongeError, ValueError):
    """Target and draft model have different vocabularies."""


class ContextLengthError(MongeError, ValueError):
    """A prompt, or a prompt and its continuation, does not fit the model's context."""


class UnsupportedModelError(MongeError, ValueError):
    """A model whose architecture cannot be decoded as requested."""


class BackendError(MongeError, RuntimeError):
    """A network that cannot run as requested, on this machine or at all."""


class DrafterError(MongeError, RuntimeError):
    """A drafter raised after it had drawn tokens; to continue without them would bias the texts of the round."""


class ModelLoadError(MongeError, OSError):
    """A checkpoint that is missing, incomplete or unreadable."""


def unknown_name(kind: str, name: object, known: Iterable[str]) -> OptionError:
    """Error for a name that is not registered, with the nearest valid name."""
    names = sorted(known)
    near = difflib.get_close_matches(str(name), names, n=1, cutoff=0.5)
    hint = f"; did you mean {near[0]!r}?" if near else "."
    return OptionError(f"unknown {kind} {name!r}{hint} Known: {', '.join(names)}")
