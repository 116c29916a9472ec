"""GGUF block layouts as pure functions: codes and scales to bytes and back. Source: ggml's ``ggml-common.h``."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Half = NDArray[np.float16]


def _join(scales: Half, payload: Bytes) -> Bytes:
    """Put each block's fp16 numbers before its payload ``[rows, blocks, n]``; flattened to rows of bytes."""
    head = np.ascontiguousarray(scales, dtype="<f2").reshape(*payload.shape[:2], -1).view(np.uint8)
    return np.concatenate([head, payload], axis=-1).reshape(len(payload), -1)


def _split(rows: Bytes, block_bytes: int, halves: int = 1) -> tuple[Half, Bytes]:
    """Inverse of :func:`_join`: scales ``[rows, blocks]``, or ``[rows, blocks, halves]`` for more than one."""
    blocks = rows.reshape(rows.shape[0], -1, block_bytes)
    scales = np.ascontiguousarray(blocks[..., : 2 * halves]).view("<f2").astype(np.float16)
    return (scales if halves > 1 else scales[..., 0]), blocks[..., 2 * halves :]


def _nibbles(codes: Bytes) -> Bytes:
    """32 codes of four bits in 16 bytes: byte j holds code j in its low and code j + 16 in its high nibble."""
    packed: Bytes = codes[..., :16] | (codes[..., 16:] << np.uint8(4))
    return packed


def _from_nibbles(payload: Bytes) -> Bytes:
    return np.concatenate([payload & np.uint8(15), payload >> np.uint8(4)], axis=-1)


def _fives(codes: Bytes) -> Bytes:
    """32 codes of five bits in 20 bytes: the fifth bits, the first in the lowest bit, then the nibbles."""
    fifth = np.packbits(codes >> np.uint8(4), axis=-1, bitorder="little")
    return np.concatenate([fifth, _nibbles(codes & np.uint8(15))], axis=-1)


def _from_fives(payload: Bytes) -> Bytes:
    fifth = np.unpackbits(payload[..., :4], axis=-1, bitorder="little")
    codes: Bytes = _from_nibbles(payload[..., 4:]) | (fifth << np.uint8(4))
    return codes


def pack_q4_0(codes: Bytes, scales: Half) -> Bytes:
    """Q4_0: fp16 scale, then 16 bytes of nibbles.

    Codes are ``[rows, blocks, 32]``, or in groups of a multiple of 32, whose blocks then have one scale.
    """
    blocks = codes.reshape(len(codes), -1, 32)
    return _join(np.repeat(scales, codes.shape[-1] // 32, axis=1), _nibbles(blocks))


def unpack_q4_0(rows: Bytes) -> tuple[Bytes, Half]:
    """Inverse of :func:`pack_q4_0`: codes ``[rows, blocks, 32]`` and scales ``[rows, blocks]``."""
    scales, payload = _split(rows, 18)
    return _from_nibbles(payload), scales


def unpack_groups(group: int, rows: Bytes) -> tuple[Bytes, Half]:
    """Inverse of :func:`pack_q4_0` for groups: codes ``[rows, groups, group]`` and scales ``[rows, groups]``.

    Raises:
        ValueError: if the blocks of a group differ in their scale's bits.
    """
    codes, scales = unpack_q4_0(rows)
    by_group = scales.view(np.uint16).reshape(len(rows), -1, group // 32)
    if (by_group != by_group[..., :1]).any():
        raise ValueError(f"blocks within a group of {group} have different scales")
    return codes.reshape(len(rows), -1, group), by_group[..., 0].view(np.float16)


def pack_q4_1(codes: Bytes, scales: Half) -> Bytes:
    """Q4_1: fp16 scale, fp16 minimum (scales ``[rows, blocks, 2]``), then the nibbles of Q4_0."""
    return _join(scales, _nibbles(codes))


def unpack_q4_1(rows: Bytes) -> tuple[Bytes, Half]:
    """Inverse of :func:`pack_q4_1`: codes ``[rows, blocks, 32]``, scales and minima ``[rows, blocks, 2]``."""
    scales, payload = _split(rows, 20, 2)
    return _from_nibbles(payload), scales


def pack_q5_0(codes: Bytes, scales: Half) -> Bytes:
    """Q5_0: fp16 scale, 4 bytes of fifth bits, then the low four bits as in Q4_0.

    Bit j of the 4 bytes, read as a little-endian integer, is the fifth bit of code j.
    """
    return _join(scales, _fives(codes))


def unpack_q5_0(rows: Bytes) -> tuple[Bytes, Half]:
    """Inverse of :func:`pack_q5_0`: codes ``[rows, blocks, 32]`` and scales ``[rows, blocks]``."""
    scales, payload = _split(rows, 22)
    return _from_fives(payload), scales


def pack_q5_1(codes: Bytes, scales: Half) -> Bytes:
    """Q5_1: fp16 scale, fp16 minimum (scales ``[rows, blocks, 2]``), then fifth bits and nibbles as in Q5_0."""
    return _join(scales, _fives(codes))


def unpack_q5_1(rows: Bytes) -> tuple[Bytes, Half]:
    """Inverse of :func:`pack_q5_1`: codes ``[rows, blocks, 32]``, scales and minima ``[rows, blocks, 2]``."""
    scales, payload = _split(rows, 24, 2)
    return _from_fives(payload), scales


def pack_q8_0(codes: Bytes, scales: Half) -> Bytes:
    """Q8_0: fp16 scale, then 32 signed bytes; the unsigned code 128 is zero."""
    return _join(scales, codes ^ np.uint8(128))


def unpack_q8_0(rows: Bytes) -> tuple[Bytes, Half]:
    """Inverse of :func:`pack_q8_0`: codes ``[rows, blocks, 32]`` and scales ``[rows, blocks]``."""
    scales, payload = _split(rows, 34)
    return payload ^ np.uint8(128), scales


def pack_q2_0(codes: Bytes, scales: Half) -> Bytes:
    """Q2_0: fp16 scale, then 16 bytes of four codes each, the first code in the lowest bits.

    ggml's zero is code 1 and ours, as in ONNX, is code 2: mirroring the codes and negating the scale gives
    the same weights, ``(3 - c - 1) * -s == (c - 2) * s``.
    """
    lanes = (np.uint8(3) - codes).reshape(*codes.shape[:-1], -1, 4)
    payload = lanes[..., 0] | (lanes[..., 1] << 2) | (lanes[..., 2] << 4) | (lanes[..., 3] << 6)
    return _join(-scales, payload)


def unpack_q2_0(rows: Bytes) -> tuple[Bytes, Half]:
    """Inverse of :func:`pack_q2_0`: codes ``[rows, blocks, 64]`` and scales ``[rows, blocks]``."""
    scales, payload = _split(rows, 18)
    lanes = np.stack([(payload >> np.uint8(shift)) & np.uint8(3) for shift in (0, 2, 4, 6)], axis=-1)
    return np.uint8(3) - lanes.reshape(*payload.shape[:-1], -1), -scales
