"""The ORT container: what a reduced build of the runtime is told, and that the table stays single in it."""

from __future__ import annotations

import onnx

from tieq.export.ort import OPERATORS


def test_the_operator_list_names_every_operator_of_the_file_and_no_path(banded_export, tmp_path):
    from tieq.runtimes.onnxruntime import save_as_onnx

    folder = banded_export().folder / "ort"
    text = (folder / OPERATORS).read_text(encoding="utf-8")
    head, *lines = text.splitlines()
    assert head == "# Generated from model.ort"
    assert "/" not in text
    save_as_onnx(folder / "model.ort", tmp_path / "model.onnx")
    for node in onnx.load(str(tmp_path / "model.onnx")).graph.node:
        domain = node.domain or "ai.onnx"
        listed = [line for line in lines if line.startswith(f"{domain};")]
        assert any(node.op_type in line for line in listed), node.op_type
