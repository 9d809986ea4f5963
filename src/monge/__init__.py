"""Lossless acceleration of large language models by speculative decoding, seen as optimal transport.

`load` makes a `Decoder` from a target and what drafts for it; `accelerate` lets the `generate` of a
model of `transformers` decode speculatively.
"""

import typing
from importlib import import_module as _import_module
from importlib.metadata import version as _version

if typing.TYPE_CHECKING:
    from monge.api import load as load
    from monge.control.registry import CONTROLLERS as CONTROLLERS
    from monge.core.errors import ContextLengthError as ContextLengthError
    from monge.core.errors import LawError as LawError
    from monge.core.errors import ModelLoadError as ModelLoadError
    from monge.core.errors import MongeError as MongeError
    from monge.core.errors import NonFiniteLogitsError as NonFiniteLogitsError
    from monge.core.errors import OptionError as OptionError
    from monge.core.errors import ProposalMismatchError as ProposalMismatchError
    from monge.core.errors import UnsupportedModelError as UnsupportedModelError
    from monge.core.errors import VocabularyMismatchError as VocabularyMismatchError
    from monge.core.grammar import Grammar as Grammar
    from monge.core.law import DenseLaw as DenseLaw
    from monge.core.law import SparseLaw as SparseLaw
    from monge.core.sampling_rules import SamplingRules as SamplingRules
    from monge.core.sampling_rules import law_from_logits as law_from_logits
    from monge.core.tree import TokenTree as TokenTree
    from monge.core.verdict import StepRecord as StepRecord
    from monge.core.verdict import Verdict as Verdict
    from monge.draft.registry import DRAFTERS as DRAFTERS
    from monge.draft.tree.registry import TREES as TREES
    from monge.engine.decoder import Decoder as Decoder
    from monge.engine.decoder import Piece as Piece
    from monge.engine.result import GenerationResult as GenerationResult
    from monge.engine.result import GenerationStats as GenerationStats
    from monge.plugins.transformers_generate import accelerate as accelerate
    from monge.plugins.transformers_generate import generate as generate
    from monge.plugins.transformers_generate import is_accelerated as is_accelerated
    from monge.plugins.transformers_generate import restore as restore
    from monge.plugins.transformers_generate import speculate as speculate
    from monge.verify.registry import VERIFIERS as VERIFIERS

_MODULES = {
    "monge.api": "load",
    "monge.control.registry": "CONTROLLERS",
    "monge.core.errors": "ContextLengthError LawError ModelLoadError MongeError "
    "NonFiniteLogitsError "
    "OptionError ProposalMismatchError UnsupportedModelError VocabularyMismatchError",
    "monge.core.grammar": "Grammar",
    "monge.core.law": "DenseLaw SparseLaw",
    "monge.core.sampling_rules": "SamplingRules law_from_logits",
    "monge.core.tree": "TokenTree",
    "monge.core.verdict": "StepRecord Verdict",
    "monge.draft.registry": "DRAFTERS",
    "monge.draft.tree.registry": "TREES",
    "monge.engine.decoder": "Decoder Piece",
    "monge.engine.result": "GenerationResult GenerationStats",
    "monge.plugins.transformers_generate": "accelerate generate is_accelerated restore speculate",
    "monge.verify.registry": "VERIFIERS",
}
_PLACES = {name: module for module, names in _MODULES.items() for name in names.split()}
"""The module of each name. Modules are imported at first use, because torch takes a second."""

__version__ = _version("monge")
__all__ = [*_PLACES]  # noqa: PLE0604 (of texts)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> object:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(_import_module(_PLACES[name]), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
