"""Whether a GGUF file kept another one's body: every tensor but the vocabulary tables, and all metadata, by bytes.

Both files are opened here; nothing is taken from whoever wrote them.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from tieq.records import Check
from tieq.source.gguf_file import GgufFile
from tieq.validate.gguf_structure import TABLES

_CHUNK_BYTES = 1 << 22
_SHOWN = 8


def kept_checks(original: Path, path: Path) -> list[Check]:
    """Compare a file with the one whose body it is said to keep: one check for the tensors, one for the metadata.

    Args:
        original: the input file.
        path: the file that was made of it.

    Raises:
        TieqError: if either is no whole GGUF file.
    """
    before, after = GgufFile(original), GgufFile(path)
    expected = [name for name in before.tensors if name not in TABLES]
    changed = {name: found for name in expected if (found := _difference(before, after, name))}
    problems = [f"{name}: {found}" for name, found in changed.items()]
    problems += [f"{name}: not in the input file" for name in after.tensors if name not in before.tensors]
    if not problems and list(after.tensors) != [name for name in before.tensors if name in after.tensors]:
        problems = ["the tensors stand in another order"]
    tensors = _check("kept tensors", len(expected), len(changed), problems)

    wrong = [key for key in before.metadata if _entry(before, key) != _entry(after, key)]
    problems = [f"{key}: {'changed' if key in after.metadata else 'missing'}" for key in wrong]
    problems += [f"{key}: not in the input file" for key in after.metadata if key not in before.metadata]
    if not problems and list(after.metadata) != list(before.metadata):
        problems = ["the keys stand in another order"]
    if before.version != after.version:
        problems.append(f"format version {before.version} became {after.version}")
    return [tensors, _check("kept metadata", len(before.metadata), len(wrong), problems)]


def _check(name: str, count: int, changed: int, problems: list[str]) -> Check:
    shown = "; ".join(problems[:_SHOWN]) + (f"; and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else "")
    return Check(name, "gguf", f"{count - changed} of {count} equal", "all, byte for byte", not problems, shown)


def _entry(file: GgufFile, key: str) -> bytes | None:
    return file.raw_metadata(key) if key in file.metadata else None


def _difference(before: GgufFile, after: GgufFile, name: str) -> str:
    """How a tensor differs between the files, or nothing."""
    if name not in after.tensors:
        return "missing"
    old, new = before.tensors[name], after.tensors[name]
    if (old.info.shape, old.kind) != (new.info.shape, new.kind):
        return f"{old.kind} {list(old.info.shape)} became {new.kind} {list(new.info.shape)}"
    left, right = before.raw(name).reshape(-1), after.raw(name).reshape(-1)
    for start in range(0, left.size, _CHUNK_BYTES):
        piece = slice(start, start + _CHUNK_BYTES)
        unequal = left[piece] != right[piece]
        if unequal.any():
            return f"byte {start + int(np.argmax(unequal))} of {left.size} differs"
    return ""
