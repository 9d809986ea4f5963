"""Drawn rounds: a tree, a verifier, limits and tables, all chosen by Hypothesis.

Their law by enumeration.

One round is drafted by the real drafter and tree builder and decided by the real verifier; the
target goes on to the horizon.
"""

import ast
import hashlib
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from random import Random
from typing import Final

import numpy as np
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from monge.core.context import Context, DraftPlan
from monge.core.errors import OptionError
from monge.core.sampling_rules import SamplingRules
from monge.draft.model import Model
from monge.draft.tree.base import TreeBuilder, TreeLimits
from monge.draft.tree.fixed_width import FixedWidth
from monge.draft.tree.registry import TREES
from monge.laws.draws import Draws
from monge.laws.from_logits import law_from_logits
from monge.laws.law import Law
from monge.laws.proposal import Arbitrary, Deterministic, Iid, Mixed, Proposal
from monge.laws.tree import GrowingTree, TokenTree
from monge.oracle.exact_law import exact_law, law_error
from monge.oracle.tabular import TabularModel
from monge.verify.base import Rule, as_verifier, why_no_exactness
from monge.verify.layer import FLOW_RULES
from monge.verify.registry import VERIFIERS
from tests.verify.programs import remembering_programs
from tests.verify.tables import remembering_tables
from tests.verify.whole_trees import continued

Text = tuple[int, ...]
PROMPT: Final[Text] = (0,)
MAX_DRAFTS: Final = 512  # outcomes of all draws of a tree, repeats counted
ENUMERABLE_OPTIMAL: Final = "optimal_given_candidates"


def verifiers() -> list[str]:
    """Every verifier that can be enumerated, `layer` with every inner rule and with its own choice."""
    texts = [name for name in VERIFIERS if name not in {"optimal", "gumbel"}]
    inner = [ENUMERABLE_OPTIMAL if name == "optimal" else name for name in FLOW_RULES]
    return [*texts, ENUMERABLE_OPTIMAL, *(f"layer({name!r})" for name in inner)]


WAYS: Final = (
    *("iid", "without_replacement", "top", "greedy_plus_one", "mixed(0)", "mixed", "mixed(2)"),
    "temperatures((0.7, 1.6))",
)
"""How children are drawn."""

WIDTHS: Final = (
    *((1,), (2,), (3,), (4,), (1, 1), (1, 2), (2, 1), (2, 2), (3, 1), (1, 3)),
    *((1, 1, 1), (1, 2, 1), (2, 1, 1), (1, 1, 2), (2, 2, 1)),
)


@dataclass(frozen=True, slots=True)
class Pruned(TreeBuilder):
    """A sampled tree that keeps its most probable paths: its candidates become `Arbitrary`."""

    grown: FixedWidth
    num_kept: int

    @property
    def limits(self) -> TreeLimits:
        return replace(self.grown.limits, proposes=frozenset[type[Proposal]]({Arbitrary}))

    def expand(
        self,
        tree: GrowingTree,
        frontier: Sequence[int],
        laws: Sequence[Law],
        plan: DraftPlan,
        draws: Draws,
    ) -> Sequence[int]:
        grown = self.grown.expand(tree, frontier, laws, plan, draws)
        law_of = dict(zip(frontier, laws, strict=True))
        for node in range(1, tree.num_nodes):
            if (parent := tree.parents[node]) in law_of:
                prob = law_of[parent].prob(tree.token_ids[node])
                tree.path_probs[node] = tree.path_probs[parent] * prob
        return grown

    def finish(self, tree: GrowingTree, plan: DraftPlan) -> TokenTree:
        best = sorted(range(1, tree.num_nodes), key=lambda node: -tree.path_probs[node])
        return tree.finish().prune(best[: self.num_kept])


def builder_of(text: str) -> TreeBuilder:
    """The builder that a drawn text names; `pruned` is known here only."""
    if not text.startswith("pruned"):
        return TREES.parse(text)
    num_kept, widths, way = ast.literal_eval(text.removeprefix("pruned"))
    return Pruned(FixedWidth(widths, way), num_kept)


@dataclass(frozen=True, slots=True)
class Shape:
    """A tree by its text, and how large it may become.

    Facts, since a strategy must not call what the type checker checks.
    """

    text: str
    max_depth: int
    max_nodes: int
    is_sampled: bool


