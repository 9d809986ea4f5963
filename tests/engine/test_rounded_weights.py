"""Targets whose weights are rounded: another network, and exact for that one."""

import copy

import pytest
import torch

import monge
from monge.backends.cpu.packed_linear import PackedLinear
from monge.backends.cpu.rounded_weights import round_weights
from monge.backends.registry import BACKENDS, Compiled
from monge.core.errors import BackendError, MongeError, OptionError
from monge.networks.forward import SourceWeights, rounded_weights_of
from monge.networks.hf_tree import HfTreeModel
from monge.networks.network_facts import num_weights
from monge.networks.prefix_cache import PrefixCache
from tests.engine.compiling import require, shared_programs
from tests.engine.tiny import network, perturbed, prompts

KINDS = ("int8", "int4", "bfloat16")
COMPILED = ("int4", pytest.param("bfloat16", marks=pytest.mark.slow))
"""Kinds of whole programs; that of four bits has maps of eight too."""


@pytest.fixture(autouse=True, scope="module")
def programs(tmp_path_factory):
    require("compiled")
    with shared_programs(tmp_path_factory):
        yield


def target():
    return network("llama", "sdpa")


class TestRounding:
    @pytest.mark.parametrize("kind", KINDS)
    def test_the_network_stays_as_it_is(self, kind):
        before = {name: one.clone() for name, one in target().state_dict().items()}
        rounded = round_weights(target(), kind)
        after = target().state_dict()
        assert before.keys() == after.keys()
        assert all(torch.equal(before[name], after[name]) for name in before)
        tables = [one.get_input_embeddings().weight.data_ptr() for one in (rounded, target())]
        assert tables[0] == tables[1]
        assert any(isinstance(one, PackedLinear) for one in rounded.modules())

    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    def test_logits_stay_close(self, kind, dtype):
        given = copy.deepcopy(target()).to(dtype)
        ids = torch.tensor([[1, 5, 9, 3, 7]])
        with torch.no_grad():
            ours = round_weights(given, kind)(ids).logits
            exact = copy.deepcopy(given).float()(ids).logits
        assert ours.dtype == torch.float32
        assert (ours - exact).norm() <= {"int4": 0.3}.get(kind, 0.05) * exact.norm()
        if (kind, dtype) != ("bfloat16", torch.bfloat16):  # bfloat16 numbers stay what they are
            assert not torch.equal(ours, exact)


@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_rounded_weights_count_as_weights(kind, is_tied):
    given = copy.deepcopy(target())
    given.config.tie_word_embeddings = is_tied
    if is_tied:
        given.get_output_embeddings().weight = given.get_input_embeddings().weight
    size = sum(weight.numel() for weight in given.parameters())
    assert num_weights(given) == num_weights(round_weights(given, kind)) == size


class TestFourBits:
    def test_the_output_layer_has_eight(self):
        rounded = round_weights(target(), "int4")
        modules = rounded.named_modules()
        kinds = {name: one.weights for name, one in modules if isinstance(one, PackedLinear)}
        assert kinds.pop("lm_head") == "int8"
        assert set(kinds.values()) == {"int4"}

    def test_maps_that_lose_too_much_have_eight_and_are_listed(self, monkeypatch):
        given, said = copy.deepcopy(target()), []
        with torch.no_grad():
            given.model.layers[0].mlp.up_proj.weight[3, 5] = 1e6  # float16 ends at 65504
        monkeypatch.setattr("monge.backends.cpu.rounded_weights.notify", said.append)
        rounded = round_weights(given, "int4")
        assert rounded.model.layers[0].mlp.up_proj.weights == "int8"
        assert rounded.model.layers[0].mlp.down_proj.weights == "int4"
        (told,) = said
        assert told.endswith("much in 4 bits, these maps have 8: model.layers.0.mlp.up_proj")
        assert rounded_weights_of(HfTreeModel(rounded)) == "int4"


class TestDecoding:
    @pytest.mark.parametrize("kind", COMPILED)
    @pytest.mark.parametrize(
        "options",
        [
            pytest.param({"drafter": "suffix"}, marks=pytest.mark.slow),
            {"drafter": "model", "tree": "best_first(2, 2)", "controller": "fixed"},
        ],
        ids=["suffix", "tree"],
    )
    def test_speculative_text_is_the_text_of_the_rounded_network(self, kind, options):
        rounded = round_weights(target(), kind)
        if options["drafter"] == "model":
            options = options | {"draft": perturbed(target()), "draft_backend": "eager"}
        decoder = monge.load(target=target(), backend=f"compiled(weights={kind!r})", **options)
        assert decoder.backend == f"compiled, {kind} weights"
        texts = [
            [result.token_ids for result in made.generate(prompts((3, 9, 5)), max_new_tokens=20)]
            for made in (decoder, monge.load(target=rounded, drafter="none"))
        ]
        assert texts[0] == texts[1]

    @pytest.mark.parametrize("kind", COMPILED)
    def test_logits_depend_on_the_text_alone(self, kind):
        options = {"backend": f"compiled(weights={kind!r})", "batch_invariant": True}
        decoder = monge.load(target=target(), drafter="none", **options)
        assert decoder.backend == f"compiled, {kind} weights"


