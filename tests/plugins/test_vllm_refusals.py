"""Where the plugin changes vLLM, and where it refuses to, against a vLLM that is played."""

import sys
from functools import wraps
from types import ModuleType, SimpleNamespace

import pytest
import torch

from monge.core.errors import MongeError, OptionError
from monge.plugins.vllm import hooks
from monge.plugins.vllm.hooks import register

SPEC = {
    "method": "draft_model",
    "draft_sample_method": "probabilistic",
    "rejection_sample_method": "standard",
    "parallel_drafting": False,
}


def rejection_sample(
    draft_token_ids,
    num_draft_tokens,
    max_spec_len,
    cu_num_draft_tokens,
    draft_probs,
    target_logits,
    bonus_token_ids,
    sampling_metadata,
    synthetic_mode=False,
    synthetic_conditional_rates=None,
    use_fp64_gumbel=False,
):
    """vLLM's rule for greedy requests."""
    rows, start = [], 0
    for row, count in enumerate(num_draft_tokens):
        best = target_logits[start : start + count].argmax(-1).tolist()
        drafted = draft_token_ids[start : start + count].tolist()
        output = []
        for token in best:
            output.append(token)
            if token != drafted[len(output) - 1]:
                break
        else:
            output.append(int(bonus_token_ids[row]))
        rows.append(output + [-1] * (max_spec_len + 1 - len(output)))
        start += count
    return torch.tensor(rows, dtype=torch.int32)


def config(settings=None, *, v2=False, **spec):
    return SimpleNamespace(
        additional_config={} if settings is None else {"monge": settings},
        speculative_config=SimpleNamespace(**{**SPEC, **spec}),
        use_v2_model_runner=v2,
        device_config=SimpleNamespace(device=torch.device("cpu")),
    )


class Vllm:
    """Its modules, as far as the plugin reads or changes them."""

    def __init__(self, monkeypatch):
        self.made = config()
        vllm = self

        class EngineArgs:
            def create_engine_config(self):
                return vllm.made

        class RejectionSampler:
            def __init__(self, sampler):
                self.sampler = sampler

        class StructuredOutputManager:
            def __init__(self, vllm_config):
                self.vllm_config = vllm_config

            def validate_tokens(self, request, spec_tokens):
                return spec_tokens[:request]

            def grammar_bitmask(
                self, requests, structured_output_request_ids, scheduled_spec_decode_tokens
            ):
                return scheduled_spec_decode_tokens

        def expand_batch_to_tokens(x, cu_num_tokens, num_tokens, replace_from=0, replace_to=0):
            raise AssertionError

        def apply_top_k_only(logits, k):
            return logits[: k.max()]

        def compute_probs_and_sample_next_token(logits, sampling_metadata, use_fp64_gumbel=False):
            raise AssertionError

        self.sampler = ModuleType("vllm.v1.sample.rejection_sampler")
        self.sampler.RejectionSampler = RejectionSampler
        self.sampler.rejection_sample = rejection_sample
        self.sampler.expand_batch_to_tokens = expand_batch_to_tokens
        self.top_k = ModuleType("vllm.v1.sample.ops.topk_topp_sampler")
        self.top_k.apply_top_k_only = apply_top_k_only
        self.proposer = ModuleType("vllm.v1.spec_decode.llm_base_proposer")
        self.proposer.compute_probs_and_sample_next_token = compute_probs_and_sample_next_token
        self.grammar = ModuleType("vllm.v1.structured_output")
        self.grammar.StructuredOutputManager = StructuredOutputManager
        self.arguments = ModuleType("vllm.engine.arg_utils")
        self.arguments.EngineArgs = EngineArgs
        self.config = ModuleType("vllm.config")
        self.config.get_current_vllm_config = lambda: self.made
        self.package = ModuleType("vllm")
        self.package.__version__ = "0.32.0+cpu"
        for module in list(vars(self).values()):
            if isinstance(module, ModuleType):
                monkeypatch.setitem(sys.modules, module.__name__, module)
        monkeypatch.setattr(hooks, "_IN_USE", [])
        monkeypatch.setattr("monge.backends.cpu.law_masses.load_law_masses", self.load)
        hooks.register.cache_clear()

    def load(self):
        """No machine has a compiler here."""
        raise OSError("no compiler")

    @property
    def functions(self):
        return (
            self.sampler.rejection_sample,
            self.sampler.expand_batch_to_tokens,
            self.top_k.apply_top_k_only,
            self.proposer.compute_probs_and_sample_next_token,
        )

    def start(self, settings=None, **options):
        """What vLLM does: the engine's configuration, its scheduler, its worker."""
        self.made = config(settings, **options)
        made = self.arguments.EngineArgs().create_engine_config()
        manager = self.grammar.StructuredOutputManager(made)
        self.sampler.RejectionSampler("sampler")
        return manager


@pytest.fixture
def vllm(monkeypatch):
    return Vllm(monkeypatch)


def changed(vllm, before):
    return [now is not then for now, then in zip(vllm.functions, before, strict=True)]


