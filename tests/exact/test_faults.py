"""Faults at every call of a part, enumerated.

The written text keeps the target's law, or the request ends in an error.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from monge.api import make_components
from monge.control.fixed import Fixed
from monge.core.context import Context, DraftPlan
from monge.core.draws import Draws, SeededDraws
from monge.core.errors import DrafterError, NonFiniteLogitsError
from monge.core.law import Law
from monge.core.model import NodeBlock
from monge.core.proposal import WithoutReplacement
from monge.core.sampling_rules import SamplingRules
from monge.core.tree import GrowingTree, TokenTree
from monge.core.verdict import Verdict
from monge.draft.base import AnyDrafter, Capabilities, Draft, Drafter
from monge.draft.growth import LevelForward, TreeExpansion
from monge.draft.layer_skip import LayerSkipDrafter
from monge.draft.model import ModelDrafter
from monge.draft.published_heads import HeadDrafter
from monge.draft.shape import ShapeDrafter
from monge.draft.tree.base import TreeBuilder, TreeLimits
from monge.draft.tree.registry import TREES
from monge.engine.batch import Batch
from monge.engine.components import Components
from monge.engine.decoder import Decoder
from monge.engine.session import Request, Session
from monge.heads.readers.registry import load_head
from monge.testing.decoding import Case, target_law
from monge.testing.oracle import exact_law
from monge.testing.tabular import RandomTable, TabularModel
from monge.verify.base import Rule, Verifier, as_verifier
from monge.verify.problem import ScoredTree
from monge.verify.registry import VERIFIERS
from tests.draft.test_cross_tokenizer import foreign
from tests.draft.test_layer_skip import Layered
from tests.heads.readers.published import KINDS
from tests.heads.toy import random_head

pytestmark = [
    pytest.mark.usefixtures("unchecked_types"),
    pytest.mark.filterwarnings("ignore:request .*the drafter failed:UserWarning"),
]

Text = tuple[int, ...]
END = -1
"""Stands behind what a request had written when it ended in an error."""


class Fault(Exception):
    """An error that no library knows."""


@dataclass(slots=True)
class Faults:
    """Counts the calls of one kind and raises in one of them.

    Args:
        key: Part, method, and `before` or `after` its work.
        number: The call that raises, from 0; `None` for none.
        goes_on: Whether all later calls raise too.
    """

    key: tuple[str, str, str]
    number: int | None
    goes_on: bool = False
    count: int = 0

    def meet(self, *key: str) -> None:
        if key != self.key:
            return
        self.count += 1
        if self.number is not None and (
            self.count == self.number + 1 or (self.goes_on and self.count > self.number)
        ):
            raise Fault(f"call {self.count - 1} of {key}")

    def around(self, part: str, method: str, work: Callable[[], Any]) -> Any:
        self.meet(part, method, "before")
        done = work()
        self.meet(part, method, "after")
        return done


class FaultyModel(TabularModel):
    def __init__(self, seed: int, vocab_size: int, part: str, faults: Faults) -> None:
        super().__init__(RandomTable(vocab_size, seed), vocab_size)
        self._part, self._faults = part, faults

    def open(self, prefixes: Mapping[int, Sequence[int]]) -> None:
        self._faults.around(self._part, "open", lambda: TabularModel.open(self, prefixes))

    def append(self, pieces: Mapping[int, Sequence[int]]) -> None:
        self._faults.around(self._part, "append", lambda: TabularModel.append(self, pieces))

    def extend(self, blocks: Mapping[int, NodeBlock]) -> Any:
        return self._faults.around(self._part, "extend", lambda: TabularModel.extend(self, blocks))

    def commit(self, paths: Mapping[int, Sequence[int]]) -> None:
        self._faults.around(self._part, "commit", lambda: TabularModel.commit(self, paths))

    def close(self, sequence: int) -> None:
        self._faults.around(self._part, "close", lambda: TabularModel.close(self, sequence))


@dataclass(frozen=True, slots=True)
class FaultyDrafter(Drafter[Any]):
    """Somebody else's drafter, of which nobody knows where it raises."""

    inner: AnyDrafter
    faults: Faults

    @property
    def capabilities(self) -> Capabilities:
        return self.inner.capabilities

    def open(self, contexts: Sequence[Context]) -> Sequence[Any]:
        return self.faults.around("drafter", "open", lambda: self.inner.open(contexts))

    def draft(
        self,
        contexts: Sequence[Context],
        states: Sequence[Any],
        plans: Sequence[DraftPlan],
        draws: Sequence[Draws],
    ) -> Sequence[Draft[Any]]:
        return self.faults.around(
            "drafter", "draft", lambda: self.inner.draft(contexts, states, plans, draws)
        )

    def observe(
        self, contexts: Sequence[Context], drafts: Sequence[Draft[Any]], verdicts: Sequence[Verdict]
    ) -> Sequence[Any]:
        return self.faults.around(
            "drafter", "observe", lambda: self.inner.observe(contexts, drafts, verdicts)
        )

    def close(self, context: Context) -> None:
        self.faults.around("drafter", "close", lambda: self.inner.close(context))


