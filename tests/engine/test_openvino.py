"""The OpenVINO backend: the network's logits, or those of the network with rounded weights; and nothing else in silence."""

import copy
import importlib.util
import shutil
from functools import partial

import pytest
import torch

import monge
from monge.core.errors import BackendError, OptionError
from monge.core.model import NodeBlock
from monge.engine import openvino as backend
from monge.engine.backends import BACKENDS, OpenVino
from monge.engine.compiled_store import FOLDER_VARIABLE, cache_folder
from monge.engine.hf import HfTreeModel
from monge.engine.loading import as_sequence_model
from monge.engine.openvino import OpenVinoStep, openvino_step
from monge.engine.openvino_program import Program
from monge.engine.openvino_weights import with_weights
from monge.engine.step import StepOutput
from monge.engine.step_check import step_spec
from tests.engine.compiling import shared_programs
from tests.engine.tiny import network, perturbed, prompts
from tests.parity.comparing import RandomGrowth, assert_same_tokens, plain_greedy

HAS_OPENVINO = importlib.util.find_spec("openvino") is not None
needs_openvino = pytest.mark.skipif(not HAS_OPENVINO, reason="openvino is not installed: pip install 'monge[openvino]'")
LARGEST_DIFFERENCE = 5e-5
"""Allowed between float32 forwards in another order of summation; as for the eager backend."""


def target():
    return network("llama", "sdpa")  # heads share keys, so this is the grouped attention as well


def silent(_):
    pass


def node_differences(held, kind):
    """Largest difference to fresh forwards of the network, round by round."""
    growth = RandomGrowth(held, prompts((9, 4, 6), seed=1), seed=2, step=openvino_step(held, kind, silent))
    differences = [growth.round(compare=True) for _ in range(8)]
    assert growth.non_prefix_commits > 8, "the rounds were to move columns of the cache"
    return differences


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory):
    """Stored graphs, shared by the test processes of a run; that of the target is made once."""
    with shared_programs(tmp_path_factory, partial(openvino_step, weights_kind="same", notify=silent)) as made:
        if HAS_OPENVINO:
            made(target())
        yield cache_folder() / "programs"


@pytest.fixture
def graph(folder):
    """A fresh graph of the target."""
    key = backend.program_key(target(), step_spec(target()), backend._FORMAT, backend.openvino_version())
    stored, _ = backend.find_program(key, ".zip")
    return backend._read(stored.path)


def no_exporting(*_):
    raise AssertionError("nothing was to be exported here")


