from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import gguf
import numpy as np
import pytest

from tieq.codecs import ggml
from tieq.codecs.schemes import SCHEMES, dequantize

GOLDEN = json.loads(Path(__file__).with_name("golden.json").read_text(encoding="utf-8"))
BLOCKS = [pytest.param(name, block, id=f"{name}-{n}") for name in GOLDEN for n, block in enumerate(GOLDEN[name])]
# Schemes whose blocks are those of a ggml type of their name; the others have some of its blocks in one.
OWN = {name for name in SCHEMES if name in ggml.GGML_TYPES}
# Scales that have ever mattered: ordinary, zero of both signs, subnormal, largest, of both signs.
SCALES = np.array([1, -1, 0.0, -0.0, 2.0**-24, -(2.0**-24), 3e-6, 65504, -65504, 0.01], np.float16)


def random_blocks(name: str) -> tuple[np.ndarray, np.ndarray]:
    """Codes over the whole range that the layout can hold, 40 rows of 5 blocks, and hostile scales (and minima)."""
    random = np.random.default_rng(0)
    scheme = SCHEMES[name]
    codes = random.integers(0, 1 << scheme.bits, (40, 5, scheme.block)).astype(np.uint8)
    codes[0], codes[1] = 0, (1 << scheme.bits) - 1
    return codes, random.choice(SCALES, (40, 5, 2) if scheme.affine else (40, 5))


def bits(values: np.ndarray) -> np.ndarray:
    """Float32 as integers, so that -0.0 and 0.0 differ."""
    return np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)


def test_every_type_has_golden_blocks() -> None:
    assert set(GOLDEN) == OWN


def test_the_golden_file_is_what_its_script_makes() -> None:
    spec = importlib.util.spec_from_file_location("make_golden", Path(__file__).with_name("make_golden.py"))
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    assert script.GOLDEN.read_text(encoding="utf-8") == script.text(script.make())


@pytest.mark.parametrize(("name", "block"), BLOCKS)
def test_packing_gives_the_bytes_of_an_independent_encoder(name: str, block: dict) -> None:
    scheme = SCHEMES[name]
    codes = (np.array(block["levels"]) + scheme.zero_point).astype(np.uint8).reshape(1, 1, -1)
    scales = np.array([[block["scale"]]], np.float16)
    assert scheme.pack_gguf(codes, scales).tobytes().hex() == block["bytes"]


@pytest.mark.parametrize(("name", "block"), BLOCKS)
def test_golden_bytes_decode_to_the_independent_values(name: str, block: dict) -> None:
    scheme = SCHEMES[name]
    rows = np.frombuffer(bytes.fromhex(block["bytes"]), np.uint8)[None]
    expected = np.frombuffer(bytes.fromhex(block["decoded"]), "<f4")[None]
    codes, scales = scheme.unpack_gguf(rows)
    assert np.array_equal(codes[0, 0].astype(int) - scheme.zero_point, block["levels"])
    # Equality of values: the mirrored Q2_0 codes give a zero the other sign.
    assert np.array_equal(dequantize(codes, scales, scheme), expected)


def test_q4_0_block_written_by_hand() -> None:
    # Scale 0.5 is 0x3800, little-endian 00 38. Codes 0..15 then 15..0: byte j is j in the low nibble and 15 - j, the
    # code 16 further on, in the high one: j=0 gives f0, j=1 gives e1, ... j=15 gives 0f.
    codes = np.array([*range(16), *range(15, -1, -1)], np.uint8).reshape(1, 1, 32)
    rows = SCHEMES["q4_0"].pack_gguf(codes, np.array([[0.5]], np.float16))
    assert rows.tobytes().hex() == "0038" + "f0e1d2c3b4a5968778695a4b3c2d1e0f"


