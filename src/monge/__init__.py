"""Lossless acceleration of large language models by speculative decoding, seen as optimal transport.

`load` makes a `Decoder` from a target and what drafts for it; parts are objects, such as
`Pool(Ngram(), Model())` and `Chain(4)`, or their texts. `accelerate` lets the `generate` of a
model of `transformers` decode speculatively.
"""

import typing
import warnings as _warnings
from importlib import import_module as _import_module
from importlib.metadata import version as _version

from monge.core.former_modules import take_former_modules as _take_former_modules
from monge.core.parts import PARTS as _PARTS

if typing.TYPE_CHECKING:
    from monge.api import load as load
    from monge.backends.registry import Compiled as Compiled
    from monge.backends.registry import Eager as Eager
    from monge.control.fixed import Fixed as Fixed
    from monge.control.fsm import CachedFsm as CachedFsm
    from monge.control.fsm import Fsm as Fsm
    from monge.control.goodput import Goodput as Goodput
    from monge.control.hedge import Hedge as Hedge
    from monge.control.linear_selection import LinearSelection as LinearSelection
    from monge.control.on_the_fly import OnTheFly as OnTheFly
    from monge.control.q_learning import QLearning as QLearning
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
    from monge.core.sampling_rules import SamplingRules as SamplingRules
    from monge.core.verdict import StepRecord as StepRecord
    from monge.core.verdict import Verdict as Verdict
    from monge.draft.base import NoDrafter as NoDrafter
    from monge.draft.ensemble import Ensemble as Ensemble
    from monge.draft.model import Model as Model
    from monge.draft.ngram import Ngram as Ngram
    from monge.draft.pool import Pool as Pool
    from monge.draft.published_heads import Head as Head
    from monge.draft.registry import DRAFTERS as DRAFTERS
    from monge.draft.retokenize import Retokenize as Retokenize
    from monge.draft.shape import Shape as Shape
    from monge.draft.suffix import Suffix as Suffix
    from monge.draft.tree.best_first import BestFirst as BestFirst
    from monge.draft.tree.best_first import Eagle2 as Eagle2
    from monge.draft.tree.fixed_width import Chain as Chain
    from monge.draft.tree.fixed_width import FixedWidth as FixedWidth
    from monge.draft.tree.paths import Paths as Paths
    from monge.draft.tree.registry import TREES as TREES
    from monge.engine.decoder import Decoder as Decoder
    from monge.engine.decoder import StreamChunk as StreamChunk
    from monge.engine.result import GenerationResult as GenerationResult
    from monge.engine.result import GenerationStats as GenerationStats
    from monge.laws.from_logits import law_from_logits as law_from_logits
    from monge.laws.law import DenseLaw as DenseLaw
    from monge.laws.law import SparseLaw as SparseLaw
    from monge.laws.tree import TokenTree as TokenTree
    from monge.plugins.transformers_generate import accelerate as accelerate
    from monge.plugins.transformers_generate import generate as generate
    from monge.plugins.transformers_generate import is_accelerated as is_accelerated
    from monge.plugins.transformers_generate import restore as restore
    from monge.plugins.transformers_generate import speculate as speculate
    from monge.verify.block import Block as Block
    from monge.verify.canonical import Canonical as Canonical
    from monge.verify.greedy import Greedy as Greedy
    from monge.verify.gumbel import Gumbel as Gumbel
    from monge.verify.k_seq import KSeq as KSeq
    from monge.verify.layer import Layer as Layer
    from monge.verify.multipath_block import MultipathBlock as MultipathBlock
    from monge.verify.naive_tree import NaiveTree as NaiveTree
    from monge.verify.optimal import Optimal as Optimal
    from monge.verify.recursive_rejection import RecursiveRejection as RecursiveRejection
    from monge.verify.recursive_rejection_without_replacement import (
        RecursiveRejectionWithoutReplacement as RecursiveRejectionWithoutReplacement,
    )
    from monge.verify.registry import VERIFIERS as VERIFIERS
    from monge.verify.sample_and_match import SampleAndMatch as SampleAndMatch
    from monge.verify.speculative_sampling import SpeculativeSampling as SpeculativeSampling
    from monge.verify.traversal import Traversal as Traversal

_MODULES = {
    "monge.api": "load",
    "monge.control.registry": "CONTROLLERS",
    "monge.core.errors": "ContextLengthError LawError ModelLoadError MongeError "
    "NonFiniteLogitsError "
    "OptionError ProposalMismatchError UnsupportedModelError VocabularyMismatchError",
    "monge.core.grammar": "Grammar",
    "monge.laws.law": "DenseLaw SparseLaw",
    "monge.core.sampling_rules": "SamplingRules",
    "monge.laws.from_logits": "law_from_logits",
    "monge.laws.tree": "TokenTree",
    "monge.core.verdict": "StepRecord Verdict",
    "monge.draft.registry": "DRAFTERS",
    "monge.draft.tree.registry": "TREES",
    "monge.engine.decoder": "Decoder StreamChunk",
    "monge.engine.result": "GenerationResult GenerationStats",
    "monge.plugins.transformers_generate": "accelerate generate is_accelerated restore speculate",
    "monge.verify.registry": "VERIFIERS",
}
_PLACES = {name: module for module, names in _MODULES.items() for name in names.split()}
_PLACES |= {
    name: module
    for table in _PARTS.values()
    for module, _, name in (place.partition(":") for place in table.values())
}
"""The module of each name. Modules are imported at first use, because torch takes a second."""

_FORMER_NAMES = {"Piece": "StreamChunk"}
"""Names that this release takes beside the present names."""

_take_former_modules()
__version__ = _version("monge")
__all__ = [*_PLACES]  # noqa: PLE0604 (of texts)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> object:
    if name in _FORMER_NAMES:
        present = _FORMER_NAMES[name]
        text = f"monge.{name} is monge.{present} now; the next release takes no other name"
        _warnings.warn(text, FutureWarning, stacklevel=2)
        return __getattr__(present)
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(_import_module(_PLACES[name]), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
