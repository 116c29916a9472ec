"""Frozen records that travel between the stages. They hold facts and derive numbers; they read no files."""

from __future__ import annotations

import dataclasses
import enum
from typing import Any


class Role(str, enum.Enum):
    """What a vocabulary table is used for."""

    LOOKUP = "lookup"
    LOGITS = "logits"


class Verdict(str, enum.Enum):
    """How the lookup and the logits role are stored."""

    SHARED = "shared"
    EQUAL_COPIES = "stored twice, equal"
    TWO_PRECISIONS = "stored twice, one matrix in two precisions"
    DIFFERENT = "stored twice, different"
    HEAD_MISSING = "head missing"
    LOOKUP_MISSING = "lookup missing"


@dataclasses.dataclass(frozen=True)
class TensorInfo:
    """A stored tensor: name, shape (row-major), storage type in the container's own words, and bytes."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int

    @property
    def parameters(self) -> int:
        """Number of elements."""
        count = 1
        for extent in self.shape:
            count *= extent
        return count


@dataclasses.dataclass(frozen=True)
class RoleUse:
    """One role of the table: the stored tensor that plays it and what the model does around it.

    ``multiplier`` scales the looked-up row (lookup) or the logits (logits); ``softcap`` bounds the logits as
    ``cap * tanh(z / cap)``; ``bias`` tells whether a bias is added to the logits.
    """

    role: Role
    tensor: str | None
    multiplier: float = 1.0
    softcap: float | None = None
    bias: bool = False


@dataclasses.dataclass(frozen=True)
class CopyDifference:
    """How two stored copies of a table differ: rows that differ, largest absolute and relative RMS difference."""

    rows: int
    max_abs: float
    relative_rms: float


@dataclasses.dataclass(frozen=True)
class TieGraph:
    """Which stored tensors play ``lookup`` and ``logits``, and what the flag and the tokenizer say about it.

    ``flag`` is ``tie_word_embeddings`` as stored (None when absent); ``flag_default`` is what the architecture
    assumes when it is absent. ``tied`` says whether an export shares one table.
    """

    verdict: Verdict
    lookup: RoleUse
    logits: RoleUse
    rows: int
    columns: int
    flag: bool | None
    flag_default: bool
    tied: bool
    difference: CopyDifference | None = None
    tokenizer_ids: int | None = None
    notes: tuple[str, ...] = ()

    @property
    def table(self) -> str:
        """Stored name of the tensor that holds the lookup table (the head's, where only that is stored)."""
        name = self.lookup.tensor or self.logits.tensor
        assert name is not None
        return name

    def to_json(self) -> dict[str, Any]:
        """Plain dictionary for ``tie_graph.json``."""
        return dataclasses.asdict(self)


@dataclasses.dataclass(frozen=True)
class TieArithmetic:
    """The arithmetic of tying, in parameters."""

    table: int
    body: int

    @property
    def tied_total(self) -> int:
        """Parameters when one table plays both roles."""
        return self.table + self.body

    @property
    def untied_total(self) -> int:
        """Parameters when each role has a table of its own."""
        return 2 * self.table + self.body

    @property
    def saved_share(self) -> float:
        """Share of the untied total that tying saves."""
        return self.table / self.untied_total


@dataclasses.dataclass(frozen=True)
class Matrix:
    """A weight matrix as it multiplies: ``rows`` outputs by ``columns`` inputs.

    ``transposed`` tells that the checkpoint stores it as ``[columns, rows]`` (GPT-2's Conv1D).
    """

    name: str
    rows: int
    columns: int
    transposed: bool = False


@dataclasses.dataclass(frozen=True)
class BandDecision:
    """A row band of a table: its share of the rows as wished, scheme of the residuals, number of rows.

    ``nbytes`` counts codes, fp16 scales and row numbers; ``onnx_bytes`` what an ONNX file adds: codes, fp16 scales,
    the row map of the lookup and the columns of the logits.
    """

    share: float
    scheme: str
    rows: int
    nbytes: int
    onnx_bytes: int


@dataclasses.dataclass(frozen=True)
class Decision:
    """The precision of one matrix: scheme, solver, stored bits per weight, and why.

    ``name`` is the model's own name for the matrix, ``stored`` the source tensor that its values are read from.
    ``positive`` leaves negative scales out, for a container whose kernels take none.
    """

    name: str
    stored: str
    role: str
    rows: int
    columns: int
    scheme: str
    solver: str
    bits_per_weight: float
    reason: str
    transposed: bool = False
    bands: tuple[BandDecision, ...] = ()
    positive: bool = False

    @property
    def total_bits_per_weight(self) -> float:
        """Stored bits per weight of the table, row bands included, fp16 scales."""
        return self.bits_per_weight + 8 * sum(band.nbytes for band in self.bands) / (self.rows * self.columns)


@dataclasses.dataclass(frozen=True)
class Payload:
    """Bytes in a container that hold a vocabulary table, or a row band of one: where they are and who reads them.

    ``names`` are the tensors or initializers that name these bytes; ``readers`` the operators or roles that
    use them; ``bits_per_weight`` the stored bits per weight of the table including scales, in a band what it adds for
    each weight of the whole table. ``band_rows`` are the rows that a band refines, None for a table; ``flaw`` says
    where the roles do not read the payload alike; ``scales`` where the scales are, if elsewhere.
    """

    names: tuple[str, ...]
    location: str
    nbytes: int
    scheme: str
    bits_per_weight: float
    readers: tuple[str, ...]
    band_rows: int | None = None
    flaw: str = ""
    scales: str = ""


@dataclasses.dataclass(frozen=True)
class Check:
    """One gate: what was measured, against which bound, and whether it holds.

    ``undecided`` tells that the bound lies within two standard errors of what was measured.
    """

    name: str
    subject: str
    value: float | int | str
    bound: str
    passed: bool
    detail: str = ""
    undecided: bool = False
