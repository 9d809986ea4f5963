"""Arguments of the wrong type, as a program meets them: without the type checker of these tests."""

import json
import subprocess
import sys
from typing import Final

import pytest

_PROGRAM: Final = """
import json, sys
import numpy as np, torch
from monge.api import make_components
from monge.core.errors import OptionError
from monge.engine.decoder import Decoder
from monge.oracle.tabular import RandomTable, TabularModel

decoder = Decoder(make_components(TabularModel(RandomTable(5, 1), 5), TabularModel(RandomTable(5, 2), 5)))
said = []
for prompts, options in json.load(sys.stdin):
    try:
        results = decoder.generate(eval(prompts), **{"max_new_tokens": 3} | eval(options))
        said.append([list(result.token_ids) for result in results])
    except OptionError as error:
        said.append(str(error))
print(json.dumps(said))
"""

_PROMPTS: Final = {
    "b'ab'": "prompts must be text, token ids or a list of either; got bytes",
    "7": "prompts must be text, token ids or a list of either; got int",
    "[[0, 1], None]": "prompt: NoneType is neither text nor token ids; give a str or whole numbers",
    "[1.7]": "prompt: token ids must be whole numbers; got 1.7 at place 0",
    "[[0, True]]": "prompt: token ids must be whole numbers; got True at place 1",
    "torch.tensor([0.5])": "prompt: token ids must be whole numbers; got 0.5 at place 0",
    "[1, [2]]": "prompts: token ids stand beside other prompts; put the ids of each prompt into a "
    "list of their own",
}
_OPTIONS: Final = {
    "{'max_new_tokens': 2.5}": "max_new_tokens must be a whole number; got 2.5",
    "{'max_new_tokens': True}": "max_new_tokens must be a whole number; got True",
    "{'seed': 1.5}": "seed must be a whole number of at least -2^63 and less than 2^64; got 1.5",
    "{'n': 0}": "n must be a whole number of at least 1; got 0",
    "{'min_tokens': -1}": "min_tokens must be a whole number of at least 0; got -1",
    "{'min_tokens': 4}": "min_tokens=4 is more than max_new_tokens=3",
    "{'logprobs': 'all'}": "logprobs must be a whole number of at least 0; got 'all'",
    "{'repetition_penalty': '2'}": "repetition_penalty must be a finite number; got '2'",
    "{'presence_penalty': float('nan')}": "presence_penalty must be a finite number; got nan",
    "{'bad_words': [3]}": "'bad_words' must be a text or a list of texts",
    "{'stop_token_ids': ['a']}": "stop_token_ids: token ids must be whole numbers; got 'a' at place 0",
    "{'logit_bias': {'a': 1}}": "logit_bias: token ids must lie in 0..4; got 'a'",
    "{'logit_bias': {1: 'x'}}": "logit_bias: a bias must be a finite number; got 'x' for token 1",
}
_REFUSED: Final = [
    *(((prompt, "{}"), message) for prompt, message in _PROMPTS.items()),
    *((("[[0, 1]]", options), message) for options, message in _OPTIONS.items()),
]
_TAKEN: Final = (
    ("[[0, 1]]", "{}"),
    ("np.array([0, 1])", "{}"),
    ("torch.tensor([0, 1])", "{}"),
    ("torch.tensor([[0, 1]])", "{}"),
    ("[np.int64(0), np.int64(1)]", "{}"),
    ("list(torch.tensor([0, 1]))", "{}"),
    ("[[0, 1]]", "{'max_new_tokens': np.int64(3), 'seed': np.int64(4)}"),
)


@pytest.fixture(scope="module")
def said() -> list[object]:
    """The outcome of every case, in order."""
    cases = json.dumps([*(case for case, _ in _REFUSED), *_TAKEN])
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM], input=cases, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_wrong_types_are_refused_by_name(said):
    assert said[: len(_REFUSED)] == [message for _, message in _REFUSED]


def test_whole_numbers_of_numpy_and_torch_are_token_ids(said):
    first, *others = said[len(_REFUSED) :]
    assert len(first[0]) == 3
    assert all(one == first for one in others)
