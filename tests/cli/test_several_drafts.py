"""Several draft models from Python and from the command line."""

import json

import pytest

from monge.api import built_in, load
from monge.core.errors import OptionError
from monge.draft.ensemble import Ensemble
from monge.loading.networks import load_network

PROMPT = "The sea was calm"


@pytest.fixture(scope="module")
def models(tiny_paths):
    """The tiny draft model and, as a second one, the target itself."""
    target, draft = tiny_paths
    return ["--target", target, "--draft", draft, "--draft", target]


@pytest.fixture(scope="module")
def expected(tiny_paths):
    (result,) = load(*tiny_paths).generate([PROMPT], max_new_tokens=12)
    return result


def test_a_list_of_draft_models_drafts_together(tiny_paths, expected):
    target, draft = tiny_paths
    decoder = load(target, [draft, target])
    assert isinstance(decoder.components.drafter, Ensemble)
    (result,) = decoder.generate([PROMPT], max_new_tokens=12)
    assert result.token_ids == expected.token_ids
    assert result.stats.block_efficiency > 1  # the target as a draft model knows every token
    of_one = type(load(target, [draft]).components.drafter)
    assert of_one is type(load(target, draft).components.drafter)


def test_lists_that_do_not_fit_are_refused(tiny_paths):
    target, draft = tiny_paths
    network = load_network(draft)
    for drafts, message in (
        ([draft, target, f"{draft}/."], r"draft: .* is given twice"),
        ([network, network], "draft: a LlamaForCausalLM is given twice"),
        ([], "draft: the list is empty"),
        ([draft, built_in("shape")], r"is a head; a list takes draft models only"),
    ):
        with pytest.raises(OptionError, match=message):
            load(target, drafts)
    with pytest.raises(OptionError, match=r"drafter 'model' takes no list of draft models"):
        load(target, [draft, target], drafter="model")


def test_generate_and_batch(run, models, expected, tmp_path):
    record = json.loads(run("generate", PROMPT, *models, "--max-new-tokens", 12, "--json").stdout)
    assert record["text"] == expected.text
    assert record["stats"]["block_efficiency"] > 1
    (tmp_path / "in.jsonl").write_text(json.dumps({"prompt": PROMPT}) + "\n")
    files = (tmp_path / "in.jsonl", tmp_path / "out.jsonl")
    result = run("batch", *files, *models, "--max-new-tokens", 12)
    assert result.exit_code == 0, result.stderr
    assert json.loads(files[1].read_text())["text"] == expected.text


def test_bench_decode(run, models, tmp_path):
    first = "first: drafter=model, controller=fixed"
    arms = ["--arm", "both: controller=fixed", "--arm", first, "--named-only"]
    (tmp_path / "prompts.txt").write_text(PROMPT + "\n")
    small = [
        "--batch",
        "1",
        "--temperature",
        "0",
        "--repeats",
        "1",
        "--max-new-tokens",
        "8",
        "--json",
    ]
    files = ["--prompts", tmp_path / "prompts.txt", "--out", tmp_path / "out"]
    result = run("bench", "decode", *models, *arms, *small, *files)
    assert result.exit_code == 0, result.stderr
    measured = json.loads(result.stdout.splitlines()[-1])["arms"]
    found = {arm["arm"]: arm["block_efficiency"] for arm in measured}
    assert found["both"] > found["first"]  # the second draft model is the target itself
