"""Products of few rows: the machine code beside exact sums and beside its plain twin."""

import copy
import ctypes
import hashlib
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers.pytorch_utils import Conv1D

from monge.backends.cpu import native_library as native
from monge.backends.cpu import packed_linear
from monge.backends.cpu.block_panels import COLUMNS
from monge.backends.cpu.code_cache import FOLDER_VARIABLE, StoredCode, cache_folder
from monge.backends.cpu.gguf_blocks import BLOCK_TYPES, panels_of_type
from monge.backends.cpu.native_library import native_library
from monge.backends.cpu.packed_linear import (
    OPERATION,
    PackedLinear,
    eight_bit_panels_of,
    follow_weights,
    four_bit_panels_of,
    load_packed_linear,
    matrix_of,
    merge_products,
    pack_linears,
    panels_of,
)
from monge.core.errors import BackendError
from tests.engine.compiling import compile_forward, require, shared_programs
from tests.engine.test_gguf_blocks import random_rows
from tests.engine.tiny import network

KINDS = ("bfloat16", "float16", "float32")
MAKERS = {"int8": eight_bit_panels_of, "int4": four_bit_panels_of}
"""Panels of rounded weights."""
PANELS = dict.fromkeys(KINDS, panels_of) | MAKERS
SIZES = [(1, 1), (31, 7), (32, 64), (33, 65), (200, 129), (96, 300)]


def matrix(width, depth, kind, seed=0):
    numbers = torch.randn(width, depth, generator=torch.Generator().manual_seed(seed))
    return numbers.to(getattr(torch, kind)).float() if kind in KINDS else numbers


def numbers(*shape, seed=1):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@settings(deadline=None)
@given(st.integers(1, 3 * COLUMNS), st.integers(1, 70), st.sampled_from(KINDS))
def test_panels_hold_the_matrix(width, depth, kind):
    given = matrix(width, depth, kind)
    panels = panels_of(given)
    assert panels.dtype == (torch.int32 if kind == "bfloat16" else getattr(torch, kind))
    assert torch.equal(matrix_of(panels, width), given)


def test_infinity_beside_float16_numbers_is_held_in_float32():
    given = torch.tensor([[1 + 2.0**-10, torch.inf]])  # no bfloat16 number, and one of both types
    panels = panels_of(given)
    assert panels.dtype == torch.float32
    assert torch.equal(matrix_of(panels, 1), given)


def test_panels_hold_every_kind_of_number():
    numbers = [0.0, -0.0, torch.inf, -torch.inf, 2.0**-133, -(2.0**-126), 3.3895314e38]
    given = torch.tensor([numbers])
    found = matrix_of(panels_of(given), 1)
    assert panels_of(given).dtype == torch.int32
    assert torch.equal(found.view(torch.int32), given.view(torch.int32))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    require("compiled")
    with shared_programs(tmp_path_factory):
        yield cache_folder()


def function(path, load=ctypes.CDLL):
    found = load(str(path)).aoti_torch_cpu_packed_linear
    pointer, count = ctypes.c_void_p, ctypes.c_int64
    found.argtypes = [pointer, pointer, count, pointer, count, pointer]
    found.restype = ctypes.c_int32
    return found


