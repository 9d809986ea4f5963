"""Self-speculation: the layer_subset network is the target's own layers, and the text stays the target's."""

import copy
from collections.abc import Sequence

import pytest
import torch

from monge.api import make_components
from monge.core.errors import OptionError, UnsupportedModelError
from monge.core.model import LayeredModel, NodeBlock
from monge.core.sampling_rules import SamplingRules
from monge.engine.decoder import Decoder
from monge.engine.models.layer_subset import layer_subset
from monge.loading.networks import as_sequence_model
from monge.testing.decoding import Case, output_law, target_law
from monge.testing.oracle import law_error
from monge.testing.tabular import RandomTable, TabularModel
from tests.engine.tiny import FAMILIES
from tests.engine.tiny import network as make_network

VOCAB = 3


class Layered(TabularModel):
    """A table whose layer_subset forms are other tables."""

    asked: tuple[int, ...] = ()

    def __init__(self) -> None:
        super().__init__(RandomTable(VOCAB, 11), VOCAB)
        self.num_layers = 8

    def layer_subset(self, layers: Sequence[int]) -> TabularModel:
        self.asked = tuple(layers)
        return TabularModel(RandomTable(VOCAB, 23 + len(layers)), VOCAB)


CASE = Case(prompt=(0, 1), horizon=2, max_new_tokens=2, rules=SamplingRules(temperature=0.7))
RAGGED = Case(
    prompt=(0, 1, 0), horizon=2, max_new_tokens=3, neighbours=((2, 1),), eos_ids=frozenset({2})
)


@pytest.mark.parametrize(
    ("case", "parts"),
    [
        (CASE, {"drafter": "layer_skip", "tree": "chain(2)", "verifier": "single_draft"}),
        (CASE, {"drafter": "layer_skip", "tree": "fixed_width((2,), 'iid')", "verifier": "rrs"}),
        (CASE, {"drafter": "layer_skip", "tree": "best_first(3, 2, 2)"}),
        (RAGGED, {"drafter": "pool('ngram(2)', 'layer_skip(num_layers=2)')", "tree": "chain(1)"}),
    ],
)
def test_lossless(case: Case, parts: dict[str, str]) -> None:
    found = output_law(lambda: make_components(Layered(), **parts), case)
    assert law_error(found, target_law(Layered(), case)) < 1e-12


@pytest.mark.parametrize(
    ("settings", "kept"),
    [("", (0, 1, 6, 7)), ("(num_layers=3)", (0, 1, 2)), ("(layers=(0, 5))", (0, 5))],
)
def test_which_layers_stay(settings: str, kept: tuple[int, ...]) -> None:
    target = Layered()
    make_components(target, drafter=f"layer_skip{settings}")
    assert target.asked == kept


@pytest.mark.parametrize(
    "family", [name for name, family in FAMILIES.items() if family.reads_trees]
)
def test_all_layers_give_the_target_s_own_logits_and_fewer_give_others(family: str) -> None:
    """Every family: the same numbers from the whole, other ones from a part, and the target's undisturbed by either."""
    network = make_network(family)
    target = as_sequence_model(network)
    assert isinstance(target, LayeredModel)
    total = target.num_layers
    models = [target, target.layer_subset(range(total)), target.layer_subset(range(1, total))]
    for model in models:
        model.open({0: (5, 6, 7)})
    blocks = {0: NodeBlock.chain((8, 9, 10))}
    first, whole, part = (model.extend(blocks)[0] for model in models)
    torch.testing.assert_close(whole, first, rtol=0.0, atol=0.0)
    assert float((part - first).abs().max()) > 1e-3
    torch.testing.assert_close(
        network(torch.tensor([[5, 6, 7, 8, 9, 10]])).logits[0, 3:], first, rtol=1e-4, atol=1e-4
    )


def test_no_weight_is_copied_and_the_network_stays_as_it_was() -> None:
    network = make_network("gemma3")
    before = network.state_dict().keys()
    short = layer_subset(network, (0, 2))
    ours = {weight.data_ptr() for weight in network.parameters()}
    assert {weight.data_ptr() for weight in short.parameters()} < ours
    assert short.config.layer_types == [network.config.layer_types[layer] for layer in (0, 2)]
    assert (short.config.num_hidden_layers, network.config.num_hidden_layers) == (2, 4)
    assert network.state_dict().keys() == before
    assert [layer.self_attn.layer_idx for layer in network.model.layers] == [0, 1, 2, 3]


@pytest.mark.parametrize("family", ["llama", "bloom"])
def test_greedy_text_is_the_plain_one(family: str) -> None:
    """On a target that reads trees, and on one that reads chains only."""
    network = make_network(family)
    prompts = [(5, 6, 7), (9, 8)]
    target = as_sequence_model(network)
    plain, drafted, whole = (
        Decoder(make_components(target, drafter=drafter, tree=tree)).generate(
            prompts, max_new_tokens=12
        )
        for drafter, tree in (
            ("none", None),
            ("layer_skip(num_layers=1)", "chain(3)"),
            ("layer_skip(num_layers=2)", "chain(3)"),
        )
    )
    assert [one.token_ids for one in drafted] == [one.token_ids for one in plain]
    assert all(record.num_accepted == record.depth for one in whole for record in one.records)
    assert target.forward_s > 0.0


@pytest.mark.parametrize(
    ("drafter", "message"),
    [
        ("layer_skip(layers=(0, 1), num_layers=2)", "layers or num_layers, not both"),
        ("layer_skip(num_layers=9)", "between 1 and the target's 8; got 9"),
        ("layer_skip(num_layers=0)", "between 1 and the target's 8; got 0"),
    ],
)
def test_bad_settings_are_refused(drafter: str, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        make_components(Layered(), drafter=drafter)
    with pytest.raises(OptionError, match="can leave layers out; TabularModel cannot"):
        make_components(TabularModel(RandomTable(3, 1), 3), drafter=drafter)


@pytest.mark.parametrize("layers", [(), (1, 0), (0, 0), (0, 2), (-1, 0)])
def test_bad_layers_are_refused(layers: tuple[int, ...]) -> None:
    with pytest.raises(OptionError, match="layers in increasing order, each between 0 and 1"):
        layer_subset(make_network("llama"), layers)


def test_layers_that_cannot_be_told_apart_are_refused() -> None:
    network = copy.deepcopy(make_network("llama"))
    network.model.more = torch.nn.ModuleList(network.model.layers)
    with pytest.raises(
        UnsupportedModelError, match="one list of 2 numbered layers was expected; found 2"
    ):
        layer_subset(network, (0,))
