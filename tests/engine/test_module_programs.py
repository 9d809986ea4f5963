"""Small modules in the backend of a network.

The numbers of the module itself, or the module itself with a reason.
"""

import warnings
from dataclasses import replace
from functools import partial

import pytest
import torch

import monge
from monge.backends.cpu import compiled
from monge.backends.cpu.code_cache import FOLDER_VARIABLE, PROGRAMS, writable_folder
from monge.backends.cpu.compiled import pending_module
from monge.core.errors import BackendError
from monge.heads.readers.registry import load_head
from monge.heads.shape.head import FirstStep, LaterStep, ShapeHead, TargetSizes, make_predictor
from monge.loading.networks import as_sequence_model
from monge.networks.base import NodeBlock
from monge.networks.forward import Forward
from monge.networks.hf_tree import HfTreeModel, make_models_ready
from monge.networks.network_facts import OutputLayer
from monge.training.texts import feature_model
from tests.engine.compiling import require, shared_programs, verdicts_of
from tests.engine.tiny import COMMON, network, prompts
from tests.heads.readers.published import KINDS, steps_of

LARGEST_DIFFERENCE = 5e-5
"""Allowed between float32 forwards in another order of summation; as for logits."""
HIDDEN = COMMON["hidden_size"]


def target():
    return network("llama", "sdpa")


def no_building(*_, **__):
    raise AssertionError("nothing was to be made here")


def shape_head(seed=0, *, is_branched=True, alignment="none", kind="gated"):
    sizes = TargetSizes.of(feature_model(target()))
    settings = {"width": 4, "gate_rank": 2} if kind == "gated" else {}
    predictor = make_predictor(kind, sizes, num_steps=2, is_branched=is_branched, **settings)
    head = ShapeHead(predictor, sizes, alignment, None if alignment == "none" else 4)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in [*head.predictor.parameters(), *head.alignments.buffers()]:
            tensor.copy_(torch.rand(tensor.shape, generator=generator) - 0.5)
    head.remember(feature_model(target()))
    return head.eval()


def rows(count, *widths, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return [torch.rand(count, width, generator=generator) - 0.5 for width in widths]


@pytest.fixture(scope="module")
def backend(tmp_path_factory):
    """The compiled backend; its programs for these tests are made once a run."""
    require("compiled")

    def make(module):
        return compile_module(module, rows(1, *widths(module)))

    with shared_programs(tmp_path_factory, make) as made:
        steps = FirstStep(shape_head()).eval(), LaterStep(shape_head(), 2).eval()
        for module in (OutputLayer(target()), *steps):
            made(module)
        yield "compiled"


def widths(module):
    if isinstance(module, LaterStep):
        predictor = module.head.predictor
        return predictor.start(*rows(1, HIDDEN, HIDDEN)).shape[1], HIDDEN, HIDDEN
    return (HIDDEN, HIDDEN) if isinstance(module, FirstStep) else (HIDDEN,)


def assert_same(program, module, count):
    inputs = rows(count, *widths(module), seed=count)
    with torch.inference_mode():
        for ours, theirs in zip(program(*inputs), module(*inputs), strict=True):
            torch.testing.assert_close(ours, theirs, atol=LARGEST_DIFFERENCE, rtol=0)


def compile_module(module, like):
    return pending_module(module, like).make()


@pytest.mark.parametrize(
    "step",
    [
        pytest.param(FirstStep, id="first", marks=pytest.mark.slow),
        pytest.param(partial(LaterStep, number=2), id="later"),
    ],
)
def test_steps_give_the_head_s_numbers(backend, step):
    module = step(shape_head()).eval()
    host = HfTreeModel(target(), make_module=pending_module)
    program = host.module_forward(module, rows(1, *widths(module)))
    assert program is not module
    for count in (1, 3, 64, 65, 1):
        assert_same(program, module, count)


def test_the_output_layer_is_the_network_s(backend):
    model, eager = as_sequence_model(target(), backend=backend), feature_model(target())
    (states,) = rows(3, HIDDEN)
    logits = model.unembed(states), eager.unembed(states)
    torch.testing.assert_close(*logits, atol=LARGEST_DIFFERENCE, rtol=0)


def test_steps_of_a_head_with_a_cache(backend, tmp_path):
    """The program gives the head's numbers, and every text its own, whoever is read beside it."""
    network_ = network("llama", "sdpa", num_hidden_layers=4)
    KINDS["eagle3"](HIDDEN, COMMON["vocab_size"]).write(tmp_path)
    model = as_sequence_model(network_, backend=backend)
    plain, compiled_head = (
        host.head_model(*steps_of(load_head(tmp_path).float()))
        for host in (HfTreeModel(network_), model)
    )
    chains = {0: NodeBlock.chain((5, 6, 7)), 1: NodeBlock.chain((8,)), 2: NodeBlock.chain((9, 3))}
    blocks = {2: NodeBlock((1, 2, 3), (-1, -1, 1)), 0: NodeBlock.chain((4,))}
    states, drafted = rows(6, 3 * HIDDEN)[0], rows(4, HIDDEN)[0]

    def read(head, requests, chains, states, drafted):
        for request in requests:
            head.open(request)
        first = head.read({one: chains[one] for one in requests}, states)
        own = {one: block for one, block in blocks.items() if one in requests}
        return [*first, *head.extend(own, drafted)]

    found = read(compiled_head, (0, 1, 2), chains, states, drafted)
    expected = read(plain, (0, 1, 2), chains, states, drafted)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=LARGEST_DIFFERENCE, rtol=0)
    for request in (0, 1, 2):
        compiled_head.close(request)
    alone = read(compiled_head, (2,), chains, states[4:], drafted[:3])
    own = found[0][4:], found[1][2:], found[2][:3], found[3][:3]
    assert all(torch.equal(*pair) for pair in zip(alone, own, strict=True))