@pytest.fixture(scope="module", params=["this machine's registers", "the widest registers"])
def code(request, folder, tmp_path_factory):
    """The machine code, for registers of the size at hand and for those of 64 bytes, which the compiler makes up elsewhere."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param != "this machine's registers":
            source = tmp_path_factory.mktemp("wide") / "packed_linear.cpp"
            text = packed_linear._SOURCE.read_text()
            source.write_text(text.replace("#ifdef __AVX512F__", "#if 1"))
            patch.setattr(packed_linear, "_SOURCE", source)
        return function(native_library(packed_linear._SOURCE))


def multiplied(code, rows, panels, *widths):
    """What the machine code makes of tensors, called as compiled programs call it."""
    panels = panels if isinstance(panels, list) else [panels]
    owned = torch._C._aoti.unsafe_alloc_void_ptrs_from_tensors([rows, *panels])
    first, *others = map(_address, owned)
    out = ctypes.c_void_p()
    matrices = (ctypes.c_void_p * len(others))(*others)
    columns = (ctypes.c_int64 * len(widths))(*widths)
    try:
        if code(first, matrices, len(others), columns, len(widths), ctypes.byref(out)):
            raise RuntimeError("refused")
        stolen = _capsule(out.value, None, None)
        return torch._C._aoti.alloc_tensor_by_stealing_from_void_ptr(stolen)
    finally:
        torch._C._aoti.alloc_tensors_by_stealing_from_void_ptrs(owned)


_capsule, _pointer = ctypes.pythonapi.PyCapsule_New, ctypes.pythonapi.PyCapsule_GetPointer
_capsule.restype = ctypes.py_object
_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
_pointer.restype, _pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]


def _address(capsule):
    return _pointer(capsule, None)


class TestMachineCode:
    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize(("width", "depth"), SIZES)
    def test_sums_are_exact_to_rounding(self, code, kind, width, depth):
        given = matrix(width, depth, kind)
        for count in (*range(1, 15), 24, 25):
            rows = numbers(count, depth)
            exact = rows.double() @ given.double().T
            scale = rows.double().abs() @ given.double().abs().T
            found = multiplied(code, rows, panels_of(given), width)
            assert ((found.double() - exact).abs() <= depth * 2.0**-24 * scale).all()

    @pytest.mark.parametrize("kind", PANELS)
    def test_a_row_does_not_depend_on_its_neighbours(self, code, kind):
        panels, rows = PANELS[kind](matrix(70, 150, kind)), numbers(27, 150)
        alone = torch.cat([multiplied(code, row[None], panels, 70) for row in rows])
        for count in range(1, 28):
            assert torch.equal(multiplied(code, rows[:count], panels, 70), alone[:count])
        rows[3], rows[4] = torch.nan, torch.inf
        found, kept = multiplied(code, rows, panels, 70), [row not in {3, 4} for row in range(27)]
        assert torch.equal(found[kept], alone[kept])
        assert not found[3:5].isfinite().any()

    def test_special_numbers_stay_what_they_are(self, code):
        panels = panels_of(torch.tensor([[1.0], [-1.0], [0.5]]))
        for number in (torch.inf, -torch.inf, 2.0**-140):
            found = multiplied(code, torch.tensor([[number]]), panels, 3)
            assert found[0].tolist() == [number, -number, number / 2]
        assert multiplied(code, torch.tensor([[torch.nan]]), panels, 3).isnan().all()

    @pytest.mark.parametrize("kind", ["bfloat16", *MAKERS])
    def test_several_threads_give_the_same(self, code, kind):
        panels, rows = PANELS[kind](matrix(4099, 512, kind)), numbers(5, 512)
        threads, results = torch.get_num_threads(), []
        try:
            for count in (1, 2, 3):
                torch.set_num_threads(count)
                results.append(multiplied(code, rows, panels, 4099))
        finally:
            torch.set_num_threads(threads)
        assert torch.equal(results[0], results[1])
        assert torch.equal(results[0], results[2])

    @pytest.mark.parametrize(
        "rows",
        [numbers(2, 21), numbers(20, 2).T, numbers(2, 20).double(), numbers(*[1] * 8, 20)],
        ids=["another depth", "not in one piece", "another type", "too many dimensions"],
    )
    def test_what_it_cannot_read_is_refused(self, code, rows):
        with pytest.raises(RuntimeError, match="refused"):
            multiplied(code, rows, panels_of(matrix(40, 20, "float32")), 40)


@pytest.fixture(scope="module")
def portable_code(folder):
    """The machine code for any processor of the architecture, without its vector instructions."""
    with pytest.MonkeyPatch.context() as patch:
        flags = tuple(one for one in native._FLAGS if one not in native._NATIVE)
        patch.setattr(native, "_FLAGS", flags)
        return function(native_library(packed_linear._SOURCE))


@pytest.mark.parametrize("kind", MAKERS)
class TestEveryBuild:
    """Rounded panels: the same with and without the instructions of this processor."""

    def integers(self, *shape, seed, least=-127, largest=127):
        """Whole numbers whose groups have the scale 1, so that all products are exact."""
        draws = torch.Generator().manual_seed(seed)
        drawn = torch.randint(least, largest + 1, shape, generator=draws)
        drawn[..., ::32], drawn[..., 1::32] = largest, least
        return drawn.float()

    @pytest.mark.parametrize("count", [1, 2, 3, 5, 8, 13, 16, 27])
    def test_integers_are_those_of_every_build(self, code, portable_code, count, kind):
        rows = self.integers(count, 150, seed=1)
        least, largest = {"int8": (-127, 127), "int4": (-9, 6)}[kind]
        given = self.integers(70, 150, seed=2, least=least, largest=largest)
        panels = MAKERS[kind](given)
        exact = rows @ given.T
        for build in (code, portable_code):
            assert torch.equal(multiplied(build, rows, panels, 70), exact)

    @pytest.mark.parametrize("size", [1e-37, 2.0**-140, 1e36])
    def test_extreme_numbers(self, code, portable_code, size, kind):
        panels = MAKERS[kind](self.integers(40, 64, seed=3) / 127)
        rows = numbers(3, 64)
        rows *= size / rows.abs().amax(dim=1, keepdim=True)
        expected = packed_linear.plain_packed_linear(rows, panels, 40)
        for build in (code, portable_code):
            found = multiplied(build, rows, panels, 40)
            assert (found - expected).abs().max() <= 1e-6 * expected.abs().max()

    @pytest.mark.parametrize("wrong", [torch.inf, -torch.inf, torch.nan])
    def test_what_is_not_finite_shows(self, code, portable_code, wrong, kind):
        panels, rows = MAKERS[kind](matrix(40, 130, "float32")), numbers(3, 130)
        alone = multiplied(code, rows, panels, 40)
        rows[1, 70] = wrong
        for build in (code, portable_code):
            found = multiplied(build, rows, panels, 40)
            assert not found[1].isfinite().any()
        assert torch.equal(multiplied(code, rows, panels, 40)[[0, 2]], alone[[0, 2]])


@pytest.mark.parametrize("name", BLOCK_TYPES)
class TestBlocksOfFiles:
    """Panels of blocks of GGUF files, by every build."""

    NUM_BLOCKS, WIDTH = 3, 70

    @pytest.fixture
    def panels(self, name):
        return panels_of_type(name, random_rows(name, self.WIDTH, self.NUM_BLOCKS, largest=0.01))

    @pytest.fixture
    def rows(self, name):
        return numbers(27, self.NUM_BLOCKS * BLOCK_TYPES[name][1].size)

    def test_products_are_those_of_the_twin(self, code, portable_code, panels, rows):
        read = packed_linear.rounded_rows(rows, packed_linear.group_size_of(panels)).double()
        exact = read @ matrix_of(panels, self.WIDTH).double().T
        twin = packed_linear.plain_packed_linear(rows, panels, self.WIDTH)
        assert (twin - exact).abs().max() <= 1e-5 * exact.abs().max()
        for count in (1, 2, 3, 5, 8, 13, 27):
            for build in (code, portable_code):
                found = multiplied(build, rows[:count], panels, self.WIDTH)
                assert (found - exact[:count]).abs().max() <= 1e-5 * exact.abs().max()

    def test_a_row_does_not_depend_on_its_neighbours(self, code, portable_code, panels, rows):
        for build in (code, portable_code):
            alone = torch.cat([multiplied(build, row[None], panels, self.WIDTH) for row in rows])
            for count in range(1, 28):
                found = multiplied(build, rows[:count], panels, self.WIDTH)
                assert torch.equal(found, alone[:count])

    def test_rows_of_another_depth_are_refused(self, code, panels, rows):
        with pytest.raises(RuntimeError, match="refused"):
            multiplied(code, numbers(2, rows.shape[1] + 1), panels, self.WIDTH)


@pytest.mark.parametrize("kind", ["float32", *MAKERS])
class TestSeveralMatrices:
    """One call for all matrices that multiply the same rows."""

    @pytest.mark.parametrize("widths", [(40, 7, 7), (1, 33), (1500, 4, 900)])
    def test_give_what_each_gives_alone(self, code, kind, widths):
        given = [PANELS[kind](matrix(width, 96, "float32", seed=width)) for width in widths]
        threads = torch.get_num_threads()
        try:
            torch.set_num_threads(2)
            for count in (1, 5, 13):
                rows = numbers(count, 96)
                alone = [multiplied(code, rows, *one) for one in zip(given, widths, strict=True)]
                together = multiplied(code, rows, given, *widths)
                assert torch.equal(together, torch.cat(alone, dim=-1))
                twin = OPERATION(rows, given, list(widths))
                torch.testing.assert_close(twin, together, rtol=1e-4, atol=1e-4)
        finally:
            torch.set_num_threads(threads)

    def test_may_be_of_two_kinds(self, code, kind):
        """Training changes single matrices, and with them the kinds that hold them exactly."""
        given = [PANELS[kind](matrix(40, 96, "float32")), panels_of(matrix(7, 96, "bfloat16"))]
        for panels, widths in ((given, (40, 7)), (given[::-1], (7, 40))):
            rows = numbers(3, 96)
            alone = [multiplied(code, rows, *one) for one in zip(panels, widths, strict=True)]
            assert torch.equal(multiplied(code, rows, panels, *widths), torch.cat(alone, dim=-1))

    @pytest.mark.parametrize("wrong", ["two depths", "too few widths"])
    def test_what_does_not_fit_together_is_refused(self, code, kind, wrong):
        given = PANELS[kind](matrix(40, 96, "float32"))
        other, widths = given, [40]
        if wrong == "two depths":
            other, widths = PANELS[kind](matrix(40, 192, "float32")), [40, 40]
        with pytest.raises(RuntimeError, match="refused"):
            multiplied(code, numbers(2, 96), [given, other], *widths)


class TestMergedProducts:
    """Graphs of modules in which several maps read the same rows."""

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(20, 40), nn.Linear(20, 7, bias=False)
            self.third = nn.Linear(47, 5)
            self.bare = nn.Linear(20, 3)

        def forward(self, rows):
            both = torch.cat([self.first(rows), self.second(rows)], dim=-1)
            return self.third(both), self.bare(rows * 2)

    class Changes(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(20, 40), nn.Linear(20, 7)

        def forward(self, given):
            rows = given * 2
            before = self.first(rows)
            rows.add_(1)
            return before, self.second(rows)

    @pytest.mark.parametrize(("kind", "merged"), [(Twice, [1, 1, 2]), (Changes, None)])
    def test_products_of_the_same_rows_become_one_unless_these_change(self, kind, merged):
        module, rows = kind().eval(), numbers(3, 20)
        pack_linears(module)
        with torch.no_grad():
            program = torch.export.export(module, (rows,), strict=False)
            expected = module(rows)
            merge_products(program.graph)
            program.graph.lint()
            program.graph_module.recompile()
            found = program.module()(rows)
        calls = program.graph.find_nodes(op="call_function", target=OPERATION)
        assert merged in (None, sorted(len(one.args[1]) for one in calls))
        assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_the_plain_twin_gives_the_same_to_rounding(code, kind):
    given, rows = matrix(90, 140, kind), numbers(2, 5, 140)
    expected = OPERATION(rows, [panels_of(given)], [90])
    torch.testing.assert_close(multiplied(code, rows, panels_of(given), 90), expected)
    torch.testing.assert_close(expected, nn.functional.linear(rows, given))


class Maps(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(20, 40), nn.Linear(40, 20, bias=False)
        self.again = nn.ModuleList([self.first])
        self.turned, self.norm = Conv1D(30, 20), nn.LayerNorm(20)

    def forward(self, rows):
        return self.turned(self.norm(self.second(self.again[0](rows))))


def test_other_threads_run_during_large_products(folder):
    # As torch calls programs: the interpreter's lock is held.
    code = function(native_library(packed_linear._SOURCE), ctypes.PyDLL)
    rows, panels = torch.ones(64, 1024), panels_of(torch.ones(1024, 1024))
    ran, start = [], threading.Event()
    other = threading.Thread(target=lambda: (start.wait(), ran.append(True)))
    other.start()
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e6)  # so that this thread gives the lock to nobody by itself
    try:
        start.set()
        for _ in range(1000):
            if ran:
                break
            out = multiplied(code, rows, panels, 1024)
        assert ran
    finally:
        sys.setswitchinterval(interval)
        other.join()
    assert torch.equal(out, torch.full((64, 1024), 1024.0))


def test_every_map_is_replaced_once():
    module, rows = Maps(), numbers(3, 20)
    expected, before = module(rows), module.second.weight
    pack_linears(module)
    assert all(type(one) is PackedLinear for one in (module.first, module.second, module.turned))
    assert module.again[0] is module.first
    assert torch.equal(module.second.weight, before)
    torch.testing.assert_close(module(rows), expected)


class TestOnDisk:
    @pytest.fixture(autouse=True)
    def own_folder(self, tmp_path, monkeypatch):
        require("compiled")
        monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))

    @pytest.fixture
    def source(self, tmp_path):
        """A small file: what is on disk does not depend on the code."""
        path = tmp_path / "one.cpp"
        path.write_text('extern "C" int one() { return 1; }\n')
        return path

    @pytest.mark.parametrize("is_whole", [False, True])
    def test_is_compiled_once_unless_damaged(self, source, monkeypatch, is_whole):
        with monkeypatch.context() as patch:  # a process loads a path once
            patch.setattr(native, "_loadable", lambda stored: stored.path)
            path = native_library(source)
        whole = path.read_bytes()
        path.write_bytes(b"another machine's code")
        if is_whole:
            digest = hashlib.sha256(path.read_bytes()).hexdigest()
            torch.save({"sha256": digest, "constants": {}}, path.with_suffix(".constants"))
        assert native_library(source).stat().st_size == len(whole)
        monkeypatch.setattr(subprocess, "run", None)
        assert native_library(source) == path

    def test_a_compiler_that_refuses(self, tmp_path, monkeypatch):
        broken = tmp_path / "packed_linear.cpp"
        broken.write_text("no program\n")
        monkeypatch.setattr(packed_linear, "_SOURCE", broken)
        with pytest.raises(RuntimeError, match=r"packed_linear.cpp does not compile: .*error"):
            native_library(packed_linear._SOURCE)
        assert not list(Path(tmp_path, "programs").glob("*.so"))

    def test_a_network_whose_products_do_not_compile_is_refused(self, monkeypatch):
        def refuse():
            raise RuntimeError("products of few rows do not compile: no")

        monkeypatch.setattr("monge.backends.cpu.compiled.load_packed_linear", refuse)
        monkeypatch.setattr(
            "monge.backends.cpu.compiled.compile_exported",
            lambda *_: StoredCode(path=Path("none.pt2"), constants={}),
        )
        with pytest.raises(
            BackendError,
            match="cannot be compiled: RuntimeError: products of few rows do not compile",
        ):
            compile_forward(network("llama", "sdpa"))


@pytest.mark.parametrize("kind", MAKERS)
class TestRoundedWeights:
    """Panels of integers: the machine code against its plain twin."""

    @pytest.mark.parametrize(("width", "depth"), SIZES)
    def test_machine_code_equals_the_plain_twin(self, code, width, depth, kind):
        panels = MAKERS[kind](matrix(width, depth, "float32"))
        for count in (*range(1, 11), 24, 25):
            rows = numbers(count, depth)
            twin = packed_linear.plain_packed_linear(rows.double(), panels, width)
            found = multiplied(code, rows, panels, width)
            assert (found.double() - twin).abs().max() <= 1e-5 * twin.abs().max()

    def test_operation_runs_the_machine_code_outside_of_programs(self, code, kind):
        packed_linear.load_packed_linear()
        for weights in (kind, "exact", "bfloat16"):
            linear = packed_linear.PackedLinear(numbers(40, 70), numbers(40), weights=weights)
            assert linear.weights == weights
            rows = numbers(2, 3, 70)
            twin = packed_linear.plain_packed_linear(rows, linear.panels, 40) + linear.bias
            torch.testing.assert_close(linear(rows), twin, rtol=1e-4, atol=1e-4)
        assert linear.weight.shape == (40, 70)


class TestEightBits:
    @pytest.mark.parametrize("depth", [1, 64, 150])
    def test_numbers_are_within_half_a_step(self, depth):
        given = numbers(70, depth)
        panels = eight_bit_panels_of(given)
        assert panels.dtype == torch.uint8
        found = matrix_of(panels, 70, depth)
        # A scale is rounded up to bfloat16, by at most one part in 128.
        steps = torch.nn.functional.pad(given, (0, -depth % 64)).unflatten(1, (-1, 64))
        step = (steps.abs().amax(dim=-1) / 127 * (1 + 2**-7)).repeat_interleave(64, dim=1)
        assert ((found - given).abs() <= step[:, :depth] / 2 * (1 + 1e-6)).all()


class TestFourBits:
    @pytest.mark.parametrize("depth", [1, 32, 150])
    def test_numbers_are_within_half_a_step(self, depth):
        given = numbers(70, depth)
        found = matrix_of(four_bit_panels_of(given), 70, depth)
        groups = torch.nn.functional.pad(given, (0, -depth % 32)).unflatten(1, (-1, 32))
        least, largest = groups.aminmax(dim=-1)
        errors = torch.nn.functional.pad(found - given, (0, -depth % 32)).unflatten(1, (-1, 32))
        # Where the integers are those of Q4_0, the error of a whole group is smaller, not of each number.
        half_a_step = (largest - least) / 30 * (1 + 2**-9)
        assert (errors.norm(dim=-1) <= half_a_step * 32**0.5).all()

    @settings(deadline=None)
    @given(st.integers(0, 2**32 - 1), st.sampled_from([-1, 1]))
    def test_blocks_of_gguf_files_stay(self, seed, sign):
        draws = torch.Generator().manual_seed(seed)
        scale = sign * torch.exp(torch.randn(40, 3, 1, generator=draws) - 5).half().float()
        least = (torch.randn(40, 3, 1, generator=draws) / 16).half().float()
        integers = torch.randint(0, 16, (40, 3, 32), generator=draws)
        integers[..., 5] = 0
        # Q4_0: 0 is the number that is farthest from zero.
        around_zero = (scale * (integers - 8)).flatten(1)
        assert torch.equal(matrix_of(four_bit_panels_of(around_zero), 40, 96), around_zero)
        # Q4_1: 0 and 15 are the least and the largest number.
        integers[..., 9] = 15
        unequal = (scale.abs() * integers + least).flatten(1)
        assert torch.equal(matrix_of(four_bit_panels_of(unequal), 40, 96), unequal)

    @pytest.mark.parametrize("wrong", ["unequal", "too large"])
    def test_a_matrix_that_loses_too_much_has_eight_bits(self, wrong):
        given = numbers(40, 96)
        if wrong == "unequal":
            given[:, ::32] = 12.0
        else:
            given[3, 5] = 1e6  # float16 ends at 65504
        assert four_bit_panels_of(given) is None
        linear = PackedLinear(given, weights="int4")
        assert linear.weights == "int8"
        assert torch.equal(linear.panels, eight_bit_panels_of(given))


def routing_bias(model):
    state = copy.deepcopy(model.state_dict())
    (name,) = (name for name in state if name.endswith("e_score_correction_bias"))
    model.load_state_dict(state | {name: torch.tensor([3.0, 3.0, -3.0, -3.0])})


def frequencies(model):
    model.model.rotary_emb.inv_freq.mul_(0.1)


def another_buffer(model):
    model.model.rotary_emb.inv_freq = model.model.rotary_emb.inv_freq * 0.1


def replaced_layers(model):
    model.model.layers[0].self_attn = copy.deepcopy(model.model.layers[0].self_attn)
    model.model.norm.weight = nn.Parameter(-model.model.norm.weight.detach())


def another_activation(model):
    model.model.layers[0].mlp.act_fn = nn.Tanh()


def another_slope(model):
    model.model.layers[1].mlp.act_fn = nn.LeakyReLU(2.0)


def another_scale(model):
    model.model.layers[0].self_attn.scaling = 3.0


def another_kind_of_norm(model):
    model.model.norm = nn.LayerNorm(len(model.model.norm.weight), bias=False)


def a_bias_of_logits(model):
    model.lm_head.bias = nn.Parameter(numbers(model.lm_head.out_features))


def a_layer_of_its_own(model):
    model.model.layers[1].mlp = copy.deepcopy(model.model.layers[1].mlp)
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight.neg_()


def a_weight_of_its_own(model):
    layer = model.model.layers[1].input_layernorm
    layer.weight = nn.Parameter(-layer.weight.detach())


class TestCopiesOfChangedNetworks:
    """A compiled program reads the tensors of a copy, and has the layers of the time when it was traced."""

    @pytest.fixture(autouse=True)
    def _machine_code(self):
        load_packed_linear()

    def copies(self, family):
        model = copy.deepcopy(network(family, "sdpa"))
        layers = model.model.layers
        if family == "llama":
            layers[1].mlp = layers[0].mlp
            layers[1].mlp.act_fn = nn.LeakyReLU(0.1)
            layers[1].input_layernorm.weight = layers[0].input_layernorm.weight
        packed = copy.deepcopy(model)
        pack_linears(packed)
        return model, packed

    @pytest.mark.parametrize(
        ("family", "change"),
        [
            ("deepseek_v3", routing_bias),
            ("deepseek_v3", frequencies),
            ("llama", another_buffer),
            ("llama", replaced_layers),
        ],
    )
    def test_take_other_numbers(self, family, change):
        model, packed = self.copies(family)
        ids = torch.arange(3, 30)[None]
        with torch.inference_mode():
            before = model(ids).logits
            change(model)
            assert follow_weights(packed, model)
            torch.testing.assert_close(packed(ids).logits, model(ids).logits, atol=2e-4, rtol=1e-4)
            assert not torch.allclose(before, model(ids).logits, atol=0.1)

    @pytest.mark.parametrize(
        "change",
        [
            *(another_activation, another_slope, another_scale, another_kind_of_norm),
            *(a_bias_of_logits, a_layer_of_its_own, a_weight_of_its_own),
        ],
    )
    def test_are_of_no_use_for_other_layers(self, change):
        model, packed = self.copies("llama")
        assert follow_weights(packed, model)
        change(model)
        assert not follow_weights(packed, model)
