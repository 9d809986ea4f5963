"""A result tells its seed only where that gives the text again, alone and in a crowd."""

import pytest

from monge.api import load
from monge.cli.serve import _say
from tests.bench.tiny import save_pair

PROMPTS = [[5, 6, 7, 8, 9], [40, 41], [300, 7, 300], [9] * 20, [1, 2, 3], [77], [8, 8, 8], [12, 13]]
OPTIONS = {"max_new_tokens": 24, "temperature": 1.0, "ignore_eos": True}


@pytest.fixture(scope="module")
def decoders():
    """Of the built-in pair: in bfloat16 seven of eight texts differ alone and in a crowd."""
    return {one: load(dtype=one, controller="fixed") for one in ("float32", "bfloat16", "float16")}


def test_the_target_or_the_draft_model_may_be_the_coarse_one(tmp_path):
    target, draft = save_pair(tmp_path)
    whole, half = load(target, dtype="float32"), load(draft, dtype="bfloat16")
    for networks in ((whole, half), (half, whole)):
        mixed = load(*(one.components.target.network for one in networks), controller="fixed")
        assert str(mixed.components.coarse_dtype) == "torch.bfloat16"


@pytest.mark.parametrize(
    ("dtype", "is_told"), [("float32", True), ("bfloat16", False), ("float16", False)]
)
def test_a_told_seed_gives_the_text_of_a_crowd_alone(decoders, capsys, dtype, is_told):
    decoder = decoders[dtype]
    crowd = decoder.generate(PROMPTS, seed=3, **OPTIONS)
    assert {result.seed for result in crowd} == {3 if is_told else None}
    assert decoder.generate(PROMPTS[0], seed=3, max_new_tokens=2)[0].seed == crowd[0].seed
    for prompt, result in zip(PROMPTS, crowd, strict=True):
        if is_told:
            (alone,) = decoder.generate([prompt], seed=result.seed, row=result.row, **OPTIONS)
            assert alone.token_ids == result.token_ids
    _say(decoder, "serving here", verbose=False, is_open=False)
    assert ("seed null" in " ".join(capsys.readouterr().err.split())) is not is_told
