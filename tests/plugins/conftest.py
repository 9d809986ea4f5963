"""The built-in target as models of `transformers`."""

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from monge.api import built_in


@pytest.fixture(scope="module")
def built_in_pair():
    """The built-in target and its tokenizer."""
    target = AutoModelForCausalLM.from_pretrained(built_in("target")).eval()
    return target, AutoTokenizer.from_pretrained(built_in("target"))
