"""Published heads in the real loop: lossless with every legal pairing, and aligned with the text."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import pytest
import torch

from monge.api import make_components
from monge.control.base import Reads, SoloController
from monge.core.context import DraftPlan
from monge.core.errors import ProposalMismatchError
from monge.core.sampling_rules import SamplingRules
from monge.draft.eagle import ChainRun
from monge.draft.published_heads import Head
from monge.draft.tree.registry import TREES
from monge.engine.components import Components
from monge.engine.decoder import Decoder
from monge.heads.readers.base import PublishedHead
from monge.heads.readers.registry import load_head
from monge.networks.hf_tree import HfTreeModel
from monge.oracle.decoding import Case, output_law, target_law
from monge.oracle.exact_law import law_error
from monge.oracle.tabular import RandomTable, TabularModel
from tests.engine.tiny import VOCAB as WORDS
from tests.engine.tiny import network, prompts
from tests.heads.readers.published import KINDS, Published

LARGEST_ERROR = 1e-12
VOCAB = 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("heads")


@cache
def head_of(kind: str, folder: Path) -> PublishedHead:
    return load_head(KINDS[kind](VOCAB, VOCAB).write(folder / kind))


def table(seed: int = 3) -> TabularModel:
    return TabularModel(RandomTable(VOCAB, seed), VOCAB)


def components(kind: str, folder: Path, tree: str, verifier: str | None) -> Components:
    target = table()
    return make_components(
        target,
        drafter=Head(target=target, head=head_of(kind, folder), tree=TREES.parse(tree)),
        verifier=verifier,
    )


def check_lossless(made: Callable[[], Components], temperature: float = 1, **case: object) -> None:
    rules = SamplingRules(temperature=temperature)
    one = Case(**{"prompt": (0, 1), "rules": rules, **case})
    assert law_error(output_law(made, one), target_law(table(), one)) < LARGEST_ERROR


DEEP = ("eagle3", "dspark-rnn")
FAMILIES = ("eagle3", "mtp-deepseek", "dflash", "dflash2", "dspark-rnn")
"""One layout of each; the others are enumerated at one temperature, and at all with the slow tests."""
CHAINS = [
    pytest.param(kind, heat, marks=pytest.mark.slow if kind not in FAMILIES and heat != 0.7 else ())
    for kind in KINDS
    for heat in (0.0, 0.7, 1.0)
]


@pytest.mark.parametrize(("kind", "temperature"), CHAINS)
def test_sampled_chains_are_lossless(kind: str, temperature: float, folder: Path) -> None:
    """Two rounds; for one of each kind of head also a chain of two that reaches beyond the end."""
    num_tokens = 3 if kind in DEEP and temperature == 0.7 else 2
    made = partial(components, kind, folder, "chain(2)", "speculative_sampling")
    check_lossless(made, temperature, max_new_tokens=num_tokens)


PAIRINGS = [
    ("eagle3", "best_first(4, 2, 2)", "sample_and_match", 1),
    ("dflash2", "best_first(4, 2, 2)", "sample_and_match", 0.7),
    ("mtp-qwen", "best_first(3, 2, 2)", "sample_and_match", 0),
    ("mtp-mimo", "fixed_width((2,), children='iid')", "recursive_rejection", 1),
    ("dspark-rnn", "fixed_width((2, 1))", "recursive_rejection_without_replacement", 1),
    ("mtp-deepseek", "fixed_width((2,), children='iid')", "canonical", 0.7),
    ("speculators-dspark", "fixed_width((2,), children='greedy_plus_one')", "greedy", 1),
]


@pytest.mark.parametrize(("kind", "tree", "verifier", "temperature"), PAIRINGS)
def test_trees_are_lossless(
    kind: str, folder: Path, tree: str, verifier: str, temperature: float | int
) -> None:
    check_lossless(lambda: components(kind, folder, tree, verifier), temperature)


def test_lossless_in_a_ragged_batch_beyond_the_end_and_from_a_prompt_of_one_token(
    folder: Path,
) -> None:
    end = {"horizon": 2, "max_new_tokens": 3, "eos_ids": frozenset({1})}
    beside = {"prompt": (2,), "neighbours": ((0, 1, 2),), "slot": 1}
    check_lossless(
        lambda: components("eagle3", folder, "chain(2)", "speculative_sampling"), **beside, **end
    )


@pytest.mark.parametrize(
    ("tree", "verifier"),
    [
        ("best_first(4, 2, 2)", "speculative_sampling"),
        ("fixed_width((2,), children='without_replacement')", "recursive_rejection"),
    ],
)
def test_biased_pairings_are_refused(folder: Path, tree: str, verifier: str) -> None:
    with pytest.raises(ProposalMismatchError):
        components("eagle3", folder, tree, verifier)


def test_a_head_in_a_pool_follows_the_text(folder: Path) -> None:
    head_of("eagle3", folder)
    parts = {
        "drafter": "pool('ngram', 'head')",
        "tree": "chain(1)",
        "verifier": "speculative_sampling",
    }
    check_lossless(lambda: make_components(table(), head=folder / "eagle3", **parts), 0.7)


# Heads with chosen weights, which are right about every token exactly if states, tokens and steps
# are paired as published.


def markov_table(token_ids: tuple[int, ...]) -> list[float]:
    """The next token is almost surely the one after the last."""
    return [0.97 if token == (token_ids[-1] + 1) % VOCAB else 0.015 for token in range(VOCAB)]


def next_tokens() -> torch.Tensor:
    """Matrix that takes a token's indicator to the logits of the next."""
    columns = [markov_table((token,)) for token in range(VOCAB)]
    return torch.tensor(columns, dtype=torch.float64).log().T.contiguous()