def _texts(builder: str, way: str, widths: Text) -> list[str]:
    """A builder's trees of about these widths."""
    depth, width = len(widths), max(widths)
    texts = {
        "chain": [f"chain({depth}, {way!r})"],
        "fixed_width": [f"fixed_width({widths}, {way!r})"],
        "paths": [f"paths({width}, {depth})"],
        "pruned": [f"pruned({size}, {widths}, {way!r})" for size in (1, 3)],
    }
    sizes = product((2, 4, 6), (1, 2))
    ranked = [f"{builder}({size}, {depth}, {width}, {beam})" for size, beam in sizes]
    return texts.get(builder, ranked)


@cache
def shapes(verifier: str) -> dict[str, tuple[Shape, ...]]:
    """By builder, the trees for which a verifier is exact by its declaration, and on which it can be enumerated."""
    found: dict[str, dict[Shape, None]] = {}
    for builder, way, widths in product(BUILDERS, WAYS, WIDTHS):
        for text in _texts(builder, way, widths):
            if (limits := _limits(text)) is not None and _is_legal(limits, verifier):
                is_sampled = limits.proposes != {Deterministic}
                shape = Shape(text, limits.max_depth, limits.max_nodes, is_sampled)
                found.setdefault(builder, {})[shape] = None
    return {builder: tuple(own) for builder, own in found.items()}


@cache
def _limits(text: str) -> TreeLimits | None:
    try:
        return builder_of(text).limits
    except OptionError:
        return None  # the way of drawing needs wider nodes


BUILDERS: Final = (*TREES, "pruned")
BUDGETED: Final = ("fixed_width", "paths")
"""Builders of sampled trees that divide a budget among the nodes of a level.

Drawn three times as often.
"""


def _is_legal(limits: TreeLimits, verifier: str) -> bool:
    rule = _rule(verifier)
    if why_no_exactness(rule, limits.proposes, limits.max_width) is not None:
        return False
    draws_positions = any(
        issubclass(kind, Mixed) or (issubclass(kind, Iid) and limits.max_width > 1)
        for kind in limits.proposes
    )
    return rule.is_enumerable or (verifier == "layer" and not draws_positions)


@cache
def _rule(verifier: str) -> Rule:
    return VERIFIERS.parse(verifier)


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """One round of one request.

    Args:
        tree: Tree builder, with settings.
        verifier: Verifier, with settings.
        targets: Weights of the target's next token; which of them it is depends on the text.
        drafts: The same of the draft model.
        seed: Of the tables; where both are equal and `is_same`, target and draft model are.
        is_same: Whether the draft model picks its weights as the target does.
        max_nodes: Limit of the round; `None` for the builder's own.
        max_depth: The same.
        rules: The request's sampling rules.
        draft_rules: The draft model's, `None` for the request's.
    """

    tree: str
    verifier: str
    targets: tuple[tuple[int, ...], ...]
    drafts: tuple[tuple[int, ...], ...]
    seed: int = 0
    is_same: bool = False
    max_nodes: int | None = None
    max_depth: int | None = None
    rules: SamplingRules = SamplingRules()
    draft_rules: SamplingRules | None = None

    @property
    def plan(self) -> DraftPlan:
        """The limits."""
        return DraftPlan(max_nodes=self.max_nodes, max_depth=self.max_depth)


RULES: Final = (
    *[SamplingRules()] * 3,
    *(SamplingRules(temperature=value) for value in (0, 0.6, 1.6)),
    *(SamplingRules(top_k=2), SamplingRules(top_p=0.7), SamplingRules(temperature=0.8, min_p=0.3)),
)


def rounds(verifier: str) -> SearchStrategy[Round]:
    """Legal rounds for a verifier.

    Hypothesis draws one generator for a round: its own choices favour small and equal values, and
    faults hide in rounds whose laws are all point masses, or whose draft model is the target.
    """
    known = shapes(verifier)
    return st.randoms(use_true_random=True).map(lambda random: _round(random, verifier, known))


def _round(random: Random, verifier: str, known: dict[str, tuple[Shape, ...]]) -> Round:
    builders = sorted(known) + 2 * [name for name in BUDGETED if name in known]
    some = [random.choice(known[random.choice(builders)]) for _ in range(3)]
    # Trees without levels are many.
    shape = max(some, key=lambda one: one.is_sampled * one.max_depth * min(one.max_nodes, 6))
    fits = [size for size in (2, 3, 4) if size**shape.max_nodes <= MAX_DRAFTS]
    vocab = random.choice(fits or [2])
    largest = shape.max_nodes if fits else MAX_DRAFTS.bit_length() - 1
    targets = _weights(random, vocab)
    return Round(
        tree=shape.text,
        verifier=verifier,
        targets=targets,
        drafts=targets if random.random() < 0.25 else _weights(random, vocab),
        seed=random.randrange(100),
        is_same=random.random() < 0.2,
        max_nodes=random.randint(min(2, largest), largest)
        if not fits or random.random() < 0.7
        else None,
        max_depth=random.randint(0, shape.max_depth) if random.random() < 0.2 else None,
        rules=random.choice(RULES),
        draft_rules=random.choice(RULES) if random.random() < 0.3 else None,
    )


