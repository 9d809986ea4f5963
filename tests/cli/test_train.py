"""`monge train shape` on a tiny network.

A head comes out, is used, and goes on after an interrupt.
"""

import copy
import json
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from transformers import AutoTokenizer

from monge.api import built_in
from monge.cli.progress import working
from monge.cli.train import Interrupts
from monge.core.errors import OptionError, UnsupportedModelError
from monge.heads.shape.checkpoint import CONFIG, load_head
from monge.training import loop
from monge.training.loop import STATE, Recipe
from monge.training.own_text import ANSWERS, Answer, TextSettings, cut_rows, write_own_text
from monge.training.shape import HeadSettings, make_head
from monge.training.texts import feature_model
from tests.engine.tiny import network, prompts

MADE = ("--preset", "paper", "--steps", "4", "--batch", "16", "--num-steps", "1")
TEXT = TextSettings(num_tokens=1920, row_length=24, prompt_length=4, batch_size=32)


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> list[Answer]:
    return write_own_text(
        network("llama"), prompts((3, 6, 5), seed=1), TEXT, tmp_path_factory.mktemp("text")
    )


def weights(model: Any) -> None:
    model.model.norm.weight.data.mul_(2)


def frequencies(model: Any) -> None:
    model.model.rotary_emb.inv_freq.mul_(0.5)


def activation(model: Any) -> None:
    model.model.layers[0].mlp.act_fn = torch.nn.Tanh()


def penalty(model: Any) -> None:
    model.generation_config.repetition_penalty = 1.3


def test_own_text_is_kept_and_goes_on(rows: list[Answer], tmp_path: Path) -> None:
    model, texts = network("llama"), prompts((3, 6, 5), seed=1)
    told: list[float] = []

    def stop_after_one_batch(count: float) -> None:
        told.append(count)
        if sum(told) > TEXT.batch_size - 1e-6:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_own_text(model, texts, TEXT, tmp_path, stop_after_one_batch)
    assert len(told) > TEXT.row_length - TEXT.prompt_length, (
        "a batch is counted while it is written"
    )
    told.clear()
    again = write_own_text(model, texts, TEXT, tmp_path, told.append)
    assert told[0] == TEXT.batch_size
    assert again == rows
    assert {len(prompt) + len(answer) for prompt, answer in again} == {24}
    assert [prompt for prompt, _ in again[:2]] == [tuple(texts[0]), tuple(texts[1][-4:])]
    assert len(set(again)) == 80
    with pytest.raises(OptionError, match="answers to other prompts or by other settings"):
        write_own_text(model, texts[:1], TEXT, tmp_path)
    with pytest.raises(OptionError, match="answers to other prompts or by other settings"):
        write_own_text(model, texts, replace(TEXT, seed=1), tmp_path)
    for change in (weights, frequencies, activation, penalty):
        change(other := copy.deepcopy(model))
        with pytest.raises(OptionError, match="or of another network"):
            write_own_text(other, texts, TEXT, tmp_path)
    (tmp_path / ANSWERS).write_bytes(b"rows")
    with pytest.raises(OptionError, match="remove it to write the answers again"):
        write_own_text(model, texts, TEXT, tmp_path)


def test_bad_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="no prompts to answer"):
        write_own_text(network("llama"), [], TEXT, tmp_path)
    with pytest.raises(OptionError, match="5 tokens do not fill a row of 6"):
        cut_rows([(1, 2), (3, 4, 5)], 6)
    assert cut_rows([(1, 2), (3, 4, 5)], 2) == [((), (1, 2)), ((), (3, 4))]
    for bad in ({"row_length": 4, "prompt_length": 4}, {"temperatures": (0.0,)}, {"num_tokens": 9}):
        with pytest.raises(OptionError, match="own text"):
            TextSettings(**bad)
    with pytest.raises(OptionError, match="unknown preset 'brunch'; did you mean 'branch'"):
        HeadSettings(preset="brunch")
    with pytest.raises(OptionError, match="three rows of text or more"):
        make_head(network("llama"), cut_rows([range(12)], 6), HeadSettings(), tmp_path)
    with pytest.raises(UnsupportedModelError, match="shows no hidden states"):
        feature_model(network("bloom"))


@pytest.mark.parametrize("preset", ["ridge", "paper", "branch"])
def test_presets_make_heads_that_load(preset: str, rows: list[Answer], tmp_path: Path) -> None:
    recipe = Recipe(steps=20, batch_size=64, evaluate_every=10, learning_rate=0.01)
    settings = HeadSettings(preset=preset, num_steps=2, width=16, recipe=recipe)
    outcome = make_head(network("llama"), rows, settings, tmp_path, about={"target": "tiny"})
    assert outcome.quality is not None
    assert outcome.quality.block_efficiency > 1.05
    loaded = load_head(tmp_path)
    assert loaded.predictor.is_branched == (preset != "paper")
    loaded.check(feature_model(network("llama")))
    about = json.loads((tmp_path / CONFIG).read_text())["about"]
    assert about["target"] == "tiny"
    assert about["settings"]["preset"] == preset
    assert (tmp_path / STATE).exists() == (preset != "ridge")


def test_a_training_goes_on_with_its_own_target_and_text_only(
    rows: list[Answer], tmp_path: Path
) -> None:
    """A network that differs in one norm has the same shapes, and embeddings."""
    settings = HeadSettings(num_steps=1, width=4, recipe=Recipe(steps=2, batch_size=16))
    make_head(model := network("llama"), rows, settings, tmp_path)
    weights(other := copy.deepcopy(model))
    with pytest.raises(OptionError, match=r"other values of \['target'\]"):
        make_head(other, rows, settings, tmp_path)
    with pytest.raises(OptionError, match=r"other values of \['text'\]"):
        make_head(model, rows[:-9], settings, tmp_path)
    with pytest.raises(OptionError, match=r"other values of \['preset'\]"):
        make_head(model, rows, replace(settings, preset="paper"), tmp_path)
    make_head(model, rows, settings, tmp_path)


