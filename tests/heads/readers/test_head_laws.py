"""Published heads, read from the layouts in which they are published.

Their laws are those of the formulas, and stored ones.
"""

from functools import cache
from pathlib import Path

import pytest
import torch

from monge.core.context import Context, DraftPlan
from monge.core.draws import TapeDraws
from monge.core.law import Law
from monge.core.model import NodeBlock
from monge.core.proposal import Iid
from monge.core.sampling_rules import SamplingRules, law_from_logits
from monge.core.tree import TokenTree
from monge.core.verdict import Verdict
from monge.draft.head import HeadDrafter
from monge.draft.tree.registry import TREES
from monge.heads.readers.base import PublishedHead
from monge.heads.readers.registry import load_head
from monge.testing.tabular import RandomTable, TabularModel
from tests.heads.readers.formulas import Case, formula
from tests.heads.readers.golden import GOLDEN
from tests.heads.readers.published import KINDS

VOCAB = 4
LARGEST_ERROR = 1e-6
"""Angles of rotary positions are float32, as in the published networks."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("heads")


@cache
def head_of(kind: str, folder: Path) -> PublishedHead:
    return load_head(KINDS[kind](VOCAB, VOCAB).write(folder / kind))


def table() -> TabularModel:
    return TabularModel(RandomTable(VOCAB, 3), VOCAB)


def case_of(target: TabularModel, tokens: tuple[int, ...]) -> Case:
    """The table's states are its logits, at every layer."""
    states = [
        torch.tensor(list(target.table(tokens[: end + 1])), dtype=torch.float64).log()
        for end in range(len(tokens) - 1)
    ]
    eye = torch.eye(VOCAB, dtype=torch.float64)
    return Case(tokens, [[state, state] for state in states], eye, eye)


def grown(drafter: HeadDrafter, contexts: list[Context], states: list) -> list[TokenTree]:
    tapes = [TapeDraws([0.1, 0.5, 0.9, 0.3] * 9) for _ in contexts]
    return [
        draft.tree
        for draft in drafter.draft(contexts, states, [DraftPlan()] * len(contexts), tapes)
    ]


def context(request: int, tokens: tuple[int, ...]) -> Context:
    return Context(request_id=request, token_ids=tokens, num_prompt_tokens=1, rules=SamplingRules())


def path_to(tree: TokenTree, node: int) -> list[int]:
    return [] if node == 0 else [*path_to(tree, int(tree.parents[node])), int(tree.token_ids[node])]


def check_tree(kind: str, tree: TokenTree, tokens: tuple[int, ...]) -> int:
    """Compare the law at every node that has children with the formula; how many there were."""
    law = formula(kind, KINDS[kind](VOCAB, VOCAB), case_of(table(), tokens))
    laws = 0
    for node, proposal in enumerate(tree.proposals):
        if tree.candidates[node]:
            assert isinstance(proposal, Iid)
            expected = law_from_logits(law(path_to(tree, node)), SamplingRules())
            assert largest_difference(proposal.law, expected) < LARGEST_ERROR, (
                kind,
                path_to(tree, node),
            )
            laws += 1
    return laws


def largest_difference(law: Law, other: Law) -> float:
    return max(abs(law.prob(token) - other.prob(token)) for token in range(VOCAB))