class TestBadInput:
    def test_an_unknown_kind_names_the_known_ones(self):
        with pytest.raises(OptionError, match="weights 'int7'.*bfloat16, exact, file, int4, int8"):
            BACKENDS.parse("compiled(weights='int7')")

    def test_a_machine_without_a_compiler_is_told_so(self, monkeypatch):
        where = "monge.backends.cpu.rounded_weights.why_no_compiler"
        monkeypatch.setattr(where, lambda: "no compiler")
        with pytest.raises(BackendError, match="needs a C\\+\\+ compiler: no compiler"):
            round_weights(target(), "int8")

    def test_weights_of_other_types_or_not_finite_are_refused(self):
        given = copy.deepcopy(target())
        with torch.no_grad():
            given.lm_head.weight[3, 5] = torch.inf
        with pytest.raises(BackendError, match="lm_head.weight"):
            round_weights(given, "int8")
        with pytest.raises(BackendError, match="float64"):
            round_weights(given.double(), "int8")

    def test_a_rounded_network_that_runs_eagerly_says_that_it_is_rounded(self, monkeypatch):
        def fails(*_, **__):
            raise BackendError("there is no room")

        monkeypatch.setattr("monge.backends.cpu.compiled.load_or_make", fails)
        with pytest.warns(UserWarning, match="runs eagerly: there is no room"):
            decoder = monge.load(target(), backend="compiled(weights='int8')", drafter="none")
        assert decoder.backend == "eager, int8 weights"

    @pytest.mark.parametrize("kind", ["exact", *KINDS])
    def test_rows_of_another_depth_are_refused(self, kind):
        linear = PackedLinear(torch.ones(5, 64), weights=kind)
        round_weights(target(), "int8")  # loads the machine code
        with pytest.raises(ValueError, match="rows of 200 numbers"):
            linear(torch.ones(2, 200))


INT8 = "compiled(weights='int8')"


def trained(given):
    with torch.no_grad():
        next(given.parameters()).add_(0.1)


def loaded_anew(given):
    given.load_state_dict(copy.deepcopy(given.state_dict()))


def assigned(given):
    layer = next(one for one in given.modules() if isinstance(one, torch.nn.Linear))
    layer.weight.data = layer.weight.data * 2


def given_another_layer(given):
    layer = given.get_decoder().layers[0].mlp
    layer.down_proj = copy.deepcopy(layer.down_proj)


class TestChangedNetworks:
    @pytest.fixture
    def given(self):
        return copy.deepcopy(target())

    @pytest.fixture
    def decoder(self, given, monkeypatch):
        """Of a rounded network that cannot be compiled, which saves a minute."""

        def refused(*_):
            raise BackendError("not here")

        monkeypatch.setattr(Compiled, "_on_cpu", refused)
        with pytest.warns(UserWarning, match="the network runs eagerly: not here"):
            return monge.load(given, drafter="ngram", backend=INT8)

    @pytest.mark.parametrize("change", [trained, loaded_anew, assigned, given_another_layer])
    def test_they_are_refused(self, change, given, decoder):
        assert decoder.generate([[5, 6, 7]], max_new_tokens=4)[0].token_ids
        change(given)
        with pytest.raises(BackendError, match=r"changed after it was loaded.*update_weights\(\)"):
            decoder.generate([[5, 6, 7]], max_new_tokens=4)

    @pytest.mark.parametrize("change", [trained, loaded_anew, assigned, given_another_layer])
    def test_they_are_followed_when_told(self, change, given, decoder):
        first = decoder.generate([[5, 6, 7]], max_new_tokens=4)[0].token_ids
        change(given)
        decoder.update_weights()
        with pytest.warns(UserWarning, match="runs eagerly: not here"):
            expected = monge.load(copy.deepcopy(given), drafter="none", backend=INT8)
        ours = decoder.generate([[5, 6, 7]], max_new_tokens=4)[0].token_ids
        assert ours == expected.generate([[5, 6, 7]], max_new_tokens=4)[0].token_ids
        assert ours != first or change is not trained

    def test_texts_that_are_open_or_kept_do_not_meet_other_weights(self, decoder, monkeypatch):
        target, kept, cleared = decoder.components.target, PrefixCache(), []
        monkeypatch.setattr(kept, "clear", lambda: cleared.append(True))
        stream = decoder.stream([5, 6, 7], max_new_tokens=30)
        next(stream)
        with pytest.raises(MongeError, match="between texts; open now: 1"):
            decoder.update_weights()
        stream.close()
        target.prefixes = kept
        decoder.update_weights()
        assert cleared

    def test_reading_and_running_changes_nothing(self, given, decoder):
        given.state_dict()
        given(torch.tensor([[1, 2]])).logits.sum().backward()
        given.train().eval()
        assert decoder.generate([[5, 6, 7]], max_new_tokens=4)[0].token_ids

    def test_captured_forwards_read_the_numbers_where_they_lie(self, given):
        source = SourceWeights(given, "compiled", are_copied=False)
        trained(given)
        source.check()
        assigned(given)
        with pytest.raises(BackendError, match="was changed"):
            source.check()