@needs_openvino
class TestSteps:
    @pytest.mark.parametrize("kind", ["same", "int8", "bf16"])
    def test_node_logits(self, kind, monkeypatch):
        monkeypatch.setattr(backend, "_has_bfloat16", lambda: False)
        differences = node_differences(with_weights(target(), kind), kind)
        assert max(differences) < LARGEST_DIFFERENCE, differences

    def test_arithmetic_in_bfloat16_rounds_as_that_of_torch(self):
        if not backend._has_bfloat16():
            pytest.skip("this processor has no instructions for bfloat16, and computes in float32")
        held = with_weights(target(), "bf16")
        narrow = copy.deepcopy(held).bfloat16()
        growth = RandomGrowth(narrow, prompts((9, 4, 6), seed=1), seed=2, reference=held)
        usual = max(growth.round(compare=True) for _ in range(8))
        largest = max(node_differences(held, "bf16"))
        assert LARGEST_DIFFERENCE < largest < 2 * usual, (largest, usual)

    @pytest.mark.parametrize("num_nodes", [1, 5, 64, 65])
    @pytest.mark.parametrize("num_rows", [1, 3])
    def test_sizes(self, num_nodes, num_rows):
        models = HfTreeModel(target()), HfTreeModel(target(), openvino_step(target(), "same", silent))
        texts = dict(enumerate(prompts((300, 1, 20)[:num_rows], seed=3)))
        blocks = {row: NodeBlock.chain(prompts((num_nodes,), seed=row)[0]) for row in texts}
        eager, ours = ({} for _ in models)
        for model, logits in zip(models, (eager, ours), strict=True):
            model.open(texts)
            for _ in range(2):  # the second block reads what the first one wrote
                logits.update(model.extend(blocks))
                model.commit({row: range(num_nodes) for row in texts})
        for row, expected in eager.items():
            torch.testing.assert_close(ours[row], expected, atol=LARGEST_DIFFERENCE, rtol=0)

    @pytest.mark.parametrize("num_nodes", [1, 3, 64])
    def test_a_chain_is_read_as_any_block(self, num_nodes, monkeypatch):
        step = openvino_step(target(), "same", silent)
        plain, short = HfTreeModel(target(), step), HfTreeModel(target(), openvino_step(target(), "same", silent))
        monkeypatch.setattr(plain, "_chain_step", None)
        logits = {plain: [], short: []}
        for model, made in logits.items():
            model.open({0: (9,), 1: prompts((70,), seed=1)[0]})  # the second row, so that rows are told apart
            for _ in range(3):
                block = NodeBlock.chain(prompts((num_nodes,), seed=2)[0])
                made.append(model.extend({1: block})[1])
                made.append(model.extend({1: NodeBlock.chain((7, 8), after=num_nodes - 1)})[1])
                model.commit({1: range(num_nodes + 1)})
                # A tree in between, which writes into the same memory.
                made.append(model.extend({1: NodeBlock((7, 8, 9), (-1, 0, 0))})[1])
                model.commit({1: (0, 2)})
        # Not bit for bit: the runtime may choose another kernel for a buffer that lies elsewhere.
        for expected, ours in zip(*logits.values(), strict=True):
            torch.testing.assert_close(ours, expected, atol=LARGEST_DIFFERENCE, rtol=0)

    def test_short_chains_run_as_the_next_longer_program_or_a_while_as_the_last(self, monkeypatch):
        """What is read beyond them leaves no trace, even at the end of their room."""
        longest = target().config.max_position_embeddings
        counts = (9, 1, 2, 4, 1, 2, 3, *(1,) * 8, 5, 8, 6, 9, 2, 1, 4, 1)
        step = openvino_step(target(), "same", silent)
        run, sizes = Program.run, []
        monkeypatch.setattr(Program, "run", lambda self, *args: sizes.append((self.nodes, args[0])) or run(self, *args))
        models = HfTreeModel(target()), HfTreeModel(target(), step)
        tokens = prompts((longest,), seed=4)[0]
        start = longest - sum(counts)
        for model in models:
            model.open({0: tokens[:start]})
        for count in counts:
            block = NodeBlock.chain(tokens[start : start + count])
            expected, ours = (model.extend({0: block})[0] for model in models)
            assert ours.shape == expected.shape
            torch.testing.assert_close(ours, expected, atol=LARGEST_DIFFERENCE, rtol=0)
            for model in models:
                model.commit({0: range(count)})
            start += count
        run_as = [None, 1, 2, 4, 4, 4, 4, *[4] * 6, 1, 1, 8, 8, 8, None, 2, 2, 4, 4]
        assert sizes == [(nodes, (1, nodes or count)) for nodes, count in zip(run_as, counts, strict=True)]

    def test_small_trees_run_as_the_next_larger_program(self, monkeypatch):
        step = openvino_step(target(), "same", silent)
        run, sizes = Program.run, []
        monkeypatch.setattr(Program, "run", lambda self, *args: sizes.append(self.nodes) or run(self, *args))
        models = HfTreeModel(target()), HfTreeModel(target(), step)
        blocks = (
            NodeBlock((5, 6), (-1, -1)),
            NodeBlock((7, 8, 9), (0, 0, 1)),
            NodeBlock((4, 3, 2, 1, 5), (-1, 2, 2, 3, 4)),
            NodeBlock((6,), (7,)),
        )
        for model in models:
            model.open({0: prompts((40,), seed=5)[0]})
        for _ in range(2):
            for block in blocks:
                expected, ours = (model.extend({0: block})[0] for model in models)
                torch.testing.assert_close(ours, expected, atol=LARGEST_DIFFERENCE, rtol=0)
            for model in models:
                model.commit({0: (0, 2, 6)})
        assert sizes == [2, 4, 8, 1] * 2

    def test_a_large_network_has_one_program_and_short_chains_run_a_while_as_the_last(self, monkeypatch):
        monkeypatch.setattr(backend, "_SMALL", 1000)
        step = openvino_step(target(), "same", silent)
        run, sizes = Program.run, []
        monkeypatch.setattr(Program, "run", lambda self, *args: sizes.append(args[0]) or run(self, *args))
        models = HfTreeModel(target()), HfTreeModel(target(), step)
        for model in models:
            model.open({0: (5, 6)})
        for count in (5, 3, 1, 2, 6, 1):
            expected, ours = (model.extend({0: NodeBlock.chain((7,) * count)})[0] for model in models)
            torch.testing.assert_close(ours, expected, atol=LARGEST_DIFFERENCE, rtol=0)
            for model in models:
                model.commit({0: (0,)})
        assert sizes == [(1, count) for count in (5, 3, 3, 3, 6, 1)]
        assert list(step._programs) == [None]

    def test_the_runtime_sees_a_language_model(self):
        step = openvino_step(target(), "same", silent)
        assert [len(program._request.query_state()) for program in step._programs.values()] == [1] * len(step._programs)

    def test_the_cache_may_move_under_a_text(self):
        """It does where a text outgrows it, and where a short text follows a long one: no place of before may be touched."""
        models = HfTreeModel(target()), HfTreeModel(target(), openvino_step(target(), "same", silent))
        for sequence, (length, count) in enumerate(((180, 4), (3, 3), (230, 2), (5, 12))):
            blocks = [NodeBlock.chain(tokens) for tokens in prompts((20,) * count, seed=sequence)]
            logits = []
            for model in models:
                model.open({sequence: prompts((length,), seed=9)[0]})
                for block in blocks:
                    logits.append(model.extend({sequence: block})[sequence])
                    model.commit({sequence: range(20)})
                model.close(sequence)
            for expected, ours in zip(logits[:count], logits[count:], strict=True):
                torch.testing.assert_close(ours, expected, atol=LARGEST_DIFFERENCE, rtol=0)

    def test_short_prompts_are_read_by_steps(self, monkeypatch):
        models = HfTreeModel(target()), HfTreeModel(target(), openvino_step(target(), "same", silent))
        texts, logits = dict(enumerate(prompts((64, 3), seed=4), start=1)), []
        for model in models:
            model.open({0: (5,)})  # a first forward lays out the cache
            if model is models[1]:
                monkeypatch.setattr(model, "_whole", no_exporting)
            model.open(texts)
            logits.append(model.extend({row: NodeBlock.chain((7, 8)) for row in texts}))
        for row in texts:
            torch.testing.assert_close(logits[1][row], logits[0][row], atol=LARGEST_DIFFERENCE, rtol=0)

    def test_logits_of_one_step_survive_the_next(self):
        model = HfTreeModel(target(), openvino_step(target(), "same", silent))
        model.open({0: (5, 6)})
        first = model.extend({0: NodeBlock.chain((7,))})[0]
        kept = first.clone()
        model.extend({0: NodeBlock.chain((9,))})
        assert torch.equal(first, kept)

    def test_a_step_right_after_an_empty_prompt(self):
        models = [HfTreeModel(target()), HfTreeModel(target(), openvino_step(target(), "same", silent))]
        logits = []
        for model in models:
            model.open({0: (5,)})
            model.commit({0: ()})
            logits.append(model.extend({0: NodeBlock.chain((7, 8))})[0])
        torch.testing.assert_close(*logits, atol=LARGEST_DIFFERENCE, rtol=0)

    def test_the_network_is_left_alone(self):
        before = {name: (weight.data_ptr(), weight.stride()) for name, weight in target().state_dict().items()}
        attention = target().config._attn_implementation
        openvino_step(with_weights(target(), "int8"), "int8", silent)
        assert {name: (weight.data_ptr(), weight.stride()) for name, weight in target().state_dict().items()} == before
        assert target().config._attn_implementation == attention


