"""Every ggml type through the ggml library that llama-cpp-python ships: encode, decode, row sizes.

These types live in GGUF only. Source: ``ggml.h`` (``ggml_quantize_chunk``, ``ggml_row_size``,
``ggml_get_type_traits``) and ggml's ``enum ggml_type``.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tieq.errors import MissingRuntimeError, TieqError

GGML_TYPES: dict[str, int] = {
    "f32": 0, "f16": 1, "q4_0": 2, "q4_1": 3, "q5_0": 6, "q5_1": 7, "q8_0": 8, "q2_k": 10, "q3_k": 11,
    "q4_k": 12, "q5_k": 13, "q6_k": 14, "iq2_xxs": 16, "iq2_xs": 17, "iq3_xxs": 18, "iq1_s": 19, "iq4_nl": 20,
    "iq3_s": 21, "iq2_s": 22, "iq4_xs": 23, "iq1_m": 29, "bf16": 30, "tq1_0": 34, "tq2_0": 35, "mxfp4": 39,
    "q1_0": 41, "q2_0": 42,
}  # fmt: skip
TYPE_NAMES = {number: name for name, number in GGML_TYPES.items()}


class _TypeTraits(ctypes.Structure):
    """``struct ggml_type_traits``."""

    _fields_ = (
        ("type_name", ctypes.c_char_p),
        ("blck_size", ctypes.c_int64),
        ("blck_size_interleave", ctypes.c_int64),
        ("type_size", ctypes.c_size_t),
        ("is_quantized", ctypes.c_bool),
        ("to_float", ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)),
        ("from_float_ref", ctypes.c_void_p),
    )


@functools.lru_cache(maxsize=1)
def _library() -> Any:
    try:
        # The loader of llama-cpp-python finds the library on every platform; its symbols include ggml-base's.
        from llama_cpp._ggml import libggml
    except (ImportError, OSError, RuntimeError) as error:
        raise MissingRuntimeError(
            f"the ggml library cannot be loaded ({error}).",
            where="llama-cpp-python",
            todo="Install it with `pip install llama-cpp-python`.",
        ) from error
    libggml.ggml_quantize_requires_imatrix.restype = ctypes.c_bool
    libggml.ggml_quantize_requires_imatrix.argtypes = [ctypes.c_int]
    libggml.ggml_quantize_chunk.restype = ctypes.c_size_t
    libggml.ggml_quantize_chunk.argtypes = [
        ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64,
        ctypes.c_void_p,
    ]  # fmt: skip
    libggml.ggml_get_type_traits.restype = ctypes.POINTER(_TypeTraits)
    libggml.ggml_get_type_traits.argtypes = [ctypes.c_int]
    return libggml


def _traits(name: str) -> _TypeTraits:
    if name not in GGML_TYPES:
        raise TieqError(f"'{name}' is not a ggml type that tieq knows.", todo=f"Use one of {', '.join(GGML_TYPES)}.")
    traits: _TypeTraits = _library().ggml_get_type_traits(GGML_TYPES[name]).contents
    return traits


def block_size(name: str) -> int:
    """Weights in a block of the ggml type."""
    return int(_traits(name).blck_size)


def bits_per_weight(name: str) -> float:
    """Stored bits per weight, scales included."""
    traits = _traits(name)
    return 8.0 * float(traits.type_size) / float(traits.blck_size)


def row_bytes(name: str, columns: int) -> int:
    """Bytes of a row of a type."""
    traits = _traits(name)
    return columns // int(traits.blck_size) * int(traits.type_size)


def requires_importance(name: str) -> bool:
    """Whether ggml refuses to encode the type without importance weights."""
    _traits(name)
    return bool(_library().ggml_quantize_requires_imatrix(GGML_TYPES[name]))


def encode(weights: NDArray[np.float32], name: str, importance: NDArray[np.float32] | None = None) -> NDArray[np.uint8]:
    """Encode float32 ``[rows, columns]`` to rows of ggml bytes ``[rows, row_bytes]``.

    Args:
        weights: the matrix.
        name: a ggml type.
        importance: one positive weight a column, ``[columns]``; the error of column j is weighted by it.

    Raises:
        TieqError: if the block does not divide the columns, or the type needs importance and has none.
    """
    rows, columns = weights.shape
    traits = _traits(name)
    if columns % traits.blck_size:
        raise TieqError(
            f"{name} needs columns divisible by {traits.blck_size}, not {columns}.",
            todo="Choose another scheme for this matrix.",
        )
    if importance is None and requires_importance(name):
        raise TieqError(f"{name} needs importance weights, and none were measured.", todo="Use `--effort standard`.")
    if importance is not None and importance.shape != (columns,):
        raise TieqError(f"importance has the shape {list(importance.shape)} where [{columns}] is expected.")
    source = np.ascontiguousarray(weights, dtype=np.float32)
    weighting = None if importance is None else np.ascontiguousarray(importance, dtype=np.float32)
    out = np.empty((rows, columns // traits.blck_size * traits.type_size), dtype=np.uint8)
    written = _library().ggml_quantize_chunk(
        GGML_TYPES[name],
        source.ctypes.data,
        out.ctypes.data,
        0,
        rows,
        columns,
        None if weighting is None else weighting.ctypes.data,
    )
    if written != out.nbytes:
        raise TieqError(f"ggml wrote {written} bytes of {name} where {out.nbytes} were expected.")
    return out


def decode(data: NDArray[np.uint8], name: str) -> NDArray[np.float32]:
    """Decode rows of ggml bytes ``[rows, row_bytes]`` to float32 ``[rows, columns]``."""
    if name == "f32":
        return np.ascontiguousarray(data).view(np.float32)
    traits = _traits(name)
    source = np.ascontiguousarray(data)
    if source.shape[1] % traits.type_size:
        raise TieqError(
            f"{name} has blocks of {traits.type_size} bytes, which do not divide rows of {source.shape[1]}."
        )
    columns = source.shape[1] // traits.type_size * traits.blck_size
    out = np.empty((source.shape[0], columns), dtype=np.float32)
    traits.to_float(source.ctypes.data, out.ctypes.data, out.size)
    return out
