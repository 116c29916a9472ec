"""Plan and weights to the quantized checkpoint: codes, scales and float tensors, independent of any container.

``quantized.safetensors`` holds, per planned matrix in ``[rows = outputs, columns = inputs]`` order: ``NAME.codes``
uint8 ``[rows, blocks, bytes]`` (ONNX bit order; five bits take a byte) and ``NAME.scales`` fp16 ``[rows, blocks]``
(affine: ``[rows, blocks, 2]`` with the minima) for the integer schemes,
``NAME.ggml`` uint8 ``[rows, row_bytes]`` for other ggml types, ``NAME`` fp16 for casts; every other tensor of the
model as float32 under its own name. A row band of a table (see :mod:`tieq.bands`) adds ``NAME.band0.codes``,
``NAME.band0.scales`` and ``NAME.band0.rows``, int32 and ascending. The scheme of each stands in the metadata key
``tieq``.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tieq.ahead import ahead
from tieq.bands import Band, band_prefix, encode_bands
from tieq.calibrate import Statistics, usable_importance
from tieq.codecs import ggml
from tieq.codecs.schemes import SCHEMES, Codes, Scales, dequantize, unpack_codes
from tieq.encoding import Tensors, decode, encode
from tieq.errors import RefusedError, TieqError
from tieq.plan import Plan
from tieq.progress import counter
from tieq.records import Decision
from tieq.sequential import solve_body
from tieq.source.base import ModelSource
from tieq.source.reference import ReferenceModel
from tieq.tensor_file import TensorFile

FORMAT_VERSION = 1
# Type, shape and offsets of a tensor in a safetensors header, and the endings of its name.
_ENTRY_BYTES = 200
_CHECKED_ROWS = 8192


@dataclasses.dataclass(frozen=True)
class BodyRun:
    """What the body is solved on, layer by layer: the float model and calibration tokens ``[sequences, length]``."""

    model: ReferenceModel
    ids: NDArray[np.int64]


def quantize(
    source: ModelSource,
    plan: Plan,
    floats: list[str],
    path: Path,
    statistics: Statistics | None,
    logits: str,
    body: BodyRun | None = None,
) -> None:
    """Quantize every planned matrix once and write the quantized checkpoint.

    Args:
        source: where weights are read, one tensor at a time.
        plan: decisions.
        floats: canonical names of the tensors that stay float.
        path: file to write.
        statistics: calibration statistics, or None for equal weights.
        logits: module name whose statistic weighs the shared table.
        body: to solve the body for the inputs that the quantized model gives it; None to take every matrix alone.

    Raises:
        RefusedError: if a matrix holds NaN or infinity; its rows are listed.
    """
    header = {
        "version": FORMAT_VERSION,
        "tensors": {decision.name: _header_entry(decision) for decision in plan.decisions},
    }
    metadata = {"tieq": json.dumps(header, sort_keys=True)}
    # An entry of the header for each tensor, of which a matrix has up to two and a row band three.
    names = [name for d in plan.decisions for name in [d.name] * (2 + 3 * len(d.bands))] + floats
    room = 2 * len(metadata["tieq"]) + sum(len(json.dumps(name)) + _ENTRY_BYTES for name in names)
    with TensorFile(path, room) as file:
        work = _Work(source, statistics, logits, file)
        for decision in plan.tables:
            work.do_table(decision)
        if body is not None and any(decision.role == "body" for decision in plan.decisions):
            _solve_in_order(work, plan, body)
        # What no decoder layer holds, or all of the body.
        rest = [decision for decision in plan.decisions if decision.name not in work.done]
        if rest:
            with counter("body", sum(d.rows * d.columns for d in rest) // 1_000_000 or 1, "million weights") as advance:
                ready = 0
                for decision, weights in zip(rest, ahead(work.read, rest), strict=True):
                    work.do_body(decision, weights)
                    ready += decision.rows * decision.columns
                    advance(ready // 1_000_000)
                    ready %= 1_000_000
        for name in floats:
            values = np.ascontiguousarray(source.read(name))
            refuse_bad_rows(name, values.reshape(len(values), -1))
            file.add(name, values)
        file.close(metadata)


class _Work:
    """Encodes matrices one by one and writes the result."""

    def __init__(self, source: ModelSource, statistics: Statistics | None, logits: str, file: TensorFile) -> None:
        self._source, self._statistics, self._logits, self._file = source, statistics, logits, file
        self.done: set[str] = set()
        self.stored_lookup: Tensors = {}

    def read(self, decision: Decision) -> NDArray[np.float32]:
        """Weights ``[rows, columns]`` of the source, refused where they are not finite."""
        values = self._source.read(decision.stored)
        weights = np.ascontiguousarray(values.T if decision.transposed else values)
        refuse_bad_rows(decision.name, weights)
        return weights

    def do_table(self, decision: Decision) -> None:
        """Quantize a table as the source has it, under the calibration statistics, with its row bands."""
        known, importance, weights = self._statistics, self._importance(decision), self.read(decision)
        with counter(f"{decision.role} ({decision.scheme})", decision.rows, "rows") as advance:
            made = self.encode(decision, weights, importance, advance)
        if decision.bands:
            for name, values in encode_bands(decision, weights, decode(decision, made), known, importance).items():
                self._file.add(name, values)
        if decision.role in ("table", "lookup"):
            self.stored_lookup = made

    def do_body(self, decision: Decision, weights: NDArray[np.float32]) -> None:
        """Quantize a matrix of the body, read already, under the calibration statistics."""
        self.encode(decision, weights, self._importance(decision))

    def _importance(self, decision: Decision) -> NDArray[np.float32] | None:
        known = self._statistics
        return known.importance(decision.name, decision.role, self._logits) if known else None

    def encode(
        self,
        decision: Decision,
        weights: NDArray[np.float32],
        importance: NDArray[np.float32] | None,
        advance: Callable[[int], None] = lambda rows: None,
    ) -> Tensors:
        """Quantize given weights; returns what is stored, without row bands."""
        made = encode(decision, weights, importance, advance)
        for name, values in made.items():
            self._file.add(name, values)
        self.done.add(decision.name)
        return made


def _solve_in_order(work: _Work, plan: Plan, body: BodyRun) -> None:
    planned = {decision.name: decision for decision in plan.decisions if decision.role == "body"}
    for decision in planned.values():
        work.read(decision)  # a bad row is refused under its own name, before it spoils every later input
    # One body serves all containers, so it is solved for the table without row bands, which all of them have.
    lookup = decode(plan.tables[0], work.stored_lookup)
    solve_body(
        body.model,
        body.ids,
        lookup,
        lambda name, weights, cost: decode(planned[name], work.encode(planned[name], weights, usable_importance(cost))),
    )


def _header_entry(decision: Decision) -> dict[str, Any]:
    entry: dict[str, Any] = {"scheme": decision.scheme, "rows": decision.rows, "columns": decision.columns}
    if decision.bands:
        entry["bands"] = [{"scheme": band.scheme, "rows": band.rows} for band in decision.bands]
    return entry


def refuse_bad_rows(name: str, weights: NDArray[np.float32]) -> None:
    """Refuse a matrix ``[rows, columns]`` that holds NaN or infinity.

    Raises:
        RefusedError: with the matrix's name and its bad rows.
    """
    pieces = (weights[start : start + _CHECKED_ROWS] for start in range(0, len(weights), _CHECKED_ROWS))
    bad = np.flatnonzero(np.concatenate([~np.isfinite(piece).all(axis=1) for piece in pieces]))
    if bad.size:
        shown = ", ".join(map(str, bad[:8])) + (" ..." if bad.size > 8 else "")
        raise RefusedError(
            f"{bad.size} rows hold NaN or infinity: {shown}.", where=name, todo="Repair the checkpoint first."
        )


class QuantizedCheckpoint:
    """Reads ``quantized.safetensors`` lazily.

    Raises:
        TieqError: if the file is not one of ours.
    """

    def __init__(self, path: Path) -> None:
        from safetensors import SafetensorError, safe_open

        self._path = str(path)
        try:
            with safe_open(self._path, framework="numpy") as file:
                header, names = json.loads(file.metadata()["tieq"]), list(file.keys())
            version = header["version"]
            self._schemes: dict[str, str] = {name: entry["scheme"] for name, entry in header["tensors"].items()}
            self._extents = {name: (entry["rows"], entry["columns"]) for name, entry in header["tensors"].items()}
            self._bands: dict[str, list[str]] = {
                name: [band["scheme"] for band in entry.get("bands", [])] for name, entry in header["tensors"].items()
            }
        except (SafetensorError, OSError, KeyError, TypeError, ValueError, AttributeError) as error:
            raise TieqError(f"is no quantized checkpoint ({error}).", where=str(path)) from error
        if version != FORMAT_VERSION:
            raise TieqError(f"has format version {version}, this tieq reads {FORMAT_VERSION}.", where=str(path))
        suffixes = (".codes", ".scales", ".ggml")
        rows = {f"{band_prefix(name, k)}.rows" for name, bands in self._bands.items() for k in range(len(bands))}
        others = rows.union(self._schemes)
        self.floats = [name for name in names if name not in others and not name.endswith(suffixes)]

    def _get(self, name: str) -> NDArray[Any]:
        from safetensors import safe_open

        # A new mapping each time: what an older one has touched would stay resident until the end.
        with safe_open(self._path, framework="numpy") as file:
            values: NDArray[Any] = file.get_tensor(name)
            return values

    @property
    def matrices(self) -> list[str]:
        """Names of the quantized matrices."""
        return list(self._schemes)

    def scheme(self, name: str) -> str:
        """Scheme of a quantized matrix."""
        return self._schemes[name]

    def extent(self, name: str) -> tuple[int, int]:
        """Rows and columns of a quantized matrix."""
        return self._extents[name]

    def codes(self, name: str) -> tuple[Codes, Scales]:
        """Codes ``[rows, blocks, block]`` and scales of an integer-scheme matrix."""
        packed, scales = self.packed(name)
        return unpack_codes(packed, SCHEMES[self._schemes[name]].bits), scales

    def packed(self, name: str) -> tuple[NDArray[np.uint8], Scales]:
        """Packed codes ``[rows, blocks, bytes]`` in ONNX bit order, and scales."""
        return self._get(f"{name}.codes"), self.scales(name)

    def scales(self, name: str) -> Scales:
        """Scales of an integer-scheme matrix."""
        return self._get(f"{name}.scales")

    def bands(self, name: str) -> tuple[Band, ...]:
        """Row bands of a table, the most worthwhile rows first; none for other matrices."""
        found = []
        for number, scheme in enumerate(self._bands[name]):
            prefix = band_prefix(name, number)
            rows, packed, scales = (self._get(f"{prefix}.{key}") for key in ("rows", "codes", "scales"))
            found.append(Band(scheme, rows, packed, scales))
        return tuple(found)

    def ggml_rows(self, name: str) -> NDArray[np.uint8]:
        """Rows of GGUF bytes ``[rows, row_bytes]``, whatever the scheme."""
        scheme = self._schemes[name]
        if scheme in SCHEMES:
            return SCHEMES[scheme].pack_gguf(*self.codes(name))
        if scheme == "f16":
            return np.ascontiguousarray(self.tensor(name)).view(np.uint8)
        rows: NDArray[np.uint8] = self._get(f"{name}.ggml")
        return rows

    def tensor(self, name: str) -> NDArray[Any]:
        """A float tensor, or the fp16 values of a matrix that was only cast."""
        values: NDArray[Any] = self._get(name)
        return values

    def decode(self, name: str) -> NDArray[np.float32]:
        """Dequantized values ``[rows, columns]`` of a matrix, without row bands."""
        scheme = self._schemes[name]
        if scheme in SCHEMES:
            return dequantize(*self.codes(name), SCHEMES[scheme])
        return ggml.decode(self.ggml_rows(name), scheme)

    def refined(self, name: str) -> NDArray[np.float32]:
        """Dequantized values ``[rows, columns]`` of a table with its row bands added."""
        values = self.decode(name)
        for band in self.bands(name):
            values[band.rows] += band.decode()
        return values
