"""Prompts read by compiled programs.

The same texts as by the network, without logits that nobody wants.
"""

import copy

import pytest
import torch

from monge.core.errors import BackendError
from monge.core.model import NodeBlock
from monge.engine.backends.base import StepOutput
from monge.engine.backends.compiled import CompiledStep
from monge.engine.backends.parity_check import check_step
from monge.engine.models.hf_tree import HfTreeModel
from tests.engine.compiling import require, shared_programs
from tests.engine.tiny import network, prompts

LARGEST_DIFFERENCE = 5e-5
"""Allowed between float32 forwards in another order of summation; as for the eager backend."""


def target():
    return network("llama", "sdpa")


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    require("compiled")
    with shared_programs(tmp_path_factory) as make:
        yield make


@pytest.fixture
def seen(monkeypatch):
    """Shapes of the logits that the program is asked for."""
    shapes, run = [], CompiledStep._output

    def noted(step, inputs):
        output = run(step, inputs)
        shapes.append(tuple(output.logits.shape[:2]))
        return output

    monkeypatch.setattr(CompiledStep, "_output", noted)
    return shapes


def opened(model):
    """A model whose cache is laid out, as every first forward of the network does."""
    model.open({-1: (5, 6)})
    model.close(-1)
    return model


@pytest.mark.parametrize("lengths", [(1,), (2,), (130,), (9, 4, 7), (100, 1, 60)])
def test_what_follows_a_prompt(compiled, seen, lengths):
    eager, ours = opened(HfTreeModel(target())), opened(HfTreeModel(target(), compiled(target())))
    seen.clear()
    texts = dict(enumerate(prompts(lengths, seed=4)))
    for model in (eager, ours):
        model.open(texts)
    assert seen
    assert {nodes for _, nodes in seen} == {1}
    assert sum(rows for rows, _ in seen) >= len(lengths)
    blocks = {row: NodeBlock((5, 6, 7), (-1, -1, 0)) for row in texts}
    expected, found = eager.extend(blocks), ours.extend(blocks)
    for row in texts:
        torch.testing.assert_close(found[row], expected[row], atol=LARGEST_DIFFERENCE, rtol=0)


def test_hidden_states_of_whole_prompts_come(compiled, seen):
    def watching(layers):
        return compiled(target(), *layers)

    models = HfTreeModel(target()), HfTreeModel(target(), compiled(target()), watching)
    text = prompts((40,), seed=4)[0]
    states = []
    for model in models:
        watched = model.watch((2,))
        opened(model)
        seen.clear()
        model.open({0: text})
        states.append(watched.take(0))
    assert seen == [(1, 1)]
    assert states[0].shape[0] == len(text)
    torch.testing.assert_close(states[1], states[0], atol=LARGEST_DIFFERENCE, rtol=0)


def test_programs_with_attention_of_their_own_read_prompts_of_all_lengths(compiled, seen):
    model = HfTreeModel(target(), compiled(target()))
    seen.clear()
    model.open({0: prompts((400,), seed=4)[0]})
    assert seen == [(1, 1)]


def test_longer_prompts_are_the_networks(compiled, seen):
    step = compiled(target())
    step.prompt_tokens = step.max_nodes = 20
    model = HfTreeModel(target(), step)
    seen.clear()
    model.open({0: prompts((21,), seed=4)[0]})
    assert seen == []
    model.open({1: prompts((20,), seed=4)[0]})
    assert seen == [(1, 1)]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::FutureWarning")  # newer hosts call the argument `cache`
def test_a_network_without_a_choice_of_logits(compiled, seen):
    """Its program reads short prompts all the same, as any block."""

    class Plain(type(target())):
        def forward(
            self,
            input_ids,
            position_ids,
            attention_mask,
            past_key_values,
            use_cache,
            output_hidden_states=False,
        ):
            return super().forward(
                input_ids=input_ids,
                position_ids=position_ids,
                attention_mask=attention_mask,
                past_key_values=past_key_values,
                use_cache=use_cache,
                output_hidden_states=output_hidden_states,
            )

    plain = copy.deepcopy(target())
    plain.__class__ = Plain
    step = compiled(plain)
    assert step.prompt_tokens == 0
    model = opened(HfTreeModel(plain, step))
    seen.clear()
    model.open({0: (5, 6, 7)})
    assert seen == [(1, 3)]


def test_a_program_that_reads_prompts_wrongly_is_refused(compiled, monkeypatch):
    step = compiled(target())
    check_step(target(), step, "compiled")

    def forgetful(self, token_ids, positions, masks, cache):
        return StepOutput(logits=torch.zeros(len(token_ids), 1, 97))

    monkeypatch.setattr(CompiledStep, "read_prompt", forgetful)
    with pytest.raises(
        BackendError, match="LlamaForCausalLM, compiled, has other logits than the network"
    ):
        check_step(target(), step, "compiled")
