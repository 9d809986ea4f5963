"""`accelerate(model, backend="compiled")`: the texts of plain `generate`, by a program that follows the weights."""

import contextlib
import copy
import functools
import io
import logging
import pickle
import subprocess
import sys
import time
import types

import pytest
import torch
from transformers import LlamaForCausalLM
from transformers.generation.streamers import BaseStreamer

import monge
from monge.backends.cpu.code_cache import code_key, network_facts
from monge.backends.cpu.compiled import CompiledForward
from monge.core.errors import BackendError, OptionError
from monge.networks import background_compiler
from monge.networks.forward import SourceWeights
from monge.plugins import transformers_compiled, transformers_generate
from monge.plugins.transformers_compiled import CompiledComponents, _Gain, why_no_compiled_call
from tests.engine.compiling import require, shared_programs
from tests.engine.tiny import network, padded, perturbed, prompts

ROWS = padded(prompts((9, 4, 7), seed=7))
ONE = padded(prompts((6,), seed=8))
GREEDY = {"do_sample": False, "max_new_tokens": 12, "eos_token_id": None}
OUTPUTS = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}


def target():
    return copy.deepcopy(network("llama", "sdpa"))


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    require("compiled")
    with shared_programs(tmp_path_factory) as make:
        make(network("llama", "sdpa"))
        yield


@pytest.fixture
def runs(monkeypatch):
    """A list that grows with every forward of a program."""
    calls, output = [], CompiledForward._output

    def noting(self, inputs):
        calls.append(len(inputs[0]))
        return output(self, inputs)

    monkeypatch.setattr(CompiledForward, "_output", noting)
    return calls


@pytest.fixture
def said(caplog):
    with caplog.at_level(logging.INFO, logger="monge"):
        yield lambda: [record.getMessage() for record in caplog.records]


@pytest.fixture
def model(compiled, runs):
    """A model whose program is loaded."""
    model = monge.accelerate(target(), backend="compiled")
    assert_plain(model)
    assert runs
    return model


def plainly(model, inputs, **settings):
    """The text of `transformers`, by a copy that is not accelerated."""
    return monge.restore(copy.deepcopy(model)).generate(**inputs, **settings)


def assert_plain(model, inputs=ROWS):
    expected = plainly(model, inputs, **GREEDY)
    assert torch.equal(model.generate(**inputs, **GREEDY), expected)


class TestTexts:
    @pytest.mark.parametrize("inputs", [ONE, ROWS], ids=["one", "ragged"])
    @pytest.mark.parametrize("draft", [None, "model"])
    def test_scores_and_logits(self, compiled, runs, inputs, draft):
        plain = target()
        model = monge.accelerate(target(), draft and perturbed(plain), backend="compiled")
        settings = {**inputs, **GREEDY, **OUTPUTS, "repetition_penalty": 1.4}
        expected, output = plain.generate(**settings), model.generate(**settings)
        assert torch.equal(output.sequences, expected.sequences)
        for name in ("scores", "logits"):
            ours, theirs = torch.stack(getattr(output, name)), torch.stack(getattr(expected, name))
            torch.testing.assert_close(ours, theirs, atol=2e-4, rtol=1e-4)
        assert runs

    @pytest.mark.parametrize("rules", [{"top_k": 9, "top_p": 0.8}, {"temperature": 0.7}], ids=str)
    def test_a_seed_names_the_text_of_the_eager_backend(self, model, rules):
        settings = {**ROWS, **GREEDY, "do_sample": True, "seed": 3, **rules}
        eager = monge.accelerate(target(), backend="eager")
        assert eager.generate.compiled is None
        assert torch.equal(model.generate(**settings), eager.generate(**settings))

    def test_calls_share_one_copy_of_the_weights(self, model, runs):
        kept = model.generate.compiled
        program = kept._target.forward
        for options in (
            {},
            {"drafter": "none"},
            {"do_sample": True},
            {"controller": "fixed"},
            {"seed": 1},
        ):
            runs.clear()
            model.generate(**ONE, **(GREEDY | options))
            assert runs
            assert kept._target.forward is program
        assert len(kept._components) <= 4

    def test_an_error_of_a_call_leaves_the_program_usable(self, model):
        def fails(_, __):
            raise RuntimeError("of the caller")

        with pytest.raises(Exception, match="of the caller"):
            model.generate(**ROWS, **GREEDY, logits_processor=[fails])
        assert_plain(model)

    def test_a_call_inside_another_runs_eagerly(self, model, runs):
        texts = []

        class Generates(BaseStreamer):
            def put(self, value):
                runs.clear()
                texts.append(model.generate(**ONE, **GREEDY))
                assert runs == []

            def end(self):
                pass

        expected = plainly(model, ONE, **GREEDY)
        assert torch.equal(model.generate(**ONE, **GREEDY, streamer=Generates()), expected)
        assert all(torch.equal(text, expected) for text in texts)

    def test_copies_have_programs_of_their_own(self, model):
        with torch.no_grad():
            (copied := copy.deepcopy(model)).lm_head.weight.neg_()
        assert copied.generate.compiled is not model.generate.compiled
        assert_plain(copied)
        assert_plain(model)


