"""Medusa and EAGLE heads from the shared training.

Figures that mean what they say, and files that their readers read.
"""

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from monge.core.errors import ModelLoadError, OptionError
from monge.draft.by_name import drafter_of
from monge.heads.readers.registry import load_head
from monge.heads.target import TargetSizes
from monge.testing.tabular import RandomTable, TabularModel
from monge.training.chain import Step, chain_quality
from monge.training.eagle import EagleTrainee
from monge.training.loop import STATE, Recipe, Watch
from monge.training.losses import Weights
from monge.training.medusa import MedusaTrainee
from monge.training.own_text import TextSettings, write_own_text
from monge.training.published import layer_config, train_published
from monge.training.texts import Ends, Texts, read_texts
from tests.engine.tiny import network, prompts

VOCAB, STEPS = 4, 2
LAWS = RandomTable(VOCAB, 2)
RECIPE = Recipe(steps=20, batch_size=96, evaluate_every=10)
TEXT = TextSettings(num_tokens=960, row_length=24, prompt_length=4, batch_size=32)


def ends() -> Ends:
    eye = torch.eye(VOCAB)
    return Ends(embed=lambda ids: eye[ids], unembed=lambda states: states)


def texts(rows: int = 24, length: int = 12) -> Texts:
    """Text whose next law is known from its last token."""
    laws = torch.tensor([list(LAWS((token,))) for token in range(VOCAB)])
    generator = torch.Generator().manual_seed(0)
    columns = [torch.randint(VOCAB, (rows,), generator=generator)]
    for _ in range(length - 1):
        columns.append(torch.multinomial(laws[columns[-1]], 1, generator=generator)[:, 0])
    table = TabularModel(lambda text: list(LAWS(text[-1:])), VOCAB)
    read = read_texts(table, torch.stack(columns, dim=1))
    return Texts(token_ids=read.token_ids, states=read.states.float())


LLAMA = {
    "hidden_size": VOCAB,
    "vocab_size": VOCAB,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 2,
    "intermediate_size": 6,
    "rms_norm_eps": 1e-6,
    "rope_theta": 100.0,
}


def trainee(kind: str) -> MedusaTrainee | EagleTrainee:
    common = {
        "fitted": texts(),
        "held_out": texts(8),
        "ends": ends(),
        "parts": Weights(),
        "num_steps": STEPS,
    }
    return MedusaTrainee(**common) if kind == "medusa" else EagleTrainee(**common, config=LLAMA)


def test_survival_is_the_mean_over_the_target_s_texts() -> None:
    """Two steps, every text enumerated with its probability."""
    generator = torch.Generator().manual_seed(1)
    first, second = torch.randn(2, 2, 3, generator=generator, dtype=torch.float64)
    p, q = torch.softmax(first[0], 0), torch.softmax(first[1], 0)
    later, drafted = torch.softmax(second[0], 0), torch.softmax(second[1], 0)
    expected = sum(torch.minimum(p, q)) * sum(torch.minimum(later, drafted))
    found = 0.0
    for token in range(3):
        steps = [
            Step(first[1:2], first[:1], torch.tensor([token])),
            Step(second[1:2], second[:1], torch.tensor([0])),
        ]
        quality = chain_quality([steps])
        found += float(p[token]) * quality.survival[1]
        assert quality.acceptance[0] == pytest.approx(float(torch.minimum(p, q).sum()))
        assert quality.block_efficiency == pytest.approx(1 + sum(quality.survival))
    assert found == pytest.approx(float(expected))


@pytest.mark.parametrize("kind", ["medusa", "eagle"])
def test_heads_start_from_the_target_s_last_state(kind: str) -> None:
    """Every law is the target's last one, which is exactly what the figures then say."""
    one, text = trainee(kind), texts(8)
    quality = one.quality(text)
    laws = torch.softmax(text.states.double(), dim=2)
    agreed = torch.minimum(laws[:, : -1 - STEPS], laws[:, 1:-STEPS]).sum(dim=2)
    assert quality.acceptance[0] == pytest.approx(float(agreed.mean()), abs=1e-6)


def test_an_eagle_head_that_knows_the_laws_is_always_accepted() -> None:
    """States, tokens and places of all steps fit together.

    The next state is a function of the next token here.
    """
    one = trainee("eagle")
    laws = torch.tensor([list(LAWS((token,))) for token in range(VOCAB)]).log()
    with torch.no_grad():
        one.tensors["fc.weight"].copy_(torch.cat([laws.T, torch.zeros(VOCAB, VOCAB)], dim=1))
    quality = one.quality(texts(8))
    assert quality.survival == pytest.approx((1.0,) * STEPS, abs=1e-5)


@pytest.mark.parametrize("kind", ["medusa", "eagle"])
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
    return write_own_text(
        network("llama"), prompts((3, 6, 5), seed=1), TEXT, tmp_path_factory.mktemp("text")
    )


@pytest.mark.parametrize("kind", ["medusa", "eagle"])
def test_training_writes_a_head_and_goes_on_after_an_interrupt(
    kind: str, rows: Tensor, tmp_path: Path
) -> None:
    seen: list[int] = []
    stopping = Watch(
        on_step=lambda progress: seen.append(progress.step), should_stop=lambda: len(seen) == 7
    )
    stopped = train_published(
        kind, network("llama"), rows, tmp_path / "a", recipe=RECIPE, watch=stopping
    )
    assert stopped.quality is None
    assert drafter_of(tmp_path / "a", None) is None
    seen.clear()
    went_on = train_published(kind, network("llama"), rows, tmp_path / "a", recipe=RECIPE)
    at_once = train_published(kind, network("llama"), rows, tmp_path / "b", recipe=RECIPE)
    assert went_on.quality == at_once.quality
    assert went_on.progress.history[-1][1] > 1.5
    head = load_head(tmp_path / "a")
    assert head.num_parameters == went_on.num_parameters
    head.check(TargetSizes(hidden_size=32, num_layers=2, vocab_size=97))
    about = json.loads((tmp_path / "a" / "config.json").read_text())["about"]
    assert about["tokens"] == rows.numel()
    with pytest.raises(OptionError, match=r"other values of \['learning_rate'\]"):
        train_published(
            kind,
            network("llama"),
            rows,
            tmp_path / "a",
            recipe=Recipe(steps=20, batch_size=96, evaluate_every=10, learning_rate=1e-4),
        )
    (tmp_path / "a" / STATE).write_bytes(b"no state")
    with pytest.raises(ModelLoadError, match="cannot go on from"):
        train_published(kind, network("llama"), rows, tmp_path / "a", recipe=RECIPE)


def test_bad_kinds_and_too_little_text_are_refused(rows: Tensor, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="unknown kind of head 'hydra'.*Known: eagle, medusa"):
        train_published("hydra", network("llama"), rows, tmp_path, recipe=RECIPE)
    with pytest.raises(OptionError, match="rows of 24 tokens are too short for 40 steps"):
        train_published("eagle", network("llama"), rows, tmp_path, recipe=RECIPE, num_steps=40)


def test_layers_have_the_target_s_sizes() -> None:
    config = layer_config(
        network("qwen3"), TargetSizes(hidden_size=32, num_layers=2, vocab_size=97)
    )
    assert (config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]) == (
        4,
        2,
        8,
    )
