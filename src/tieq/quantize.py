"""Plan and weights to the quantized checkpoint: codes, scales and float tensors, independent of any container.

``quantized.safetensors`` holds, per planned matrix in ``[rows = outputs, columns = inputs]`` order: ``NAME.codes``
uint8 ``[rows, blocks, bytes]`` (ONNX bit order) and ``NAME.scales`` fp16 ``[rows, blocks]`` for the integer schemes,
``NAME.ggml`` uint8 ``[rows, row_bytes]`` for other ggml types, ``NAME`` fp16 for casts; every other tensor of the
model as float32 under its own name. The scheme of each stands in the metadata key ``tieq``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tieq.calibrate import Statistics
from tieq.codecs import ggml
from tieq.codecs.schemes import SCHEMES, Codes, Scales, dequantize, pack_codes, unpack_codes
from tieq.errors import RefusedError, TieqError
from tieq.plan import Plan
from tieq.progress import counter
from tieq.records import Decision
from tieq.solve import SOLVERS
from tieq.source.base import ModelSource

FORMAT_VERSION = 1


def quantize(
    source: ModelSource,
    plan: Plan,
    floats: list[str],
    path: Path,
    statistics: Statistics | None,
    logits: str,
) -> None:
    """Quantize every planned matrix once and write the quantized checkpoint.

    Args:
        source: where weights are read, one tensor at a time.
        plan: decisions.
        floats: canonical names of the tensors that stay float.
        path: file to write.
        statistics: calibration statistics, or None for equal weights.
        logits: module name whose statistic weighs the shared table.

    Raises:
        RefusedError: if a matrix holds NaN or infinity; its rows are listed.
    """
    from safetensors.numpy import save_file

    tensors: dict[str, NDArray[Any]] = {}
    weights_total = sum(d.rows * d.columns for d in plan.decisions) // 1_000_000 or 1
    with counter("quantize", weights_total, "million weights") as advance:
        done = 0
        for decision in plan.decisions:
            values = source.read(decision.stored)
            weights = np.ascontiguousarray(values.T if decision.transposed else values)
            refuse_bad_rows(decision.name, weights)
            importance = statistics.importance(decision.name, decision.role, logits) if statistics else None
            tensors.update(_encode(decision, weights, importance))
            done += decision.rows * decision.columns
            advance(done // 1_000_000)
            done %= 1_000_000
    for name in floats:
        values = np.ascontiguousarray(source.read(name))
        refuse_bad_rows(name, values.reshape(len(values), -1))
        tensors[name] = values
    header = {
        "version": FORMAT_VERSION,
        "tensors": {d.name: {"scheme": d.scheme, "rows": d.rows, "columns": d.columns} for d in plan.decisions},
    }
    save_file(dict(sorted(tensors.items())), path, metadata={"tieq": json.dumps(header, sort_keys=True)})


def refuse_bad_rows(name: str, weights: NDArray[np.float32]) -> None:
    """Refuse a matrix ``[rows, columns]`` that holds NaN or infinity.

    Raises:
        RefusedError: with the matrix's name and its bad rows.
    """
    bad = np.flatnonzero(~np.isfinite(weights).all(axis=1))
    if bad.size:
        shown = ", ".join(map(str, bad[:8])) + (" ..." if bad.size > 8 else "")
        raise RefusedError(
            f"{bad.size} rows hold NaN or infinity: {shown}.", where=name, todo="Repair the checkpoint first."
        )


def _encode(
    decision: Decision, weights: NDArray[np.float32], importance: NDArray[np.float32] | None
) -> dict[str, NDArray[Any]]:
    name, scheme = decision.name, decision.scheme
    if scheme in SCHEMES:
        codes, scales = SOLVERS[decision.solver](weights, SCHEMES[scheme], importance)
        return {f"{name}.codes": pack_codes(codes, SCHEMES[scheme].bits), f"{name}.scales": scales}
    if scheme == "f16":
        limit = np.finfo(np.float16).max
        return {name: np.clip(weights, -limit, limit).astype(np.float16)}
    if importance is not None and importance.ndim == 2:
        importance = np.ascontiguousarray(importance.diagonal())
    return {f"{name}.ggml": ggml.encode(weights, scheme, importance)}


def round_trip(
    decision: Decision, weights: NDArray[np.float32], importance: NDArray[np.float32] | None
) -> NDArray[np.float32]:
    """Quantize a matrix ``[rows, columns]`` as :func:`quantize` would and decode it again, all in memory.

    Args:
        decision: scheme and solver.
        weights: the matrix.
        importance: see :class:`tieq.solve.Solver`.
    """
    name, scheme = decision.name, decision.scheme
    made = _encode(decision, weights, importance)
    if scheme in SCHEMES:
        return dequantize(
            unpack_codes(made[f"{name}.codes"], SCHEMES[scheme].bits), made[f"{name}.scales"], SCHEMES[scheme]
        )
    if scheme == "f16":
        return made[name].astype(np.float32)
    return ggml.decode(made[f"{name}.ggml"], scheme)


class QuantizedCheckpoint:
    """Reads ``quantized.safetensors`` lazily.

    Raises:
        TieqError: if the file is not one of ours.
    """

    def __init__(self, path: Path) -> None:
        from safetensors import SafetensorError, safe_open

        try:
            self._file = safe_open(str(path), framework="numpy")
            header = json.loads(self._file.metadata()["tieq"])
            version = header["version"]
            self._schemes: dict[str, str] = {name: entry["scheme"] for name, entry in header["tensors"].items()}
        except (SafetensorError, OSError, KeyError, TypeError, ValueError, AttributeError) as error:
            raise TieqError(f"is no quantized checkpoint ({error}).", where=str(path)) from error
        if version != FORMAT_VERSION:
            raise TieqError(f"has format version {version}, this tieq reads {FORMAT_VERSION}.", where=str(path))
        suffixes = (".codes", ".scales", ".ggml")
        names = self._file.keys()
        self.floats = [name for name in names if name not in self._schemes and not name.endswith(suffixes)]

    @property
    def matrices(self) -> list[str]:
        """Names of the quantized matrices."""
        return list(self._schemes)

    def scheme(self, name: str) -> str:
        """Scheme of a quantized matrix."""
        return self._schemes[name]

    def codes(self, name: str) -> tuple[Codes, Scales]:
        """Codes ``[rows, blocks, block]`` and scales of an integer-scheme matrix."""
        packed, scales = self.packed(name)
        return unpack_codes(packed, SCHEMES[self._schemes[name]].bits), scales

    def packed(self, name: str) -> tuple[NDArray[np.uint8], Scales]:
        """Packed codes ``[rows, blocks, bytes]`` in ONNX bit order, and scales."""
        return self._file.get_tensor(f"{name}.codes"), self._file.get_tensor(f"{name}.scales")

    def ggml_rows(self, name: str) -> NDArray[np.uint8]:
        """Rows of GGUF bytes ``[rows, row_bytes]``, whatever the scheme."""
        scheme = self._schemes[name]
        if scheme in SCHEMES:
            return SCHEMES[scheme].pack_gguf(*self.codes(name))
        if scheme == "f16":
            return np.ascontiguousarray(self.tensor(name)).view(np.uint8)
        rows: NDArray[np.uint8] = self._file.get_tensor(f"{name}.ggml")
        return rows

    def tensor(self, name: str) -> NDArray[Any]:
        """A float tensor, or the fp16 values of a matrix that was only cast."""
        values: NDArray[Any] = self._file.get_tensor(name)
        return values

    def decode(self, name: str) -> NDArray[np.float32]:
        """Dequantized values ``[rows, columns]`` of a matrix."""
        scheme = self._schemes[name]
        if scheme in SCHEMES:
            return dequantize(*self.codes(name), SCHEMES[scheme])
        return ggml.decode(self.ggml_rows(name), scheme)