def matrix(model):
    return model.model.layers[0].mlp.up_proj


def step(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model(**ROWS, labels=ROWS["input_ids"]).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def through_data(model):
    for weight in model.parameters():
        weight.data.mul_(1.1)


def a_row_through_data(model):
    model.lm_head.weight.data[5] += 3


def a_column_through_data(model):
    weight = model.lm_head.weight
    weight.data[:, 7] += 3 - 6 * (torch.arange(len(weight)) % 2)


def loaded(model):
    model.load_state_dict({name: -weight for name, weight in model.state_dict().items()})


def moved(model):
    matrix(model).weight.data = matrix(model).weight.data.flip(0).clone()


def assigned(model):
    matrix(model).weight = torch.nn.Parameter(matrix(model).weight.detach().flip(0))


def halved(model):
    """All numbers in 16 bits, then one matrix of three that are multiplied together is not any more."""
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(weight.bfloat16())
    assert_plain(model)
    with torch.no_grad():
        model.model.layers[0].self_attn.q_proj.weight.mul_(1.01)


def another_layer(model):
    model.model.layers[0].mlp.up_proj = copy.deepcopy(matrix(model)).requires_grad_(False)
    matrix(model).weight.neg_()


def frequencies(model):
    model.model.rotary_emb.inv_freq.mul_(0.1)


CHANGES = [step, through_data, a_row_through_data, a_column_through_data]
CHANGES += [loaded, moved, assigned, halved, another_layer, frequencies]


class TestWeights:
    @pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
    def test_changes_are_followed(self, model, runs, change):
        before = model.generate(**ROWS, **GREEDY)
        change(model)
        runs.clear()
        assert_plain(model)
        assert runs
        assert not torch.equal(model.generate(**ROWS, **GREEDY), before)

    @pytest.mark.slow
    def test_buffers_of_few_numbers_are_no_part_of_a_program(self, compiled, runs):
        """The compiler would write them into its code."""
        with pytest.MonkeyPatch.context() as patch:
            # So that it is compiled before the first call.
            patch.setattr(transformers_compiled, "compiled_by", lambda _: contextlib.nullcontext())
            model = copy.deepcopy(network("deepseek_v3", "sdpa"))
            assert_plain(monge.accelerate(model, backend="compiled"))
        assert runs
        before = model.generate(**ROWS, **GREEDY)
        state = copy.deepcopy(model.state_dict())
        (name,) = (name for name in state if name.endswith("e_score_correction_bias"))
        model.load_state_dict(state | {name: torch.tensor([3.0, 3.0, -3.0, -3.0])})
        runs.clear()
        assert_plain(model)
        assert runs
        assert not torch.equal(model.generate(**ROWS, **GREEDY), before)

    def test_what_is_not_looked_at_would_be_stale(self, model, monkeypatch):
        """The texts above differ from those of old weights: a check that sees nothing is caught."""
        monkeypatch.setattr(SourceWeights, "has_changed", lambda *_: False)
        monkeypatch.setattr(SourceWeights, "check", lambda _: None)
        loaded(model)
        assert not torch.equal(model.generate(**ROWS, **GREEDY), plainly(model, ROWS, **GREEDY))

    def test_a_draft_model_may_be_trained_as_well(self, compiled):
        draft = perturbed(target())
        model = monge.accelerate(target(), draft, backend="compiled")
        for _ in range(2):
            assert_plain(model)
            step(draft)

    def test_nothing_is_copied_again_without_a_change(self, model, monkeypatch):
        monkeypatch.setattr(CompiledForward, "follow", lambda *_: pytest.fail("copied"))
        model(**ROWS).logits.sum().backward()
        model.train().eval()
        model.state_dict()
        assert_plain(model)

    def test_following_that_costs_more_than_it_gains_is_left_out(self, model, runs, said):
        kept = model.generate.compiled
        loaded(model)
        assert_plain(model)
        kept._gain.cost_s = 1e6
        for _ in range(3):
            step(model)
            runs.clear()
            assert_plain(model)
            assert runs == []
        told = [text for text in said() if "runs eagerly while its weights change" in text]
        assert len(told) >= 1
        assert "following them takes 1e+06 s" in told[0]
        kept._gain.seconds = 1e7  # many tokens since the last change
        assert_plain(model)
        assert runs

    def test_eager_calls_between_compiled_ones_draft_from_the_same_texts(
        self, model, runs, monkeypatch
    ):
        decode, rounds = transformers_generate.decode, []

        def counted(sessions, *given, **options):
            yield from decode(sessions, *given, **options)
            rounds.append(sum(session.num_rounds for session in sessions))

        monkeypatch.setattr(transformers_generate, "decode", counted)
        drafts = {"drafter": "suffix(max_history=400)", "controller": "fixed"}
        first = model.generate(**ONE, **GREEDY, **drafts)
        assert runs
        with torch.no_grad():
            model.model.norm.weight.mul_(2.0)  # the same greedy text
        model.generate.compiled._gain.cost_s = 1e6
        runs.clear()
        assert torch.equal(model.generate(**ONE, **GREEDY, **drafts), first)
        assert runs == []
        assert rounds[1] < rounds[0] / 2

    def test_the_rule(self):
        gain = _Gain()
        assert gain.pays(), "nothing is known of the first time"
        gain.cost_s, gain.seconds = 1.0, 3.0
        gain.turn()
        assert gain.pays()
        gain.seconds = 1.0
        gain.turn()
        assert not gain.pays(), "of one second, half is won"
        gain.seconds = 2.0
        assert gain.pays()


def autocast(model):
    return torch.autocast("cpu", torch.bfloat16)


class Replaced:
    """A forward that is put into the instance, as mixed precision and trainers do."""

    def __init__(self, model, sign=-1):
        self.model, old = model, model.forward

        def forward(self, *inputs, fused=False, **keywords):
            output = old(*inputs, **keywords)
            output.logits = output.logits * sign
            return output

        functools.update_wrapper(forward, type(model).forward)
        model.forward = types.MethodType(forward, model)

    def __enter__(self):
        pass

    def __exit__(self, *_):
        del self.model.forward


def hooked(model):
    layer = model.model.layers[0].mlp
    return layer.register_forward_hook(lambda module, inputs, output: output * 1.5)


class TestCallsThatAProgramCannotTake:
    @pytest.mark.parametrize(
        ("make", "reason"),
        [(autocast, "autocast is on"), (Replaced, "was replaced"), (hooked, "has hooks")],
        ids=["autocast", "forward", "hook"],
    )
    def test_run_eagerly(self, model, runs, said, make, reason):
        with make(model):
            runs.clear()
            ours = [model.generate(**ROWS, **GREEDY) for _ in range(2)]
            expected = MethodOf(model).generate(**ROWS, **GREEDY)
        assert runs == []
        assert torch.equal(ours[0], expected)
        assert len([text for text in said() if reason in text]) == 1
        assert_plain(model)
        assert runs

    def test_a_replaced_forward_that_changes_nothing_is_no_reason(self, compiled, runs):
        model = target()
        with Replaced(model, sign=1):
            monge.accelerate(model, backend="compiled")
            for _ in range(2):
                expected = MethodOf(model).generate(**ROWS, **GREEDY)
                assert torch.equal(model.generate(**ROWS, **GREEDY), expected)
                assert runs
                loaded(model)

    def test_a_replaced_forward_is_judged_by_the_weights_of_now(self, compiled, runs):
        model = target()
        weight = model.model.norm.weight.detach()
        assert weight[0] == 1
        with Replaced(model, sign=weight[:1]):
            monge.accelerate(model, backend="compiled")
            model.generate(**ROWS, **GREEDY)
            assert runs
            with torch.no_grad():
                model.model.norm.weight[0] = -1
            expected = MethodOf(model).generate(**ROWS, **GREEDY)
            assert torch.equal(model.generate(**ROWS, **GREEDY), expected)

    def test_another_type(self, model, runs, monkeypatch):
        place = "monge.backends.cpu.compiled.load_or_make"
        monkeypatch.setattr(place, lambda *_: pytest.fail("compiled"))
        model.to(torch.float64)
        monkeypatch.setattr("monge.backends.registry.Compiled._on_cpu", no_backend)
        runs.clear()
        with pytest.warns(UserWarning, match="the network runs eagerly: not here"):
            assert_plain(model)
        assert runs == []

    def test_hooks_of_the_host_change_nothing(self, model, runs):
        """It adds them when somebody asks for hidden states, and leaves them there."""
        with torch.no_grad():
            model(**ONE, output_hidden_states=True)
        assert model.model.layers[0]._forward_hooks
        runs.clear()
        assert torch.equal(model.generate(**ROWS, **GREEDY), plainly(model, ROWS, **GREEDY))
        assert runs

    def test_hooks_of_checkpointing_change_nothing(self, model, runs):
        old = model.gradient_checkpointing_enable
        getattr(model, "activation_checkpointing_enable", old)()
        model.enable_input_require_grads()
        model.train()
        assert why_no_compiled_call(model) is None
        runs.clear()
        expected = plainly(model, ROWS, **GREEDY)
        assert torch.equal(model.generate(**ROWS, **GREEDY), expected)
        assert runs
        assert all(module.training for module in model.modules())


class MethodOf:
    """The host's own method of a model that is accelerated."""

    def __init__(self, model):
        self.model = model

    def generate(self, **settings):
        return type(self.model).generate(self.model, **settings)


def no_backend(*_):
    raise BackendError("not here")


class TestRoundedWeights:
    @pytest.fixture
    def rounded(self, monkeypatch):
        """A rounded network that is not compiled, which saves a minute."""
        monkeypatch.setattr("monge.backends.registry.Compiled._on_cpu", no_backend)
        model = monge.accelerate(target(), backend="compiled(weights='int8')")
        with pytest.warns(UserWarning, match="the network runs eagerly: not here"):
            model.generate(**ONE, **GREEDY)
        return model

    @pytest.mark.filterwarnings("ignore:backend 'compiled' is not used")
    def test_follow_the_weights(self, rounded):
        texts = []
        for _ in range(2):
            ours = rounded.generate(**ONE, **GREEDY)[0, ONE["input_ids"].shape[1] :].tolist()
            own = monge.restore(copy.deepcopy(rounded))
            decoder = monge.load(own, backend="compiled(weights='int8')", drafter="none")
            prompt = ONE["input_ids"][0].tolist()
            (result,) = decoder.generate([prompt], max_new_tokens=12, ignore_eos=True)
            assert ours == list(result.token_ids)
            texts.append(ours)
            loaded(rounded)
        assert texts[0] != texts[1]

    def test_are_never_replaced_by_others(self, rounded):
        reason = "rounded weights cannot be run here.*has hooks"
        with hooked(rounded), pytest.raises(BackendError, match=reason):
            rounded.generate(**ONE, **GREEDY)


class TestArguments:
    @pytest.mark.parametrize(
        ("backend", "message"),
        [
            ("compild", "unknown backend 'compild'.*compiled"),
            ("compiled(weights='file')", "'file' keeps the types of a GGUF file.*monge.load"),
            ("compiled(weights='int3')", "int3"),
        ],
    )
    def test_of_accelerate(self, backend, message):
        model = target()
        with pytest.raises(OptionError, match=message):
            monge.accelerate(model, backend=backend)
        assert "generate" not in vars(model)

    @pytest.mark.parametrize("backend", ["eager", "compiled"])
    def test_a_call_brings_no_backend(self, backend):
        refusal = "backend is not supported: give it to monge.accelerate"
        with pytest.raises(OptionError, match=refusal):
            monge.accelerate(target()).generate(**ONE, **GREEDY, backend=backend)
        with pytest.raises(OptionError, match=refusal):
            monge.generate(target(), **ONE, **GREEDY, backend=backend)


class TestAnotherProcess:
    def test_gets_the_structure_and_no_numbers(self):
        model = monge.accelerate(target(), perturbed(target()), backend="compiled")
        model.set_output_embeddings(model.get_input_embeddings())
        model.model(**ONE, output_hidden_states=True)
        model.model.layers[0].register_forward_hook(lambda *_: None)
        file = io.BytesIO()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(background_compiler, "_FEW", 100)
            background_compiler._StructurePickler(file).dump({"target": model})
        file.seek(0)
        made = pickle.load(file)["target"]
        assert code_key(made, *network_facts(made)) == code_key(model, *network_facts(model))
        assert made.get_output_embeddings() is made.get_input_embeddings()
        assert not made.lm_head.weight.any()
        assert torch.equal(made.model.norm.weight, model.model.norm.weight)
        assert not made.model.layers[0]._forward_hooks
        assert self.num_states_elsewhere(file.getbuffer()) == len(model.model.layers) + 1
        numbers = sum(weight.numel() for weight in model.parameters() if weight.numel() > 100)
        assert len(file.getbuffer()) < 4 * numbers

    def num_states_elsewhere(self, pickled):
        """Number of hidden states in a process that has made no network of the class."""
        code = """
import pickle, sys, torch
model = pickle.load(sys.stdin.buffer)["target"].model
print(len(model(torch.ones(1, 3, dtype=int), output_hidden_states=True).hidden_states or ()))
"""
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, input=pickled, stdout=subprocess.PIPE, check=True)
        return int(done.stdout)

    def test_what_cannot_be_passed_on_is_compiled_here(self, compiled, runs, said, monkeypatch):
        monkeypatch.setattr("monge.backends.cpu.compiled.find_code", lambda *_: None)
        model = target()
        vars(model)["of_the_user"] = lambda: None
        monge.accelerate(model, backend="compiled")
        assert_plain(model)
        assert any("cannot be compiled beside the answers" in text for text in said())
        assert runs

    @pytest.mark.slow
    def test_compiles_while_calls_are_answered(self, monkeypatch, tmp_path, runs):
        require("compiled")
        monkeypatch.setenv("MONGE_CACHE", str(tmp_path))
        model = monge.accelerate(target(), perturbed(target()), backend="compiled")
        assert_plain(model)
        assert runs == []
        (compiler,) = model.generate.compiled._compilers.values()
        until = time.monotonic() + 280
        while compiler._process.poll() is None and time.monotonic() < until:
            step(model)
            assert_plain(model)
            time.sleep(1)
        assert compiler._process.returncode == 0
        assert_plain(model)
        assert runs


def test_kept_programs_are_not_pickled(model):
    copied = pickle.loads(pickle.dumps(model.generate.compiled))
    assert isinstance(copied, CompiledComponents)
    assert (copied.backend, copied._target) == (model.generate.compiled.backend, None)


def test_restore_drops_the_copies(model):
    assert isinstance(monge.restore(model), LlamaForCausalLM)
    assert "generate" not in vars(model)