@dataclass(frozen=True, slots=True)
class FaultyBuilder(TreeBuilder):
    inner: TreeBuilder
    faults: Faults

    @property
    def limits(self) -> TreeLimits:
        return self.inner.limits

    def expand(
        self,
        tree: GrowingTree,
        frontier: Sequence[int],
        laws: Sequence[Law],
        plan: DraftPlan,
        draws: Draws,
    ) -> Sequence[int]:
        return self.faults.around(
            "builder", "expand", lambda: self.inner.expand(tree, frontier, laws, plan, draws)
        )

    def finish(self, tree: GrowingTree, plan: DraftPlan) -> TokenTree:
        return self.faults.around("builder", "finish", lambda: self.inner.finish(tree, plan))


class FaultyVerifier(Verifier):
    def __init__(self, rule: Rule, faults: Faults) -> None:
        self._inner, self._faults = as_verifier(rule), faults
        self.accepts, self.max_width = rule.accepts, rule.max_width

    def verify(self, tree: TokenTree, target_laws: Any, draws: Draws) -> Verdict:
        return self._inner.verify(tree, target_laws, draws)

    def verify_many(self, scored: Sequence[ScoredTree]) -> Sequence[Verdict | NonFiniteLogitsError]:
        return self._faults.around("verifier", "verify", lambda: self._inner.verify_many(scored))


class CannotRead(TabularModel):
    """A network that cannot read one token, wherever it stands in what is drafted."""

    token = 1
    prompt: Text = ()
    """Beginning of the texts in which it cannot."""

    def extend(self, blocks: Mapping[int, NodeBlock]) -> Any:
        logits = super().extend(blocks)
        for sequence, block in blocks.items():
            text = (*self.text(sequence), *block.token_ids)
            if self.token in block.token_ids and text[: len(self.prompt)] == self.prompt:
                raise Fault(f"token {self.token}")
        return logits


class ReadsFewNodes(TabularModel):
    """A draft network without the memory for several nodes: at once, or beside those it has read.

    Nor does it read some depths, in texts of some beginning.
    """

    most_at_once: float = float("inf")
    most_beside: float = float("inf")
    too_deep: Mapping[int, int] = MappingProxyType({})
    """By request, the first depth that is not read."""

    def extend(self, blocks: Mapping[int, NodeBlock]) -> Any:
        logits = super().extend(blocks)
        for sequence in blocks:
            nodes = self._nodes[sequence]
            depth = max(map(len, nodes)) - len(self.text(sequence))
            if (
                sum(len(one.token_ids) for one in blocks.values()) > self.most_at_once
                or len(nodes) > self.most_beside
                or depth >= self.too_deep.get(sequence, depth + 1)
            ):
                raise Fault("out of memory")
        return logits


class CannotEmbed(TabularModel):
    """A target one of whose tokens its heads cannot read, once they are made."""

    is_broken = False

    def embed(self, token_ids: Sequence[int]) -> Any:
        if self.is_broken and 1 in token_ids:
            raise Fault("token 1")
        return super().embed(token_ids)