@pytest.mark.slow  # every one of them is another architecture
@pytest.mark.parametrize("kind", ["gated", "ridge"])
@pytest.mark.parametrize("alignment", ["gaussian"])
@pytest.mark.parametrize("is_branched", [True, False])
def test_every_kind_of_head(backend, kind, alignment, is_branched):
    head = shape_head(kind=kind, alignment=alignment, is_branched=is_branched)
    with torch.no_grad():
        for step in head.alignments:
            step.strength.fill_(0.5)
    for module in (FirstStep(head).eval(), LaterStep(head, 2).eval()):
        assert_same(compile_module(module, rows(1, *widths(module))), module, 3)


def test_heads_of_one_architecture_share_a_program_and_no_numbers(backend, monkeypatch):
    monkeypatch.setattr(compiled, "_compile_module", no_building)
    modules = [FirstStep(shape_head(seed)).eval() for seed in (0, 1)]
    programs = [compile_module(module, rows(1, HIDDEN, HIDDEN)) for module in modules]
    for program, module in zip(programs, modules, strict=True):
        assert_same(program, module, 3)
    inputs = rows(1, HIDDEN, HIDDEN)
    assert not torch.allclose(programs[0](*inputs)[1], programs[1](*inputs)[1], atol=0.01)


def test_other_numbers_are_refused_and_not_kept(backend, monkeypatch, tmp_path):
    """Nor are those of the program that is then compiled."""
    module, like = FirstStep(shape_head()).eval(), rows(1, HIDDEN, HIDDEN)
    built, loaded, load = [], [], compiled.LoadedCode
    with monkeypatch.context() as patch:
        patch.setattr(
            compiled, "LoadedCode", lambda *given: loaded.append(given[0]) or load(*given)
        )
        compile_module(module, like)
    path = loaded[0].path
    whole = {file.name: file.read_bytes() for file in (path, path.with_suffix(".constants"))}
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    folder = writable_folder(PROGRAMS)

    def build(*given):
        built.append(given)
        for name, content in whole.items():
            (folder / name).write_bytes(content)
        return replace(loaded[0], path=folder / path.name)

    def spoilt(*given):
        run = load(*given)
        return lambda inputs: [one * 1.01 for one in run(inputs)]

    build()
    monkeypatch.setattr(compiled, "LoadedCode", spoilt)
    monkeypatch.setattr(compiled, "_compile_module", build)
    with pytest.raises(BackendError, match="FirstStep, .* other numbers: .* from a float64 run"):
        compile_module(module, like)
    assert len(built) == 2
    assert not list(folder.iterdir())


def test_a_module_that_cannot_be_traced_runs_eagerly(backend):
    class Branching(torch.nn.Module):
        def forward(self, states):
            return (states if bool(states.sum() > 0) else -states,)

    module = Branching().eval()
    host = HfTreeModel(target(), make_module=pending_module)
    program, (states,) = host.module_forward(module, rows(1, HIDDEN)), rows(3, HIDDEN)
    with pytest.warns(UserWarning, match="part of a head runs eagerly: Branching cannot .*"):
        make_models_ready((host,))
    assert torch.equal(program(states)[0], module(states)[0])


class TestTogether:
    """Programs of modules are made with those of networks, and announced once."""

    def make(self):
        """A host whose modules take ten seconds to compile, and give twice their numbers then."""
        made = []

        def doubled(module, like):
            def make():
                made.append(module)
                return lambda states: (2 * module(states)[0],)

            return Forward(module, make, lambda: 10)

        return HfTreeModel(target(), make_module=doubled), made

    def test_one_message_says_how_long_all_take(self, caplog):
        host, made = self.make()
        (states,) = rows(2, HIDDEN)
        programs = [host.module_forward(OutputLayer(host.network), (states[:1],)) for _ in "ab"]
        assert made == []
        with caplog.at_level("INFO", logger="monge"):
            make_models_ready((host,))
            make_models_ready((host,))
        assert len(made) == 2
        (message,) = (record.message for record in caplog.records)
        assert message.startswith("compiling 2 modules for this machine, about 20 s in all")
        expected = 2 * OutputLayer(host.network)(states)[0]
        assert all(torch.equal(program(states)[0], expected) for program in programs)
        assert len(made) == 2

    def test_a_program_called_before_the_others_are_made_is_compiled_alone(self, caplog):
        host, made = self.make()
        (states,) = rows(2, HIDDEN)
        program = host.module_forward(OutputLayer(host.network), (states[:1],))
        with caplog.at_level("INFO", logger="monge"):
            program(states)
            make_models_ready((host,))
        assert len(made) == 1
        assert [one.message[:21] for one in caplog.records] == ["compiling 1 module fo"]


@pytest.mark.parametrize(
    ("tree", "temperature"), [("chain(2)", 1.0), ("fixed_width((2, 1), children='iid')", 0.7)]
)
def test_verdicts_are_those_of_the_eager_head(backend, tree, temperature):
    texts, records = prompts((9, 4), seed=6), []
    for name in ("eager", backend):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            settings = {"tree": tree, "backend": name, "controller": "fixed"}
            decoder = monge.load(target(), shape_head(), **settings)
        options = {"max_new_tokens": 24, "temperature": temperature, "seed": 3}
        records.append(verdicts_of(decoder, texts, **options))
    assert records[0] == records[1]
    assert sum(accepted for accepted, _ in records[0]) > 0
