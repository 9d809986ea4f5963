"""`generate(custom_generate=monge.speculate)` with every drafter that can be named, and with heads: the text stays the same."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

import monge
from monge.core.errors import ModelLoadError, OptionError
from monge.core.sampling_rules import SamplingRules
from monge.draft.published_heads import Head
from monge.heads.readers.registry import load_head
from monge.heads.shape.checkpoint import save_head
from monge.heads.shape.head import ShapeHead, TargetSizes, make_predictor
from monge.plugins import transformers_compiled
from monge.training.texts import feature_model
from tests.engine.tiny import COMMON, VOCAB, network, padded, perturbed, prompts
from tests.heads.readers.published import eagle3, qwen_mtp

ROWS = prompts((9, 4, 7), seed=7)
SETTINGS = {**padded(ROWS), "do_sample": False, "max_new_tokens": 16}
HIDDEN = COMMON["hidden_size"]
NAMED = ("suffix", "pool('ngram(2)', 'suffix')")


@pytest.fixture(scope="module")
def heads(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("heads")
    model = feature_model(network("llama"))
    sizes = TargetSizes.of(model)
    shape = ShapeHead(
        make_predictor("gated", sizes, num_steps=2, is_branched=True, width=4, gate_rank=2), sizes
    )
    shape.remember(model)
    save_head(shape, folder / "shape", dtype=torch.float32, about={})
    made = {"mtp": qwen_mtp(HIDDEN, VOCAB), "eagle3": eagle3(HIDDEN, VOCAB)}
    folders = {name: head.write(folder / name) for name, head in made.items()}
    return {"shape": folder / "shape", **folders}


def target() -> Any:
    return network("llama")


def plain() -> torch.Tensor:
    return target().generate(**SETTINGS)


def ours(**settings: Any) -> torch.Tensor:
    return target().generate(**SETTINGS | settings, custom_generate=monge.speculate)


@pytest.mark.parametrize("drafter", NAMED)
def test_a_named_drafter_drafts_the_greedy_text(drafter: str) -> None:
    assert torch.equal(ours(drafter=drafter), plain())


def test_a_draft_model_of_shorter_context() -> None:
    draft = copy.deepcopy(perturbed(target()))
    draft.config.max_position_embeddings = 15
    assert torch.equal(ours(assistant_model=draft), plain())


@pytest.mark.parametrize("kind", ["shape", "mtp", "eagle3"])
@pytest.mark.parametrize("tree", [None, "best_first(6, 2, 3)"])
def test_a_head_drafts_the_greedy_text(heads: dict[str, Path], kind: str, tree: str | None) -> None:
    assert torch.equal(ours(draft_model=heads[kind], tree=tree), plain())


def test_a_loaded_head_and_one_in_a_pool(heads: dict[str, Path]) -> None:
    head = load_head(heads["mtp"])
    for drafter in (None, "pool('ngram', 'head')"):
        assert torch.equal(ours(draft_model=head, drafter=drafter), plain())


def test_a_head_drafts_under_the_rules_of_the_request(
    heads: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[object] = []
    made = transformers_compiled.make_components

    def noted(*models: object, **settings: object) -> object:
        seen.append(parts := made(*models, **settings))  # type: ignore[arg-type]
        return parts

    monkeypatch.setattr(transformers_compiled, "make_components", noted)
    sampled = {"do_sample": True, "temperature": 0.7, "top_k": 9, "seed": 3}
    rows = [ours(**sampled, draft_model=heads["eagle3"]) for _ in range(2)]
    assert torch.equal(*rows)
    drafter = seen[0].drafter  # type: ignore[attr-defined]
    assert isinstance(drafter, Head)
    assert drafter.rules == SamplingRules(temperature=0.7, top_k=9)


def test_drafters_that_do_not_fit_are_refused(heads: dict[str, Path], tmp_path: Path) -> None:
    made = eagle3(HIDDEN * 2, VOCAB).write(tmp_path / "wide")
    for settings, message in (
        ({"draft_model": made}, "states 64 wide"),
        ({"draft_model": heads["eagle3"], "drafter": "suffix"}, "takes no head"),
        ({"draft_model": perturbed(target()), "drafter": "ngram"}, "takes no draft model"),
        ({"draft_model": tmp_path / "nothing"}, "nothing"),
    ):
        with pytest.raises((OptionError, ModelLoadError), match=message):
            ours(**settings)
