"""Programs are compiled together, after one announcement, and only those that are used."""

import logging
from contextlib import contextmanager

import pytest
import torch

import monge
from monge.core.errors import BackendError
from monge.core.model import NodeBlock
from monge.engine.backends.base import Backend, Pending
from monge.engine.backends.parity_check import step_spec
from monge.engine.backends.traced_step import TracedStep, UncompiledStep
from monge.engine.models.hf_tree import HfTreeModel
from monge.engine.models.network_facts import OutputLayer
from monge.engine.notices import watched_by
from tests.engine.tiny import network, perturbed


def target():
    return network("llama", "sdpa")


class Program(Pending):
    """Takes down that it is made, and makes what it is told."""

    made: list[str]

    def __init__(self, name, make, expected_s=20):
        self.name, self._make, self.expected_s = name, make, expected_s

    def make(self):
        type(self).made.append(self.name)
        return self._make()


def step(of, *layers):
    spec = step_spec(of, layers)
    return UncompiledStep(TracedStep(of, spec), spec)


def refused(*_):
    raise BackendError("no compiler today")


def model_of(of, *, make_step=step, make_module=lambda module: module, expected_s=20):
    return HfTreeModel(
        of,
        Program("step", lambda: make_step(of), expected_s),
        lambda layers: Program("step with states", lambda: make_step(of, *layers), expected_s),
        lambda module, _: Program("module", lambda: make_module(module), expected_s // 2),
    )


@pytest.fixture
def said(caplog):
    """Announcements, and what was shown as going on."""
    Program.made, shown = [], []

    @contextmanager
    def show(name, seconds):
        shown.append((name, seconds))
        yield

    with caplog.at_level(logging.INFO, logger="monge"), watched_by(show):
        yield lambda: ([record.getMessage() for record in caplog.records], shown)


def read(model):
    model.open({0: (5, 6)})
    return model.extend({0: NodeBlock.chain((7,))})[0]


def test_one_announcement_for_what_a_head_needs_and_nothing_else(said):
    model = model_of(target())
    model.watch((model.num_layers,))
    rows = torch.zeros(1, model.hidden_size)
    model.module_program(OutputLayer(target()), [rows])
    assert Program.made == []
    logits = read(model)
    model.unembed(rows)
    assert Program.made == ["step with states", "module", "module"]
    eager = HfTreeModel(target())
    torch.testing.assert_close(logits, read(eager), atol=5e-5, rtol=0)
    told, shown = said()
    what = "for this machine, about {} s in all; kept for later starts"
    assert told == [
        f"compiling 2 programs {what.format(30)}",
        # The output layer was asked for when all was made.
        f"compiling 1 program {what.format(10)}",
    ]
    assert shown == [("compiling 2 programs", 30), ("compiling 1 program", 10)]


def test_a_module_that_runs_first_has_all_made(said):
    model = model_of(target())
    model.watch((model.num_layers,))
    model.unembed(torch.zeros(1, model.hidden_size))
    assert Program.made == ["step with states", "module"]
    read(model)
    assert len(said()[0]) == 1


def test_stored_programs_are_loaded_without_a_word(said):
    model = model_of(target(), expected_s=0)
    read(model)
    assert Program.made == ["step"]
    assert said() == ([], [])


def test_who_asks_what_runs_has_it_made(said):
    model = model_of(target())
    assert model.step.name == UncompiledStep.name
    assert model.pending() == ()


def test_what_cannot_be_compiled_runs_eagerly(said):
    model = model_of(target(), make_step=refused, make_module=refused)
    with pytest.warns(UserWarning, match="is not used, the network runs eagerly: no compiler"):
        logits = read(model)
    torch.testing.assert_close(logits, read(HfTreeModel(target())))
    with pytest.warns(UserWarning, match="part of a head runs eagerly: no compiler"):
        model.unembed(torch.zeros(1, model.hidden_size))


def test_an_interrupted_program_is_made_by_the_next_call(said):
    interrupts = [KeyboardInterrupt]

    def make(module):
        if interrupts:
            raise interrupts.pop()
        return module

    model, rows = model_of(target(), make_module=make), torch.zeros(1, target().config.hidden_size)
    with pytest.raises(KeyboardInterrupt):
        model.unembed(rows)
    assert model.unembed(rows).shape == (1, model.vocab_size)
    assert Program.made == ["step", "module", "module"]


def test_loading_a_pair_announces_both_at_once_and_before_the_first_request(said):
    class Fake(Backend):
        def sequence_model(self, network):
            return model_of(network)

    decoder = monge.load(
        target(), perturbed(target()), backend=Fake(), controller="fixed", tree="chain(2)"
    )
    assert Program.made == ["step", "step"]
    decoder.generate([(5, 6, 7)], max_new_tokens=4)
    assert Program.made == ["step", "step"]
    assert said()[1] == [("compiling 2 programs", 40)]
