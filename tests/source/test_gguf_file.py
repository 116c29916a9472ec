from __future__ import annotations

import struct
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from tieq.codecs import ggml
from tieq.errors import TieqError
from tieq.source.gguf_file import GgufFile

Kind = gguf.GGUFValueType
Maker = Callable[..., Path]
UINT32, STRING, ARRAY = 4, 8, 9
F32, Q4_0 = 0, 2


# A GGUF file by hand, for what no writer would write.


def text(value: str | bytes) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(data)) + data


def header(tensors: int = 0, values: int = 0, *, version: int = 3, magic: bytes = b"GGUF") -> bytes:
    return magic + struct.pack("<IQQ", version, tensors, values)


def pair(key: str, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def entry(name: str, extents: list[int], kind: int = F32, offset: int = 0) -> bytes:
    """A directory entry; ``extents`` in ggml's order, the row length first."""
    return text(name) + struct.pack(f"<I{len(extents)}QIQ", len(extents), *extents, kind, offset)


def aligned(directory: bytes, data: bytes) -> bytes:
    return directory + bytes(-len(directory) % 32) + data


@pytest.fixture
def opened(tmp_path: Path) -> Callable[[bytes], GgufFile]:
    def open_bytes(content: bytes) -> GgufFile:
        path = tmp_path / "by-hand.gguf"
        path.write_bytes(content)
        return GgufFile(path)

    return open_bytes


@pytest.fixture
def refused(opened: Callable[[bytes], GgufFile]) -> Callable[..., None]:
    """Expect a refusal, quickly and without memory for what the file claims."""

    def expect(content: bytes, match: str) -> None:
        tracemalloc.start()
        start = time.monotonic()
        try:
            with pytest.raises(TieqError, match=match):
                opened(content)
            # The files here have under 1 kB. A megabyte and a second are far above what reading them takes and
            # far below what the smallest false claim (2**40) would.
            assert tracemalloc.get_traced_memory()[1] < 1_000_000
            assert time.monotonic() - start < 1.0
        finally:
            tracemalloc.stop()

    return expect


SCALARS: dict[str, tuple[Any, Kind]] = {
    "u8": (255, Kind.UINT8),
    "i8": (-128, Kind.INT8),
    "u16": (65535, Kind.UINT16),
    "i16": (-32768, Kind.INT16),
    "u32": (2**32 - 1, Kind.UINT32),
    "i32": (-(2**31), Kind.INT32),
    "u64": (2**64 - 1, Kind.UINT64),
    "i64": (-(2**63), Kind.INT64),
    "f32": (1.5, Kind.FLOAT32),
    "f64": (-1e300, Kind.FLOAT64),
    "true": (True, Kind.BOOL),
    "false": (False, Kind.BOOL),
    "string": ("für 日本 😀\n", Kind.STRING),
    "empty": ("", Kind.STRING),
}


@pytest.mark.parametrize("name", SCALARS)
def test_every_metadata_type_is_read_as_written(name: str, gguf_file: Maker) -> None:
    value, kind = SCALARS[name]
    found = GgufFile(gguf_file(metadata={"x.before": 1, "x.key": (value, kind), "x.after": "end"}))
    assert found.metadata["x.key"].value == value
    assert type(found.metadata["x.key"].value) is type(value)
    assert (found.metadata["x.key"].kind, found.metadata["x.key"].element_kind) == (int(kind), None)
    assert list(found.metadata) == ["general.architecture", "x.before", "x.key", "x.after"]
    assert found.get("x.after") == "end"


@pytest.mark.parametrize("name", SCALARS)
def test_every_array_type_is_read_as_written(name: str, gguf_file: Maker) -> None:
    value, kind = SCALARS[name]
    other = "b" if kind is Kind.STRING else (not value if kind is Kind.BOOL else 1)
    array = [value, other, value]
    found = GgufFile(gguf_file(metadata={"x.key": (array, Kind.ARRAY, kind), "x.after": 7}))
    assert found.get("x.key") == array
    assert (found.metadata["x.key"].kind, found.metadata["x.key"].element_kind) == (ARRAY, int(kind))
    assert found.get("x.after") == 7


def test_empty_arrays_are_read(opened: Callable[[bytes], GgufFile]) -> None:
    empty = struct.pack("<IQ", UINT32, 0)
    strings = struct.pack("<IQ", STRING, 0)
    found = opened(header(0, 2) + pair("a", ARRAY, empty) + pair("b", ARRAY, strings))
    assert (found.get("a"), found.get("b"), found.get("c", 5)) == ([], [], 5)


@pytest.mark.parametrize("alignment", [None, 8, 64, 4096])
def test_tensors_of_several_types_are_read_whatever_the_alignment(alignment: int | None, gguf_file: Maker) -> None:
    random = np.random.default_rng(0)
    weights = random.standard_normal((6, 64)).astype(np.float32)
    kinds = ["f32", "f16", "bf16", "q4_0", "q8_0", "q5_1"]
    tensors = {f"t.{kind}": (weights, kind) for kind in kinds}
    tensors["vector"] = (random.standard_normal(5), "f32")
    tensors["cube"] = (random.standard_normal((2, 3, 4)), "f32")
    found = GgufFile(gguf_file(tensors, alignment=alignment))
    assert list(found.tensors) == list(tensors)
    for kind in kinds:
        expected = ggml.decode(ggml.encode(weights, kind), kind) if kind != "f32" else weights
        assert np.array_equal(found.read(f"t.{kind}"), expected)
        assert np.array_equal(found.read(f"t.{kind}", slice(2, 4)), expected[2:4])
        info = found.tensors[f"t.{kind}"].info
        assert (info.shape, info.dtype) == ((6, 64), kind.upper())
        assert info.nbytes == 6 * 64 * ggml.bits_per_weight(kind) / 8
    assert np.array_equal(found.read("vector"), tensors["vector"][0].astype(np.float32))
    assert np.array_equal(found.read("cube"), tensors["cube"][0].astype(np.float32))
    assert found.architecture == "llama"


def test_the_reader_agrees_with_gguf_py(gguf_file: Maker) -> None:
    weights = np.random.default_rng(1).standard_normal((4, 256)).astype(np.float32)
    path = gguf_file({"a": (weights, "q6_k"), "b": (weights, "q4_k")}, {"x.list": [1.5, 2.5], "x.text": "ä"})
    mine, theirs = GgufFile(path), gguf.GGUFReader(path)
    for tensor in theirs.tensors:
        assert np.array_equal(mine.raw(tensor.name), tensor.data)
        assert mine.tensors[tensor.name].info.nbytes == tensor.n_bytes
        assert mine.tensors[tensor.name].offset == tensor.data_offset
    for key in ("x.list", "x.text"):
        assert mine.get(key) == theirs.fields[key].contents()


def test_version_2_is_read(gguf_file: Maker, tmp_path: Path) -> None:
    path = gguf_file({"t": (np.ones((2, 32)), "f32")})
    content = bytearray(path.read_bytes())
    content[4] = 2
    path.write_bytes(content)
    assert GgufFile(path).read("t").sum() == 64


def test_a_file_cut_anywhere_is_refused(gguf_file: Maker, tmp_path: Path) -> None:
    weights = np.ones((4, 32))
    whole = gguf_file(
        {"a": (weights, "q8_0"), "b": (weights[:1], "f32")},
        {"x.text": "word", "x.list": ["a", "bc"], "x.numbers": [1, 2, 3]},
    )
    content = whole.read_bytes()
    tensor = GgufFile(whole).tensors["b"]
    end = tensor.offset + tensor.info.nbytes  # what follows is padding
    cut = tmp_path / "cut.gguf"
    for length in range(end):
        cut.write_bytes(content[:length])
        with pytest.raises(TieqError, match=r"cut\.gguf: "):
            GgufFile(cut)
    cut.write_bytes(content[:end])
    assert GgufFile(cut).read("b").sum() == 32


def damaged(content: bytes, length: int) -> list[bytes]:
    """Each of the first ``length`` bytes of a file replaced by several others."""
    made = []
    for position, byte in enumerate(content[:length]):
        others = {0, 1, 0x7F, 0x80, 0xFF, byte ^ 1, byte ^ 0x80} - {byte}
        made += [content[:position] + bytes([value]) + content[position + 1 :] for value in others]
    return made


def test_a_file_with_any_one_byte_damaged_is_read_or_refused(opened: Callable[[bytes], GgufFile]) -> None:
    directory = (
        header(2, 3)
        + pair("general.alignment", UINT32, struct.pack("<I", 32))
        + pair("s", STRING, text("word"))
        + pair("a", ARRAY, struct.pack("<IQ", STRING, 1) + text("x"))
        + entry("m", [8, 2], F32, 0)
        + entry("q", [32, 2], Q4_0, 64)
    )
    content = aligned(directory, bytes(64 + 36))
    assert opened(content).read("q").shape == (2, 32)
    for bad in damaged(content, len(directory)):
        try:
            found = opened(bad)
            values = {name: found.read(name) for name in found.tensors}
        except TieqError:
            continue
        for name, tensor in found.tensors.items():
            assert values[name].shape == tensor.info.shape


HUGE = 2**60


@pytest.mark.parametrize(
    ("content", "match"),
    [
        (b"", "too short"),
        (b"GGUF", "too short"),
        (header(magic=b"PK\3\4"), "not a little-endian GGUF"),
        (header(magic=b"FUGG"), "not a little-endian GGUF"),
        (header(version=1), "version 1"),
        (header(version=4), "version 4"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "version 50331648"),
        (header(HUGE, 0), "asks for"),
        (header(2**64 - 1, 0), "asks for"),
        (header(0, HUGE), "asks for"),
        (header(0, 2**64 - 1), "asks for"),
        (header(0, 1) + struct.pack("<Q", 2**63) + b"key", "asks for 9223372036854775808 bytes"),
        (header(0, 1) + struct.pack("<Q", 2**64 - 1) + b"key", "asks for"),
        (header(0, 1) + pair("k", STRING, struct.pack("<Q", 2**63)), "asks for"),
        (header(0, 1) + pair("k", ARRAY, struct.pack("<IQ", UINT32, 2**62)), "asks for"),
        (header(0, 1) + pair("k", ARRAY, struct.pack("<IQ", UINT32, 2**64 - 1)), "asks for"),
        (header(0, 1) + pair("k", ARRAY, struct.pack("<IQ", STRING, 2**40)), "array of 1099511627776 elements"),
        (header(0, 1) + pair("k", ARRAY, struct.pack("<IQ", 77, 1)), "elements of type 77"),
        (header(0, 1) + pair("k", 13, b""), "unknown value type 13"),
        (header(0, 1) + pair("k", 2**32 - 1, b""), "unknown value type"),
        (header(0, 2) + pair("k", UINT32, b"1234") * 2, "'k' appears twice"),
        (aligned(header(2, 0) + entry("t", [8]) * 2, bytes(64)), "'t' appears twice"),
        (aligned(header(1, 0) + entry("t", [8], 9999), bytes(64)), "unknown ggml type 9999"),
        (aligned(header(1, 0) + entry("t", [8], 4), bytes(64)), "unknown ggml type 4"),
        (aligned(header(1, 0) + entry("t", []), bytes(64)), "is empty"),
        (aligned(header(1, 0) + entry("t", [0]), bytes(64)), "is empty"),
        (aligned(header(1, 0) + entry("t", [8, 0]), bytes(64)), "is empty"),
        (aligned(header(1, 0) + entry("t", [0, 8]), bytes(64)), "is empty"),
        (aligned(header(1, 0) + entry("t", [1] * 5), bytes(64)), "5 dimensions"),
        (header(1, 0) + text("t") + struct.pack("<I", 2**32 - 1), "4294967295 dimensions"),
        (aligned(header(1, 0) + entry("t", [2**63]), bytes(64)), "needs bytes"),
        (aligned(header(1, 0) + entry("t", [2**64 - 1] * 4), bytes(64)), "needs bytes"),
        (aligned(header(1, 0) + entry("t", [2**32, 2**32]), bytes(64)), "needs bytes"),
        (aligned(header(1, 0) + entry("t", [8], F32, 2**64 - 32), bytes(64)), "needs bytes"),
        (aligned(header(1, 0) + entry("t", [8], F32, 2**63), bytes(64)), "needs bytes"),
        (aligned(header(1, 0) + entry("t", [17]), bytes(64)), "needs bytes"),
        (header(0, 1) + pair("general.alignment", UINT32, struct.pack("<I", 0)), "alignment 0"),
        (header(0, 1) + pair("general.alignment", UINT32, struct.pack("<I", 48)), "alignment 48"),
        (header(0, 1) + pair("general.alignment", 5, struct.pack("<i", -32)), "alignment -32"),
        (
            header(1, 1) + pair("general.alignment", 10, struct.pack("<Q", 2**63)) + entry("t", [8]) + bytes(64),
            "needs bytes",
        ),
    ],
)
def test_hostile_claims_are_refused_at_once(content: bytes, match: str, refused: Callable[..., None]) -> None:
    refused(content, match)


@pytest.mark.parametrize(
    "value",
    [
        pair("general.alignment", STRING, text("32k")),
        pair("general.alignment", 6, struct.pack("<f", float("nan"))),
        pair("general.alignment", 6, struct.pack("<f", float("inf"))),
        pair("general.alignment", ARRAY, struct.pack("<IQI", UINT32, 1, 32)),
    ],
    ids=["string", "nan", "infinity", "array"],
)
def test_an_alignment_that_is_no_integer_is_refused(value: bytes, refused: Callable[..., None]) -> None:
    refused(header(0, 1) + value, "alignment")


@pytest.mark.parametrize("extents", [[33], [16], [16, 2], [48, 2]])
def test_rows_that_end_inside_a_block_are_refused(extents: list[int], opened: Callable[[bytes], GgufFile]) -> None:
    content = aligned(header(1, 0) + entry("t", extents, Q4_0), bytes(200))
    with pytest.raises(TieqError):
        opened(content)


def test_an_offset_off_the_alignment_is_refused(opened: Callable[[bytes], GgufFile]) -> None:
    with pytest.raises(TieqError):
        opened(aligned(header(1, 0) + entry("t", [4], F32, 3), bytes(64)))


def test_names_and_strings_that_are_no_utf8_do_not_raise(opened: Callable[[bytes], GgufFile]) -> None:
    directory = header(1, 1) + text(b"k\xff") + struct.pack("<I", STRING) + text(b"\xfe\x00") + entry("t", [8])
    found = opened(aligned(directory, bytes(32)))
    assert found.get("k\ufffd") == "\ufffd\x00"
    assert found.read("t").shape == (8,)


def test_reading_does_not_copy_the_file(gguf_file: Maker) -> None:
    path = gguf_file({"t": (np.zeros((4096, 256)), "f32")})
    tracemalloc.start()
    try:
        found = GgufFile(path)
        row = found.read("t", slice(100, 101))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert row.shape == (1, 256)
    assert peak < path.stat().st_size / 10  # 4 MB on disk, and one row of 1 kB was asked for