@pytest.mark.parametrize(("name", "count"), [("int4_g64", 2), ("int4_g128", 4)])
def test_a_group_is_blocks_of_q4_0_with_one_scale(name: str, count: int) -> None:
    codes, scales = random_blocks(name)
    each = codes.reshape(len(codes), -1, 32)
    # Group 0 of a row is its first `count` blocks, group 1 the next ones.
    of_each = np.stack([scales[:, number // count] for number in range(each.shape[1])], axis=1)
    rows = SCHEMES[name].pack_gguf(codes, scales)
    assert np.array_equal(rows, SCHEMES["q4_0"].pack_gguf(each, of_each))
    decoded = bits(dequantize(codes, scales, SCHEMES[name]))
    assert np.array_equal(decoded, bits(ggml.decode(rows, "q4_0")))


@pytest.mark.parametrize("name", ["int4_g64", "int4_g128"])
def test_blocks_with_scales_of_their_own_are_no_group(name: str) -> None:
    group = SCHEMES[name].block
    rows = SCHEMES["q4_0"].pack_gguf(np.zeros((1, group // 32, 32), np.uint8), np.zeros((1, group // 32), np.float16))
    rows[0, -17] = 0x80  # the last block's scale is negative zero: equal, but of other bits
    with pytest.raises(ValueError, match=f"blocks within a group of {group} have different scales"):
        SCHEMES[name].unpack_gguf(rows)


def test_q5_0_block_written_by_hand() -> None:
    # Scale 0.5 as above. Codes 0..31: byte j has the low bits of j, j, in its low and those of j + 16, j again, in its
    # high nibble. The fifth bits are 0 for codes 0 to 15 and 1 from 16 on: 16 bits of each, the first in the lowest.
    codes = np.arange(32, dtype=np.uint8).reshape(1, 1, 32)
    rows = SCHEMES["q5_0"].pack_gguf(codes, np.array([[0.5]], np.float16))
    assert rows.tobytes().hex() == "0038" + "0000ffff" + "00112233445566778899aabbccddeeff"


def test_affine_blocks_written_by_hand() -> None:
    # Scale 0.5 and then minimum -2 (0xc000), then the payloads of Q4_0 and Q5_0.
    scales = np.array([[[0.5, -2.0]]], np.float16)
    codes = np.array([*range(16), *range(15, -1, -1)], np.uint8).reshape(1, 1, 32)
    rows = SCHEMES["q4_1"].pack_gguf(codes, scales)
    assert rows.tobytes().hex() == "003800c0" + "f0e1d2c3b4a5968778695a4b3c2d1e0f"
    rows = SCHEMES["q5_1"].pack_gguf(np.arange(32, dtype=np.uint8).reshape(1, 1, 32), scales)
    assert rows.tobytes().hex() == "003800c0" + "0000ffff" + "00112233445566778899aabbccddeeff"


def test_q8_0_block_written_by_hand() -> None:
    # Scale -2 is 0xc000, little-endian 00 c0. Code - 128 as two's complement: 1 is -127 = 81, 128 is 0 = 00,
    # 255 is 127 = 7f, 127 is -1 = ff, 0 is -128 = 80, and 27 times 129 is 1 = 01.
    codes = np.array([1, 128, 255, 127, 0, *[129] * 27], np.uint8).reshape(1, 1, 32)
    rows = SCHEMES["q8_0"].pack_gguf(codes, np.array([[-2.0]], np.float16))
    assert rows.tobytes().hex() == "00c0" + "81007fff80" + "01" * 27


def test_q2_0_block_written_by_hand() -> None:
    # Scale 1 is stored negated, 0xbc00, little-endian 00 bc. Each code c is stored as 3 - c, first in the low bits:
    # 0,1,2,3 is 3 | 2<<2 | 1<<4 | 0<<6 = 1b; 0,0,0,3 is 3 | 3<<2 | 3<<4 | 0 = 3f; 3,3,3,0 is 3<<6 = c0.
    codes = np.array([0, 0, 0, 3, *[0, 1, 2, 3] * 14, 3, 3, 3, 0], np.uint8).reshape(1, 1, 64)
    rows = SCHEMES["q2_0"].pack_gguf(codes, np.array([[1.0]], np.float16))
    assert rows.tobytes().hex() == "00bc" + "3f" + "1b" * 14 + "c0"


@pytest.mark.parametrize("name", SCHEMES)
def test_unpacking_inverts_packing_for_any_code_and_scale(name: str) -> None:
    codes, scales = random_blocks(name)
    found_codes, found_scales = SCHEMES[name].unpack_gguf(SCHEMES[name].pack_gguf(codes, scales))
    assert np.array_equal(found_codes, codes)
    assert np.array_equal(found_scales.view(np.uint16), scales.view(np.uint16))


@pytest.mark.parametrize("name", sorted(OWN))
def test_packing_inverts_unpacking_for_any_byte(name: str) -> None:
    # A scale whose fp16 is NaN keeps its bits as well: scales are copied, at most with the sign bit flipped.
    width = ggml.block_size(name) * ggml.bits_per_weight(name) / 8
    rows = np.random.default_rng(1).integers(0, 256, (200, 3 * int(width))).astype(np.uint8)
    assert np.array_equal(SCHEMES[name].pack_gguf(*SCHEMES[name].unpack_gguf(rows)), rows)


@pytest.mark.parametrize("name", SCHEMES)
def test_packing_leaves_its_inputs_alone(name: str) -> None:
    codes, scales = random_blocks(name)
    kept_codes, kept_scales = codes.copy(), scales.copy()
    rows = SCHEMES[name].pack_gguf(codes, scales)
    SCHEMES[name].unpack_gguf(rows)
    assert np.array_equal(codes, kept_codes)
    assert np.array_equal(scales.view(np.uint16), kept_scales.view(np.uint16))


@pytest.mark.parametrize("name", ["q4_0", "q4_1", "q5_0", "q5_1", "q8_0"])
def test_dequantized_values_equal_those_of_gguf_py_bit_for_bit(name: str) -> None:
    codes, scales = random_blocks(name)
    rows = SCHEMES[name].pack_gguf(codes, scales)
    expected = gguf.quants.dequantize(rows, gguf.GGMLQuantizationType[name.upper()])
    assert np.array_equal(bits(dequantize(codes, scales, SCHEMES[name])), bits(expected))


@pytest.mark.parametrize("name", ["q4_0", "q4_1", "q5_0", "q5_1", "q8_0"])
def test_dequantized_values_equal_those_of_ggml_bit_for_bit(name: str) -> None:
    codes, scales = random_blocks(name)
    decoded = ggml.decode(SCHEMES[name].pack_gguf(codes, scales), name)
    assert np.array_equal(bits(dequantize(codes, scales, SCHEMES[name])), bits(decoded))


def test_dequantized_q2_0_equals_that_of_ggml_up_to_the_sign_of_zero() -> None:
    codes, scales = random_blocks("q2_0")
    found = dequantize(codes, scales, SCHEMES["q2_0"])
    decoded = ggml.decode(SCHEMES["q2_0"].pack_gguf(codes, scales), "q2_0")
    assert np.array_equal(found, decoded)
    # The only difference in bits is the mirrored zero: 0 * s here, 0 * -s there.
    assert not found[bits(found) != bits(decoded)].any()
