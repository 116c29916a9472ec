"""Write the ONNX container: a fused graph where the family is described, optimum's elsewhere; one data file."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tieq.artifact import GENERATION_GRAPH
from tieq.errors import RefusedError
from tieq.export import genai
from tieq.export.onnx_graph import export_float_graph
from tieq.progress import stage
from tieq.quantize import QuantizedCheckpoint
from tieq.source.decoder import Decoder, decoder
from tieq.source.reference import ReferenceModel, model_documents

if TYPE_CHECKING:
    import onnx_ir as ir

    from tieq.export.onnx_data import DataFile

# The names that optimum and Transformers.js look for.
MODEL, DATA = "model.onnx", "model.onnx_data"
_INLINE_BYTES = 16384
_IR_VERSION, _OPSET = 10, 21


def write_onnx(
    load: Callable[[], ReferenceModel],
    config: dict[str, Any],
    checkpoint: QuantizedCheckpoint,
    folder: Path,
    *,
    lookup: str,
    logits: str,
    tied: bool,
    accuracy_level: int,
    generation: dict[str, Any] | None = None,
) -> tuple[Path, str]:
    """Write ``model.onnx``, ``model.onnx_data`` and the model's configuration into ``folder``.

    A fused graph has an optional input ``num_logits_to_keep``: how many of the last positions get logits, all where it
    is not given or 0. ``model_generate.onnx`` keeps one.

    Args:
        load: gives the float reference; called only for optimum's graph.
        config: the text model's Hugging Face configuration.
        checkpoint: what was quantized.
        folder: an existing folder.
        lookup: parameter name of the lookup table in the model.
        logits: parameter name of the logits matrix in the model.
        tied: whether the lookup table plays the logits role too.
        accuracy_level: see :class:`tieq.export.onnx_products.Products`.
        generation: the model's own ``generation_config.json``: a chat model ends turns with tokens that only it names.

    Returns:
        The path of the model file, and which graph it has: ``fused``, or ``optimum`` with the reason.
    """
    import onnx_ir as ir
    from onnx_ir.passes import common

    from tieq.export.onnx_data import DataFile
    from tieq.export.onnx_decoder import DecoderGraph
    from tieq.export.onnx_nodes import Nodes
    from tieq.export.onnx_products import Products
    from tieq.export.onnx_surgery import Surgeon

    described, kind = _described(config, checkpoint)
    with tempfile.TemporaryDirectory(dir=folder) as scratch, (folder / DATA).open("wb") as file:
        if described is None:
            with stage("ONNX: float graph (optimum)"):
                export_float_graph(load(), Path(scratch), checkpoint.matrices)
            model = ir.load(Path(scratch) / MODEL)
            with stage("ONNX: quantized operators"):
                data = DataFile(file, folder / DATA, model.graph)
                model.graph.opset_imports["com.microsoft"] = 1
                products = Products(data, checkpoint, accuracy_level)
                Surgeon(model, checkpoint, products, lookup=lookup, logits=logits, tied=tied).operate()
                common.RemoveUnusedNodesPass()(model)
                common.CommonSubexpressionEliminationPass()(model)
                _save(model, data, folder / MODEL)
        else:
            with stage("ONNX: fused graph"):
                data = None
                for name in (MODEL, GENERATION_GRAPH):
                    model = _empty_model()
                    data = DataFile(file, folder / DATA, model.graph, beside=data)
                    DecoderGraph(
                        described,
                        Nodes(model.graph),
                        Products(data, checkpoint, accuracy_level),
                        checkpoint,
                        lookup=lookup,
                        logits=logits,
                        tied=tied,
                        generate=name == GENERATION_GRAPH,
                    ).build(int(config["vocab_size"]), genai.context_length(config))
                    _save(model, data, folder / name)
    documents = model_documents(config)
    settings = {"dtype": "fp32", "use_external_data_format": {MODEL: 1}}
    documents["config.json"] = with_settings(documents["config.json"], settings)
    if generation is not None:
        documents["generation_config.json"] = json.dumps(generation, indent=2) + "\n"
    if described is not None:
        own = json.loads(documents["generation_config.json"])
        found = genai.genai_config(described, config, own, GENERATION_GRAPH)
        documents[genai.FILE] = json.dumps(found, indent=2) + "\n"
    for name, content in documents.items():
        (folder / name).write_text(content, encoding="utf-8")
    return folder / MODEL, kind


def with_settings(config: str, settings: dict[str, Any]) -> str:
    """A configuration with what Transformers.js wants to know about the files: no suffix, data beside the model."""
    return json.dumps({**json.loads(config), "transformers.js_config": settings}, indent=2, sort_keys=True) + "\n"


def _described(config: dict[str, Any], checkpoint: QuantizedCheckpoint) -> tuple[Decoder | None, str]:
    """The record that the fused graph is built from; without one, the reason."""
    try:
        return decoder(config, {*checkpoint.matrices, *checkpoint.floats}), "fused"
    except RefusedError as error:
        return None, f"optimum ({error.what})"


def _empty_model() -> ir.Model:
    import onnx_ir as ir

    imports = {"": _OPSET, "com.microsoft": 1}
    graph = ir.Graph([], [], nodes=[], opset_imports=imports, name="decoder")
    return ir.Model(graph, ir_version=_IR_VERSION, producer_name="tieq")


def _save(model: ir.Model, data: DataFile, target: Path) -> None:
    """Move what is large into the data file and write the model, without what would differ between machines or runs."""
    import onnx_ir as ir

    data.move_out(_INLINE_BYTES)
    for node in model.graph:
        node.metadata_props.clear()
        node.doc_string = None
    data.file.flush()
    ir.save(model, target)