@dataclass(frozen=True, slots=True)
class RaisesAfterDrawing(ModelDrafter):
    """Somebody else's drafter, which dislikes what it has drawn."""

    token: int = 1
    request_id: int = 0

    def draft(
        self,
        contexts: Sequence[Context],
        states: Sequence[Any],
        plans: Sequence[DraftPlan],
        draws: Sequence[Draws],
    ) -> Sequence[Draft[Any]]:
        drafts = ModelDrafter.draft(self, contexts, states, plans, draws)
        for context, draft in zip(contexts, drafts, strict=True):
            if context.request_id == self.request_id and self.token in draft.tree.token_ids[1:]:
                raise Fault(f"token {self.token}")
        return drafts


def written(
    make: Callable[[], Components], case: Case, *, isolated: bool = True
) -> dict[Text, float]:
    """Law of what the loop writes up to the horizon.

    What ended in an error before ends with `END`.
    """
    return exact_law(lambda draws: _run(make(), case, draws, isolated=isolated))


def _run(components: Components, case: Case, draws: Draws, *, isolated: bool) -> Text:
    prompts = list(case.neighbours)
    prompts.insert(case.slot, case.prompt)
    sessions = [
        Session(
            Request(
                prompt_ids=prompt,
                max_new_tokens=case.max_new_tokens,
                rules=case.rules,
                seed=row,
                draws=draws if row == case.slot else None,
            ),
            request_id=row,
        )
        for row, prompt in enumerate(prompts)
    ]
    watched, batch = sessions[case.slot], Batch(components, isolated=isolated)
    try:
        batch.join(sessions)
        while watched.finish_reason is None and watched.num_generated < case.horizon:
            batch.step()
    except Fault:
        watched.fail(Fault())
    text = watched.completion_ids[: case.horizon]
    return text if len(text) == case.horizon or watched.error is None else (*text, END)


def excess(law: Mapping[Text, float], truth: Mapping[Text, float]) -> float:
    """By how much a beginning is written more often than under the target's law.

    Where nothing ends in an error that is the largest difference of the two laws of beginnings,
    since both sum to one. Where something does, some texts of the target's law are cut off: no
    beginning is written more often than under that law.
    """
    beginnings = {
        text[:length]
        for text in (*truth, *law)
        for length in range(len(text) + 1)
        if END not in text[:length]
    }

    def mass(of: Mapping[Text, float], beginning: Text) -> float:
        return sum(weight for text, weight in of.items() if text[: len(beginning)] == beginning)

    return max(mass(law, beginning) - mass(truth, beginning) for beginning in beginnings)


def num_errors(law: Mapping[Text, float]) -> float:
    """Mass of the texts that ended in an error."""
    return sum(weight for text, weight in law.items() if text[-1:] == (END,))


PAIRS = [
    ("chain(2)", "single_draft"),
    ("chain(2)", "block"),
    ("chain(2)", "layer"),
    ("fixed_width((2, 1), 'iid')", "rrs"),
    ("fixed_width((2, 1), 'iid')", "layer('rrs')"),
    ("paths(2, 2)", "multipath_block"),
]
MORE_PAIRS = [
    ("chain(3)", "block"),
    ("fixed_width((2, 1), 'iid')", "layer('k_seq')"),
    ("fixed_width((2, 1), 'iid')", "multipath_block"),
    ("fixed_width((2, 1), 'without_replacement')", "rrs_without_replacement"),
    ("fixed_width((2, 1), 'without_replacement')", "traversal"),
    ("fixed_width((2, 1), 'greedy_plus_one')", "greedy"),
    ("fixed_width((2, 1), 'systematic')", "systematic"),
    ("threshold(0.1, 2, 2, 6, 'iid')", "rrs"),
    ("sequoia(3, 2, (0.5, 0.3), 'iid')", "rrs"),
    ("best_first(4, 3, 2, 2)", "target_walk"),
]


