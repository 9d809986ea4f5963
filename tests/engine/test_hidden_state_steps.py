"""Hidden states from the steps of fast backends.

Those of the network, and heads draft from them as they do on eager steps.
"""

import warnings

import pytest
import torch

import monge
from monge.backends.cpu import code_cache, compiled
from monge.backends.cpu.compiled import CompiledForward
from monge.core.errors import BackendError
from monge.heads.shape.checkpoint import save_head
from monge.heads.shape.head import ShapeHead, TargetSizes, make_predictor
from monge.loading.networks import as_sequence_model
from monge.networks.base import NodeBlock
from monge.networks.forward import ForwardOutput
from monge.training.texts import feature_model
from tests.engine.compiling import compile_forward, require, shared_programs, verdicts_of
from tests.engine.tiny import COMMON, VOCAB, network, prompts
from tests.heads.readers.published import eagle3

LARGEST_DIFFERENCE = 5e-5
"""Allowed between float32 forwards in another order of summation; as for logits."""
ALL, LAST = (0, 1, 2), (2,)


def target():
    return network("llama", "sdpa")


@pytest.fixture(scope="module")
def backend(tmp_path_factory):
    """The compiled backend; its programs for these tests are made once a run."""
    require("compiled")

    def make(layers):
        return compile_forward(target(), layers)

    with shared_programs(tmp_path_factory, make) as made:
        for layers in ((), LAST):
            made(layers)
        yield "compiled"


@pytest.fixture
def read(backend, monkeypatch):
    """Notes what the backend's steps show, step by step."""
    seen, kind = [], CompiledForward
    run = kind.read

    def noting(step, *inputs):
        seen.append(step.layers)
        return run(step, *inputs)

    monkeypatch.setattr(kind, "read", noting)
    return seen


@pytest.fixture(scope="module")
def heads(tmp_path_factory):
    folder = tmp_path_factory.mktemp("heads")
    model = feature_model(target())
    sizes = TargetSizes.of(model)
    settings = {"num_steps": 2, "is_branched": True, "width": 4, "gate_rank": 2}
    shape = ShapeHead(make_predictor("gated", sizes, **settings), sizes)
    shape.remember(model)
    save_head(shape, folder / "shape", dtype=torch.float32, about={})
    third = eagle3(COMMON["hidden_size"], VOCAB).write(folder / "eagle3")
    return {"shape": folder / "shape", "eagle3": third}


def load(backend):
    return as_sequence_model(target(), backend=backend)


@pytest.mark.parametrize("layers", [LAST, pytest.param(ALL, marks=pytest.mark.slow)])
def test_states_of_the_committed_text(backend, read, layers):
    model = load(backend)
    watched = model.watch(layers)
    assert model.forward.layers == layers
    read.clear()
    texts = {seq: list(text) for seq, text in enumerate(prompts((6, 3), seed=4))}
    model.open({seq: text[:-1] for seq, text in texts.items()})
    taken = {seq: [watched.take(seq)] for seq in texts}
    for number in range(3):
        # Rows of different length, and a block that reads one of them only; every path leaves a
        # node out.
        blocks = {
            seq: NodeBlock((text[-1], 5 + number, 7 + seq)[: 3 - seq], (-1, 0, 0)[: 3 - seq])
            for seq, text in texts.items()
        }
        model.extend(blocks)
        model.extend({0: NodeBlock((11,), (2,))})
        model.commit({0: (0, 2, 3), 1: (0,)})
        texts[0] += [7, 11, 13 + number]
        texts[1] += [13 + number]
        for seq in texts:
            taken[seq].append(watched.take(seq))
    assert read == [layers] * 6
    for seq, text in texts.items():
        with torch.inference_mode():
            states = target()(torch.tensor([text[:-1]]), output_hidden_states=True).hidden_states
        expected = torch.cat([states[layer][0] for layer in layers], dim=-1)
        torch.testing.assert_close(torch.cat(taken[seq]), expected, atol=LARGEST_DIFFERENCE, rtol=0)


@pytest.mark.parametrize(
    ("kind", "temperature"), [pytest.param("shape", 0.0, marks=pytest.mark.slow), ("eagle3", 1.0)]
)
def test_verdicts_of_heads_are_those_of_the_eager_backend(backend, read, heads, kind, temperature):
    texts = prompts((9, 4), seed=6)
    records = []
    for name in ("eager", backend):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            settings = {"tree": "best_first(4, 2, 2)", "backend": name, "controller": "fixed"}
            decoder = monge.load(target(), heads[kind], **settings)
        read.clear()
        options = {"max_new_tokens": 24, "temperature": temperature, "seed": 3}
        records.append(verdicts_of(decoder, texts, **options))
        assert (len(read) > 0) is (name == backend)
    assert records[0] == records[1]
    assert all(read), "every step was to show hidden states"


def test_other_states_are_refused(backend, monkeypatch):
    run = CompiledForward.read

    def other(*inputs):
        output = run(*inputs)
        wrong = tuple(state * 1.01 for state in output.states)
        return ForwardOutput(logits=output.logits, states=wrong)

    monkeypatch.setattr(CompiledForward, "read", other)
    # The good program of other tests is neither removed nor compiled again.
    monkeypatch.setattr(code_cache, "_remove", lambda path: None)
    monkeypatch.setattr(
        compiled, "compile_exported", lambda *given: compiled.find_code(given[-1], ".pt2", "")
    )
    with pytest.raises(BackendError, match="has other logits or hidden states than the network"):
        compile_forward(target(), LAST)
    model = load(backend)
    model.watch(LAST)
    reason = "states are watched, so every step .* runs eagerly: .* other logits or hidden"
    with pytest.warns(UserWarning, match=reason):
        watched = _watched_open(model)
    watched.take(0)
    model.extend({0: NodeBlock.chain((7,))})
    model.commit({0: (0,)})
    with torch.inference_mode():
        output = target()(torch.tensor([(5, 6, 7)]), output_hidden_states=True)
    expected = output.hidden_states[-1][0, -1:]
    torch.testing.assert_close(watched.take(0), expected, atol=LARGEST_DIFFERENCE, rtol=0)


def _watched_open(model):
    watched = model.watch(LAST)
    model.open({0: (5, 6)})  # a pending step is made now
    return watched
