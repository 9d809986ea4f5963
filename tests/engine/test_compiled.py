"""The compiled backend: made once, checked, never wrong in silence, and quiet while it decodes."""

import copy
import re
import resource
import shutil

import pytest
import torch
from torch._dynamo.utils import counters

import monge
from monge.backends.cpu import code_cache
from monge.backends.cpu import compiled as backend
from monge.backends.cpu.code_cache import FOLDER_VARIABLE, cache_folder
from monge.backends.cpu.compiled import CompiledForward, traced_forward
from monge.backends.parity_check import check_forward, forward_spec
from monge.backends.traced import tensors_of
from monge.core.errors import BackendError, OptionError
from monge.loading.networks import as_draft_model, as_sequence_model
from monge.networks.base import NodeBlock
from monge.networks.forward import ForwardOutput, NetworkForward
from monge.networks.hf_tree import HfTreeModel
from monge.networks.network_facts import OutputLayer
from tests.engine.compiling import (
    compile_forward,
    read_by,
    require,
    shared_programs,
    verdicts_of,
)
from tests.engine.tiny import network, perturbed, prompts
from tests.parity.comparing import RandomGrowth, assert_same_tokens, plain_greedy

STAGES = "compiled"  # whole rounds have tests of their own
LARGEST_DIFFERENCE = 5e-5
"""Allowed between float32 forwards in another order of summation; as for the eager backend."""


def target():
    return network("llama", "sdpa")  # heads share keys, so this is the grouped attention as well


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    require("compiled")
    with shared_programs(tmp_path_factory) as make:
        yield make


@pytest.fixture
def own_folder(monkeypatch, tmp_path, compiled):
    """A copy of the compiled program of `target()` that a test may spoil."""
    compiled(target())
    folder = tmp_path / "programs"
    folder.mkdir()
    # Only its own files: another worker may write a program of its own meanwhile.
    for path in (cache_folder() / "programs").glob(f"{key_of(target())}.*"):
        shutil.copy(path, folder)
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    return folder


def key_of(net):
    return backend.code_key(net, *backend.network_facts(net), forward_spec(net), ())


def no_compiling(*_, **__):
    raise AssertionError("nothing was to be compiled here")


class TestSteps:
    def test_node_logits(self, compiled):
        growth = RandomGrowth(target(), prompts((9, 4, 6), seed=1), seed=2, step=compiled(target()))
        differences = [growth.round(compare=True) for _ in range(8)]
        assert growth.non_prefix_commits > 8, "the rounds were to move columns of the cache"
        assert max(differences) < LARGEST_DIFFERENCE, differences

    @pytest.mark.parametrize("num_nodes", [1, 2, 5, 64, 65])
    @pytest.mark.parametrize("num_rows", [1, 3])
    def test_sizes(self, compiled, num_nodes, num_rows):
        models = HfTreeModel(target()), read_by(compiled(target()), target())
        texts = dict(enumerate(prompts((300, 1, 20)[:num_rows], seed=3)))
        blocks = {row: NodeBlock.chain(prompts((num_nodes,), seed=row)[0]) for row in texts}
        eager, ours = ({} for _ in models)
        for model, logits in zip(models, (eager, ours), strict=True):
            model.open(texts)
            logits.update(model.extend(blocks))
        for row, expected in eager.items():
            torch.testing.assert_close(ours[row], expected, atol=LARGEST_DIFFERENCE, rtol=0)

    @pytest.mark.parametrize("is_narrow", [False, True])
    def test_other_weights_take_the_same_program(self, compiled, monkeypatch, is_narrow):
        """Those too that lie in panels of another type, since all of their numbers have 16 bits."""
        compiled(target())
        monkeypatch.setattr(torch._inductor, "aoti_compile_and_package", no_compiling)
        other = perturbed(target())
        if is_narrow:
            other = copy.deepcopy(other)
            other.load_state_dict(
                {name: weight.bfloat16().float() for name, weight in other.state_dict().items()}
            )
        kinds = {
            tensor.dtype
            for name, tensor in tensors_of(
                traced_forward(NetworkForward(other), forward_spec(other))
            ).items()
            if "panels" in name
        }
        assert kinds == {torch.int32 if is_narrow else torch.float32}
        growth = RandomGrowth(other, prompts((5,), seed=1), seed=2, step=compiled(other))
        assert max(growth.round(compare=True) for _ in range(3)) < LARGEST_DIFFERENCE

    def test_the_network_is_left_alone(self, compiled):
        def facts():
            weights = target().state_dict().items()
            places = {name: (weight.data_ptr(), weight.stride()) for name, weight in weights}
            return places, target().config._attn_implementation

        before = facts()
        compiled(target())
        assert facts() == before

    def test_decoding_compiles_nothing_and_keeps_no_memory(self, compiled, monkeypatch):
        model = read_by(compiled(target()), target())
        monkeypatch.setattr(torch._inductor, "aoti_compile_and_package", no_compiling)
        counters.clear()
        model.open({0: (5, 6), 1: (7,)})
        # The cache grows on the way, and the number of rows and nodes changes.
        for length in range(300):
            rows = (0, 1) if length % 3 else (0,)
            model.extend({row: NodeBlock.chain((5,) * (1 + (length + row) % 4)) for row in rows})
            model.commit(dict.fromkeys(rows, (0,)))
        assert not counters["frames"]
        assert not counters["stats"]
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for _ in range(400):
            model.extend({0: NodeBlock.chain((5, 6, 7))})
            model.commit({0: ()})
        grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        assert grown_kib < 4096, f"{grown_kib} KiB more after 400 steps"