def silent(made: Published) -> Published:
    """Layers that add nothing to what goes around them."""
    for name in made.tensors:
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            made.tensors[name].zero_()
    return made


def perfect_module() -> Published:
    """A projection that looks at the token alone."""
    made = silent(KINDS["mtp-qwen"](VOCAB, VOCAB))
    made.tensors["mtp.fc.weight"] = torch.cat([next_tokens(), torch.zeros(VOCAB, VOCAB)], dim=1)
    return made


def perfect_dspark() -> Published:
    """A bias that knows what follows every token, on rows that say nothing."""
    made = silent(KINDS["dspark"](VOCAB, VOCAB))
    made.config |= {"markov_rank": VOCAB, "mask_token_id": 2}
    del made.tensors["confidence_head.proj.weight"]
    made.tensors["norm.weight"].zero_()
    made.tensors["markov_head.markov_w1.weight"] = torch.eye(VOCAB, dtype=torch.float64)
    made.tensors["markov_head.markov_w2.weight"] = next_tokens().contiguous()
    return made


@pytest.mark.parametrize(("make", "depth"), [(perfect_module, 5), (perfect_dspark, 4)])
def test_a_head_that_knows_the_text_is_always_accepted(make, depth: int, tmp_path: Path) -> None:
    target = TabularModel(markov_table, VOCAB)
    drafter = Head(target=target, head=make().write(tmp_path), tree=TREES.parse(f"chain({depth})"))
    decoder = Decoder(make_components(target, drafter=drafter), tokenizer=None)
    (result,) = decoder.generate([(0, 1)], max_new_tokens=4 * (depth + 1), temperature=0.0)
    assert result.token_ids == tuple((2 + place) % VOCAB for place in range(4 * (depth + 1)))
    assert [record.num_accepted for record in result.records] == [depth] * 4


@dataclass(frozen=True)
class Pause(SoloController[int]):
    """Plain rounds between the first and the last ones."""

    reads = frozenset({Reads.ACCEPTED})

    def init(self, shared) -> int:
        return 0

    def plan_one(self, state, info, context_length, draws) -> DraftPlan:
        return DraftPlan(max_depth=0 if 0 < state < 9 else 3)

    def update(self, state, record) -> int:
        return state + 1


def test_a_head_reads_all_that_it_missed_at_once(tmp_path: Path, monkeypatch) -> None:
    """Token by token, a probe after a cooldown took longer than all the rounds of the cooldown."""
    target, reads, read = TabularModel(markov_table, VOCAB), [], ChainRun.read

    def noted(self, pairs) -> None:
        reads.append([len(own.token_ids) for own in pairs.values()])
        read(self, pairs)

    monkeypatch.setattr(ChainRun, "read", noted)
    drafter = Head(
        target=target, head=perfect_module().write(tmp_path), tree=TREES.parse("chain(3)")
    )
    decoder = Decoder(make_components(target, drafter=drafter, controller=Pause()), tokenizer=None)
    (result,) = decoder.generate([(0, 1)], max_new_tokens=20, temperature=0.0)
    assert [record.num_accepted for record in result.records] == [3, *[0] * 8, 3, 3]
    assert reads == [[1], [12], [4]]


# A tiny transformer as the target: trees read by its real passes, states taken from them.


@pytest.mark.parametrize(
    "kind",
    ["eagle3", "mtp-qwen", "dflash2", "speculators-dspark"],
)
def test_greedy_text_of_a_network_stays_what_it_is(kind: str, tmp_path: Path) -> None:
    target_network = network("llama")
    hidden = target_network.config.hidden_size
    made = KINDS[kind](hidden, WORDS)
    made.config.get("dflash_config", {}).pop("target_layer_ids", None)
    made.config.pop("num_target_layers", None)
    if "dflash_config" in made.config:
        made.config["dflash_config"]["target_layer_ids"] = [-1, 1]
    drafter = f"head('{made.write(tmp_path)}')"
    texts = prompts((7, 3), seed=1)
    plain = Decoder(make_components(HfTreeModel(target_network), drafter="none"), tokenizer=None)
    expected = [one.token_ids for one in plain.generate(texts, max_new_tokens=24, temperature=0.0)]
    for tree in ("chain(3)", "best_first(6, 3, 3)"):
        decoder = Decoder(make_components(HfTreeModel(target_network), drafter=drafter, tree=tree))
        found = decoder.generate(texts, max_new_tokens=24, temperature=0.0)
        assert [one.token_ids for one in found] == expected
        assert max(record.num_nodes for record in found[0].records) >= 3
