"""Several draft models from Python and from the command line."""

import json

import pytest

from monge.api import built_in, load
from monge.core.errors import OptionError
from monge.draft.ensemble import EnsembleDrafter
from monge.loading.networks import load_network

PROMPT = "The sea was calm"


@pytest.fixture(scope="module")
def drafts(tiny_paths):
    """The tiny draft model and, as a second one, the target itself."""
    target, draft = tiny_paths
    return [draft, target]


def test_a_list_of_draft_models_drafts_together(tiny_paths, drafts):
    decoder = load(tiny_paths[0], drafts)
    assert isinstance(decoder.components.drafter, EnsembleDrafter)
    (result,) = decoder.generate([PROMPT], max_new_tokens=12)
    (plain,) = load(tiny_paths[0], drafter="none").generate([PROMPT], max_new_tokens=12)
    assert result.token_ids == plain.token_ids
    assert result.stats.block_efficiency > 1  # the target as a draft model knows every token


def test_a_list_of_one_is_that_one(tiny_paths):
    target, draft = tiny_paths
    assert type(load(target, [draft]).components.drafter) is type(
        load(target, draft).components.drafter
    )


def test_lists_that_do_not_fit_are_refused(tiny_paths):
    target, draft = tiny_paths
    with pytest.raises(OptionError, match=r"draft: .* is given twice"):
        load(target, [draft, target, f"{draft}/."])
    network = load_network(draft)
    with pytest.raises(OptionError, match="draft: a LlamaForCausalLM is given twice"):
        load(target, [network, network])
    with pytest.raises(OptionError, match="draft: the list is empty"):
        load(target, [])
    with pytest.raises(OptionError, match=r"is a head; a list takes draft models only"):
        load(target, [draft, built_in("shape")])
    with pytest.raises(OptionError, match=r"drafter 'model' takes no list of draft models"):
        load(target, [draft, target], drafter="model")


def test_generate(run, tiny_paths, drafts):
    chosen = [
        "--target",
        tiny_paths[0],
        "--draft",
        drafts[0],
        "--draft",
        drafts[1],
        "--max-new-tokens",
        12,
        "--json",
    ]
    record = json.loads(run("generate", PROMPT, *chosen).stdout)
    (expected,) = load(*tiny_paths).generate([PROMPT], max_new_tokens=12)
    assert record["text"] == expected.text
    assert record["stats"]["block_efficiency"] > 1


def test_batch(run, tiny_paths, drafts, tmp_path):
    (tmp_path / "in.jsonl").write_text(json.dumps({"prompt": PROMPT}) + "\n")
    chosen = [
        "--target",
        tiny_paths[0],
        "--draft",
        drafts[0],
        "--draft",
        drafts[1],
        "--max-new-tokens",
        12,
    ]
    result = run("batch", tmp_path / "in.jsonl", tmp_path / "out.jsonl", *chosen)
    assert result.exit_code == 0, result.stderr
    (expected,) = load(*tiny_paths).generate([PROMPT], max_new_tokens=12)
    assert json.loads((tmp_path / "out.jsonl").read_text())["text"] == expected.text


def test_bench_decode(run, tiny_paths, drafts, tmp_path):
    arms = [
        "--arm",
        "both: controller=fixed",
        "--arm",
        "first: drafter=model, controller=fixed",
        "--named-only",
    ]
    (tmp_path / "prompts.txt").write_text(PROMPT + "\n")
    small = [
        "--prompts",
        tmp_path / "prompts.txt",
        "--batch",
        1,
        "--temperature",
        0,
        "--repeats",
        1,
        "--max-new-tokens",
        8,
    ]
    chosen = [
        "--target",
        tiny_paths[0],
        "--draft",
        drafts[0],
        "--draft",
        drafts[1],
        "--out",
        tmp_path / "out",
        "--json",
    ]
    result = run("bench", "decode", *chosen, *arms, *small)
    assert result.exit_code == 0, result.stderr
    found = {
        arm["arm"]: arm["block_efficiency"]
        for arm in json.loads(result.stdout.splitlines()[-1])["arms"]
    }
    assert found["both"] > found["first"]  # the second draft model is the target itself