class TestTexts:
    @pytest.mark.parametrize("tree", ["chain(4)", "best_first"])
    def test_greedy_is_that_of_transformers(self, compiled, tree):
        for model in (target(), perturbed(target())):
            compiled(model)
        decoder = monge.load(
            target(), perturbed(target()), tree=tree, backend=STAGES, controller="fixed"
        )
        assert "compiled" in repr(decoder.components.target)
        texts = prompts((9, 4, 7), seed=5)
        results = decoder.generate(texts, max_new_tokens=40, ignore_eos=True)
        for prompt, result in zip(texts, results, strict=True):
            expected = plain_greedy(target(), prompt, 40)
            assert_same_tokens(target(), prompt, result.token_ids, expected)
            assert 1.05 < result.stats.block_efficiency < 5

    def test_verdicts_are_those_of_the_eager_backend(self, compiled):
        compiled(target())
        texts, options = prompts((9, 4), seed=6), {"max_new_tokens": 40, "temperature": 1.0}
        decoders = [
            monge.load(target(), perturbed(target()), backend=name, controller="fixed")
            for name in ("eager", STAGES)
        ]
        eager, ours = (verdicts_of(decoder, texts, **options, seed=3) for decoder in decoders)
        assert eager == ours

    def test_weights_in_other_memory_are_refused_until_they_are_followed(self, compiled):
        compiled(target())
        model, (text,) = copy.deepcopy(target()), prompts((9,), seed=5)
        decoder = monge.load(model, backend=STAGES, drafter="none")
        options = {"max_new_tokens": 12, "ignore_eos": True}
        (before,) = decoder.generate([text], **options)
        weight = model.model.layers[0].self_attn.v_proj.weight
        weight.data = -2 * weight.data
        with pytest.raises(BackendError, match=r"was changed after it was loaded.*update_weights"):
            decoder.generate([text], **options)
        decoder.update_weights()
        (after,) = decoder.generate([text], **options)
        assert after.token_ids == tuple(plain_greedy(model, text, 12)) != before.token_ids


