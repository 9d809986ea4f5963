"""The repository for `custom_generate=FOLDER`.

What `generate` hands over raw arrives, and nothing is dropped.
"""

from pathlib import Path

import pytest
import torch
from transformers.generation import StoppingCriteria
from transformers.generation.streamers import BaseStreamer

from tests.engine.test_speculate import ROWS
from tests.engine.tiny import network, padded, perturbed

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


def ours(**settings):
    target = network("llama")
    return target.generate(
        **padded(ROWS), **GREEDY, custom_generate=FOLDER, trust_remote_code=True, **settings
    )


def plain(**settings):
    return network("llama").generate(**padded(ROWS), **GREEDY, **settings)


@pytest.mark.parametrize(
    "settings",
    [{}, {"tree": "fixed_width((2, 2))"}, {"num_assistant_tokens": 2}, {"controller": "fsm"}],
    ids=str,
)
def test_an_assistant_arrives(settings):
    assistant, calls = perturbed(network("llama")), []
    hook = assistant.register_forward_pre_hook(lambda *_: calls.append("forward"))
    assert torch.equal(ours(assistant_model=assistant, **settings), plain())
    hook.remove()
    assert calls


def test_without_an_assistant_ngrams_are_drafted():
    assert torch.equal(ours(repetition_penalty=1.2), plain(repetition_penalty=1.2))


class Recorder(BaseStreamer):
    def __init__(self):
        self.seen = []

    def put(self, value):
        self.seen.append(value.tolist())

    def end(self):
        self.seen.append("end")


def test_a_streamer_arrives():
    recorder = Recorder()
    output = ours(streamer=recorder)
    assert recorder.seen[0] == padded(ROWS)["input_ids"].tolist()
    assert recorder.seen[1:] == [*output[:, 11:].T.tolist(), "end"]


class StopAt(StoppingCriteria):
    def __init__(self, token):
        self.token = token

    def __call__(self, input_ids, scores, **kwargs):
        return input_ids[:, -1] == self.token


def test_criteria_arrive():
    from transformers import StoppingCriteriaList

    token = int(plain()[0, 15])
    criteria = StoppingCriteriaList([StopAt(token)])
    assert torch.equal(
        ours(stopping_criteria=criteria),
        plain(stopping_criteria=StoppingCriteriaList([StopAt(token)])),
    )


def test_stop_strings_need_their_tokenizer_and_get_it():
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from monge.api import built_in

    target = AutoModelForCausalLM.from_pretrained(built_in("target")).eval()
    tokenizer = AutoTokenizer.from_pretrained(built_in("target"))
    inputs = tokenizer("The history of", return_tensors="pt", return_token_type_ids=False)
    stop = {
        "stop_strings": [" Countries"],
        "tokenizer": tokenizer,
        "do_sample": False,
        "max_new_tokens": 20,
    }
    with_ours = target.generate(**inputs, **stop, custom_generate=FOLDER, trust_remote_code=True)
    assert torch.equal(with_ours, target.generate(**inputs, **stop))
    with pytest.raises(ValueError, match="give tokenizer= as well"):
        ours(stop_strings=["a"])


def test_what_cannot_be_honoured_is_refused():
    with pytest.raises(ValueError, match="must share the model's tokenizer"):
        ours(assistant_tokenizer=object())
    with pytest.raises(ValueError, match="does not support the decoding method"):
        ours(num_beams=2)
    with pytest.raises(ValueError, match="trust_remote_code"):
        network("llama").generate(
            **padded(ROWS), **GREEDY, custom_generate=FOLDER, trust_remote_code=False
        )
