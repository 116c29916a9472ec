"""The proof that a body was kept, on files that gguf-py wrote and that were then changed in one place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGUFReader

from tieq.records import Check
from tieq.validate.kept import kept_checks

VALUES = np.random.default_rng(0).standard_normal((5, 64)).astype(np.float32)
TENSORS = {"token_embd.weight": VALUES, "blk.0.a": 2 * VALUES, "blk.0.b": 3 * VALUES, "output.weight": VALUES}
METADATA = {"llama.one": 1, "llama.two": 2, "llama.three": 3}


def write(path: Path, tensors: dict[str, np.ndarray], metadata: dict[str, int]) -> Path:
    """A GGUF file of float32 tensors and unsigned metadata."""
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in metadata.items():
        writer.add_uint32(key, value)
    for name, values in tensors.items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def compared(tmp_path: Path, tensors: dict[str, np.ndarray], metadata: dict[str, Any] | None = None) -> list[Check]:
    """The checks of a file with these contents against the original."""
    original = write(tmp_path / "original.gguf", TENSORS, METADATA)
    return kept_checks(original, write(tmp_path / "new.gguf", tensors, METADATA if metadata is None else metadata))


def test_other_tables_are_no_difference(tmp_path):
    table = {"token_embd.weight": VALUES.astype(np.float16)}
    for tensors in ({**TENSORS, **table}, {k: v for k, v in {**TENSORS, **table}.items() if k != "output.weight"}):
        assert compared(tmp_path, tensors) == [
            Check("kept tensors", "gguf", "2 of 2 equal", "all, byte for byte", True),
            Check("kept metadata", "gguf", "4 of 4 equal", "all, byte for byte", True),
        ]


@pytest.mark.parametrize("chunk", [1 << 22, 100])
def test_a_single_byte_is_named_wherever_it_is(chunk, tmp_path, monkeypatch):
    monkeypatch.setattr("tieq.validate.kept._CHUNK_BYTES", chunk)
    original, path = (write(tmp_path / name, TENSORS, METADATA) for name in ("original.gguf", "new.gguf"))
    tensor = next(tensor for tensor in GGUFReader(path).tensors if tensor.name == "blk.0.b")
    untouched = path.read_bytes()
    for at in (0, 99, 100, VALUES.nbytes - 1):
        content = bytearray(untouched)
        content[tensor.data_offset + at] ^= 0x80
        path.write_bytes(content)
        tensors, metadata = kept_checks(original, path)
        assert (tensors.passed, tensors.value) == (False, "1 of 2 equal")
        assert tensors.detail == f"blk.0.b: byte {at} of {VALUES.nbytes} differs"
        assert metadata.passed


@pytest.mark.parametrize(
    ("tensors", "value", "detail"),
    [
        ({"blk.0.a": VALUES}, "0 of 2 equal", "blk.0.a: byte 2 of 1280 differs; blk.0.b: missing"),
        (
            {"blk.0.a": 2 * VALUES, "blk.0.b": VALUES.astype(np.float16)},
            "1 of 2 equal",
            "blk.0.b: f32 [5, 64] became f16 [5, 64]",
        ),
        (
            {"blk.0.a": 2 * VALUES, "blk.0.b": 3 * VALUES.reshape(10, 32)},
            "1 of 2 equal",
            "blk.0.b: f32 [5, 64] became f32 [10, 32]",
        ),
        (
            {"blk.0.a": 2 * VALUES, "blk.0.b": 3 * VALUES, "blk.0.c": VALUES},
            "2 of 2 equal",
            "blk.0.c: not in the input file",
        ),
        ({"blk.0.b": 3 * VALUES, "blk.0.a": 2 * VALUES}, "2 of 2 equal", "the tensors stand in another order"),
    ],
)
def test_what_became_of_a_tensor_is_said(tensors, value, detail, tmp_path):
    check, metadata = compared(tmp_path, {"token_embd.weight": VALUES, **tensors})
    assert (check.passed, check.value, check.detail) == (False, value, detail)
    assert metadata.passed


@pytest.mark.parametrize(
    ("metadata", "value", "detail"),
    [
        ({**METADATA, "llama.two": 7}, "3 of 4 equal", "llama.two: changed"),
        ({"llama.one": 1, "llama.two": 2}, "3 of 4 equal", "llama.three: missing"),
        ({**METADATA, "llama.four": 4}, "4 of 4 equal", "llama.four: not in the input file"),
        (dict(reversed(METADATA.items())), "4 of 4 equal", "the keys stand in another order"),
    ],
)
def test_what_became_of_the_metadata_is_said(metadata, value, detail, tmp_path):
    tensors, check = compared(tmp_path, TENSORS, metadata)
    assert tensors.passed
    assert (check.passed, check.value, check.detail) == (False, value, detail)


def test_a_value_that_no_longer_is_the_same_text_is_found_though_it_reads_alike(tmp_path):
    paths = []
    for name, text in (("original.gguf", b"caf\xe9"), ("new.gguf", b"caf\xea")):  # neither is UTF-8
        path = write(tmp_path / name, TENSORS, METADATA)
        path.write_bytes(path.read_bytes().replace(b"llama.one", b"llama" + text))
        paths.append(path)
    _, check = kept_checks(*paths)
    assert not check.passed


def test_another_format_version_is_a_difference(tmp_path):
    original, path = (write(tmp_path / name, TENSORS, METADATA) for name in ("original.gguf", "new.gguf"))
    content = bytearray(path.read_bytes())
    content[4] = 2
    path.write_bytes(content)
    _, check = kept_checks(original, path)
    assert check.detail == "format version 3 became 2"


def test_many_differences_are_counted_and_the_first_shown(tmp_path):
    original = write(tmp_path / "original.gguf", {f"blk.{i}": VALUES for i in range(12)}, METADATA)
    tensors, _ = kept_checks(original, write(tmp_path / "new.gguf", {"blk.0": VALUES}, METADATA))
    assert tensors.value == "1 of 12 equal"
    assert tensors.detail.endswith("blk.8: missing; and 3 more")