@needs_openvino
class TestTexts:
    @pytest.mark.parametrize("tree", ["chain(4)", "best_first"])
    def test_greedy_is_that_of_transformers(self, tree):
        decoder = monge.load(target(), perturbed(target()), tree=tree, backend="openvino", controller="fixed")
        assert repr(decoder.parts.target).endswith("sdpa, openvino)")
        texts = prompts((9, 4, 7), seed=5)
        for prompt, result in zip(texts, decoder.generate(texts, max_new_tokens=40, ignore_eos=True), strict=True):
            assert_same_tokens(target(), prompt, result.token_ids, plain_greedy(target(), prompt, 40))
            assert 1.05 < result.stats.block_efficiency < 5

    def test_verdicts_are_those_of_the_eager_backend(self):
        texts = prompts((9, 4), seed=6)
        records = []
        for name in ("eager", "openvino"):
            decoder = monge.load(target(), perturbed(target()), backend=name, controller="fixed")
            results = decoder.generate(texts, max_new_tokens=40, temperature=1.0, seed=3)
            records.append([(record.num_accepted, record.token_ids) for result in results for record in result.records])
        assert records[0] == records[1]

    def test_int8_decodes_the_rounded_network_and_says_so(self):
        decoder = monge.load(target(), perturbed(target()), backend="openvino(weights='int8')", controller="fixed")
        assert repr(decoder.parts.target).endswith("sdpa, openvino, int8 weights)")
        rounded = with_weights(target(), "int8")
        texts = prompts((9, 4), seed=5)
        for prompt, result in zip(texts, decoder.generate(texts, max_new_tokens=40, ignore_eos=True), strict=True):
            assert_same_tokens(rounded, prompt, result.token_ids, plain_greedy(rounded, prompt, 40))


