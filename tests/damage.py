"""Container files that are wrong in ways that a gate has to see: a doubled table, a wrong scale."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

FACTOR = np.float16(1.5)


def rewrite_gguf(path: Path, target: Path, edit: Callable[[dict[str, Any]], None]) -> Path:
    """Copy a GGUF file with gguf-py, its tensors edited as ``name -> (rows of bytes, type)``."""
    from gguf import GGUFReader, GGUFValueType, GGUFWriter

    reader = GGUFReader(path)
    tensors = {tensor.name: (np.array(tensor.data), tensor.tensor_type) for tensor in reader.tensors}
    edit(tensors)
    writer = GGUFWriter(target, reader.fields["general.architecture"].contents())
    for key, field in reader.fields.items():
        if key.startswith("GGUF.") or key == "general.architecture":
            continue
        element = field.types[1] if field.types[0] == GGUFValueType.ARRAY else None
        writer.add_key_value(key, field.contents(), field.types[0], sub_type=element)
    for name, (data, kind) in tensors.items():
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


def doubled_gguf(path: Path, target: Path) -> Path:
    """The table a second time, as the output tensor."""
    return rewrite_gguf(path, target, lambda tensors: tensors.update({"output.weight": tensors["token_embd.weight"]}))


def misscaled_gguf(path: Path, target: Path) -> Path:
    """Every scale of a Q4_0 table half as large again."""

    def edit(tensors: dict[str, Any]) -> None:
        data, kind = tensors["token_embd.weight"]
        blocks = data.reshape(-1, 18).copy()
        scales = blocks[:, :2].copy().view(np.float16) * FACTOR
        blocks[:, :2] = scales.view(np.uint8)
        tensors["token_embd.weight"] = (blocks.reshape(data.shape), kind)

    return rewrite_gguf(path, target, edit)


def doubled_onnx(path: Path, folder: Path) -> Path:
    """The lookup's codes a second time at the end of the data file."""

    def edit(tensors: dict[str, Any], data: Path) -> None:
        codes = next(tensor for name, tensor in tensors.items() if name.endswith("lookup_codes"))
        fields = {entry.key: entry for entry in codes.external_data}
        content = data.read_bytes()
        start, length = int(fields["offset"].value), int(fields["length"].value)
        end = -len(content) % 4096 + len(content)
        data.write_bytes(content.ljust(end, b"\0") + content[start : start + length])
        fields["offset"].value = str(end)

    return _rewrite_onnx(path, folder, edit)


def misscaled_onnx(path: Path, folder: Path) -> Path:
    """Every scale of the table half as large again."""

    def edit(tensors: dict[str, Any], data: Path) -> None:
        lookup = next(name for name in tensors if name.endswith("lookup_codes"))
        scales = tensors[lookup.replace("lookup_codes", "scales")]
        fields = {entry.key: int(entry.value) for entry in scales.external_data if entry.key != "location"}
        piece = slice(fields["offset"], fields["offset"] + fields["length"])
        content = bytearray(data.read_bytes())
        content[piece] = (np.frombuffer(bytes(content[piece]), np.float16) * FACTOR).tobytes()
        data.write_bytes(content)

    return _rewrite_onnx(path, folder, edit)


def _rewrite_onnx(path: Path, folder: Path, edit: Callable[[dict[str, Any], Path], None]) -> Path:
    import onnx

    shutil.copytree(path.parent, folder)
    (folder / "model_generate.onnx").unlink(missing_ok=True)
    model = onnx.load(str(folder / path.name), load_external_data=False)
    edit({tensor.name: tensor for tensor in model.graph.initializer}, folder / "model.onnx_data")
    onnx.save(model, str(folder / path.name))
    return folder / path.name


def doubled_ort(path: Path, target: Path) -> Path:
    """What a plain conversion of the ONNX file makes: codes for the lookup and codes for the logits."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    options.optimized_model_filepath = str(target)
    options.add_session_config_entry("session.save_model_format", "ORT")
    onnxruntime.InferenceSession(str(_onnx_beside(path)), options, providers=["CPUExecutionProvider"])
    return target


def misscaled_ort(path: Path, target: Path) -> Path:
    """The mis-scaled ONNX file, converted as an export does."""
    from tieq.export.ort import write_ort

    target.mkdir()
    return write_ort(misscaled_onnx(_onnx_beside(path), target / "onnx"), target)


def _onnx_beside(path: Path) -> Path:
    return path.parent.parent / "onnx" / "model.onnx"


def doubled_tflite(path: Path, target: Path) -> Path:
    """The lookup's codes and scales a second time, in buffers of their own."""

    def edit(model: Any, graph: Any, table: int) -> None:
        import copy

        def twin(number: int) -> int:
            made = copy.deepcopy(graph.tensors[number])
            made.name = f"{made.name.decode()}.twin"
            model.buffers.append(copy.copy(model.buffers[made.buffer]))
            made.buffer = len(model.buffers) - 1
            graph.tensors.append(made)
            return len(graph.tensors) - 1

        codes = twin(table)
        graph.tensors[codes].quantization.details.scales = twin(graph.tensors[table].quantization.details.scales)
        lookup = next(operator for operator in graph.operators if table in operator.inputs)
        lookup.inputs = [codes if index == table else int(index) for index in lookup.inputs]

    return _rewrite_tflite(path, target, edit)


def misscaled_tflite(path: Path, target: Path) -> Path:
    """Every scale of the table half as large again."""

    def edit(model: Any, graph: Any, table: int) -> None:
        buffer = model.buffers[graph.tensors[graph.tensors[table].quantization.details.scales].buffer]
        buffer.data = (np.array(buffer.data, np.uint8).view(np.float16) * FACTOR).view(np.uint8)

    return _rewrite_tflite(path, target, edit)


def _rewrite_tflite(path: Path, target: Path, edit: Callable[[Any, Any, int], None]) -> Path:
    import flatbuffers
    from ai_edge_litert import schema_py_generated as schema

    model = schema.ModelT.InitFromPackedBuf(path.read_bytes(), 0)
    graph = model.subgraphs[0]
    table = next(at for at, tensor in enumerate(graph.tensors) if tensor.name == b"model.embed_tokens.weight")
    edit(model, graph, table)
    builder = flatbuffers.Builder(1 << 20)
    builder.Finish(model.Pack(builder), b"TFL3")
    target.write_bytes(bytes(builder.Output()))
    return target
