"""Every arm decodes the same law: the same prompts, greedily and in float32, give the same tokens."""

from dataclasses import replace
from itertools import product

import pytest
import torch

from monge.bench.arms import (
    USUAL,
    Call,
    HostArm,
    MongeArm,
    arms_of,
    assistant_options,
    host_arms,
    named_arm,
)
from monge.bench.decode import tune_assistant
from monge.bench.pair import load_pair
from monge.bench.runner import Settings
from monge.core.errors import OptionError
from monge.draft.tree.registry import TREES
from monge.prompts import encode
from monge.verify.base import why_no_exactness
from monge.verify.registry import VERIFIERS
from tests.heads.readers.published import eagle3

TUNED = {0.0: assistant_options(3), 1.0: assistant_options(2)}


def legal_arms(pair):
    """Every verifier with every kind of tree that it is exact for."""
    trees = ("chain", "fixed_width", 'fixed_width(children="iid")', "best_first")
    for tree, verifier in product(trees, VERIFIERS):
        limits = TREES.parse(tree).limits
        rule = VERIFIERS.make(verifier)
        if why_no_exactness(rule, limits.proposes, limits.max_width) is None:
            settings = {"drafter": pair.drafter(), "tree": tree, "verifier": verifier}
            yield MongeArm(name=f"{tree} {verifier}", settings={**settings, "controller": "fixed"})


def call(pair, texts, temperature=0.0, seed=0):
    prompt_ids = tuple(encode(pair.tokenizer, text) for text in texts)
    return Call(prompt_ids=prompt_ids, max_new_tokens=12, temperature=temperature, seed=seed)


@pytest.fixture(scope="module")
def plain(tiny_pair):
    host, asked = HostArm(name="h", family="plain"), call(tiny_pair, ["The sea was calm"])
    return host.decode(tiny_pair, asked).token_ids


@pytest.fixture(scope="module")
def arms(tiny_pair):
    return [*host_arms(tiny_pair, TUNED), *arms_of(USUAL), *legal_arms(tiny_pair)]


def test_an_arm_forgets_the_pair_that_it_ran_before(tiny_pair):
    """Times of other forwards, and rests that were decided by them, would last for the whole run."""
    arm, asked = MongeArm(name="m", settings={"controller": "goodput"}), call(tiny_pair, ["Once"])
    memories = []
    for _ in range(2):
        arm.prepare(tiny_pair)
        arm.decode(tiny_pair, asked)
        memories.append(arm.shared_states[0.0, 1])
    assert memories[0].latency is not memories[1].latency


def test_assistant_settings_do_not_leak_into_the_next_arm(tiny_pair):
    default, tuned = (arm for arm in host_arms(tiny_pair, TUNED) if arm.family == "assisted")
    for arm, expected in ((tuned, 3), (default, None)):
        arm.decode(tiny_pair, call(tiny_pair, ["The sea"]))
        assert tiny_pair.draft.generation_config.num_assistant_tokens == expected


def test_sampling_rules_hold_for_every_arm(tiny_pair, arms, plain):
    """With the most probable token alone, sampled texts are the greedy ones."""
    sampled = replace(call(tiny_pair, ["The sea was calm"], 1.0), truncation={"top_k": 1})
    for arm in arms[:3] + arms[-3:]:
        arm.prepare(tiny_pair)
        assert arm.decode(tiny_pair, sampled).token_ids == plain


def test_greedy_arms_agree_and_only_ours_has_records(tiny_pair, arms, plain):
    assert len(arms) > 15
    for arm in arms:
        decoded = arm.decode(tiny_pair, call(tiny_pair, ["The sea was calm"]))
        assert decoded.token_ids == plain, arm.name
        assert bool(decoded.records) == (arm.family == "monge"), arm.name
    ragged = call(tiny_pair, ["The sea was calm", "A", "Question: why is this one so much longer?"])
    made = HostArm(name="h", family="plain"), MongeArm(name="m")
    host, ours = (arm.decode(tiny_pair, ragged).token_ids for arm in made)
    assert host == ours
    assert host[0] == plain[0]


