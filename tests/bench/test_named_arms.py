"""Arms that are written down, controllers in the comparison, and a draft that is worth nothing."""

import re

import pytest
import torch

from monge.bench.arms import NO_DRAFTS, NONE, Call, arms_of, named_arm
from monge.bench.pair import load_pair
from monge.bench.report import arm_record, slowest_adaptive
from monge.bench.runner import Settings, measure
from monge.core.errors import OptionError
from monge.prompts import Prompt, encode, interleaved, shipped


def test_named_arm():
    arm = named_arm(
        "price, wide: tree=fixed_width((2, 1)), controller=goodput(max_window=4), "
        "drafter=model(top_k=5)"
    )
    assert arm.name == "price, wide"
    expected = {
        "tree": "fixed_width((2, 1))",
        "controller": "goodput(max_window=4)",
        "drafter": "model(top_k=5)",
    }
    assert arm.settings == expected
    assert "latency" in arm.reads
    assert named_arm("mine:").settings == {}
    named = named_arm("depth=3: drafter=suffix")
    assert (named.name, named.settings) == ("depth=3", {"drafter": "suffix"})


def test_an_arm_without_a_name_is_called_by_its_values():
    text = "drafter=pool(ngram, model(top_k=2)), tree=chain(8, 'top')"
    assert named_arm(text).name == "pool(ngram, model(top_k=2)) chain(8, 'top')"
    assert [arm.name for arm in arms_of(["drafter=none", ""])] == ["none", "the defaults"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("mine", "cannot read arm 'mine'; write 'name: part=value"),
        ("a: tree=chain(2), tree=chain(3)", "tree is given twice"),
        (": tree=chain", "cannot read arm ': tree=chain'; write 'name: part=value"),
        ("a: tree=", "cannot read arm"),
        ("a: chain(8)", "cannot read arm"),
        ("a: tre=chain(8)", "did you mean 'tree'"),
        ("a: controller=goodpt", "did you mean 'goodput'"),
        ("a: controller=goodput(max_windw=3)", "did you mean 'max_window'"),
        ("a: drafter=ngrams", "did you mean 'ngram'"),
        ("a: verifier=blok", "did you mean 'block'"),
        ("a: draft_backend=compile", "did you mean 'compiled'"),
        ("a: draft_top_k=2", "unknown part of arm 'a: draft_top_k=2'"),
        ("a: tree=chain(0)", "depth must be at least 1"),
        ("a: drafter=pool('suffix', 'ngram(2.5)')", "num_draft_tokens must be int"),
    ],
)
def test_bad_arms_are_refused(text, message):
    with pytest.raises(OptionError, match=re.escape(message)):
        named_arm(text)
    with pytest.raises(OptionError, match="two arms are called 'monge'"):
        arms_of(["monge:", "monge: tree=chain(2)"])


@pytest.fixture(scope="module")
def measurements(tiny_pair):
    settings = Settings(max_new_tokens=8, repeats=2, batch_sizes=(1, 2))
    prompts = tuple(encode(tiny_pair.tokenizer, text) for text in ("The sea was", "Once"))
    texts = (
        "mine: controller=goodput",
        "never: controller=goodput, tree=best_first, verifier=speculative_sampling",
    )
    return measure(
        tiny_pair, arms_of([NO_DRAFTS, *texts]), prompts, settings, on_call=lambda *_: None
    )


def test_every_cell_learns_for_itself(measurements):
    mine = [measurement for measurement in measurements if measurement.arm.name == "mine"]
    assert len(mine) == 4
    arm = mine[0].arm
    assert set(arm.shared_states) == {(0.0, 1), (0.0, 2), (1.0, 1), (1.0, 2)}
    for (_, batch_size), shared in arm.shared_states.items():
        assert batch_size in {size for _, size, _ in shared.latency.times}
    records = [arm_record(measurement, measurements) for measurement in mine]
    assert all(record["ratio_to_none"]["median"] > 0 for record in records)
    worst = min(records, key=lambda record: record["ratio_to_none"]["median"])
    slowest = slowest_adaptive(measurements)
    assert slowest["ratio_to_faster_plain"] == worst["ratio_to_none"]["median"]
    assert all(slowest[name] == worst[name] for name in ("arm", "temperature", "batch_size"))
    assert slowest_adaptive([one for one in measurements if one.arm.name == NONE]) is None
    (reason,) = {one.failure for one in measurements if one.arm.name == "never"}
    assert str(reason).startswith("ProposalMismatchError"), "it cannot be prepared"


def test_useless_draft_is_useless_and_changes_no_text(tiny_paths):
    """A draft that is the target itself guesses everything; spoilt, next to nothing."""
    target = tiny_paths[0]
    rates, texts = [], []
    for useless in (False, True):
        pair = load_pair(target, target, useless_draft=useless)
        prompt_ids = (encode(pair.tokenizer, "The sea was"),)
        call = Call(prompt_ids=prompt_ids, max_new_tokens=24, temperature=0.0, seed=0)
        output = named_arm("controller=fixed").decode(pair, call)
        rates.append(sum(record.num_accepted for record in output.records) / len(output.records))
        texts.append(output.token_ids)
        assert ("output shifted" in str(pair.names["draft"])) == useless
    assert texts[0] == texts[1]
    assert rates[0] > 2.5
    assert rates[1] < 0.5
    with pytest.raises(OptionError, match="needs a draft model"):
        load_pair(target, useless_draft=True)
    assert torch.is_grad_enabled()


def test_mixed_stream_takes_tasks_in_turns():
    prompts = interleaved(shipped(per_task=3))
    assert [prompt.task for prompt in prompts] == ["gsm8k", "humaneval", "prose"] * 3
    assert set(prompts) == set(shipped(per_task=3))
    uneven = [Prompt(task=task, text=str(place)) for place, task in enumerate("aaab")]
    assert [prompt.text for prompt in interleaved(uneven)] == ["0", "3", "1", "2"]