@needs_openvino
class TestStoredGraphs:
    def test_are_found_again_whatever_the_weights(self, monkeypatch):
        openvino_step(target(), "same", silent)
        monkeypatch.setattr(backend, "export_graph", no_exporting)
        openvino_step(target(), "same", no_exporting)
        other = perturbed(target())
        growth = RandomGrowth(other, prompts((5,), seed=1), seed=2, step=openvino_step(other, "same", no_exporting))
        assert max(growth.round(compare=True) for _ in range(3)) < LARGEST_DIFFERENCE

    @pytest.mark.parametrize("suffix", [".zip", ".constants"])
    def test_damaged_ones_are_made_again(self, folder, monkeypatch, tmp_path, graph, suffix):
        monkeypatch.setattr(backend, "export_graph", lambda *_: graph)
        shutil.copytree(folder, tmp_path / "programs")
        monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
        for path in (tmp_path / "programs").glob(f"*{suffix}"):
            path.write_bytes(path.read_bytes()[:100])
        told = []
        openvino_step(target(), "same", told.append)
        assert "cannot be used" in told[0]
        assert "exporting LlamaForCausalLM for OpenVINO" in told[1]
        monkeypatch.setattr(backend, "export_graph", no_exporting)
        openvino_step(target(), "same", no_exporting)

    def test_another_version_has_another_graph(self, monkeypatch):
        import openvino

        openvino_step(target(), "same", silent)
        monkeypatch.setattr(openvino, "get_version", lambda: "another")
        monkeypatch.setattr(backend, "export_graph", no_exporting)
        with pytest.raises(BackendError, match="nothing was to be exported"):
            openvino_step(target(), "same", silent)

    @pytest.mark.parametrize("error", [OSError(28, "No space left on device"), RuntimeError("could not write")])
    def test_no_room_leaves_nothing_behind(self, monkeypatch, tmp_path, graph, error):
        import openvino

        monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
        monkeypatch.setattr(backend, "export_graph", lambda *_: graph)
        told = []

        def half(model, xml, numbers):
            xml.write_text("half of it")
            raise error

        monkeypatch.setattr(openvino, "serialize", half)
        step = openvino_step(target(), "same", told.append)
        assert isinstance(step, OpenVinoStep)
        assert "cannot be kept, the next start exports again" in told[-1]
        assert not list((tmp_path / "programs").iterdir())

    def test_a_step_with_other_logits_is_refused(self, monkeypatch):
        run = OpenVinoStep.__call__
        monkeypatch.setattr(OpenVinoStep, "__call__", lambda *inputs: StepOutput(logits=run(*inputs).logits * 1.01))
        with pytest.raises(BackendError, match="has other logits than the network: .* of the largest, not 0.0001"):
            openvino_step(target(), "same", silent)


class TestRefusals:
    def test_not_installed(self, monkeypatch):
        monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
        with pytest.raises(BackendError, match=r"needs the package openvino: pip install 'monge\[openvino\]'"):
            as_sequence_model(target(), backend="openvino")

    def test_unknown_weights(self):
        with pytest.raises(OptionError, match="weights must be one of same, bf16, int8; got 'int4'"):
            BACKENDS.parse("openvino(weights='int4')")
        with pytest.raises(OptionError, match="unknown option of backend 'openvino': 'weight'; did you mean 'weights'"):
            BACKENDS.parse("openvino(weight='int8')")

    @needs_openvino
    def test_networks_that_read_no_trees_run_eagerly(self):
        with pytest.warns(UserWarning, match="backend 'openvino' is not used, .* OpenVINO runs networks that read trees"):
            model = as_sequence_model(network("bloom"), backend="openvino")
        model.open({0: (5, 6)})
        assert model.extend({0: NodeBlock.chain((7,))})[0].shape == (1, model.vocab_size)

    @needs_openvino
    def test_another_law_is_no_way_out(self):
        with pytest.raises(BackendError, match="OpenVINO runs networks that read trees"):
            as_sequence_model(network("bloom"), backend=OpenVino(weights="int8"))

    @needs_openvino
    def test_other_types(self):
        half = perturbed(target(), 0.01).bfloat16()
        with pytest.warns(UserWarning, match="takes float32 here: load it with dtype='float32'"):
            as_sequence_model(half, backend="openvino")
