"""The exact law of the text that a rule writes, on small random cases in the real loop."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from monge.api import make_components
from monge.core.errors import OptionError
from monge.draft.tree.children import CHILDREN
from monge.draft.tree.registry import TREES
from monge.oracle.decoding import Case, output_law, target_law
from monge.oracle.exact_law import OracleError, PositionError, law_error
from monge.oracle.tabular import RandomTable, Style, TabularModel
from monge.verify.base import Rule, why_no_exactness
from monge.verify.registry import VERIFIERS

EXACT: Final = 1e-12
"""Largest law error of an exact rule: rounding of float64."""

_TABLES: Final[tuple[tuple[Style, int, int], ...]] = (
    ("positive", 11, 23),
    ("positive", 7, 7),  # equal laws of target and draft model
    ("sparse", 5, 17),
    ("ties", 3, 4),
)
"""Style of the tables, and the seeds of the target's and of the draft model's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeProof:
    """The largest law error of a rule on a tree; infinite if the rule has no law there, with the reason."""

    tree: str
    law_error: float
    reason: str | None = None

    @property
    def is_exact(self) -> bool:
        """True if the text has the target's law, to rounding."""
        return self.law_error < EXACT


def prove(verifier: str) -> list[TreeProof]:
    """Enumerate every draw of a verifier on small trees of all kinds that it accepts.

    Args:
        verifier: Its name, with settings.

    Raises:
        OptionError: If the name is unknown, or the rule cannot be enumerated.
    """
    rule = VERIFIERS.parse(verifier)
    if not rule.is_enumerable:
        raise OptionError(
            f"verifier {verifier!r} draws positions in [0, 1] and cannot be enumerated; prove it by "
            "integration"
        )
    trees = {f"chain(2, {way!r})": 2 for way in ("iid", "without_replacement", "top")}
    for widths, depth in (("(3,)", 1), ("(2,)", 1), ("(2, 1)", 2)):
        trees |= {f"fixed_width({widths}, {way!r})": depth for way in CHILDREN}
    trees |= {"paths(2, 2)": 2}
    accepted = {tree: depth for tree, depth in trees.items() if _accepts(rule, tree)}
    if not accepted:
        raise OptionError(
            f"verifier {verifier!r} accepts no way in which trees draw children; see `monge list`"
        )
    return [_proof(rule, tree, depth) for tree, depth in accepted.items()]


def _accepts(rule: Rule, tree: str) -> bool:
    try:
        limits = TREES.parse(tree).limits
    except OptionError:
        return False  # the sampling scheme needs wider nodes
    return why_no_exactness(rule, limits.proposes, limits.max_width) is None


def _proof(rule: Rule, tree: str, depth: int) -> TreeProof:
    vocab = 3 if depth == 1 or tree.startswith("chain") else 2
    case = Case(horizon=depth + 1, max_new_tokens=depth + 1)
    worst = 0.0
    for style, *seeds in _TABLES:

        def models(style: Style = style, seeds: Sequence[int] = seeds) -> list[TabularModel]:
            return [TabularModel(RandomTable(vocab, seed, style), vocab) for seed in seeds]

        try:
            law = output_law(
                lambda models=models: make_components(*models(), tree=tree, verifier=rule), case
            )
        except PositionError as error:
            raise OptionError(f"{rule.title} cannot be enumerated: {error}") from error
        except OracleError as error:
            return TreeProof(tree=tree, law_error=float("inf"), reason=str(error))
        worst = max(worst, law_error(law, target_law(models()[0], case)))
    return TreeProof(tree=tree, law_error=worst)
