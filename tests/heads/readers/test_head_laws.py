"""Published heads, read from the layouts in which they are published: their laws are those of the formulas."""

from functools import cache
from pathlib import Path

import pytest
import torch

from monge.core.context import Context, DraftPlan
from monge.core.sampling_rules import SamplingRules
from monge.core.verdict import Verdict
from monge.draft.published_heads import Head
from monge.draft.tree.registry import TREES
from monge.heads.readers.base import PublishedHead
from monge.heads.readers.registry import load_head
from monge.laws.draws import TapeDraws
from monge.laws.from_logits import law_from_logits
from monge.laws.proposal import Iid
from monge.laws.tree import TokenTree
from monge.networks.base import NodeBlock
from monge.oracle.tabular import RandomTable, TabularModel
from tests.heads.readers.formulas import Case, formula
from tests.heads.readers.published import KINDS
from tests.kit.laws import total_variation

VOCAB = 4
LARGEST_ERROR = 1e-6
"""Angles of rotary positions are float32, as in the published networks."""
TEXTS = ((0, 2, 3, 1), (3, 1))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("heads")


@cache
def head_of(kind: str, folder: Path) -> PublishedHead:
    return load_head(KINDS[kind](VOCAB, VOCAB).write(folder / kind))


def drafter_with(
    kind: str, folder: Path, tree: str = "fixed_width((2, 2, 2), children='iid')"
) -> Head:
    target = TabularModel(RandomTable(VOCAB, 3), VOCAB)
    return Head(target=target, head=head_of(kind, folder), tree=TREES.parse(tree))


def contexts_of(texts: tuple[tuple[int, ...], ...]) -> list[Context]:
    return [
        Context(request_id=request, token_ids=text, num_prompt_tokens=1, rules=SamplingRules())
        for request, text in enumerate(texts)
    ]


def grown(drafter: Head, contexts: list[Context], states: list) -> list[TokenTree]:
    tapes, plans = [TapeDraws([0.1, 0.5, 0.9, 0.3] * 9) for _ in contexts], [DraftPlan()] * 2
    return [draft.tree for draft in drafter.draft(contexts, states, plans, tapes)]


def path_to(tree: TokenTree, node: int) -> list[int]:
    return [] if node == 0 else [*path_to(tree, int(tree.parents[node])), int(tree.token_ids[node])]


def check_tree(kind: str, tree: TokenTree, drafter: Head, tokens: tuple[int, ...]) -> None:
    """Compare the law at every node that has children with the formula."""
    table, eye = drafter.target.table, torch.eye(VOCAB, dtype=torch.float64)
    # The table's states are its logits, at every layer.
    texts = [tokens[: end + 1] for end in range(len(tokens) - 1)]
    states = [torch.tensor(list(table(text)), dtype=torch.float64).log() for text in texts]
    case = Case(tokens, [[state, state] for state in states], eye, eye)
    law = formula(kind, KINDS[kind](VOCAB, VOCAB), case)
    inner = [node for node, candidates in enumerate(tree.candidates) if candidates]
    assert max(tree.depths) == drafter.capabilities.max_depth <= len(inner)
    for node in inner:
        proposal, path = tree.proposals[node], path_to(tree, node)
        assert isinstance(proposal, Iid)
        expected = law_from_logits(law(path), SamplingRules())
        assert total_variation(proposal.law, expected) < LARGEST_ERROR, (kind, path)


@pytest.mark.parametrize(
    ("kind", "beside"),
    [*((kind, None) for kind in KINDS), ("eagle3", "dflash"), ("dflash", "eagle3")],
)
def test_every_node_has_the_law_of_the_formula(kind: str, beside: str | None, folder: Path) -> None:
    """Two texts in one batch, over two rounds, with branches.

    The second round reads what the first one committed. Another head of the target changes nothing.
    """
    drafter, contexts = drafter_with(kind, folder), contexts_of(TEXTS)
    target = drafter.target
    if beside is not None:
        tree = TREES.parse("chain(1)")
        other = Head(target=target, head=head_of(beside, folder), tree=tree)
    target.open({request: text[:-1] for request, text in enumerate(TEXTS)})
    if beside is not None:
        other.open(contexts)
    trees = grown(drafter, contexts, list(drafter.open(contexts)))
    for text, tree in zip(TEXTS, trees, strict=True):
        check_tree(kind, tree, drafter, text)
    # Commit the root and a path of two, then one more token: the next round reads states for three
    # new positions.
    for request, tree in enumerate(trees):
        first = tree.candidates[0][0]
        path = [first, *tree.candidates[first][:1]]
        target.extend({request: NodeBlock(tree.token_ids, tree.parents)})
        target.commit({request: (0, *path)})
        tokens = (int(tree.token_ids[node]) for node in path)
        contexts[request] = contexts[request].append((*tokens, 2))
    drafts = drafter.draft(contexts, [()] * 2, [DraftPlan(max_depth=0)] * 2, [TapeDraws([])] * 2)
    verdict = Verdict(path=(), next_token=2, next_kind="bonus")
    states = drafter.observe(contexts, drafts, [verdict] * 2)
    for context, tree in zip(contexts, grown(drafter, contexts, list(states)), strict=True):
        check_tree(kind, tree, drafter, context.token_ids)
