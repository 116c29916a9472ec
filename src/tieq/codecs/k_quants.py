"""ggml's K-quants and 4-bit non-linear types as pure functions: codes and scales out of the bytes, codes back in.

A weight is ``level * scale + minimum``: the code picks the level, and each group of 16 or 32 columns has a scale and,
in some types, a minimum, themselves stored in few bits under the fp16 scales of a block of 256. Encoding from floats
stays with ggml; here codes are exchanged under scales that stand. Sources: ``block_q2_K`` ... ``block_q6_K``,
``block_iq4_nl``, ``block_iq4_xs`` in ggml's ``ggml-common.h`` and their ``dequantize_row`` in ``ggml-quants.c``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]


@dataclasses.dataclass(frozen=True)
class Field:
    """Where some bits of every code of a block stand.

    Bytes ``start`` to ``stop`` in chunks of ``chunk``: a chunk holds the bits of its first ``chunk`` codes in the
    lowest ``bits`` of its bytes, those of the next ones above. They are the codes' bits from ``shift`` on.
    """

    start: int
    stop: int
    chunk: int
    bits: int
    shift: int = 0

    def get(self, blocks: Bytes) -> Bytes:
        """From blocks ``[..., bytes]`` to the field's share of the codes ``[..., codes]``."""
        found: Bytes = _spread(blocks[..., self.start : self.stop], self.chunk, self.bits) << np.uint8(self.shift)
        return found

    def put(self, blocks: Bytes, codes: Bytes) -> None:
        """Write the field's share of the codes into the blocks."""
        mask = np.uint8((1 << self.bits) - 1)
        lanes = ((codes >> np.uint8(self.shift)) & mask).reshape(*codes.shape[:-1], -1, 8 // self.bits, self.chunk)
        shifts = np.arange(0, 8, self.bits, dtype=np.uint8)[:, None]
        packed = np.bitwise_or.reduce(lanes << shifts, axis=-2)
        blocks[..., self.start : self.stop] = packed.reshape(*codes.shape[:-1], -1)


def _spread(field: Bytes, chunk: int, bits: int) -> Bytes:
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    lanes: Bytes = (field.reshape(*field.shape[:-1], -1, 1, chunk) >> shifts) & np.uint8((1 << bits) - 1)
    return lanes.reshape(*field.shape[:-1], -1)


def _half(blocks: Bytes, at: int) -> Floats:
    """The fp16 number at byte ``at`` of each block, ``[..., 1]``."""
    return np.ascontiguousarray(blocks[..., at : at + 2]).view("<f2").astype(np.float32)


def _scales_q2_k(blocks: Bytes) -> tuple[Floats, Floats]:
    packed = blocks[..., :16]
    return _half(blocks, 80) * (packed & np.uint8(15)), -_half(blocks, 82) * (packed >> np.uint8(4))


def _scales_q3_k(blocks: Bytes) -> tuple[Floats, Floats]:
    codes = _spread(blocks[..., 96:104], 8, 4) | (_spread(blocks[..., 104:108], 4, 2) << np.uint8(4))
    return _without_minima(_half(blocks, 108) * (codes.astype(np.float32) - 32))


def _scales_q4_k(blocks: Bytes) -> tuple[Floats, Floats]:
    first, second, last = blocks[..., 4:8], blocks[..., 8:12], blocks[..., 12:16]
    scales = np.concatenate([first & 63, (last & 15) | ((first >> 6) << 4)], axis=-1)
    minima = np.concatenate([second & 63, (last >> 4) | ((second >> 6) << 4)], axis=-1)
    return _half(blocks, 0) * scales, -_half(blocks, 2) * minima


def _scales_q6_k(blocks: Bytes) -> tuple[Floats, Floats]:
    return _without_minima(_half(blocks, 208) * np.ascontiguousarray(blocks[..., 192:208]).view(np.int8))


def _scales_iq4_nl(blocks: Bytes) -> tuple[Floats, Floats]:
    return _without_minima(_half(blocks, 0))


def _scales_iq4_xs(blocks: Bytes) -> tuple[Floats, Floats]:
    codes = _spread(blocks[..., 4:8], 1, 4) | (_spread(blocks[..., 2:4], 1, 2) << np.uint8(4))
    return _without_minima(_half(blocks, 0) * (codes.astype(np.float32) - 32))


def _without_minima(scales: Floats) -> tuple[Floats, Floats]:
    return scales, np.zeros_like(scales)


@dataclasses.dataclass(frozen=True)
class Layout:
    """One row of the table of layouts.

    Attributes:
        block: weights in a block.
        nbytes: bytes of a block.
        group: columns that share a scale.
        levels: what the codes 0, 1, ... stand for, ascending whole numbers of int8's range.
        fields: where the codes' bits are.
        read: effective scales and minima of blocks ``[..., nbytes]``, ``[..., block / group]`` float32 each.
    """

    block: int
    nbytes: int
    group: int
    levels: tuple[int, ...]
    fields: tuple[Field, ...]
    read: Callable[[Bytes], tuple[Floats, Floats]]

    def scales(self, rows: Bytes) -> tuple[Floats, Floats]:
        """Scales and minima ``[rows, groups]`` of rows of bytes ``[rows, row_bytes]``."""
        scales, minima = self.read(self._blocks(rows))
        return scales.reshape(len(rows), -1), minima.reshape(len(rows), -1)

    def unpack(self, rows: Bytes) -> Bytes:
        """Codes ``[rows, columns]`` of rows of bytes."""
        blocks = self._blocks(rows)
        codes: Bytes = self.fields[0].get(blocks)
        for field in self.fields[1:]:
            codes |= field.get(blocks)
        return codes.reshape(len(rows), -1)

    def replace(self, rows: Bytes, codes: Bytes) -> Bytes:
        """The rows with other codes under the same scales."""
        blocks: Bytes = self._blocks(rows).copy()
        for field in self.fields:
            field.put(blocks, codes.reshape(*blocks.shape[:2], self.block))
        return blocks.reshape(rows.shape)

    def _blocks(self, rows: Bytes) -> Bytes:
        blocks: Bytes = rows.reshape(len(rows), -1, self.nbytes)
        return blocks


_IQ4_LEVELS = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)

LAYOUTS: dict[str, Layout] = {
    "q2_k": Layout(256, 84, 16, tuple(range(4)), (Field(16, 80, 32, 2),), _scales_q2_k),
    "q3_k": Layout(256, 110, 16, tuple(range(-4, 4)), (Field(32, 96, 32, 2), Field(0, 32, 32, 1, 2)), _scales_q3_k),
    "q4_k": Layout(256, 144, 32, tuple(range(16)), (Field(16, 144, 32, 4),), _scales_q4_k),
    "q5_k": Layout(256, 176, 32, tuple(range(32)), (Field(48, 176, 32, 4), Field(16, 48, 32, 1, 4)), _scales_q4_k),
    "q6_k": Layout(
        256, 210, 16, tuple(range(-32, 32)), (Field(0, 128, 64, 4), Field(128, 192, 32, 2, 4)), _scales_q6_k
    ),
    "iq4_nl": Layout(32, 18, 32, _IQ4_LEVELS, (Field(2, 18, 16, 4),), _scales_iq4_nl),
    "iq4_xs": Layout(256, 136, 32, _IQ4_LEVELS, (Field(8, 136, 16, 4),), _scales_iq4_xs),
}
