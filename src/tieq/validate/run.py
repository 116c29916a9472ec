"""Validate container files: structure, equality between containers, runtimes, gates; the result is one document."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tieq.progress import say
from tieq.recipe import Gates
from tieq.records import Check
from tieq.text import Sequences
from tieq.validate.gates import equality_checks, generation_checks, measurement_checks, size_checks, structure_checks
from tieq.validate.kept import kept_checks
from tieq.validate.measure import Measurement, Reference, measure
from tieq.validate.structure import Structure, prove

# Times the text that a bound may ask for until it is decided.
_MORE = 4


def machine() -> str:
    """The processor and the number of its cores that can be used, by which decode rates are comparable."""
    name = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), name)
    return f"{name}, {os.cpu_count()} cores"


@dataclasses.dataclass(frozen=True)
class InputFile:
    """The file that the validated one was made from, looked at in the same way."""

    structure: Structure
    measurements: tuple[Measurement, ...]


@dataclasses.dataclass(frozen=True)
class Validation:
    """Everything that validation found."""

    structures: tuple[Structure, ...]
    measurements: tuple[Measurement, ...]
    checks: tuple[Check, ...]
    input: InputFile | None = None
    sequences: Sequences | None = None

    @property
    def passed(self) -> bool:
        """Whether every gate holds."""
        return all(check.passed for check in self.checks)

    def to_json(self) -> dict[str, Any]:
        """Plain dictionary for ``checks.json``."""
        copies = {check.subject: check.value for check in self.checks if check.name == "table copies"}
        found: dict[str, Any] = {
            "passed": self.passed,
            "checks": [dataclasses.asdict(check) for check in self.checks],
            "containers": [structure.to_json() for structure in self.structures],
            "runtimes": [
                {**dataclasses.asdict(measured), "table_copies": copies[measured.container]}
                for measured in self.measurements
            ],
        }
        if any(measured.decode_rate is not None for measured in self.measurements):
            found["machine"] = machine()
        if self.input is not None:
            found["input"] = {
                "container": self.input.structure.to_json(),
                "runtimes": [dataclasses.asdict(measured) for measured in self.input.measurements],
            }
        return found


def validate(
    files: list[Path],
    *,
    sequences: Sequences | None,
    allowed: NDArray[np.bool_] | None,
    reference: Reference | None,
    gates: Gates,
    wanted: list[str] | None = None,
    expect_tied: bool | None = None,
    input_file: Path | None = None,
    more: Callable[[int], Sequences] | None = None,
    decode: bool = False,
) -> Validation:
    """Prove the structure of each file, then run them.

    Args:
        files: container files of one model.
        sequences: tokens to run; None proves the structure only.
        allowed: ``[vocab]``, ids that count; None for all rows.
        reference: the float model's logits.
        gates: bounds.
        wanted: runtime names, None for those that take the files.
        expect_tied: whether one shared table is expected; None to judge from the file alone.
        input_file: the GGUF file whose body the one file is to have kept; it is run beside it for comparison.
        more: cuts that many sequences of the same text, for bounds that noise leaves undecided; None to leave it at
            ``sequences``.
        decode: whether the decode rate is measured too.
    """
    structures = [prove(path) for path in files]
    checks = [check for structure in structures for check in structure_checks(structure, expect_tied)]
    checks += [check for structure in structures for check in generation_checks(structure)]
    checks += [check for structure in structures for check in size_checks(structure, gates)]
    if len(structures) > 1:
        checks += equality_checks(structures)
    if input_file is not None:
        checks += kept_checks(input_file, files[0])
    measurements: list[Measurement] = []
    of_input: list[Measurement] = []
    if sequences is not None:
        mask = np.ones(structures[0].rows, dtype=bool) if allowed is None else allowed
        weights = {structure.path: "row bands" if structure.bands else "" for structure in structures}
        first = len(sequences.ids)
        while True:
            measurements, of_input = measure(
                files, sequences, mask, reference, wanted, input_file, weights, decode=decode
            )
            judged = [(item, check) for item in measurements for check in measurement_checks(item, gates)]
            unsettled = {check.subject for item, check in judged if check.undecided and item.tokens is None}
            # Slow runtimes would run shorter heads of more sequences, each time again.
            slow = any(item.tokens is not None for item in measurements)
            longer = None if more is None or slow or not unsettled else more(2 * len(sequences.ids))
            if longer is None or not len(sequences.ids) < len(longer.ids) <= _MORE * first:
                break
            say(f"within noise of a bound: {', '.join(sorted(unsettled))}; running {len(longer.ids)} sequences")
            sequences = longer
        checks += [check for _, check in judged]
    original = None if input_file is None else InputFile(prove(input_file), tuple(of_input))
    return Validation(tuple(structures), tuple(measurements), tuple(checks), original, sequences)