def case_of(tree: str, **options: Any) -> Case:
    """Two tokens where a round has few branches, one where it has many.

    What is thrown away shows in the first.
    """
    return Case(horizon=2 if tree.startswith("chain") else 1, max_new_tokens=3, **options)


@pytest.mark.parametrize(("tree", "verifier"), PAIRS + MORE_PAIRS)
def test_a_token_that_the_draft_model_cannot_read_costs_speculation_and_no_bias(
    tree: str, verifier: str
) -> None:
    def make() -> Components:
        draft = CannotRead(RandomTable(3, 23), 3)
        return make_components(
            TabularModel(RandomTable(3, 11), 3), draft, tree=tree, verifier=verifier
        )

    case = case_of(tree)
    law, truth = written(make, case), target_law(make().target, case)  # type: ignore[arg-type]
    assert num_errors(law) == 0.0
    assert excess(law, truth) < 1e-12


@pytest.mark.parametrize("seeds", [(5, 6), (7, 9)])
def test_only_the_nodes_that_cannot_be_read_end(seeds: tuple[int, int]) -> None:
    """Of independent paths, the others go on.

    Rules for whole paths rely on it that a path ends for its own sake.
    """

    def make() -> Components:
        draft = CannotRead(RandomTable(2, seeds[1]), 2)
        return make_components(
            TabularModel(RandomTable(2, seeds[0]), 2),
            draft,
            tree="paths(2, 3)",
            verifier="multipath_block",
        )

    case = Case(horizon=2, max_new_tokens=4)
    assert excess(written(make, case), target_law(make().target, case)) < 1e-12  # type: ignore[arg-type]


LIMITS = (
    {"most_at_once": 2, "too_deep": {0: 2, 1: 1}},
    {"most_beside": 2},
    {"most_at_once": 1},
    {"too_deep": {0: 1}},
)


@pytest.mark.parametrize(
    ("tree", "verifier", "limits"),
    [
        *((*pair, one) for pair in (*PAIRS, ("paths(2, 3)", "multipath_block")) for one in LIMITS),
        *((*pair, one) for pair in MORE_PAIRS for one in LIMITS[:2]),
    ],
    ids=str,
)
def test_a_network_that_reads_few_nodes_at_once_costs_time_and_no_bias(
    tree: str, verifier: str, limits: Mapping[str, Any]
) -> None:
    """A level that is too large for the network says how many tokens were drawn.

    Whether a node goes on must not depend on it where a rule weighs whole paths.
    """

    def make() -> Components:
        draft = ReadsFewNodes(RandomTable(2, 20), 2)
        for name, value in limits.items():
            setattr(draft, name, value)
        return make_components(
            TabularModel(RandomTable(2, 8), 2), draft, tree=tree, verifier=verifier
        )

    # The first token shows a bias: the rounds behind it have no drafter any more.
    case = Case(horizon=1 if "3" not in tree else 2, max_new_tokens=4)
    law, truth = written(make, case), target_law(make().target, case)  # type: ignore[arg-type]
    assert num_errors(law) == 0.0
    assert excess(law, truth) < 1e-12