@pytest.mark.parametrize("settings", [None, {}, {"verifier": "vllm"}])
def test_vllm_is_unchanged_without_settings(vllm, settings):
    before = vllm.functions
    register()
    manager = vllm.start(settings, v2=True, method="unknown")
    assert changed(vllm, before) == [False] * 4
    assert vars(manager).keys() == {"vllm_config"}


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"verifier": "block"}, [True, True, True, True]),
        (
            {"verifier": "speculative_sampling", "draft_law": "temperature"},
            [True, True, True, False],
        ),
        ({"draft_law": "request"}, [False, False, False, True]),
    ],
    ids=str,
)
def test_settings_change_the_functions_of_vllm(vllm, settings, expected, caplog):
    before = vllm.functions
    register()
    register()
    manager = vllm.start(settings)
    assert changed(vllm, before) == expected
    verifies = "verifier" in settings
    assert manager.validate_tokens(1, [4, 5, 6]) == ([4, 5] if verifies else [4])
    shown = manager.grammar_bitmask({"a": 1}, ["a"], {"a": [4, 5]})
    assert shown == {"a": [4, -1] if verifies else [4, 5]}
    if verifies:
        assert "without machine code: no compiler" in caplog.text
        logits = torch.zeros(0, 3)
        assert vllm.top_k.apply_top_k_only(logits, torch.zeros(0, dtype=torch.int64)) is logits
        numbers = (torch.tensor([7.0]), torch.tensor([2]), 2)
        assert vllm.sampler.expand_batch_to_tokens(*numbers).tolist() == [7.0, 7.0]
    vllm.start(settings)  # another engine with the same settings


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"settings": {"verifer": "block"}}, "did you mean 'verifier'"),
        ({"settings": {"verifier": "blok"}}, "unknown verifier .*did you mean 'block'"),
        ({"settings": {"draft_law": "top_k"}}, "unknown draft_law .* Known: request, temperature"),
        ({"settings": {"verifier": True}}, "must hold texts"),
        (
            {"settings": {"drafter": "ngram"}},
            "unknown setting .* 'drafter'.*Known: draft_law, veri",
        ),
        ({"v2": True, "settings": {"draft_law": "request"}}, "this is Model Runner V2"),
        ({"v2": True}, 'block verification itself, as "rejection_sample_method": "block"'),
        ({"rejection_sample_method": "synthetic"}, "rejection_sample_method is 'synthetic'"),
        ({"method": "mtp"}, "method 'mtp' may draw drafts elsewhere; draft_model, eagle, eagle3"),
        ({"parallel_drafting": True}, "parallel drafting was not tried"),
    ],
    ids=str,
)
def test_an_engine_that_cannot_be_is_refused_at_start(vllm, options, message):
    register()
    before = vllm.functions
    with pytest.raises(OptionError, match=message):
        vllm.start(**{"settings": {"verifier": "block"}, **options})
    assert changed(vllm, before) == [False] * 4


def test_drafts_that_are_not_drawn_may_come_from_any_method(vllm):
    register()
    vllm.start({"verifier": "block"}, method="mtp", draft_sample_method="greedy")


def test_engines_without_drafts_and_other_versions_are_refused(vllm):
    register()
    vllm.made = config({"verifier": "block"})
    vllm.made.speculative_config = None
    with pytest.raises(OptionError, match="no --speculative-config asks for drafts"):
        vllm.arguments.EngineArgs().create_engine_config()
    vllm.package.__version__ = "0.99.0"
    with pytest.raises(OptionError, match=r"this is vLLM 0\.99\.0; install 0\.32\.0"):
        vllm.start({"verifier": "block"})


def test_functions_with_other_arguments_are_refused(vllm):
    register()
    vllm.sampler.rejection_sample = lambda draft_token_ids, fly_window_size: None
    with pytest.raises(MongeError, match=r"rejection_sample takes .*fly_window_size.*Install vLLM"):
        vllm.start({"verifier": "block"})
    del vllm.sampler.rejection_sample
    with pytest.raises(MongeError, match="rejection_sample takes None"):
        vllm.start({"verifier": "block"})


def test_a_build_whose_rule_differs_is_refused(vllm):
    @wraps(rejection_sample)
    def broken(*args, **kwargs):
        return rejection_sample(*args, **kwargs).clamp_max(2)

    register()
    vllm.sampler.rejection_sample = broken
    with pytest.raises(MongeError, match="this build of vLLM is not supported"):
        vllm.start({"verifier": "block"})
    assert vllm.sampler.rejection_sample is broken


def test_two_engines_of_a_process_have_the_same_settings(vllm):
    register()
    vllm.start({"verifier": "block"})
    with pytest.raises(OptionError, match="in a process of its own"):
        vllm.start({"verifier": "speculative_sampling"})


def test_a_vllm_of_another_form_is_told(vllm, caplog):
    del vllm.grammar.StructuredOutputManager
    register()
    assert "this vLLM has no vllm.v1.structured_output:StructuredOutputManager" in caplog.text
    with pytest.raises((MongeError, AttributeError)):
        vllm.start({"verifier": "block"})
