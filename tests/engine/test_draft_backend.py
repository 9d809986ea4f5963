"""A draft model that runs in another way than the target: other drafts, the same law."""

import importlib.util
from functools import partial

import pytest

import monge
from monge.api import built_in
from monge.bench.pair import load_pair
from monge.core.errors import OptionError
from monge.engine.openvino import openvino_step
from monge.engine.openvino_weights import with_weights
from tests.engine.compiling import shared_programs
from tests.engine.tiny import network, perturbed, prompts
from tests.parity.comparing import assert_same_tokens, plain_greedy

HAS_OPENVINO = importlib.util.find_spec("openvino") is not None
needs_openvino = pytest.mark.skipif(not HAS_OPENVINO, reason="openvino is not installed: pip install 'monge[openvino]'")
INT8 = "openvino(weights='int8')"


def target():
    return network("llama", "sdpa")


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory):
    """Stored graphs, shared by the test processes of a run."""
    with shared_programs(tmp_path_factory, partial(openvino_step, weights_kind="same", notify=lambda _: None)) as made:
        if HAS_OPENVINO:
            made(target())
        yield


@needs_openvino
class TestDecoding:
    def test_the_text_is_the_targets(self):
        decoder = monge.load(target(), perturbed(target()), draft_backend=INT8, controller="fixed")
        assert repr(decoder.parts.target).endswith("sdpa)")
        assert repr(decoder.parts.draft_models[0]).endswith("sdpa, openvino, int8 weights)")
        texts = prompts((9, 4), seed=5)
        for prompt, result in zip(texts, decoder.generate(texts, max_new_tokens=40, ignore_eos=True), strict=True):
            assert_same_tokens(target(), prompt, result.token_ids, plain_greedy(target(), prompt, 40))
            assert result.stats.block_efficiency > 1.05

    def test_the_declared_draft_law_is_that_of_the_rounded_network(self):
        """Otherwise candidates would be verified against another law than they were drawn from."""
        draft, texts = perturbed(target()), prompts((9, 4), seed=6)
        decoders = (
            monge.load(target(), draft, draft_backend=INT8, controller="fixed"),
            monge.load(target(), with_weights(draft, "int8"), controller="fixed"),
        )
        records = [
            [
                (record.num_accepted, record.token_ids)
                for result in decoder.generate(texts, max_new_tokens=40, temperature=1.0, seed=3)
                for record in result.records
            ]
            for decoder in decoders
        ]
        assert records[0] == records[1]

    def test_the_target_alone_may_be_fast(self):
        decoder = monge.load(target(), perturbed(target()), backend="openvino", draft_backend="eager", controller="fixed")
        assert repr(decoder.parts.target).endswith("sdpa, openvino)")
        assert repr(decoder.parts.draft_models[0]).endswith("sdpa)")


class TestRefusals:
    @pytest.mark.parametrize("options", [{}, {"drafter": "ngram"}])
    def test_no_draft_model(self, options):
        with pytest.raises(OptionError, match="draft_backend='compiled' says how a draft model runs, and there is none"):
            monge.load(target(), draft_backend="compiled", **options)

    def test_unknown_names(self):
        with pytest.raises(OptionError, match="unknown backend 'openvin'; did you mean 'openvino'"):
            monge.load(target(), perturbed(target()), draft_backend="openvin")

    def test_a_comparison_without_one(self):
        with pytest.raises(OptionError, match="says how a draft model runs, and there is none"):
            load_pair(str(built_in("target")), draft_backend="eager")
