"""Two exports of the same input are the same bytes, and a second export leaves nothing of the first."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import tiny

from tieq.errors import RefusedError
from tieq.pipeline import export


def digests(folder: Path) -> dict[str, str]:
    """SHA-256 of every file by path."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_two_exports_are_byte_identical(family, tiny_checkpoint, tiny_export, tmp_path):
    first = digests(tiny_export(family).folder)
    again = export(str(tiny_checkpoint(family)), tiny.recipe(), tmp_path / "again")
    assert digests(again.folder) == first
    assert "onnx/model.onnx_data" in first


def test_a_second_export_into_the_same_folder_leaves_no_stale_bytes(tiny_checkpoint, tmp_path):
    out = tmp_path / "artifact"
    export(str(tiny_checkpoint()), tiny.recipe(8), out, ("gguf", "onnx"))
    (out / "onnx" / "own-notes.txt").write_text("precious")
    with pytest.raises(RefusedError, match=r"not the earlier artifact's, first 'onnx/own-notes\.txt'"):
        export(str(tiny_checkpoint()), tiny.recipe(4), out, ("gguf",))
    (out / "onnx" / "own-notes.txt").unlink()
    export(str(tiny_checkpoint()), tiny.recipe(4), out, ("gguf",))
    assert not (out / "onnx").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["artifact"]


def test_a_failing_export_keeps_what_was_there(tiny_checkpoint, tmp_path, monkeypatch):
    out = tmp_path / "artifact"
    export(str(tiny_checkpoint()), tiny.recipe(8), out, ("gguf",))
    before = digests(out)

    def broken(*arguments: object, **options: object) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr("tieq.export.gguf.write_gguf", broken)
    with pytest.raises(OSError, match="No space left"):
        export(str(tiny_checkpoint()), tiny.recipe(4), out, ("gguf",))
    assert digests(out) == before
    assert [path.name for path in tmp_path.iterdir()] == ["artifact"]