def test_the_commands_make_and_use_a_head(run, tiny_paths, tmp_path: Path) -> None:
    target, out, data = ["--target", tiny_paths[0]], tmp_path / "head", tmp_path / "data.txt"
    data.write_text("once upon a time\nthe history of mathematics\nwhat is two and two?\n")
    made = ("--data", data, "--out", out, "--tokens", 1000, "--alignment", "none", *MADE)
    result = run("train", "shape", *target, *made)
    assert result.exit_code == 0, result.output
    assert "block efficiency" in result.stdout
    drafter = ["--drafter", f"shape(head={str(out)!r})"]
    greedy = [*target, "--temperature", "0", "--max-new-tokens", "6"]
    drafted = run("generate", "once", *greedy, *drafter)
    assert drafted.exit_code == 0, drafted.output
    assert "MB beside the target" in drafted.stderr
    assert drafted.stdout == run("generate", "once", *greedy, "--drafter", "none").stdout
    refused = run("train", "shape", *target, "--out", out, "--mixed", "int4")
    assert refused.exit_code == 2
    assert "--mixed: 'int4' is none of none, bfloat16, float16" in refused.stderr


def test_ctrl_c_ends_after_the_step_and_the_same_command_goes_on(
    run, tiny_paths, tmp_path: Path, monkeypatch
) -> None:
    out, data = tmp_path / "head", tmp_path / "data.txt"
    data.write_text("once upon a time\nthe history of mathematics\n")
    command = ("train", "shape", "--target", tiny_paths[0], "--data", data, "--out", out, *MADE)
    step, steps = loop._step, []

    def pressed(*args):
        steps.append(args[-1])
        if steps == [0, 1]:
            signal.raise_signal(signal.SIGINT)
        return step(*args)

    monkeypatch.setattr(loop, "_step", pressed)
    ended = run(*command, "--tokens", 1000)
    assert (ended.exit_code, steps) == (130, [0, 1])
    said = " ".join(ended.stderr.split())
    assert said.count("ending after this step, which is saved; Ctrl-C again ends at once") == 1
    assert said.endswith("the same command goes on")
    assert run(*command, "--tokens", 1000).exit_code == 0
    assert steps == [0, 1, 2, 3]


def test_a_chat_model_writes_its_own_prompts(run, tmp_path: Path) -> None:
    built_in_tokenizer = AutoTokenizer.from_pretrained(built_in("target"))
    built_in_tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}<|end|>{% endfor %}assistant:"
    )
    target = network("llama", num_hidden_layers=6, vocab_size=len(built_in_tokenizer))
    target.generation_config.eos_token_id = list(range(0, len(built_in_tokenizer), 16))
    target.save_pretrained(tmp_path / "target")
    built_in_tokenizer.save_pretrained(tmp_path / "target")
    out, command = tmp_path / "head", ("train", "eagle3", "--target", tmp_path / "target")
    sizes = ("--answer-tokens", "12", "--steps", "2", "--batch", "32", "--draft-vocabulary", "64")
    result = run(*command, "--own-prompts", "24", *sizes, "--out", out)
    assert result.exit_code == 0, result.output
    turns = (out / "own_prompts" / ANSWERS).read_text().splitlines()
    answers = (out / ANSWERS).read_text().splitlines()
    assert len(turns) == 24
    assert 0 < len(answers) <= 24
    opening = json.loads(turns[0])["prompt"]
    assert all(json.loads(line)["prompt"][: len(opening)] == opening for line in answers)
    refused = run("train", "eagle3", "--own-prompts", "4", "--out", tmp_path / "other")
    assert refused.exit_code == 2
    assert "no chat template to write prompts by" in refused.stderr


def press_ctrl_c(step: int | None) -> None:
    """Press it once while four steps are trained, or twice where training goes on until the next step."""
    with working() as work, Interrupts(Recipe(steps=4)) as interrupts:
        watch = interrupts.watch(work.stage("rows"), work.stage("steps"))
        if step is not None:
            watch.on_step(loop.Progress(step=step))
        signal.raise_signal(signal.SIGINT)
        assert watch.should_stop()
        signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize(
    ("step", "num_warnings"),
    [(None, 0), (2, 1), (4, 0)],
    ids=["before the first step", "between two steps", "after the last"],
)
def test_ctrl_c_waits_for_a_step_alone(capsys, step: int | None, num_warnings: int) -> None:
    with pytest.raises(typer.Exit) as ended:
        press_ctrl_c(step)
    assert ended.value.exit_code == 130
    said = " ".join(capsys.readouterr().err.split())
    assert said.count("Ctrl-C again ends at once") == num_warnings
    assert said.count("what was done so far is saved") == 1


def test_the_built_in_head_fits_the_built_in_target_and_no_other(run, tiny_paths) -> None:
    options = ["generate", "Once", "--temperature", "0", "--max-new-tokens", "12"]
    drafted = run(*options, "--drafter", "shape")
    assert drafted.exit_code == 0, drafted.output
    assert drafted.stdout == run(*options, "--drafter", "none").stdout
    refused = run(*options, "--drafter", "shape", "--target", tiny_paths[0])
    assert refused.exit_code == 2
    said = " ".join(refused.stderr.split())
    assert "this head is for a target of hidden size 256, 12 layers and 4096 tokens" in said
