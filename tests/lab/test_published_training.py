"""`python -m lab.heads.published`: figures that mean what they say, files that their readers read."""

import json

import pytest
import torch

from lab.heads.published import KINDS, Trainee, train_published
from monge.core.errors import OptionError
from monge.heads.readers.registry import load_head
from monge.training.loop import Recipe
from monge.training.own_text import TextSettings, write_own_text
from tests.engine.tiny import network, prompts
from tests.heads.readers.published import sizes
from tests.heads.toy import markov_ends, markov_table, markov_texts

VOCAB, STEPS = 4, 2
RECIPE = Recipe(steps=20, batch_size=96, evaluate_every=10)
TEXT = TextSettings(num_tokens=960, row_length=24, prompt_length=4, batch_size=32)
HELD_OUT = markov_texts(VOCAB, 8, 12)


def trainee(kind: str) -> Trainee:
    return KINDS[kind](
        fitted=markov_texts(VOCAB, 24, 12),
        ends=markov_ends(VOCAB),
        num_steps=STEPS,
        layer=sizes(VOCAB, VOCAB),
    )


@pytest.mark.parametrize("kind", KINDS)
def test_heads_start_from_the_target_s_last_state(kind: str) -> None:
    """Every law is the target's last one, which is exactly what the figures then say."""
    laws = torch.softmax(HELD_OUT.states.double(), dim=2)
    agreed = torch.minimum(laws[:, : -1 - STEPS], laws[:, 1:-STEPS]).sum(dim=2)
    acceptance = trainee(kind).quality(HELD_OUT).acceptance
    assert acceptance[0] == pytest.approx(float(agreed.mean()), abs=1e-6)


def test_an_eagle_head_that_knows_the_laws_is_always_accepted() -> None:
    """States, tokens and places of all steps fit together: the next state is a function of the next token here."""
    one, table = trainee("eagle"), markov_table(VOCAB).table
    laws = torch.tensor([list(table((token,))) for token in range(VOCAB)]).log()
    with torch.no_grad():
        one.tensors["fc.weight"].copy_(torch.cat([laws.T, torch.zeros(VOCAB, VOCAB)], dim=1))
    assert one.quality(HELD_OUT).survival == pytest.approx((1.0,) * STEPS, abs=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_a_head_is_trained_and_read(kind: str, tmp_path) -> None:
    texts = prompts((3, 6, 5), seed=1)
    rows = write_own_text(network("llama"), texts, TEXT, tmp_path / "text")
    outcome = train_published(kind, network("llama"), rows, tmp_path, recipe=RECIPE)
    assert outcome.progress.history[-1][1] > 1.5
    assert load_head(tmp_path).num_parameters == outcome.num_parameters
    about = json.loads((tmp_path / "config.json").read_text())["about"]
    assert about["tokens"] == rows.numel()
    with pytest.raises(OptionError, match="rows of 24 tokens are too short for 40 steps"):
        train_published(kind, network("llama"), rows, tmp_path, recipe=RECIPE, num_steps=40)


def test_the_command_trains_a_head(lab, tiny_paths, tmp_path) -> None:
    (tmp_path / "data.txt").write_text("once upon a time\nthe history of mathematics\n")
    asked = f"--kind medusa --target {tiny_paths[0]} --data {tmp_path}/data.txt --tokens 800"
    made = lab("heads.published", asked, f"--steps 2 --out {tmp_path}/head")
    assert made.exit_code == 0, made.output
    assert "block efficiency" in made.stdout
    assert load_head(tmp_path / "head").max_depth == 3
