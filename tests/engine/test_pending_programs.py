"""Programs of networks are compiled together, after one announcement, and only those that are used."""

import io
import logging
import pickle
import time
from contextlib import contextmanager

import pytest
import torch

import monge
from monge.api import compile_decoder
from monge.backends.cpu.compiled import traced_forward
from monge.backends.parity_check import forward_spec
from monge.backends.registry import Backend
from monge.backends.traced import UncompiledForward
from monge.core.errors import BackendError
from monge.networks import background_compiler
from monge.networks.background_compiler import (
    BackgroundCompiler,
    compiled_by,
    is_compiled_elsewhere,
)
from monge.networks.base import NodeBlock
from monge.networks.forward import Forward
from monge.networks.hf_tree import HfTreeModel
from monge.runtime.notices import watched_by
from tests.engine.tiny import network, perturbed


def target():
    return network("llama", "sdpa")


class Compiler:
    """The forwards that were compiled, and the seconds that each takes."""

    made = []
    expected_s = 20

    @classmethod
    def pending(cls, name, run, make):
        def noted():
            cls.made.append(name)
            return make()

        return Forward(run, noted, lambda: cls.expected_s)


def step(eager):
    spec = forward_spec(eager.network)
    return UncompiledForward(eager, spec, traced_forward(eager, spec))


def refused(*_):
    raise BackendError("no compiler today")


def model_of(of, *, make_step=step, make_module=lambda module, like: Forward(module)):
    def pending(eager):
        name = "step with states" if eager.layers else "step"
        return Compiler.pending(name, eager, lambda: make_step(eager))

    return HfTreeModel(of, pending, make_module)


@pytest.fixture
def said(caplog):
    """Announcements, and what was shown as going on."""
    Compiler.made, Compiler.expected_s, shown = [], 20, []

    @contextmanager
    def show(name, seconds):
        shown.append((name, seconds))
        yield

    with caplog.at_level(logging.INFO, logger="monge"), watched_by(show):
        yield lambda: ([record.getMessage() for record in caplog.records], shown)


def read(model):
    model.open({0: (5, 6)})
    return model.extend({0: NodeBlock.chain((7,))})[0]


def read_again(model):
    model.close(0)
    return read(model)


def test_the_program_that_a_head_needs_is_announced_and_no_other(said):
    model = model_of(target())
    model.watch((model.num_layers,))
    assert Compiler.made == []
    torch.testing.assert_close(read(model), read(HfTreeModel(target())), atol=5e-5, rtol=0)
    assert Compiler.made == ["step with states"]
    what = "compiling 1 module for this machine, about 20 s in all; kept for later starts"
    assert said() == ([what], [("compiling 1 module", 20)])
    assert model.forward.name == UncompiledForward.name
    assert all(forward.is_ready for forward in model.forwards)


def test_stored_programs_are_loaded_without_a_word(said):
    Compiler.expected_s = 0
    read(model_of(target()))
    assert Compiler.made == ["step"]
    assert said() == ([], [])


def test_a_network_that_cannot_be_compiled_runs_eagerly(said):
    model = model_of(target(), make_step=refused, make_module=refused)
    with pytest.warns(UserWarning, match="is not used, the network runs eagerly: no compiler"):
        logits = read(model)
    torch.testing.assert_close(logits, read(HfTreeModel(target())))
    with pytest.warns(UserWarning, match="part of a head runs eagerly: no compiler"):
        model.unembed(torch.zeros(1, model.hidden_size))


def test_an_interrupted_program_is_made_by_the_next_call(said):
    interrupts = [KeyboardInterrupt]

    def make(of):
        if interrupts:
            raise interrupts.pop()
        return step(of)

    model = model_of(target(), make_step=make)
    with pytest.raises(KeyboardInterrupt):
        read(model)
    assert read(model).shape == (1, model.vocab_size)
    assert Compiler.made == ["step", "step"]


def test_loading_a_pair_announces_both_at_once_and_before_the_first_request(said):
    class Fake(Backend):
        def sequence_model(self, network):
            return model_of(network)

    decoder = monge.load(
        target(), perturbed(target()), backend=Fake(), controller="fixed", tree="chain(2)"
    )
    assert Compiler.made == ["step", "step"]
    decoder.generate([(5, 6, 7)], max_new_tokens=4)
    assert Compiler.made == ["step", "step"]
    assert said()[1] == [("compiling 2 modules", 40)]


class TestMeanwhile:
    """Another process compiles, and the network and modules run as they are until it ends."""

    @pytest.mark.parametrize("failure", [None, "BackendError no room"])
    def test_programs_are_taken_when_it_ends(self, said, monkeypatch, failure):
        started = []

        class Process:
            def __init__(self, command, *, stdin, **streams):
                started.append(pickle.load(stdin))
                self.returncode, self.stdout = None, io.StringIO(failure)

            def poll(self):
                return self.returncode

        processes = []
        monkeypatch.setattr(
            background_compiler.subprocess,
            "Popen",
            lambda *given, **streams: processes.append(Process(*given, **streams)) or processes[-1],
        )
        model = model_of(
            target(),
            make_module=lambda module, like: Compiler.pending("module", module, lambda: spoilt),
        )
        spoilt = lambda states: (2 * states,)  # noqa: E731 (a program of other numbers shows that it runs)
        states = torch.ones(1, model.hidden_size)
        eager = HfTreeModel(target())
        with compiled_by(
            BackgroundCompiler(compile_decoder, {"target": "folder", "tree": "chain"})
        ):
            assert torch.equal(read(model), read(eager))
            assert torch.equal(model.unembed(states), eager.unembed(states))
            assert model.forward.name == "eager"
            model.close(0)
            assert (started, Compiler.made) == (
                [(compile_decoder, {"target": "folder", "tree": "chain"})],
                [],
            )
            processes[0].returncode = 0 if failure is None else 1
            if failure is None:  # it stored them
                Compiler.expected_s = 0
            torch.testing.assert_close(read(model), read_again(eager), atol=5e-5, rtol=0)
            assert torch.equal(model.unembed(states), 2 * states[0:1])
        assert Compiler.made == ["module", "step"]
        assert model.forward.name == UncompiledForward.name
        first, *others = said()[0]
        assert "beside the first answers, about 40 s in all" in first
        if failure is None:
            assert others == []
        else:
            assert others[0] == f"compiling beside the answers failed: {failure}"
            assert [one[:19] for one in others[1:]] == ["compiling 2 modules"]

    def test_the_process_says_why_it_failed(self, said):
        with compiled_by(BackgroundCompiler(compile_decoder, {"target": "no/such/folder"})):
            assert is_compiled_elsewhere([5])
            until = time.monotonic() + 120
            while is_compiled_elsewhere([5]) and time.monotonic() < until:
                time.sleep(0.1)
            assert not is_compiled_elsewhere([5])
        (_, failed), _ = said()
        assert "failed: ModelLoadError" in failed
        assert not is_compiled_elsewhere([5])

    def test_nothing_starts_where_all_is_stored(self, said):
        with compiled_by(BackgroundCompiler(compile_decoder, {"target": "folder"})):
            Compiler.expected_s = 0
            assert read(model_of(target())).shape == (1, 97)
        assert Compiler.made == ["step"]
        assert said()[0] == []
