"""The whole engine on a device that is not there.

Nothing mixes devices, texts are the same, and the host seldom waits.
"""

import copy

import pytest
import torch

import monge
from monge.backends import cuda
from monge.engine import loop
from monge.networks.hf_tree import HfTreeModel
from monge.networks.tree_cache import CAPTURED_ROOM
from monge.runtime.clock import measured_by, num_preparations
from tests.engine import pretend
from tests.engine.pretend import placed
from tests.engine.tiny import VOCAB, network, perturbed, prompts
from tests.heads.readers.published import KINDS, eagle3
from tests.heads.toy import random_head

GREEDY, SAMPLED = {"temperature": 0.0}, {"temperature": 1.0}
HEADS = ("eagle3", "mtp-qwen", "speculators-dflash", "speculators-dspark")
TRUNCATED = {"temperature": 0.8, "top_p": 0.9, "top_k": 30, "min_p": 0.01}


def written(target, draft, settings, rules, count=2):
    decoder = monge.load(target, draft, **{"controller": "fixed", **settings})
    pretend.waits.clear()
    with measured_by(lambda: 0.0):  # a clock that stands teaches controllers nothing
        texts = list(prompts((9, 4), seed=5)[:count])
        results = decoder.generate(texts, max_new_tokens=10, seed=3, **rules)
    rounds = sum(result.stats.num_rounds for result in results)
    return [result.token_ids for result in results], rounds


def pair(place=None, family="llama", attention="sdpa"):
    """A target and a draft model, on the device if it is named."""
    models = network(family, attention), perturbed(network(family, attention))
    return models if place is None else [placed(model, place) for model in models]


@pytest.mark.parametrize(
    "settings",
    [
        {"verifier": "speculative_sampling"},
        {"verifier": "recursive_rejection_without_replacement", "tree": "fixed_width((2, 2))"},
        {"verifier": "optimal", "tree": "fixed_width((3,), children='iid')"},
        {"verifier": "canonical"},
        {"verifier": "k_seq"},
        {"verifier": "gumbel"},
        {"verifier": "block"},
        {"verifier": "multipath_block"},
        {"verifier": "block", "tree": "chain(3, 'top')"},
        {"verifier": "traversal", "tree": "fixed_width((2, 2), 'greedy_plus_one')"},
        {"verifier": "recursive_rejection", "tree": "fixed_width((2, 2), 'greedy_plus_one')"},
        {"verifier": "layer", "tree": "fixed_width((2, 2))"},
        {"tree": "eagle2"},
        {"controller": "goodput"},
        {"controller": "on_the_fly"},
    ],
    ids=str,
)
def test_sampled_texts_are_those_of_the_host(device, settings):
    expected, _ = written(*pair(), settings, SAMPLED)
    assert written(*pair(device), settings, SAMPLED)[0] == expected


@pytest.mark.parametrize("drafter", ["ngram", "suffix"])
@pytest.mark.parametrize("rules", [SAMPLED, GREEDY], ids=["sampled", "greedy"])
def test_drafters_without_a_draft_model(device, drafter, rules):
    target = network("llama", "sdpa")
    expected, _ = written(target, None, {"drafter": drafter}, rules)
    assert written(placed(target, device), None, {"drafter": drafter}, rules)[0] == expected


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        *((kind, {}) for kind in (*HEADS, "shape", "shape of chains")),
        *((kind, {"tree": "fixed_width((2, 2))"}) for kind in ("eagle3", "shape")),
    ],
)
def test_heads_on_a_device_write_the_text_of_the_cpu(device, tmp_path, kind, settings):
    target = network("llama", "sdpa")
    if kind in HEADS:
        KINDS[kind](target.config.hidden_size, VOCAB).write(tmp_path)
    # A SHAPE head is moved to where its target lies, so each has its own.
    heads = (
        tmp_path if kind in HEADS else random_head(HfTreeModel(target), is_branched=kind == "shape")
        for _ in range(2)
    )
    expected, _ = written(target, next(heads), settings, SAMPLED)
    assert written(placed(target, device), next(heads), settings, SAMPLED)[0] == expected


@pytest.mark.parametrize(
    ("verifier", "tree"),
    [("k_seq", "chain(3)"), ("naive_tree", "chain(3)"), ("layer", "fixed_width((2, 2))")],
)
def test_cut_laws_of_a_draft_vocabulary(device, tmp_path, verifier, tree):
    """On a device, tokens that the rules cut stay in the law with mass zero."""
    target, settings = network("llama", "sdpa"), {"verifier": verifier, "tree": tree}
    KINDS["eagle3"](target.config.hidden_size, VOCAB).write(tmp_path)
    expected, _ = written(target, tmp_path, settings, TRUNCATED)
    assert written(placed(target, device), tmp_path, settings, TRUNCATED)[0] == expected


@pytest.mark.parametrize(
    "rules",
    [SAMPLED, *(pytest.param(rules, marks=pytest.mark.slow) for rules in (GREEDY, TRUNCATED))],
    ids=["sampled", "greedy", "truncated"],
)
@pytest.mark.parametrize("name", ["mistral_window", "gemma3", "mixtral", "bloom"])
def test_every_family_on_a_device_writes_the_text_of_the_cpu(device, name, rules):
    expected, _ = written(*pair(None, name, "eager"), {}, rules)
    assert written(*pair(device, name, "eager"), {}, rules)[0] == expected


