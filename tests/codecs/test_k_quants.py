"""Layouts of ggml's K-quants, against ggml's own decoder."""

from __future__ import annotations

import numpy as np
import pytest

from tieq.codecs import ggml
from tieq.codecs.k_quants import LAYOUTS

each_layout = pytest.mark.parametrize("name", LAYOUTS)


def random_rows(name: str, seed: int = 0) -> np.ndarray:
    """Any bytes, 60 rows of 512 columns; fp16 numbers among them may be infinite or no numbers."""
    nbytes = int(512 * ggml.bits_per_weight(name) / 8)
    return np.random.default_rng(seed).integers(0, 256, (60, nbytes)).astype(np.uint8)


@each_layout
def test_geometry_is_ggmls(name: str) -> None:
    layout = LAYOUTS[name]
    assert layout.block == ggml.block_size(name)
    assert layout.nbytes == layout.block * ggml.bits_per_weight(name) / 8
    assert list(layout.levels) == sorted(set(layout.levels))


@each_layout
def test_levels_scales_and_minima_of_any_bytes_decode_as_in_ggml(name: str) -> None:
    layout, rows = LAYOUTS[name], random_rows(name)
    codes = layout.unpack(rows)
    assert (codes.shape, codes.dtype) == ((60, 512), np.uint8)
    assert codes.max() == len(layout.levels) - 1
    with np.errstate(invalid="ignore"):
        scales, minima = (np.repeat(part, layout.group, axis=1) for part in layout.scales(rows))
        found = np.array(layout.levels, np.float32)[codes] * scales + minima
    # Exact: a product of fp16 with at most 14 bits of scale and level fits into float32; the sum is rounded once.
    assert np.array_equal(found, ggml.decode(rows, name), equal_nan=True)
    assert np.isfinite(found).mean() > 0.5


@each_layout
def test_replaced_codes_are_found_again_and_nothing_else_changes(name: str) -> None:
    layout, rows = LAYOUTS[name], random_rows(name)
    kept = rows.copy()
    codes = np.random.default_rng(1).integers(0, len(layout.levels), (60, 512)).astype(np.uint8)
    replaced = layout.replace(rows, codes)
    assert np.array_equal(rows, kept)
    assert np.array_equal(layout.unpack(replaced), codes)
    with np.errstate(invalid="ignore"):
        found, expected = layout.scales(replaced), layout.scales(rows)
    assert all(np.array_equal(bits(left), bits(right)) for left, right in zip(found, expected, strict=True))
    assert np.array_equal(layout.replace(replaced, layout.unpack(rows)), rows)


def bits(values: np.ndarray) -> np.ndarray:
    """Float32 as integers, so that NaN equals itself."""
    return values.view(np.uint32)
