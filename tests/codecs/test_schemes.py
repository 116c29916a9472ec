from __future__ import annotations

import gguf
import numpy as np
import pytest

from tieq.codecs import ggml
from tieq.codecs.schemes import SCHEMES, dequantize, pack_codes, unpack_codes


@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=list(SCHEMES))
def test_geometry_agrees_with_ggml_and_gguf_py(scheme) -> None:
    name = ggml.TYPE_NAMES[scheme.ggml_type]
    kind = gguf.GGMLQuantizationType[name.upper()]
    assert int(kind) == scheme.ggml_type == ggml.GGML_TYPES[name]
    block, nbytes = gguf.GGML_QUANT_SIZES[kind]
    assert block == ggml.block_size(name)
    if name == scheme.name:
        assert block == scheme.block
        assert scheme.bits_per_weight == nbytes * 8 / block == ggml.bits_per_weight(name)
    else:  # some of ggml's blocks with one scale
        assert scheme.block % block == 0
        assert scheme.block > block


def test_bits_per_weight_hold_the_scales() -> None:
    # One fp16 scale a block: 4 + 16/32, 5 + 16/32, 8 + 16/32, 2 + 16/64; a minimum takes as much again.
    assert [SCHEMES[name].bits_per_weight for name in ("q4_1", "q5_1")] == [5.0, 6.0]
    assert [SCHEMES[name].bits_per_weight for name in ("q4_0", "q5_0", "q8_0", "q2_0")] == [4.5, 5.5, 8.5, 2.25]
    assert [SCHEMES[name].bits_per_weight for name in ("int4_g64", "int4_g128")] == [4.25, 4.125]


def test_onnx_holds_the_schemes_of_its_operators_alone() -> None:
    held = ["q4_0", "q8_0", "q2_0", "int4_g64", "int4_g128"]
    assert [name for name, scheme in SCHEMES.items() if scheme.onnx] == held


@pytest.mark.parametrize(("name", "columns", "blocks"), [("q4_0", 96, 3), ("q8_0", 0, 0), ("q2_0", 576, 9)])
def test_blocks_counts_the_blocks_of_a_row(name: str, columns: int, blocks: int) -> None:
    assert SCHEMES[name].blocks(columns) == blocks


@pytest.mark.parametrize(("name", "columns"), [("q4_0", 72), ("q8_0", 33), ("q2_0", 96)])
def test_columns_that_the_block_does_not_divide_are_named(name: str, columns: int) -> None:
    with pytest.raises(ValueError, match=f"{name} needs columns divisible by {SCHEMES[name].block}, not {columns}"):
        SCHEMES[name].blocks(columns)


def test_dequantize_is_level_times_scale_row_by_row() -> None:
    codes = np.full((2, 2, 32), 8, np.uint8)
    codes[1, 0, 3], codes[1, 1, 0] = 15, 0
    values = dequantize(codes, np.array([[1, 1], [0.5, -0.25]], np.float16), SCHEMES["q4_0"])
    expected = np.zeros((2, 64), np.float32)
    expected[1, 3], expected[1, 32] = 7 * 0.5, -8 * -0.25
    assert values.dtype == np.float32
    assert np.array_equal(values, expected)


def test_dequantize_is_code_times_scale_plus_minimum_in_an_affine_scheme() -> None:
    codes = np.zeros((1, 2, 32), np.uint8)
    codes[0, 0, 3], codes[0, 1, 0] = 15, 4
    values = dequantize(codes, np.array([[[2, -1], [-0.5, 8]]], np.float16), SCHEMES["q4_1"])
    expected = np.repeat(np.array([[-1, 8]], np.float32), 32, axis=1)
    expected[0, 3], expected[0, 32] = 15 * 2 - 1, 4 * -0.5 + 8
    assert values.dtype == np.float32
    assert np.array_equal(values, expected)


# ONNX order: the first code in the lowest bits.
@pytest.mark.parametrize(
    ("bits", "codes", "packed"),
    [
        (2, [1, 2, 3, 0], [0x39]),  # 1 | 2<<2 | 3<<4 | 0<<6 = 1 + 8 + 48
        (2, [0, 0, 0, 3, 3, 0, 0, 0], [0xC0, 0x03]),
        (4, [0xA, 0x3], [0x3A]),
        (4, [0xF, 0x0, 0x1, 0x8], [0x0F, 0x81]),
        (8, [0, 1, 128, 255], [0, 1, 128, 255]),
        (5, [0, 31, 16], [0, 31, 16]),  # five bits divide no byte: one code a byte
    ],
)
def test_packed_codes_written_by_hand(bits: int, codes: list[int], packed: list[int]) -> None:
    assert pack_codes(np.array(codes, np.uint8), bits).tolist() == packed
    assert unpack_codes(np.array(packed, np.uint8), bits).tolist() == codes


@pytest.mark.parametrize("bits", [2, 4, 5, 8])
def test_unpacked_codes_are_the_packed_ones_and_the_input_is_kept(bits: int) -> None:
    codes = np.random.default_rng(0).integers(0, 1 << bits, (7, 3, 64)).astype(np.uint8)
    kept = codes.copy()
    packed = pack_codes(codes, bits)
    assert packed.shape == (7, 3, 64 if bits == 5 else 64 * bits // 8)
    assert np.array_equal(unpack_codes(packed, bits), kept)
    packed[...] = 0xFF
    assert np.array_equal(codes, kept)
