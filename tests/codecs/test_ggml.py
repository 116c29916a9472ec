from __future__ import annotations

import warnings

import gguf
import numpy as np
import pytest

from tieq.codecs import ggml
from tieq.errors import TieqError

# gguf-py has no decoder for these two; Q2_0 is covered by the golden blocks and the hand-written one.
WITHOUT_GGUF_PY = {"q1_0", "q2_0"}


@pytest.mark.parametrize("name", ggml.GGML_TYPES)
def test_type_numbers_and_sizes_are_those_of_gguf_py(name: str) -> None:
    kind = gguf.GGMLQuantizationType(ggml.GGML_TYPES[name])
    assert kind.name.lower() == name
    block, nbytes = gguf.GGML_QUANT_SIZES[kind]
    assert ggml.block_size(name) == block
    assert ggml.bits_per_weight(name) == nbytes * 8 / block


@pytest.mark.parametrize("name", [name for name in ggml.GGML_TYPES if name not in WITHOUT_GGUF_PY])
def test_decoding_equals_gguf_py_for_any_bytes(name: str) -> None:
    # Random bytes reach every code and also infinite and NaN scales; NaN compares equal to NaN.
    nbytes = int(ggml.bits_per_weight(name) * 512 / 8)
    rows = np.random.default_rng(3).integers(0, 256, (64, nbytes)).astype(np.uint8)
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        expected = gguf.quants.dequantize(rows, gguf.GGMLQuantizationType[name.upper()])
    assert np.array_equal(ggml.decode(rows, name), expected.astype(np.float32), equal_nan=True)


def test_decoding_q1_0_is_a_sign_a_bit() -> None:
    # fp16 1.5 = 0x3e00, then 128 bits, the first in the lowest: bit 1 is +scale, bit 0 is -scale.
    row = np.frombuffer(bytes.fromhex("003e" + "05" + "00" * 14 + "80"), np.uint8)[None]
    expected = np.full(128, -1.5, np.float32)
    expected[[0, 2, 127]] = 1.5
    assert np.array_equal(ggml.decode(row, "q1_0")[0], expected)


@pytest.mark.parametrize("name", ["q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "bf16", "f16", "f32"])
def test_encoding_without_importance_gives_the_values_of_gguf_py(name: str) -> None:
    # Small integers lie on each of these grids, but for the extreme that the signed types put at the far end.
    weights = np.random.default_rng(4).integers(-7, 8, (16, 64)).astype(np.float32)
    weights[:, ::32] = -8
    if name == "q8_0":
        weights[:, ::32] = 127
    decoded = ggml.decode(ggml.encode(weights, name), name)
    expected = gguf.quants.quantize(weights, gguf.GGMLQuantizationType[name.upper()])
    expected = gguf.quants.dequantize(expected, gguf.GGMLQuantizationType[name.upper()])
    assert np.array_equal(decoded, expected)
    if name not in ("q4_1", "q5_1"):  # their scale (15 or 15/31 here) is rounded to fp16
        assert np.array_equal(decoded, weights)


@pytest.mark.parametrize("name", ["q4_0", "q4_k", "q6_k", "iq4_nl", "iq2_xxs"])
def test_importance_lowers_the_error_of_the_columns_it_names(name: str) -> None:
    random = np.random.default_rng(5)
    weights = random.standard_normal((64, 256)).astype(np.float32)
    importance = np.ones(256, np.float32)
    important = random.permutation(256)[:64]
    importance[important] = 100
    errors = []
    for weighting in (np.ones(256, np.float32), importance):
        gap = ggml.decode(ggml.encode(weights, name, weighting), name) - weights
        errors.append(float(np.square(gap[:, important], dtype=np.float64).sum()))
    # A quarter of the columns carries 97% of the weight; their error must fall clearly, not by chance.
    assert errors[1] < 0.95 * errors[0]


def test_encoding_keeps_its_input_and_takes_read_only_and_strided_weights() -> None:
    weights = np.random.default_rng(6).standard_normal((64, 8)).astype(np.float32).T
    kept = weights.copy()
    weights.flags.writeable = False
    rows = ggml.encode(weights, "q8_0")
    assert np.array_equal(weights, kept)
    assert np.array_equal(rows, ggml.encode(kept, "q8_0"))


def test_an_unknown_type_is_refused_with_the_known_ones() -> None:
    for call in (ggml.block_size, ggml.bits_per_weight):
        with pytest.raises(TieqError, match=r"'q9_9' is not a ggml type that tieq knows.*q4_0.*mxfp4"):
            call("q9_9")
    with pytest.raises(TieqError, match="'q9_9'"):
        ggml.encode(np.zeros((1, 32), np.float32), "q9_9")
    with pytest.raises(TieqError, match="'q9_9'"):
        ggml.decode(np.zeros((1, 32), np.uint8), "q9_9")


@pytest.mark.parametrize(("name", "columns", "block"), [("q4_0", 72, 32), ("q4_k", 576, 256), ("q1_0", 96, 128)])
def test_columns_that_the_block_does_not_divide_are_refused(name: str, columns: int, block: int) -> None:
    with pytest.raises(TieqError, match=rf"{name} needs columns divisible by {block}, not {columns}\. Choose another"):
        ggml.encode(np.zeros((2, columns), np.float32), name)


@pytest.mark.parametrize("name", ["iq2_xxs", "iq2_xs", "iq1_s"])
def test_a_type_that_needs_importance_is_refused_without_it(name: str) -> None:
    assert ggml.requires_importance(name)
    with pytest.raises(TieqError, match=rf"{name} needs importance weights.*--effort standard"):
        ggml.encode(np.ones((1, 256), np.float32), name)


def test_no_integer_scheme_needs_importance() -> None:
    assert not any(ggml.requires_importance(name) for name in ("q4_0", "q8_0", "q2_0", "q4_k", "f16"))


def test_importance_of_another_length_is_refused() -> None:
    # One float short of two blocks: ggml reads four bytes too far, which no allocator notices.
    with pytest.raises((TieqError, ValueError)):
        ggml.encode(np.ones((1, 512), np.float32), "q4_k", np.ones(511, np.float32))


def test_asking_whether_an_unknown_type_needs_importance_is_refused() -> None:
    with pytest.raises(TieqError):
        ggml.requires_importance("q9_9")


def test_rows_that_end_inside_a_block_are_not_decoded() -> None:
    with pytest.raises((TieqError, ValueError)):
        ggml.decode(np.zeros((1, 19), np.uint8), "q4_0")
