"""A draft model that runs on another backend than the target: the same law."""

import pytest

import monge
from monge.api import built_in
from monge.bench.pair import load_pair
from monge.core.errors import OptionError
from tests.engine.compiling import require, shared_programs
from tests.engine.tiny import network, perturbed, prompts
from tests.parity.comparing import assert_same_tokens, plain_greedy


def target():
    return network("llama", "sdpa")


@pytest.fixture
def compiled(tmp_path_factory):
    """Stored programs, shared by the test processes of a run."""
    require("compiled")
    with shared_programs(tmp_path_factory) as compiled:
        compiled(target())
        yield


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize(
    ("backend", "draft_backend"), [("eager", "compiled"), ("compiled", "eager")]
)
def test_the_text_is_the_targets(backend, draft_backend):
    options = {"backend": backend, "draft_backend": draft_backend, "controller": "fixed"}
    decoder = monge.load(target(), perturbed(target()), **options)
    for model, name in (
        (decoder.components.target, backend),
        (decoder.components.draft_models[0], draft_backend),
    ):
        assert repr(model).endswith("sdpa, compiled)" if name == "compiled" else "sdpa)")
    texts = prompts((9, 4), seed=5)
    results = decoder.generate(texts, max_new_tokens=40, ignore_eos=True)
    for prompt, result in zip(texts, results, strict=True):
        assert_same_tokens(target(), prompt, result.token_ids, plain_greedy(target(), prompt, 40))
        assert result.stats.block_efficiency > 1.05


class TestRefusals:
    @pytest.mark.parametrize("options", [{}, {"drafter": "ngram"}])
    def test_no_draft_model(self, options):
        with pytest.raises(
            OptionError, match="'compiled' says how a draft model runs, and there is"
        ):
            monge.load(target(), draft_backend="compiled", **options)

    def test_unknown_names(self):
        with pytest.raises(OptionError, match="unknown backend 'compile'; did you mean 'compiled'"):
            monge.load(target(), perturbed(target()), draft_backend="compile")

    def test_a_comparison_without_one(self):
        with pytest.raises(OptionError, match="says how a draft model runs, and there is none"):
            load_pair(str(built_in("target")), draft_backend="eager")
