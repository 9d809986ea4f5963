"""How surprising the target finds a prompt: its own laws, and the same cache as without asking."""

import math

import pytest
import torch

from monge.api import built_in
from monge.core.model import NodeBlock
from monge.core.prompt import PromptProfile
from monge.engine.loading import load_network
from monge.engine.models.hf_tree import HfTreeModel
from monge.engine.prompts import open_profiled
from monge.testing.tabular import RandomTable, TabularModel

VOCAB = 4


@pytest.mark.parametrize("length", [1, 2, 3, 50])
def test_surprisal_and_entropy_are_those_of_the_last_tokens(length: int) -> None:
    model = TabularModel(RandomTable(VOCAB, 3), VOCAB)
    ids = tuple(place % 3 for place in range(length))
    profile = open_profiled(model, {5: PromptProfile(token_ids=ids, text="kept")})[5]
    assert model.text(5) == ids[:-1]
    assert profile.text == "kept"
    if length == 1:
        assert profile.surprisal is None
        return
    places = range(max(1, length - 32), length)
    laws = [model.table(ids[:place]) for place in places]
    surprisals = [-math.log(law[ids[place]]) for place, law in zip(places, laws, strict=True)]
    assert profile.surprisal == pytest.approx(math.fsum(surprisals) / len(places))
    entropies = [-math.fsum(mass * math.log(mass) for mass in law if mass > 0.0) for law in laws]
    assert profile.entropy == pytest.approx(math.fsum(entropies) / len(places))


def test_what_is_known_is_not_read_again() -> None:
    model = TabularModel(RandomTable(VOCAB, 3), VOCAB)
    known = PromptProfile(token_ids=(0, 1, 2), surprisal=1.5, entropy=0.5)
    found = open_profiled(model, {1: known, 2: PromptProfile(token_ids=(2, 1))})
    assert found[1] == known
    assert found[2].surprisal == pytest.approx(-math.log(model.table((2,))[1]))
    assert (model.text(1), model.text(2)) == ((0, 1), (2,))


def test_a_network_goes_on_as_if_it_had_not_been_asked() -> None:
    network = load_network(built_in("target"))
    prompts = {1: tuple(range(40, 100)), 2: tuple(range(30, 37))}
    asked, silent = HfTreeModel(network), HfTreeModel(network)
    profiles = open_profiled(
        asked, {number: PromptProfile(token_ids=ids) for number, ids in prompts.items()}
    )
    silent.open({number: ids[:-1] for number, ids in prompts.items()})
    blocks = {number: NodeBlock.chain((ids[-1], 7, 8)) for number, ids in prompts.items()}
    ours, theirs = asked.extend(blocks), silent.extend(blocks)
    for number, ids in prompts.items():
        torch.testing.assert_close(ours[number], theirs[number], atol=1e-4, rtol=1e-4)
        with torch.no_grad():
            logits = network(torch.tensor([ids])).logits[0, -min(33, len(ids)) : -1].double()
        expected = torch.nn.functional.cross_entropy(logits, torch.tensor(ids[-logits.shape[0] :]))
        assert profiles[number].surprisal == pytest.approx(float(expected), rel=1e-4)
