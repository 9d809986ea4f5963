"""Attention in machine code: beside float64, and independent of whatever else a forward reads."""

import ctypes

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from monge.backends.cpu import grouped_attention
from monge.backends.cpu import native_library as native
from monge.backends.cpu.grouped_attention import OPERATION, plain_grouped_attention
from monge.backends.cpu.native_library import native_library
from tests.engine.compiling import require, shared_programs

SHAPES = st.tuples(
    st.sampled_from([(1, 1), (3, 1), (4, 2), (5, 1), (9, 3), (14, 2)]),  # heads, shared
    st.sampled_from([(64, 64), (16, 16), (20, 12), (80, 48), (128, 40)]),  # dim, value_dim
    st.integers(1, 3),  # batch
    st.integers(1, 6),  # nodes
    st.integers(1, 70),  # columns
)


@pytest.fixture(scope="module", params=["this machine's registers", "any processor", "16 lanes"])
def code(request, tmp_path_factory):
    """Use the machine code for registers of several sizes."""
    require("compiled")
    source = grouped_attention._SOURCE
    with shared_programs(tmp_path_factory), pytest.MonkeyPatch.context() as patch:
        if request.param != "this machine's registers":
            flags = tuple(one for one in native._FLAGS if one not in native._NATIVE)
            patch.setattr(native, "_FLAGS", flags)
        if request.param == "16 lanes":
            source = tmp_path_factory.mktemp("wide") / source.name
            text = grouped_attention._SOURCE.read_text()
            source.write_text(text.replace("#ifdef __AVX512F__", "#if 1"))
        run = ctypes.CDLL(str(native_library(source))).monge_grouped_attention
        run.argtypes = (*(ctypes.c_void_p,) * 5, ctypes.POINTER(ctypes.c_int64), ctypes.c_double)
        patch.setattr(grouped_attention, "_LOADED", [run])
        yield


def inputs(shape, seed):
    (heads, shared), (dim, value_dim), batch, nodes, columns = shape
    random = torch.Generator().manual_seed(seed)

    def numbers(*sizes):
        return torch.randn(*sizes, generator=random)

    # As a cache gives them: queries transposed, and more columns than are read.
    queries = 3 * numbers(batch, nodes, heads, dim).transpose(1, 2)
    keys, values = (
        numbers(batch, shared, columns + 5, size)[:, :, :columns] for size in (dim, value_dim)
    )
    mask = torch.rand(batch, 1, nodes, columns, generator=random) < 0.6
    mask[..., columns // 2] = True
    return queries, keys, values, mask


def attend(queries, keys, values, mask):
    return OPERATION(queries, keys, values, mask, queries.shape[-1] ** -0.5)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(shape=SHAPES, seed=st.integers(0, 99))
def test_agrees_with_float64(code, shape, seed):
    queries, keys, values, mask = inputs(shape, seed)
    doubles = [tensor.double() for tensor in (queries, keys, values)]
    exact = plain_grouped_attention(*doubles, mask, queries.shape[-1] ** -0.5)
    found = attend(queries, keys, values, mask).double()
    torch.testing.assert_close(found, exact, rtol=0, atol=2e-5)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(shape=SHAPES, seed=st.integers(0, 99))
def test_depends_on_what_is_seen_and_on_nothing_else(code, shape, seed):
    queries, keys, values, mask = inputs(shape, seed)
    together = attend(queries, keys, values, mask)
    for row in range(queries.shape[0]):
        for node in range(queries.shape[2]):
            own = slice(row, row + 1), slice(None), slice(node, node + 1)
            seen = mask[row, 0, node].nonzero()[:, 0]
            # The visible columns alone, side by side.
            visible = [tensor[row : row + 1, :, seen] for tensor in (keys, values)]
            whole = torch.ones(1, 1, 1, len(seen), dtype=torch.bool)
            alone = attend(queries[own], *visible, whole)
            assert torch.equal(alone[0, 0], together[row, node])


def test_the_usual_kernel_does_depend_on_it():
    """A control: this test of equality can fail."""
    queries, keys, values, _ = inputs(((9, 3), (64, 64), 1, 64, 200), 0)
    mask = torch.ones(1, 1, 64, 200, dtype=torch.bool)
    together = plain_grouped_attention(queries, keys, values, mask, 0.125)
    alone = [
        plain_grouped_attention(queries[:, :, [node]], keys, values, mask[:, :, [node]], 0.125)
        for node in range(64)
    ]
    assert not torch.equal(torch.cat(alone, dim=1), together)


def test_hidden_columns_are_not_read(code):
    queries, keys, values, mask = inputs(((9, 3), (64, 64), 2, 3, 40), 1)
    expected = attend(queries, keys, values, mask)
    hidden = ~mask.any(dim=2)[:, 0]
    assert hidden.any()
    for tensor in (keys, values):
        tensor.transpose(1, 2)[hidden] = torch.nan
    assert torch.equal(attend(queries, keys, values, mask), expected)


@pytest.mark.parametrize("wrong", [torch.nan, torch.inf])
def test_numbers_that_are_not_finite_stay_visible(code, wrong):
    queries, keys, values, mask = inputs(((4, 2), (16, 16), 1, 2, 20), 2)
    keys[0, 0, 10, 3] = wrong
    queries[0, :2, 0, 3] = 1.0
    out = attend(queries, keys, values, mask)
    assert out[0, 0, :2].isnan().all()
    assert out[0, :, 2:].isfinite().all()


def test_scores_far_apart(code):
    queries, keys, values, mask = inputs(((4, 2), (16, 16), 1, 2, 20), 3)
    doubles = [tensor.double() for tensor in (1e4 * queries, keys, values)]
    expected = plain_grouped_attention(*doubles, mask, 0.25)
    found = attend(1e4 * queries, keys, values, mask).double()
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)
