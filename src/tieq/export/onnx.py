"""Write the ONNX container: float graph from optimum, quantized operators, one data file, tokenizer and config."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from tieq.export.onnx_graph import export_float_graph
from tieq.progress import stage
from tieq.quantize import QuantizedCheckpoint
from tieq.source.reference import ReferenceModel

MODEL, DATA = "model.onnx", "model.onnx.data"
_SIDE_FILES = ("config.json", "generation_config.json")
_INLINE_BYTES = 16384


def write_onnx(
    model: ReferenceModel,
    checkpoint: QuantizedCheckpoint,
    folder: Path,
    *,
    lookup: str,
    logits: str,
    tied: bool,
    accuracy_level: int,
) -> Path:
    """Write ``model.onnx`` and ``model.onnx.data`` into ``folder``.

    Args:
        model: the float reference, for the graph only.
        checkpoint: what was quantized.
        folder: an existing folder.
        lookup: parameter name of the lookup table in the model.
        logits: parameter name of the logits matrix in the model.
        tied: whether the lookup table plays the logits role too.
        accuracy_level: see :class:`tieq.export.onnx_surgery.Surgeon`.

    Returns:
        The path of the model file.
    """
    import onnx_ir as ir
    from onnx_ir.passes import common

    from tieq.export.onnx_data import DataFile
    from tieq.export.onnx_surgery import Surgeon

    target = folder / MODEL
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        with stage("ONNX: float graph (optimum)"):
            export_float_graph(model, Path(scratch), checkpoint.matrices)
        with stage("ONNX: quantized operators"), (folder / DATA).open("wb") as file:
            graph_model = ir.load(Path(scratch) / MODEL)
            graph_model.graph.opset_imports["com.microsoft"] = 1
            data = DataFile(file, folder / DATA, graph_model.graph)
            surgeon = Surgeon(
                graph_model,
                checkpoint,
                data,
                lookup=lookup,
                logits=logits,
                tied=tied,
                accuracy_level=accuracy_level,
            )
            surgeon.operate()
            common.RemoveUnusedNodesPass()(graph_model)
            common.CommonSubexpressionEliminationPass()(graph_model)
            data.move_out(_INLINE_BYTES)
            _clean(graph_model)
            file.flush()
            ir.save(graph_model, target)
        for name in _SIDE_FILES:
            if (Path(scratch) / name).exists():
                shutil.copy(Path(scratch) / name, folder / name)
    return target


def _clean(model: object) -> None:
    """Drop what would differ between machines or runs: tracer's source lines in node metadata."""
    for node in model.graph:  # type: ignore[attr-defined]
        node.metadata_props.clear()
        node.doc_string = None