def test_an_arm_runs_its_draft_model_in_its_own_way(tiny_pair, plain):
    arm, asked = named_arm("own: draft_backend=eager()"), call(tiny_pair, ["The sea was calm"])
    assert arm.decode(tiny_pair, asked).token_ids == plain
    made = arm.draft
    assert made is not None
    assert made is not tiny_pair.draft_model
    arm.decode(tiny_pair, asked)
    assert arm.draft is made, "the network is made once"
    for drafter in ("ngram", "none"):
        reason = f"draft_backend says how a draft model runs, and '{drafter}' has none"
        with pytest.raises(OptionError, match=reason):
            named_arm(f"own: draft_backend=eager, drafter={drafter}").decode(tiny_pair, asked)


@pytest.mark.slow
def test_sampled_arms_have_full_length_and_follow_their_seed(tiny_pair, arms):
    for arm in arms:
        first, again, other = (
            arm.decode(
                tiny_pair, call(tiny_pair, ["The sea"], temperature=1.0, seed=seed)
            ).token_ids
            for seed in (1, 1, 2)
        )
        # Plans of a controller that reads the clock differ, and sampled texts with them.
        assert first == again or (isinstance(arm, MongeArm) and arm.reads), arm.name
        assert first != other, arm.name
        assert len(first[0]) == 12, arm.name


def test_end_of_text_token_does_not_shorten_any_arm(tiny_paths):
    pair = load_pair(*tiny_paths)
    with torch.no_grad():
        # Equal logits: the first token, which ends the text, is the greedy one.
        pair.target.model.norm.weight.zero_()
    for arm in [*host_arms(pair, TUNED), *arms_of(USUAL)]:
        tokens = arm.decode(pair, call(pair, ["The sea"], temperature=0.0)).token_ids
        assert tokens == ((0,) * 12,), arm.name


def test_tuning_tries_every_candidate(tiny_pair):
    prompts = call(tiny_pair, ["The sea"]).prompt_ids
    best, tried = tune_assistant(tiny_pair, prompts, Settings(max_new_tokens=6), (1, 4))
    found = [(entry["temperature"], entry["num_assistant_tokens"]) for entry in tried]
    assert found == [(0, 1), (0, 4), (1, 1), (1, 4)]
    for temperature, options in best.items():
        mine = [entry for entry in tried if entry["temperature"] == temperature]
        fastest = max(mine, key=lambda entry: entry["tokens_per_s"])
        assert options == assistant_options(fastest["num_assistant_tokens"])


def test_target_alone_has_no_assisted_arm(tiny_paths):
    pair = load_pair(tiny_paths[0])
    assert "transformers assisted" not in [arm.name for arm in host_arms(pair, {})]
    asked = call(pair, ["The sea"])
    ours, host = named_arm(USUAL[0]), HostArm(name="h", family="plain")
    assert ours.decode(pair, asked).token_ids == host.decode(pair, asked).token_ids
    with pytest.raises(OptionError, match="needs a draft model"):
        HostArm(name="a", family="assisted", assistant={}).decode(pair, asked)


@pytest.fixture(scope="module")
def head_pair(tiny_paths, tmp_path_factory):
    made = eagle3(32, 4096).write(tmp_path_factory.mktemp("head") / "eagle3")
    return load_pair(tiny_paths[0], str(made))


def test_a_head_stands_where_a_draft_model_would(head_pair, plain):
    assert head_pair.draft is None
    assert head_pair.head == f"head(head={head_pair.names['draft']!r})"
    asked = call(head_pair, ["The sea was calm"])
    arms = [*arms_of(USUAL), *(arm for arm in legal_arms(head_pair) if "chain" in arm.name)]
    assert len(arms) > 5
    for arm in arms:
        assert arm.decode(head_pair, asked).token_ids == plain, arm.name


@pytest.mark.parametrize("drafter", ["head", "pool('ngram', 'head')", "suffix"])
def test_every_drafter_makes_an_arm(head_pair, plain, drafter):
    arm = named_arm(f"mine: drafter={drafter}")
    asked = call(head_pair, ["The sea was calm"])
    first, again = (arm.decode(head_pair, asked) for _ in range(2))
    assert first.token_ids == again.token_ids == plain
    assert (arm.components is None) == (drafter == "suffix")
    # The other arms' target keeps no hidden states for this one, and is not asked for any.
    kept = arm.components
    assert kept is None or kept.target is not head_pair.target_model