def test_a_level_that_ends_for_its_size_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fault that the test above is there for: a level that cannot be read at once is dropped."""

    def dropped(growth: TreeExpansion, reader: LevelForward) -> None:
        growth.error, growth.frontier = Fault(), ()

    monkeypatch.setattr("monge.draft.growth._read_alone", dropped)

    def make() -> Components:
        draft = ReadsFewNodes(RandomTable(2, 20), 2)
        draft.most_at_once = 1
        return make_components(
            TabularModel(RandomTable(2, 8), 2),
            draft,
            tree="paths(2, 3)",
            verifier="multipath_block",
        )

    case = Case(horizon=2, max_new_tokens=4)
    assert excess(written(make, case), target_law(make().target, case)) > 1e-3  # type: ignore[arg-type]


class FailsTwice(TabularModel):
    """A draft network that cannot read the first level, neither for all requests nor for one."""

    calls = 0

    def extend(self, blocks: Mapping[int, NodeBlock]) -> Any:
        self.calls += 1
        if self.calls in {2, 3}:
            raise Fault("out of memory")
        return super().extend(blocks)


def test_a_node_that_is_read_alone_is_drawn_from_the_law_after_its_path() -> None:
    """Levels below one that failed are read in the same way: their parents may not be in the cache."""
    table = RandomTable(3, 23)
    drafter = ModelDrafter(
        model=FailsTwice(table, 3),
        tree=TREES.parse("fixed_width((3, 2, 2), 'without_replacement')"),
    )
    context = Context(request_id=0, token_ids=(0,), num_prompt_tokens=1, rules=SamplingRules())
    (draft,) = drafter.draft([context], drafter.open([context]), [DraftPlan()], [SeededDraws(4)])
    assert isinstance(draft.error, Fault)
    told = draft.tree
    drawn = [node for node in range(told.num_nodes) if told.candidates[node]]
    assert len(drawn) == 1 + 3 + 6
    for node in drawn:
        proposal = told.proposals[node]
        assert isinstance(proposal, WithoutReplacement)
        masses = [proposal.law.prob(token) for token in range(3)]
        assert masses == pytest.approx(list(table((0, *told.path_tokens(node)))), abs=1e-12)


class NotFinite(TabularModel):
    """A draft network whose logits after token 1 are no numbers."""

    def extend(self, blocks: Mapping[int, NodeBlock]) -> Any:
        logits = super().extend(blocks)
        for sequence, block in blocks.items():
            for row, token in enumerate(block.token_ids):
                if token == 1:
                    logits[sequence][row] = float("nan")
        return logits


@pytest.mark.parametrize(
    "min_token_prob",
    [0.01, None],
)
@pytest.mark.parametrize("tree", ["fixed_width((2, 2), 'top')", "paths(4, 3)"])
def test_a_threshold_is_asked_about_the_nodes_that_have_a_law(
    tree: str, min_token_prob: float | None
) -> None:
    model = NotFinite(RandomTable(2, 23), 2)
    drafter = ModelDrafter(model=model, tree=TREES.parse(tree))
    context = Context(request_id=0, token_ids=(0,), num_prompt_tokens=1, rules=SamplingRules())
    with pytest.warns(UserWarning, match="draft model, request 0: logits are not finite"):
        (draft,) = drafter.draft(
            [context],
            drafter.open([context]),
            [DraftPlan(min_token_prob=min_token_prob)],
            [SeededDraws(0)],
        )
    assert draft.error is None
    told = draft.tree
    nodes = [node for node in range(1, told.num_nodes) if told.depths[node] == 1]
    assert sorted(told.token_ids[node] for node in nodes) == [0, 1]
    assert [bool(told.candidates[node]) for node in nodes] == [
        told.token_ids[node] == 0 for node in nodes
    ]
    assert all(1 not in path[:-1] for path in draft.token_probs)


def networks_that_cannot_read_a_token(kind: str, folder: Path) -> Components:
    target, draft = TabularModel(RandomTable(3, 11), 3), CannotRead(RandomTable(3, 23), 3)
    tree = "fixed_width((2, 1), 'iid')"
    if kind == "pool":
        return make_components(
            target, draft, drafter="pool('ngram(2)', 'model')", tree=tree, verifier="rrs"
        )
    if kind == "layer_skip":
        target = Layered()
        target.shortened = lambda _: draft  # type: ignore[method-assign]
        return make_components(
            target, drafter=LayerSkipDrafter(target=target, tree=TREES.parse(tree)), verifier="rrs"
        )
    if kind == "shape":
        target = CannotEmbed(RandomTable(3, 11), 3)
        drafter = ShapeDrafter(
            target=target, head=random_head(target), tree=TREES.parse("chain(2)")
        )
        target.is_broken = True
        return make_components(target, drafter=drafter, verifier="rrs")
    target, path, tree = CannotEmbed(RandomTable(3, 11), 3), folder / kind, "chain(2)"
    head = load_head(path if path.exists() else KINDS[kind](3, 3).write(path))
    drafter = HeadDrafter(target=target, head=head, tree=TREES.parse(tree))
    target.is_broken = True
    return make_components(target, drafter=drafter, verifier="rrs")


@pytest.mark.parametrize("kind", ["pool", "layer_skip", "shape", "medusa", "mtp-qwen"])
def test_other_networks_that_cannot_read_a_token(kind: str, tmp_path: Path) -> None:
    def make() -> Components:
        return networks_that_cannot_read_a_token(kind, tmp_path)

    case = case_of("fixed_width((2, 1), 'iid')", prompt=(0, 2) if kind == "pool" else (0, 2, 0))
    law, truth = written(make, case), target_law(make().target, case)  # type: ignore[arg-type]
    assert num_errors(law) == 0.0
    assert excess(law, truth) < 1e-12


@pytest.mark.parametrize(("tree", "verifier"), PAIRS)
def test_a_drafter_of_others_that_raises_after_drawing_ends_its_request(
    tree: str, verifier: str
) -> None:
    def make() -> Components:
        drafter = RaisesAfterDrawing(
            model=TabularModel(RandomTable(3, 23), 3), tree=TREES.parse(tree)
        )
        return make_components(
            TabularModel(RandomTable(3, 11), 3), drafter=drafter, verifier=verifier
        )

    case = case_of(tree)
    law, truth = written(make, case), target_law(make().target, case)  # type: ignore[arg-type]
    assert 0.1 < num_errors(law) < 1.0
    assert excess(law, truth) < 1e-12
    if tree == "chain(2)":
        # The drafter fails for its neighbour, and with it the round: what it has written is unbiased.
        law = written(make, case_of(tree, neighbours=((0,),), slot=1))
        assert excess(law, truth) < 1e-12


def test_who_has_drawn_in_vain_is_told_what_to_do() -> None:
    drafter = RaisesAfterDrawing(
        model=TabularModel(RandomTable(3, 23), 3), tree=TREES.parse("chain(2)")
    )
    components = make_components(TabularModel(RandomTable(3, 11), 3), drafter=drafter)
    with pytest.raises(
        DrafterError, match="request 0: the drafter failed .Fault: token 1"
    ) as raised:
        Decoder(components, max_batch_size=3).generate(
            [(0,), (0,), (2,)], max_new_tokens=40, temperature=1.0, seed=0
        )
    assert "may raise before its first draw, or return the tree so far with `Draft.error`" in str(
        raised.value
    )


def test_what_is_drawn_is_offered_and_neighbours_keep_their_drafts() -> None:
    def texts(draft: TabularModel) -> Any:
        components = make_components(
            TabularModel(RandomTable(3, 11), 3), draft, tree="chain(3)", verifier="single_draft"
        )
        return Decoder(components, max_batch_size=3).generate(
            [(0,), (2,), (0, 2)], max_new_tokens=40, temperature=1.0, seed=10
        )

    broken = CannotRead(RandomTable(3, 23), 3)
    broken.prompt = (2,)
    with pytest.warns(
        UserWarning,
        match="request 1: the drafter failed .Fault: token 1.; the request is decoded without",
    ) as said:
        results = texts(broken)
    assert len([one for one in said if "drafter failed" in str(one.message)]) == 1
    plain = texts(TabularModel(RandomTable(3, 23), 3))
    assert [results[row].token_ids for row in (0, 2)] == [plain[row].token_ids for row in (0, 2)]
    assert [one.error for one in results] == [None] * 3
    depths = [record.depth for record in results[1].records]
    last = max(number for number, depth in enumerate(depths) if depth)
    assert 0 < depths[last] < 3, "the last tree is as far as it was drawn"
    assert not any(depths[last + 1 :])
    assert len(depths) > last + 5


def test_a_draft_model_of_other_words_offers_what_it_drew_before_its_context_ended() -> None:
    """Three of the target's tokens are six of the draft model's, which reads no more.

    The first drawn one is not read.
    """

    def make() -> Components:
        draft = foreign(TabularModel(RandomTable(4, 23), 4, max_length=6))
        return make_components(
            TabularModel(RandomTable(3, 11), 3), draft, tree="chain(2)", verifier="block"
        )

    case = Case(prompt=(2, 2, 2), horizon=2, max_new_tokens=3)
    law = written(make, case)
    assert num_errors(law) == 0.0
    assert excess(law, target_law(TabularModel(RandomTable(3, 11), 3), case)) < 1e-12
    with pytest.warns(
        UserWarning,
        match="the drafter failed .ContextLengthError: the text's 3 tokens are 7 of the draft",
    ):
        (result,) = Decoder(make()).generate([(2, 2, 2)], max_new_tokens=3, temperature=1.0, seed=0)
    assert [record.depth for record in result.records][:1] == [1]


def faulty(faults: Faults, tree: str, verifier: str) -> Components:
    target, draft = FaultyModel(11, 2, "target", faults), FaultyModel(23, 2, "draft", faults)
    drafter = FaultyDrafter(
        ModelDrafter(model=draft, tree=FaultyBuilder(TREES.parse(tree), faults)), faults
    )
    rule = FaultyVerifier(VERIFIERS.parse(verifier), faults)
    return Components(target=target, drafter=drafter, rule=rule, controller=Fixed())


CALLS = [
    *[("draft", method) for method in ("open", "append", "extend", "commit", "close")],
    *[("target", method) for method in ("open", "append", "extend", "commit", "close")],
    *[("drafter", method) for method in ("open", "draft", "observe", "close")],
    *[("builder", method) for method in ("expand", "finish")],
    ("verifier", "verify"),
]
ONLY_SPECULATION = {
    ("draft", "extend"),
    ("draft", "close"),
    ("drafter", "observe"),
    ("drafter", "close"),
}
"""Calls that never cost a text, alone.