class TestStoredPrograms:
    @pytest.fixture
    def told(self, monkeypatch):
        said = []
        for module in (backend, code_cache):
            monkeypatch.setattr(module, "notify", said.append)
        return said

    def test_are_found_again(self, own_folder, monkeypatch, told):
        monkeypatch.setattr(torch._inductor, "aoti_compile_and_package", no_compiling)
        compile_forward(target())
        assert told == []

    @pytest.mark.parametrize("suffix", [".pt2", ".constants"])
    def test_damaged_ones_are_made_again(self, own_folder, monkeypatch, told, suffix):
        kept = {path: path.read_bytes() for path in own_folder.iterdir()}
        spoilt = own_folder / f"{key_of(target())}{suffix}"
        spoilt.write_bytes(kept[spoilt][: len(kept[spoilt]) // 2])
        built = []

        def build(program, tensors, key):
            built.append(key)
            for path, content in kept.items():
                path.write_bytes(content)
            return backend.find_code(key, ".pt2", "")

        monkeypatch.setattr(backend, "compile_exported", build)
        assert isinstance(compile_forward(target()), CompiledForward)
        assert len(built) == 1
        assert "cannot be used" in told[0]
        assert spoilt.name in told[0]

    @pytest.mark.parametrize("fault", ["undefined symbol", "other logits"])
    @pytest.mark.parametrize("is_mended", [True, False])
    def test_one_that_fails_is_removed_and_made_again(
        self, own_folder, monkeypatch, told, fault, is_mended
    ):
        """By one that takes its place, or else by the next start: no program that fails is kept."""
        kept = {path: path.read_bytes() for path in own_folder.iterdir()}
        bad, load, built = set(kept), backend.LoadedCode, []

        def load_some(stored, tensors):
            if stored.path not in bad:
                return load(stored, tensors)
            if fault == "undefined symbol":
                raise RuntimeError(fault)
            run = load(stored, tensors)
            return lambda inputs: [1.01 * one for one in run(inputs)]

        def build(program, tensors, key):
            assert {path.suffix for path in own_folder.iterdir()} == {".lock"}
            built.append(key)
            for path, content in kept.items():
                path.write_bytes(content)
            if is_mended:
                bad.clear()
            return backend.find_code(key, ".pt2", "")

        monkeypatch.setattr(backend, "LoadedCode", load_some)
        monkeypatch.setattr(backend, "compile_exported", build)
        if is_mended:
            assert isinstance(compile_forward(target()), CompiledForward)
            assert isinstance(compile_forward(target()), CompiledForward)
            assert set(own_folder.iterdir()) == set(kept)
        else:
            with pytest.raises(BackendError, match=fault):
                compile_forward(target())
            assert not list(own_folder.iterdir())
        assert len(built) == len(told) == 1
        assert re.search(f"LlamaForCausalLM .*removed and compiled again: .*{fault}", told[0])

    def test_an_architecture_has_one_name(self):
        wider, moved = network("llama", "sdpa", intermediate_size=56), copy.deepcopy(target())
        moved.config._name_or_path = "elsewhere"
        assert key_of(target()) == key_of(perturbed(target())) == key_of(moved) != key_of(wider)

    @pytest.mark.parametrize("change", ["class", "value", "sharing"])
    def test_other_layers_have_another_name(self, change):
        other = copy.deepcopy(target())
        first, second = other.model.layers
        if change == "class":
            first.mlp.act_fn = torch.nn.Tanh()
        elif change == "value":
            first.input_layernorm.variance_epsilon = 0.1
        else:
            second.mlp = first.mlp
        assert key_of(other) != key_of(target())

    def test_training_is_no_part_of_a_name(self):
        trained = copy.deepcopy(target()).train()
        old = trained.gradient_checkpointing_enable
        getattr(trained, "activation_checkpointing_enable", old)()
        assert key_of(trained.eval()) == key_of(target())

    def test_plain_values_of_a_module_are_part_of_its_name(self):
        def facts(**values):
            layer = OutputLayer(target())
            vars(layer).update(values)
            return str(backend.module_facts(layer))

        assert facts() == facts()
        assert len({facts(), facts(cap=30.0), facts(factor=0.5), facts(divisor=2.0)}) == 4


def read_prompts(model, texts):
    """Logits of a small tree behind some texts."""
    model.open({-1: (5, 6)})  # which lays the cache out
    model.close(-1)
    model.open(texts)
    return model.extend({row: NodeBlock((5, 6, 7), (-1, -1, 0)) for row in texts})


@pytest.mark.parametrize("lengths", [(1,), (2,), (130,), (9, 4, 7), (100, 1, 60)])
@pytest.mark.parametrize("prompt_tokens", [None, 20], ids=["all", "short ones"])
def test_compiled_logits_after_a_prompt_are_those_of_the_network(compiled, lengths, prompt_tokens):
    step, texts = compiled(target()), dict(enumerate(prompts(lengths, seed=4)))
    step.prompt_tokens = prompt_tokens or step.prompt_tokens
    expected = read_prompts(HfTreeModel(target()), texts)
    found = read_prompts(read_by(step, target()), texts)
    for row in texts:
        torch.testing.assert_close(found[row], expected[row], atol=LARGEST_DIFFERENCE, rtol=0)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::FutureWarning")  # newer hosts call the argument `cache`
def test_a_network_without_a_choice_of_logits(compiled):
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
    step, texts = compiled(plain), {0: (5, 6, 7)}
    assert step.prompt_tokens == 0
    expected = read_prompts(HfTreeModel(target()), texts)
    found = read_prompts(read_by(step, plain), texts)
    torch.testing.assert_close(found[0], expected[0], atol=LARGEST_DIFFERENCE, rtol=0)


def test_a_program_that_reads_prompts_wrongly_is_refused(compiled, monkeypatch):
    step = compiled(target())
    check_forward(target(), step, "compiled")

    def forgetful(self, token_ids, positions, masks, cache):
        return ForwardOutput(logits=torch.zeros(len(token_ids), 1, 97))

    monkeypatch.setattr(CompiledForward, "read_prompt", forgetful)
    with pytest.raises(BackendError, match="ForCausalLM, compiled, has other logits than the netw"):
        check_forward(target(), step, "compiled")


def made_and_shown(model):
    made = as_sequence_model(model, backend="compiled")
    return made, repr(made)  # which makes a pending program


def falls_back(model, reason):
    what = f"backend 'compiled' is not used, the network runs eagerly: {reason}"
    with pytest.warns(UserWarning, match=what):
        made, shown = made_and_shown(model)
    assert "compiled" not in shown
    made.open({0: (5, 6)})
    assert made.extend({0: NodeBlock.chain((7,))})[0].shape == (1, made.vocab_size)


class TestFallback:
    def test_unknown_backend(self):
        with pytest.raises(OptionError, match="unknown backend 'compile'; did you mean 'compiled'"):
            monge.load(target(), backend="compile")
        with pytest.raises(OptionError, match="unknown backend"):
            as_draft_model(target(), as_sequence_model(target()), backend="onnx")

    def test_positions_from_token_order(self):
        falls_back(network("bloom"), "Bloom.*only networks that read trees are compiled")

    def test_attention_without_a_mask_in_memory(self):
        model = network("llama", "flex_attention")
        reason = "runs attention 'flex_attention'; eager and sdpa are compiled"
        with pytest.warns(UserWarning, match=reason):
            as_sequence_model(model, backend="compiled")

    def test_no_compiler(self):
        with torch._inductor.config.patch({"cpp.cxx": ("no-such-compiler",)}):
            falls_back(target(), "there is no C\\+\\+ compiler on this machine; install g\\+\\+")

    def test_a_network_that_cannot_be_traced(self, monkeypatch, tmp_path):
        monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
        network_with_a_branch = perturbed(target(), 0.1)
        monkeypatch.setattr(network_with_a_branch.model, "norm", _Branching())
        falls_back(network_with_a_branch, "LlamaForCausalLM cannot be compiled: .*")

    def test_no_room(self, monkeypatch, tmp_path):
        (tmp_path / "file").write_text("")
        monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "file"))
        falls_back(target(), "LlamaForCausalLM cannot be compiled: .*another one in MONGE_CACHE")


class _Branching(torch.nn.Module):
    def forward(self, hidden):
        return hidden if float(hidden.sum()) > 0 else -hidden
