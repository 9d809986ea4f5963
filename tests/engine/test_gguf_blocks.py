"""Blocks of GGUF files in panels: every number as `gguf` reads it, to the last bit."""

import numpy as np
import pytest
import torch

from monge.backends.cpu.block_panels import COLUMNS
from monge.backends.cpu.gguf_blocks import BLOCK_TYPES, panels_of_type
from monge.backends.cpu.packed_linear import matrix_of, rows_of

HALVES = {"Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,)} | dict.fromkeys(
    ("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2)
)
"""Bytes of the float16 numbers of a block; 0 for types that are not here."""


def random_rows(name, width, num_blocks, *, seed=0, largest=None):
    """Blocks of random bytes with finite scales, as `[width, bytes]`."""
    draws, size = np.random.default_rng(seed), BLOCK_TYPES[name][0]
    raw = draws.integers(0, 256, (width, num_blocks, size), dtype=np.uint8)
    for at in HALVES.get(name, (0,)):
        if largest is None:
            halves = draws.integers(0, 1 << 16, (width, num_blocks), dtype=np.uint16).view(
                np.float16
            )
            halves = np.where(np.isfinite(halves), halves, np.float16(0))
        else:
            halves = draws.uniform(-largest, largest, (width, num_blocks)).astype(np.float16)
        raw[..., at : at + 2] = halves[..., None].view(np.uint8)
    return torch.from_numpy(raw.reshape(width, -1))


@pytest.mark.parametrize("name", BLOCK_TYPES)
@pytest.mark.parametrize(("width", "num_blocks"), [(1, 1), (70, 3), (2 * COLUMNS, 2)])
def test_panels_hold_the_numbers_of_the_file(name, width, num_blocks):
    gguf = pytest.importorskip("gguf")
    rows = random_rows(name, width, num_blocks, seed=width)
    exact = gguf.dequantize(rows.numpy(), gguf.GGMLQuantizationType[name])
    panels = panels_of_type(name, rows)
    found = matrix_of(panels, width, exact.shape[1])
    assert np.array_equal(found.numpy().view(np.int32), exact.view(np.int32))
    ids = torch.randint(width, (5,), generator=torch.Generator().manual_seed(0))
    assert torch.equal(rows_of(panels, ids, exact.shape[1]), found[ids])


def test_quantised_numbers_are_those_that_the_quantiser_wrote():
    gguf = pytest.importorskip("gguf")
    given = np.random.default_rng(0).normal(size=(40, 96)).astype(np.float32)
    for name in ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"):
        written = gguf.quantize(given, gguf.GGMLQuantizationType[name])
        found = matrix_of(panels_of_type(name, torch.from_numpy(written)), 40)
        assert np.abs(found.numpy() - given).max() < {"4": 0.3, "5": 0.15, "8": 0.02}[name[1]]


def test_an_infinite_scale_is_refused():
    rows = random_rows("Q4_K", 3, 2)
    rows[1, 144:146] = torch.tensor([0, 0x7C], dtype=torch.uint8)
    with pytest.raises(ValueError, match="type Q4_K has an infinite scale"):
        panels_of_type("Q4_K", rows)