The request is decoded without the drafter, if it has to be.
"""
WAYS = [("before", False), ("before", True), ("after", False)]
PLACES = [
    *[("chain(2)", "block", part, method) for part, method in CALLS],
    *[
        (*pair, part, method)
        for pair in PAIRS
        for part, method in (("draft", "extend"), ("drafter", "draft"), ("builder", "expand"))
        if pair != ("chain(2)", "block")
    ],
]


@pytest.mark.parametrize(
    ("tree", "verifier", "part", "method", "neighbours"),
    [
        pytest.param(
            *place,
            neighbours,
            marks=() if place[1] == "block" or not neighbours else pytest.mark.slow,
        )
        for place in PLACES
        for neighbours in ((), ((1, 1),))
    ],
)
def test_a_fault_at_any_call_keeps_the_law_or_ends_the_request(
    tree: str, verifier: str, part: str, method: str, neighbours: tuple[Text, ...]
) -> None:
    case = case_of(tree, neighbours=neighbours)
    truth, num_faults = target_law(TabularModel(RandomTable(2, 11), 2), case), 0
    for when, goes_on in WAYS:
        for number in count():
            fault = Faults((part, method, when), number, goes_on)
            law, has_fired = law_with(fault, case, tree=tree, verifier=verifier)
            if not has_fired:
                break
            num_faults += 1
            assert excess(law, truth) < 1e-12, fault
            if (part, method) in ONLY_SPECULATION:
                assert num_errors(law) == 0.0, fault
            if part in {"target", "verifier"}:
                law, _ = law_with(fault, case, tree=tree, verifier=verifier, isolated=False)
                assert excess(law, truth) < 1e-12, fault
    assert num_faults >= len(WAYS)


def law_with(
    fault: Faults, case: Case, *, tree: str, verifier: str, isolated: bool = True
) -> tuple[dict[Text, float], bool]:
    """What is written with a fault, and whether there was one in any branch."""
    met = list[Faults]()

    def make() -> Components:
        met.append(replace(fault, count=0))
        return faulty(met[-1], tree, verifier)

    law = written(make, case, isolated=isolated)
    return law, any(one.count > (fault.number or 0) for one in met)
