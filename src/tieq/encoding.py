"""One matrix to its stored tensors and back: ``NAME.codes`` and ``NAME.scales``, ``NAME.ggml``, or ``NAME`` in fp16.

What a slow solver found is kept in the user's cache under everything that it follows from, so that an export that was
interrupted goes on where it was. ``TIEQ_NO_CACHE`` leaves the cache alone.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import os
from collections.abc import Callable
from importlib import resources
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tieq.codecs import ggml
from tieq.codecs.schemes import SCHEMES, dequantize, pack_codes, unpack_codes
from tieq.kept import KeptFiles, content_digest
from tieq.records import Decision
from tieq.solve import SOLVERS, encode_under_cost
from tieq.source.package import cache_folder

Tensors = dict[str, NDArray[Any]]
# Rows that are solved at a time, so that progress shows; rows are independent in every solver.
_PIECE_ROWS = 16384
_LARGEST_FOLDER = 2_000_000_000


def encode(
    decision: Decision,
    weights: NDArray[np.float32],
    importance: NDArray[np.float32] | None,
    advance: Callable[[int], None] = lambda rows: None,
) -> Tensors:
    """Quantize a matrix.

    Args:
        decision: scheme and solver; row bands are another module's.
        weights: ``[rows, columns]``.
        importance: see :class:`tieq.solve.Solver`.
        advance: told how many rows are ready.
    """
    kept = _KeptSolution(decision, weights, importance) if decision.solver == "hessian" and _wanted() else None
    found = kept.load() if kept is not None else None
    if found is None:
        found = _solve(decision, weights, importance, advance)
        if kept is not None:
            kept.save(found)
    else:
        advance(len(weights))
    return {f"{decision.name}{suffix}": values for suffix, values in found.items()}


def decode(decision: Decision, made: Tensors) -> NDArray[np.float32]:
    """The matrix ``[rows, columns]`` that :func:`encode`'s tensors stand for, without row bands."""
    name, scheme = decision.name, decision.scheme
    if scheme in SCHEMES:
        geometry = SCHEMES[scheme]
        return dequantize(unpack_codes(made[f"{name}.codes"], geometry.bits), made[f"{name}.scales"], geometry)
    if scheme == "f16":
        return made[name].astype(np.float32)
    return ggml.decode(made[f"{name}.ggml"], scheme)


def round_trip(
    decision: Decision, weights: NDArray[np.float32], importance: NDArray[np.float32] | None
) -> NDArray[np.float32]:
    """Quantize a matrix as :func:`encode` would and decode it again, all in memory."""
    found = _solve(decision, weights, importance, lambda rows: None)
    return decode(decision, {f"{decision.name}{suffix}": values for suffix, values in found.items()})


def _solve(
    decision: Decision,
    weights: NDArray[np.float32],
    importance: NDArray[np.float32] | None,
    advance: Callable[[int], None],
) -> Tensors:
    """Tensors by suffix of their name."""
    pieces = []
    for start in range(0, len(weights), _PIECE_ROWS):
        piece = weights[start : start + _PIECE_ROWS]
        pieces.append(_solve_piece(decision, piece, importance))
        advance(len(piece))
    return {suffix: np.concatenate([piece[suffix] for piece in pieces]) for suffix in pieces[0]}


def _solve_piece(decision: Decision, weights: NDArray[np.float32], importance: NDArray[np.float32] | None) -> Tensors:
    scheme = decision.scheme
    if scheme in SCHEMES:
        grid = dataclasses.replace(SCHEMES[scheme], positive=decision.positive)
        codes, scales = SOLVERS[decision.solver](weights, grid, importance)
        return {".codes": pack_codes(codes, SCHEMES[scheme].bits), ".scales": scales}
    if scheme == "f16":
        limit = np.finfo(np.float16).max
        return {"": np.clip(weights, -limit, limit).astype(np.float16)}
    if decision.solver == "hessian":
        return {".ggml": encode_under_cost(weights, scheme, importance)}
    if importance is not None and importance.ndim == 2:
        importance = np.ascontiguousarray(importance.diagonal())
    return {".ggml": ggml.encode(weights, scheme, importance)}


def _wanted() -> bool:
    return not os.environ.get("TIEQ_NO_CACHE")


class _KeptSolution:
    """The cache's file for one matrix, cost and solver; anything that is not exactly that is solved again."""

    def __init__(
        self, decision: Decision, weights: NDArray[np.float32], importance: NDArray[np.float32] | None
    ) -> None:
        self._files = KeptFiles(cache_folder() / "solved", ".safetensors", _LARGEST_FOLDER)
        inputs = {"weights": weights} if importance is None else {"weights": weights, "importance": importance}
        grid = f"{decision.scheme}{' positive' if decision.positive else ''}"
        text = f"{grid} {decision.solver} {_solver_digest()} {content_digest(inputs)}"
        self._key = hashlib.sha256(text.encode()).hexdigest()[:32]

    def load(self) -> Tensors | None:
        from safetensors import SafetensorError, safe_open

        path = self._files.path(self._key)
        try:
            with safe_open(str(path), framework="numpy") as file:
                expected = json.loads(file.metadata()["tieq"])["content_sha256"]
                found = {name.removeprefix("x"): np.array(file.get_tensor(name)) for name in file.keys()}  # noqa: SIM118
            if content_digest(found) != expected:
                return None
            self._files.touch(path)
        except (SafetensorError, OSError, KeyError, TypeError, ValueError):
            return None
        return found

    def save(self, found: Tensors) -> None:
        from safetensors import SafetensorError
        from safetensors.numpy import save_file

        metadata = {"tieq": json.dumps({"content_sha256": content_digest(found)})}
        # A tensor needs a name, and the cast one has an empty suffix.
        tensors = {f"x{suffix}": np.ascontiguousarray(values) for suffix, values in found.items()}
        try:
            self._files.write(self._key, lambda path: save_file(tensors, path, metadata=metadata))
        except (OSError, SafetensorError):
            return  # a full disk costs the cache, not the export


@functools.cache
def _solver_digest() -> str:
    """Hash over the sources that decide the result, so that a changed solver solves again."""
    digest = hashlib.sha256()
    for package in ("tieq.solve", "tieq.codecs"):
        for file in sorted(resources.files(package).iterdir(), key=lambda entry: entry.name):
            if file.name.endswith(".py"):
                digest.update(file.name.encode() + file.read_bytes())
    return digest.hexdigest()
