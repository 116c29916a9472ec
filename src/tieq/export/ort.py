"""Write the ``.ort`` container (ONNX Runtime Mobile's format) from the ONNX one, with the table still single.

A default conversion doubles the table twice over: the two names over one range of bytes become two tensors, and a
Reshape between the operators' ranks is folded into a copy. Here the lookup reads the product's own tensor, block by
block (rank 3), only its scales are reshaped when it runs, and constant folding stays off.
Source: ONNX Runtime, "ORT model format".
"""

from __future__ import annotations

import logging
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from tieq.progress import stage

MODEL = "model.ort"
# What ONNX Runtime's build script takes as --include_ops_by_config, with --enable_reduced_operator_type_support.
OPERATORS = "required_operators_and_types.config"


def write_ort(onnx_file: Path, folder: Path) -> Path:
    """Convert ``onnx_file`` (as written by :func:`tieq.export.onnx.write_onnx`) to ``folder/model.ort``.

    Beside it goes the list of the operators and types that a reduced build of the runtime needs to run it.

    Returns:
        The path of the file.
    """
    import onnx
    import onnxruntime

    target = folder / MODEL
    with stage("ORT: convert"):
        model = onnx.load(str(onnx_file), load_external_data=False)
        _widen_scales(model.graph, onnx_file.parent)
        for node in [node for node in model.graph.node if node.op_type == "GatherBlockQuantized"]:
            _read_by_blocks(model.graph, node)
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        # The extended level is the highest whose result runs on any processor.
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
        options.optimized_model_filepath = str(target)
        options.add_session_config_entry("session.save_model_format", "ORT")
        # Beside the data file, because external locations are relative to the model.
        with tempfile.NamedTemporaryFile(dir=onnx_file.parent, suffix=".onnx") as edited:
            edited.write(model.SerializeToString())
            edited.flush()
            onnxruntime.InferenceSession(
                edited.name, options, providers=["CPUExecutionProvider"], disabled_optimizers=["ConstantFolding"]
            )
        _write_operators(target)
    return target


def _write_operators(model: Path) -> None:
    from onnxruntime.tools.ort_format_model.utils import create_config_from_models

    logging.getLogger("ort_format_model.utils").setLevel(logging.WARNING)  # it would tell on stderr
    listed = model.with_name(OPERATORS)
    create_config_from_models([model], listed, enable_type_reduction=True)
    # Its comment names the model by the path of this very run.
    lines = [line for line in listed.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
    listed.write_text("\n".join([f"# Generated from {model.name}", *lines]) + "\n", encoding="utf-8")


def _widen_scales(graph: Any, folder: Path) -> None:
    """Store scales in float32: with constant folding off, a Cast would run at every step."""
    from onnx import TensorProto, numpy_helper

    initializers = {tensor.name: tensor for tensor in graph.initializer}
    for node in [node for node in graph.node if node.op_type == "Cast" and node.input[0] in initializers]:
        stored = initializers[node.input[0]]
        if stored.data_type != TensorProto.FLOAT16 or not stored.name.endswith(".scales"):
            continue
        values = numpy_helper.to_array(stored, str(folder)).astype(np.float32)
        graph.initializer.remove(stored)
        graph.initializer.append(numpy_helper.from_array(values, stored.name))
        for reader in graph.node:
            for at, name in enumerate(reader.input):
                if name == node.output[0]:
                    reader.input[at] = stored.name
        graph.node.remove(node)


def _read_by_blocks(graph: Any, node: Any) -> None:
    """Let a lookup read the codes as ``[rows, blocks, bytes]``, the tensor that the product reads."""
    from onnx import helper, numpy_helper

    initializers = {tensor.name: tensor for tensor in graph.initializer}
    lookup_codes, ids, scales = node.input
    codes = lookup_codes.replace(".lookup_codes", ".codes")
    if codes not in initializers:  # untied: nothing else reads the lookup's bytes
        return
    rows, blocks = initializers[scales].dims
    constants = {
        f"{scales}.blocks": np.array([rows, blocks, 1], np.int64),
        f"{node.output[0]}.row": np.array([0, 0, -1], np.int64),
    }
    graph.initializer.extend(numpy_helper.from_array(value, name) for name, value in constants.items())
    scales_shape, row_shape = constants
    by_block = f"{node.output[0]}.by_block"
    options = {attribute.name: attribute.i for attribute in node.attribute} | {"quantize_axis": 2}
    made = [
        helper.make_node("Reshape", [scales, scales_shape], [f"{scales}.reshaped"], name=f"{scales}/Reshape"),
        helper.make_node(
            node.op_type, [codes, ids, f"{scales}.reshaped"], [by_block], name=node.name, domain=node.domain, **options
        ),
        helper.make_node("Reshape", [by_block, row_shape], list(node.output), name=f"{node.name}/Reshape"),
    ]
    at = list(graph.node).index(node)
    graph.node.remove(node)
    for offset, new in enumerate(made):
        graph.node.insert(at + offset, new)
    graph.initializer.remove(initializers[lookup_codes])
