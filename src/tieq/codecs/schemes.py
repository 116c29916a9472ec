"""Geometry of the integer block schemes, and which containers hold each with the same codes and scales.

A scheme stores blocks of ``block`` weights along a row as unsigned codes and one fp16 scale a block:
``w = (code - zero_point) * scale``. An affine scheme has an fp16 minimum a block in place of a zero point:
``w = code * scale + minimum``. Adding a scheme takes one row here and two pure packing functions.
Sources: ggml's ``block_q4_0``, ``block_q4_1``, ``block_q5_0``, ``block_q5_1``, ``block_q8_0`` and ``block_q2_0``; ONNX
Runtime contrib operators MatMulNBits and GatherBlockQuantized (default zero point ``2 ** (bits - 1)``).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial

import numpy as np
from numpy.typing import NDArray

from tieq.codecs import gguf_blocks
from tieq.codecs.ggml import TYPE_NAMES

Codes = NDArray[np.uint8]
Scales = NDArray[np.float16]


@dataclasses.dataclass(frozen=True)
class Scheme:
    """One row of the geometry table.

    Attributes:
        name: the field's name for the scheme, lower case.
        bits: bits of one code.
        block: weights that share a scale.
        code_range: smallest and largest code that is used.
        ggml_type: number of the ggml type that GGUF holds it as.
        pack_gguf: codes ``[rows, blocks, block]`` and scales to rows of GGUF bytes.
        unpack_gguf: the inverse.
        affine: whether blocks have minima. Scales are ``[rows, blocks]`` without and ``[rows, blocks, 2]`` (scale,
            minimum) with them.
        positive: whether a solver leaves negative scales out. They let a block's largest weight land on the longer end
            of the grid whatever its sign; some kernels take none.
    """

    name: str
    bits: int
    block: int
    code_range: tuple[int, int]
    ggml_type: int
    pack_gguf: Callable[[Codes, Scales], NDArray[np.uint8]]
    unpack_gguf: Callable[[NDArray[np.uint8]], tuple[Codes, Scales]]
    affine: bool = False
    positive: bool = False

    @property
    def zero_point(self) -> int:
        """Code that stands for zero, or for the minimum in an affine scheme."""
        return 0 if self.affine else 1 << (self.bits - 1)

    @property
    def onnx(self) -> bool:
        """Whether ONNX holds it as well as GGUF: its operators take codes of 2, 4 and 8 bits around a zero point."""
        return self.bits in (2, 4, 8) and not self.affine

    @property
    def int4(self) -> bool:
        """Whether it is 4 bits around a zero point, in blocks of any size."""
        return self.bits == 4 and not self.affine

    @property
    def bits_per_weight(self) -> float:
        """Bits per weight with fp16 scales, as in the quantized checkpoint."""
        return self.bits + (32 if self.affine else 16) / self.block

    def blocks(self, columns: int) -> int:
        """Number of blocks in a row of ``columns`` weights.

        Raises:
            ValueError: if the block does not divide the columns.
        """
        if columns % self.block:
            raise ValueError(f"{self.name} needs columns divisible by {self.block}, not {columns}")
        return columns // self.block


SCHEMES: dict[str, Scheme] = {
    scheme.name: scheme
    for scheme in (
        Scheme("q4_0", 4, 32, (0, 15), 2, gguf_blocks.pack_q4_0, gguf_blocks.unpack_q4_0),
        Scheme("q4_1", 4, 32, (0, 15), 3, gguf_blocks.pack_q4_1, gguf_blocks.unpack_q4_1, affine=True),
        Scheme("q5_0", 5, 32, (0, 31), 6, gguf_blocks.pack_q5_0, gguf_blocks.unpack_q5_0),
        Scheme("q5_1", 5, 32, (0, 31), 7, gguf_blocks.pack_q5_1, gguf_blocks.unpack_q5_1, affine=True),
        # llama.cpp never stores -128; leaving code 0 out keeps the two containers equal.
        Scheme("q8_0", 8, 32, (1, 255), 8, gguf_blocks.pack_q8_0, gguf_blocks.unpack_q8_0),
        Scheme("q2_0", 2, 64, (0, 3), 42, gguf_blocks.pack_q2_0, gguf_blocks.unpack_q2_0),
        # Groups as AWQ's and GPTQ's. ONNX has a scale for each; ggml has none that large, so GGUF repeats it.
        Scheme("int4_g64", 4, 64, (0, 15), 2, gguf_blocks.pack_q4_0, partial(gguf_blocks.unpack_groups, 64)),
        Scheme("int4_g128", 4, 128, (0, 15), 2, gguf_blocks.pack_q4_0, partial(gguf_blocks.unpack_groups, 128)),
    )
}


def ggml_kind(scheme: str) -> str:
    """The ggml type that a matrix in the scheme is in GGUF."""
    return TYPE_NAMES[SCHEMES[scheme].ggml_type] if scheme in SCHEMES else scheme


def dequantize(codes: Codes, scales: Scales, scheme: Scheme) -> NDArray[np.float32]:
    """Decode codes ``[rows, blocks, block]`` and fp16 scales to float32 ``[rows, columns]``."""
    values = codes.astype(np.float32)
    wide = scales.astype(np.float32)
    if scheme.affine:
        values *= wide[..., :1]
        values += wide[..., 1:]
    else:
        values -= np.float32(scheme.zero_point)
        values *= wide[..., None]
    decoded: NDArray[np.float32] = values.reshape(values.shape[0], -1)
    return decoded


def pack_codes(codes: Codes, bits: int) -> NDArray[np.uint8]:
    """Pack codes of 2, 4 or 8 bits along the last axis, the first code in the lowest bits (ONNX order).

    ``[..., n]`` uint8 becomes ``[..., n * bits / 8]`` uint8. Codes whose bits do not divide a byte stay one a byte.
    """
    per_byte = 1 if 8 % bits else 8 // bits
    lanes = codes.reshape(*codes.shape[:-1], -1, per_byte)
    packed: NDArray[np.uint8] = lanes[..., 0].copy()
    for lane in range(1, per_byte):
        packed |= lanes[..., lane] << np.uint8(lane * bits)
    return packed


def unpack_codes(packed: NDArray[np.uint8], bits: int) -> Codes:
    """Inverse of :func:`pack_codes`."""
    bits = 8 if 8 % bits else bits
    mask = np.uint8((1 << bits) - 1)
    lanes = [(packed >> np.uint8(shift)) & mask for shift in range(0, 8, bits)]
    codes: Codes = np.stack(lanes, axis=-1).reshape(*packed.shape[:-1], -1)
    return codes