@pytest.mark.parametrize(
    ("rules", "tree"),
    [
        (TRUNCATED, "chain(3)"),
        (SAMPLED, "fixed_width((2, 2, 1))"),
        (TRUNCATED, "fixed_width((2, 2, 1), 'iid')"),
    ],
)
def test_how_often_the_host_waits(device, rules, tree):
    """Once for the draft, or for each level where repeated tokens decide its shape; and once for all verdicts of a shape.

    That is whatever the number of requests. Copies to the device that make the host wait for what is
    queued would count too.
    """
    models = pair(device)
    settings = {"tree": tree, "max_batch_size": 1}  # one by one, to count rounds
    _, rounds = written(*models, settings, {**rules, "ignore_eos": True})
    alone = sum(pretend.waits.values())
    most = 4 if "iid" in tree else 2
    assert rounds < alone <= most * rounds, pretend.waits
    written(*models, {"tree": tree}, {**rules, "ignore_eos": True})
    assert sum(pretend.waits.values()) <= 0.8 * alone, pretend.waits


@pytest.mark.parametrize("rules", [SAMPLED, GREEDY], ids=["sampled", "greedy"])
@pytest.mark.parametrize("drafter", ["model", "eagle3", "pool"])
def test_the_target_reads_a_chain_before_the_host_knows_its_tokens(
    device, tmp_path, monkeypatch, rules, drafter
):
    target, draft = pair(device)
    settings = {"tree": "chain(3)", "controller": "fixed"}
    if drafter == "eagle3":
        KINDS["eagle3"](target.config.hidden_size, VOCAB).write(tmp_path)
        draft = tmp_path
    if drafter == "pool":
        settings["drafter"] = "pool('ngram', 'model')"
    decoder = monge.load(target, draft, **settings)
    read, drawn = decoder.components.target.extend, loop.draft_trees
    counts = {"drafts": [], "reads": []}

    def drafting(*given):
        counts["drafts"].append(pretend.waits.total())
        return drawn(*given)

    def reading(*given):
        found = read(*given)
        counts["reads"].append(pretend.waits.total())
        return found

    monkeypatch.setattr(loop, "draft_trees", drafting)
    monkeypatch.setattr(decoder.components.target, "extend", reading)
    options = {"max_new_tokens": 10, "seed": 3, "ignore_eos": True}
    decoder.generate(list(prompts((9, 4), seed=5)), **options, **rules)
    assert counts["drafts"] == counts["reads"]
    assert len(set(counts["drafts"])) == len(counts["drafts"]) > 2, "rounds wait, but not there"


@pytest.mark.filterwarnings("ignore:.*not finite")
def test_chains_that_end_early_for_laws_that_are_not_finite(device):
    """The target has then read nodes that the tree does not have."""
    target = network("llama", "sdpa")
    draft = copy.deepcopy(perturbed(target))
    with torch.no_grad():
        draft.get_input_embeddings().weight[VOCAB // 2 :] = torch.nan
    expected, _ = written(target, draft, {"tree": "chain(4)"}, SAMPLED)
    found, _ = written(placed(target, device), placed(draft, device), {"tree": "chain(4)"}, SAMPLED)
    assert found == expected


def test_how_often_the_host_waits_where_nothing_is_chosen(device, tmp_path):
    """A draft model, lookups and heads, each with its default verifier."""
    target, draft = pair(device)
    rules = {**SAMPLED, "ignore_eos": True}
    eagle3(target.config.hidden_size, VOCAB).write(tmp_path)
    for given, settings, most in (
        (draft, {"drafter": "model"}, 2),
        (None, {}, 1),
        (tmp_path, {"tree": "chain(3)"}, 2),
        (random_head(HfTreeModel(network("llama", "sdpa"))), {}, 2),
    ):
        _, rounds = written(target, given, settings, rules, count=1)
        assert sum(pretend.waits.values()) <= most * rounds, pretend.waits


def test_how_often_the_host_waits_in_greedy_rounds(device):
    greedy = {**GREEDY, "ignore_eos": True}
    _, rounds = written(*pair(device), {"tree": "chain(3)"}, greedy, count=1)
    assert sum(pretend.waits.values()) <= 2 * rounds, pretend.waits


def test_rounds_in_which_something_is_captured_teach_nothing(device, monkeypatch):
    """A text outgrows the cache: graphs are captured anew, in rounds that take absurdly long."""
    monkeypatch.setattr(cuda, "GraphCapture", lambda _: pretend.Rerun())
    monkeypatch.setitem(CAPTURED_ROOM, "least", 0)
    target = placed(network("llama", "sdpa"), device)
    decoder = monge.load(
        target, drafter="ngram", backend="compiled", controller="goodput", max_batch_size=1
    )
    (prompt,) = prompts((9,), seed=5)
    time = [0.0]

    def clock():
        time[0] = max(time[0] + 1e-3, 1e6 * num_preparations())
        return time[0]

    with measured_by(clock):
        (result,) = decoder.generate([prompt], max_new_tokens=90, temperature=0, ignore_eos=True)
    absurd = [record for record in result.records if record.times.is_warm_up]
    assert absurd
    assert all(record.times.total_s > 1e5 for record in absurd)
    times = [one for kept in decoder.components.shared.latency.times.values() for one in kept]
    assert times
    assert max(times) < 1.0


class TestTheDevice:
    def test_refuses_what_lies_on_the_host(self, device):
        with pytest.raises(AssertionError, match="tensors of two devices"):
            torch.zeros(3, device=device) + torch.zeros(3)

    def test_counts_what_the_host_waits_for(self, device):
        law = monge.law_from_logits(torch.tensor([1.0, 2.0], device=device), monge.SamplingRules())
        before = sum(pretend.waits.values())
        law.prob(1)
        assert sum(pretend.waits.values()) == before + 1
