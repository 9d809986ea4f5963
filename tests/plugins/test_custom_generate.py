"""The repository for `custom_generate=FOLDER`: arguments that `generate` drops elsewhere arrive."""

from pathlib import Path

import pytest
import torch
from transformers import StoppingCriteriaList
from transformers.generation import StoppingCriteria

from tests.engine.test_speculate import ROWS
from tests.engine.tiny import network, padded, perturbed
from tests.plugins.test_accelerate import Recorder

FOLDER = str(Path(__file__).parents[2] / "examples" / "custom_generate_repository")
GREEDY = {"do_sample": False, "max_new_tokens": 12}
# The reader of requirements asks the installation for every package; nothing is fetched from a
# folder.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    """Code of repositories is copied before it is run."""
    from transformers import dynamic_module_utils

    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path))


def plain(**settings):
    return network("llama").generate(**padded(ROWS), **GREEDY, **settings)


def ours(**settings):
    return plain(custom_generate=FOLDER, trust_remote_code=True, **settings)


@pytest.mark.parametrize(
    "settings",
    [{}, {"tree": "fixed_width((2, 2))"}, {"num_assistant_tokens": 2}, {"controller": "fsm"}],
    ids=str,
)
def test_an_assistant_arrives(settings):
    assistant, calls = perturbed(network("llama")), []
    hook = assistant.register_forward_pre_hook(lambda *_: calls.append("forward"))
    settings = {"controller": "fixed"} | settings  # which drafts, whatever the clock says
    assert torch.equal(ours(assistant_model=assistant, **settings), plain())
    hook.remove()
    assert calls


def test_without_an_assistant_ngrams_are_drafted():
    assert torch.equal(ours(repetition_penalty=1.2), plain(repetition_penalty=1.2))


def test_a_streamer_arrives():
    recorder = Recorder()
    output = ours(streamer=recorder)
    assert recorder.seen[0] == padded(ROWS)["input_ids"].tolist()
    assert recorder.seen[1:] == [*output[:, 11:].T.tolist(), "end"]


def test_stopping_criteria_arrive():
    token = int(plain()[0, 15])

    class StopAt(StoppingCriteria):
        def __call__(self, input_ids, scores, **_):
            return input_ids[:, -1] == token

    criteria = StoppingCriteriaList([StopAt()])
    assert torch.equal(ours(stopping_criteria=criteria), plain(stopping_criteria=criteria))


def test_stop_strings_need_their_tokenizer_and_get_it(built_in_pair):
    target, tokenizer = built_in_pair
    inputs = tokenizer("The history of", return_tensors="pt", return_token_type_ids=False)
    stop = {"stop_strings": [" Countries"], "tokenizer": tokenizer, **GREEDY, "max_new_tokens": 20}
    with_ours = target.generate(**inputs, **stop, custom_generate=FOLDER, trust_remote_code=True)
    assert torch.equal(with_ours, target.generate(**inputs, **stop))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"stop_strings": ["a"]}, "give tokenizer= as well"),
        ({"assistant_tokenizer": object()}, "must share the model's tokenizer"),
        ({"num_beams": 2}, "does not support the decoding method"),
        ({"trust_remote_code": False}, "trust_remote_code"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_arguments_that_cannot_be_honoured_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        plain(**{"custom_generate": FOLDER, "trust_remote_code": True} | settings)
