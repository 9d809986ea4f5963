"""Medusa and EAGLE heads from the shared training: figures that mean what they say, files that their readers read."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from monge.core.errors import ModelLoadError, OptionError
from monge.draft.by_name import drafter_of
from monge.heads.readers.registry import load_head
from monge.heads.target import TargetSizes
from monge.training.chain import Weights
from monge.training.loop import STATE, Recipe, Watch
from monge.training.own_text import TextSettings, write_own_text
from monge.training.published import KINDS, PublishedTrainee, layer_config, train_published
from tests.engine.tiny import network, prompts
from tests.heads.readers.published import sizes
from tests.heads.toy import markov_ends, markov_table, markov_texts

VOCAB, STEPS = 4, 2
RECIPE = Recipe(steps=20, batch_size=96, evaluate_every=10)
TEXT = TextSettings(num_tokens=960, row_length=24, prompt_length=4, batch_size=32)
each_kind = pytest.mark.parametrize("kind", KINDS)


def trainee(kind: str) -> PublishedTrainee:
    return KINDS[kind](
        fitted=markov_texts(VOCAB, 24, 12),
        held_out=markov_texts(VOCAB, 8, 12),
        ends=markov_ends(VOCAB),
        parts=Weights(),
        num_steps=STEPS,
        layer=sizes(VOCAB, VOCAB),
    )


@each_kind
def test_heads_start_from_the_target_s_last_state(kind: str) -> None:
    """Every law is the target's last one, which is exactly what the figures then say."""
    one = trainee(kind)
    laws = torch.softmax(one.held_out.states.double(), dim=2)
    agreed = torch.minimum(laws[:, : -1 - STEPS], laws[:, 1:-STEPS]).sum(dim=2)
    quality = one.quality(one.held_out)
    assert quality.acceptance[0] == pytest.approx(float(agreed.mean()), abs=1e-6)


def test_an_eagle_head_that_knows_the_laws_is_always_accepted() -> None:
    """States, tokens and places of all steps fit together: the next state is a function of the next token here."""
    one, table = trainee("eagle"), markov_table(VOCAB).table
    laws = torch.tensor([list(table((token,))) for token in range(VOCAB)]).log()
    with torch.no_grad():
        one.tensors["fc.weight"].copy_(torch.cat([laws.T, torch.zeros(VOCAB, VOCAB)], dim=1))
    assert one.quality(one.held_out).survival == pytest.approx((1.0,) * STEPS, abs=1e-5)


@each_kind
def test_gradients_reach_every_weight(kind: str) -> None:
    one = trainee(kind)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():  # what starts at zero would hide what is behind it
        for weight in one.weights.values():
            weight.add_(0.1 * torch.randn(weight.shape, generator=generator))
    before = one.look()
    one.loss(64, torch.Generator().manual_seed(1)).backward()
    for name, weight in one.weights.items():
        assert weight.grad is not None, name
        assert float(weight.grad.abs().max()) > 0, name
    assert before == one.look()


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Tensor:
    texts, folder = prompts((3, 6, 5), seed=1), tmp_path_factory.mktemp("text")
    return write_own_text(network("llama"), texts, TEXT, folder)


@each_kind
def test_training_writes_a_head_and_goes_on_after_an_interrupt(
    kind: str, rows: Tensor, tmp_path: Path
) -> None:
    def made(folder: str, recipe: Recipe = RECIPE, **options):
        return train_published(
            kind, network("llama"), rows, tmp_path / folder, recipe=recipe, **options
        )

    seen: list[int] = []
    stopping = Watch(
        on_step=lambda progress: seen.append(progress.step), should_stop=lambda: len(seen) == 7
    )
    assert made("a", watch=stopping).quality is None
    assert drafter_of(tmp_path / "a", None) is None
    went_on = made("a")
    assert went_on.quality == made("b").quality
    assert went_on.progress.history[-1][1] > 1.5
    head = load_head(tmp_path / "a")
    assert head.num_parameters == went_on.num_parameters
    head.check(TargetSizes(hidden_size=32, num_layers=2, vocab_size=97))
    about = json.loads((tmp_path / "a" / "config.json").read_text())["about"]
    assert about["tokens"] == rows.numel()
    with pytest.raises(OptionError, match=r"other values of \['learning_rate'\]"):
        made("a", replace(RECIPE, learning_rate=1e-4))
    (tmp_path / "a" / STATE).write_bytes(b"no state")
    with pytest.raises(ModelLoadError, match="cannot go on from"):
        made("a")


def test_bad_kinds_and_too_little_text_are_refused(rows: Tensor, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="unknown kind of head 'hydra'.*Known: eagle, medusa"):
        train_published("hydra", network("llama"), rows, tmp_path, recipe=RECIPE)
    with pytest.raises(OptionError, match="rows of 24 tokens are too short for 40 steps"):
        train_published("eagle", network("llama"), rows, tmp_path, recipe=RECIPE, num_steps=40)


def test_layers_have_the_target_s_sizes() -> None:
    sizes = TargetSizes(hidden_size=32, num_layers=2, vocab_size=97)
    config = layer_config(network("qwen3"), sizes)
    names = ("num_attention_heads", "num_key_value_heads", "head_dim")
    assert [config[name] for name in names] == [4, 2, 8]