def _weights(random: Random, vocab: int) -> tuple[tuple[int, ...], ...]:
    """One to three laws: positive, with zeros, with ties, or a point mass."""
    return tuple(_law(random, vocab) for _ in range(random.randint(1, 3)))


def _law(random: Random, vocab: int) -> tuple[int, ...]:
    positive, zeros, ties, point_mass = (9, 1), (6, 0), (2, 1), (0, 0)
    largest, least = random.choice((positive, positive, positive, zeros, ties, point_mass))
    weights = [random.randint(least, largest) for _ in range(vocab)]
    weights[random.randrange(vocab)] += 1
    return tuple(weights)


class _Tables:
    """Weights after every text, chosen from a few by a hash of the text.

    Args:
        weights: The few.
        seed: Tables of different seeds choose differently.
    """

    def __init__(self, weights: Sequence[Sequence[int]], seed: int) -> None:
        self._laws = [[value / sum(own) for value in own] for own in weights]
        self._seed = seed

    def __call__(self, token_ids: Text) -> Sequence[float]:
        digest = hashlib.blake2b(repr((self._seed, token_ids)).encode(), digest_size=4).digest()
        return self._laws[int.from_bytes(digest, "big") % len(self._laws)]


class _Target:
    """The target's laws under the request's rules, by drafted path."""

    def __init__(self, case: Round) -> None:
        self._model = TabularModel(_Tables(case.targets, case.seed), len(case.targets[0]))
        self._rules, self._size = case.rules, len(case.targets[0])
        self._made: dict[Text, Law] = {}

    def law(self, path: Text) -> Law:
        if path not in self._made:
            logits = self._model._logits_after(PROMPT + path)
            self._made[path] = law_from_logits(logits, self._rules)
        return self._made[path]

    def target_masses(self, path: Text) -> np.ndarray:
        law = self.law(path)
        return np.array([law.prob(token) for token in range(self._size)])


class ReachableLaws:
    """The target's laws at the nodes of a tree; a node that the target cannot reach has none.

    A constraint of a user may raise there: plain decoding never asks it about such a text.
    """

    def __init__(self, tree: TokenTree, law: Callable[[Text], Law]) -> None:
        self._tree, self._law = tree, law

    def __len__(self) -> int:
        return self._tree.num_nodes

    def __getitem__(self, node: int) -> Law:
        path = self._tree.path_tokens(node)
        for depth, token in enumerate(path):
            assert self._law(path[:depth]).prob(token) > 0.0, f"a law was asked for after {path}"
        return self._law(path)


def round_error(case: Round) -> float:
    """Law error of the text that a round begins, to one token beyond its deepest node.

    No rule may ask for the target's law at a node that the target cannot reach.
    """
    builder, rule, target = builder_of(case.tree), as_verifier(_rule(case.verifier)), _Target(case)
    drafts = _Tables(case.drafts, case.seed if case.is_same else case.seed + 1000)
    context = Context(request_id=0, token_ids=PROMPT, num_prompt_tokens=1, rules=case.rules)
    found: dict[object, TokenTree] = {}

    def drafted(draws: Draws) -> object:
        drafter = Model(
            model=TabularModel(drafts, len(case.drafts[0])), tree=builder, rules=case.draft_rules
        )
        (draft,) = drafter.draft([context], drafter.open([context]), [case.plan], [draws])
        tree = draft.tree
        kinds = tuple((type(one), getattr(one, "width", None)) for one in tree.proposals)
        # Laws are a function of the path.
        key = tree.token_ids, tree.parents, tree.candidates, kinds
        found.setdefault(key, tree)
        return key

    texts: defaultdict[Text, float] = defaultdict(float)
    with ExitStack() as kept:
        kept.enter_context(remembering_programs())
        kept.enter_context(remembering_tables())
        for key, weight in exact_law(drafted).items():
            tree = found[key]

            def decided(draws: Draws, tree: TokenTree = tree) -> Text:
                verdict = rule.verify(tree, ReachableLaws(tree, target.law), draws)
                return (*(tree.token_ids[node] for node in verdict.path), verdict.next_token)

            for text, prob in exact_law(decided).items():
                texts[text] += weight * prob
    length = builder.limits.max_depth + 1
    return law_error(continued(texts, target, length), continued({(): 1.0}, target, length))