@pytest.mark.parametrize(
    ("kind", "beside"),
    [*((kind, None) for kind in KINDS), ("eagle3", "medusa"), ("medusa", "eagle3")],
)
def test_every_node_has_the_law_of_the_formula(kind: str, beside: str | None, folder: Path) -> None:
    """Two texts in one batch, over two rounds, with branches.

    The second round reads what the first one committed. Another head of the target changes nothing.
    """
    target = table()
    drafter = HeadDrafter(
        target=target,
        head=head_of(kind, folder),
        tree=TREES.parse("fixed_width((2, 2, 2), children='iid')"),
    )
    other = None
    if beside is not None:
        tree = TREES.parse("chain(1)")
        other = HeadDrafter(target=target, head=head_of(beside, folder), tree=tree)
    texts = [(0, 2, 3, 1), (3, 1)]
    contexts = [context(request, text) for request, text in enumerate(texts)]
    target.open({request: text[:-1] for request, text in enumerate(texts)})
    if other is not None:
        other.open(contexts)
    states = drafter.open(contexts)
    trees = grown(drafter, contexts, list(states))
    deepest = drafter.capabilities.max_depth
    for text, tree in zip(texts, trees, strict=True):
        assert max(tree.depths) == deepest
        assert check_tree(kind, tree, text) >= deepest
    # Commit the root and a path of two, then one more token: the next round reads states for three
    # new positions.
    for request, (text, tree) in enumerate(zip(texts, trees, strict=True)):
        first = tree.candidates[0][0]
        path = [first, *tree.candidates[first][:1]]
        target.extend({request: _block(tree)})
        target.commit({request: (0, *path)})
        contexts[request] = contexts[request].append(
            (*(int(tree.token_ids[node]) for node in path), 2)
        )
        assert contexts[request].token_ids[: len(text)] == text
    drafts = drafter.draft(contexts, [()] * 2, [DraftPlan(max_depth=0)] * 2, [TapeDraws([])] * 2)
    states = drafter.observe(
        contexts, drafts, [Verdict(path=(), next_token=2, next_kind="bonus")] * 2
    )
    for request, tree in enumerate(grown(drafter, contexts, list(states))):
        assert check_tree(kind, tree, contexts[request].token_ids) >= deepest


def _block(tree: TokenTree) -> NodeBlock:
    return NodeBlock(tree.token_ids, tree.parents)


@pytest.mark.parametrize("kind", KINDS)
def test_the_stored_law_is_reproduced(kind: str, folder: Path) -> None:
    """Logits of a node two levels down, stored when they were first computed."""
    target = table()
    drafter = HeadDrafter(
        target=target,
        head=head_of(kind, folder),
        tree=TREES.parse("chain(2)"),
        rules=SamplingRules(),
    )
    target.open({0: (0, 2, 3)})
    (state,) = drafter.open([context(0, (0, 2, 3, 1))])
    (tree,) = grown(drafter, [context(0, (0, 2, 3, 1))], [state])
    if drafter.capabilities.max_depth == 1:
        pytest.skip("one step only")
    proposal = tree.proposals[1]
    assert isinstance(proposal, Iid)
    found = [round(proposal.law.prob(token), 6) for token in range(VOCAB)]
    assert found == pytest.approx(GOLDEN[kind], abs=2e-6), found


@pytest.mark.parametrize("kind", ["medusa", "hydra", "eagle3", "mtp-qwen", "dflash2", "dspark-rnn"])
def test_a_level_that_is_read_again_has_the_laws_that_it_had(
    kind: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A forward that two requests share raises half-way.

    Each of them is taken back to the level before it.
    """
    target, texts = table(), [(0, 2, 3, 1), (3, 1)]
    drafter = HeadDrafter(
        target=target,
        head=head_of(kind, folder),
        tree=TREES.parse("fixed_width((2, 2, 2), children='iid')"),
    )
    contexts = [context(request, text) for request, text in enumerate(texts)]
    target.open({request: text[:-1] for request, text in enumerate(texts)})
    states = list(drafter.open(contexts))
    expected, shared, extend = grown(drafter, contexts, states), [0], drafter._run.extend

    def stumbling(blocks):
        if len(blocks) == 1:
            return extend(blocks)
        shared[0] += 1
        for request, block in blocks.items():  # what it leaves behind is of no use
            extend(
                {
                    request: NodeBlock(
                        tuple((token + 1) % VOCAB for token in block.token_ids), block.parents
                    )
                }
            )
        raise RuntimeError("out of memory")

    monkeypatch.setattr(drafter._run, "extend", stumbling)
    for one, other in zip(grown(drafter, contexts, [()] * 2), expected, strict=True):
        assert (one.token_ids, one.parents, one.candidates) == (
            other.token_ids,
            other.parents,
            other.candidates,
        )
        for proposal, same in zip(one.proposals, other.proposals, strict=True):
            assert (
                not isinstance(proposal, Iid)
                or largest_difference(proposal.law, same.law) < LARGEST_ERROR
            )
    assert shared[0] == drafter.capabilities.max_depth - 1 > 0
