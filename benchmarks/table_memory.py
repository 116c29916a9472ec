"""What a shared 4-bit table costs in memory when onnxruntime has it loaded, by how the graph shares it.

    python -m benchmarks.table_memory --out results.json

One lookup and one product of one position on a table of 128,256 x 2,048, each layout in a process of its own with a
default session: resident memory added after one step, of it anonymous, the most that there was, and the median step.
What the same session adds with a table of 64 rows is the runtime's own and is taken off.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

ROWS, COLUMNS, BLOCK = 128_256, 2_048, 32
_FEW = 64
LAYOUTS = {
    "reshape": "one initializer, a Reshape for the lookup (onnxruntime-genai's builder)",
    "two names": "two initializer names over one external byte range, float32 scales",
    "two names, fp16 scales": "the same with fp16 scales behind a Cast",
    "prepacked, fp16 scales": "two names, saved by the runtime with its own reordered copy in the file",
    "rows first, fp16 scales": "two names, with the lookup's rows of codes and scales gathered before they are widened",
    "pieces, fp16 scales": "the same, with the product by four pieces of the table (tieq's large ones, for generation)",
}


def write(layout: str, folder: Path, rows: int) -> Path:
    """Write the graph over ``rows`` rows and its data; returns the model's path."""
    path = _write(layout, folder, rows)
    return _prepack(path) if layout.startswith("prepacked") else path


def _prepack(path: Path) -> Path:
    """The model as onnxruntime saves it, with what its kernels make of the weights when a session starts."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(path.with_name("prepacked.onnx"))
    options.add_session_config_entry("session.optimized_model_external_initializers_file_name", "prepacked")
    options.add_session_config_entry("session.optimized_model_external_initializers_min_size_in_bytes", "1024")
    options.add_session_config_entry("session.save_external_prepacked_constant_initializers", "1")
    onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    path.unlink()
    path.with_name("data").unlink()
    return path.with_name("prepacked.onnx")


def _write(layout: str, folder: Path, rows: int) -> Path:
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    blocks = COLUMNS // BLOCK
    random = np.random.default_rng(0)
    codes = random.integers(0, 256, (rows, blocks, BLOCK // 2), dtype=np.uint8)
    half = layout.endswith("fp16 scales")
    scales = (random.random((rows, blocks), np.float32) * 0.01 + 0.001).astype(np.float16 if half else np.float32)
    (folder / "data").write_bytes(codes.tobytes() + scales.tobytes())

    def external(name: str, shape: tuple[int, ...], kind: int, offset: int, length: int) -> Any:
        tensor = onnx.TensorProto(name=name, data_type=kind, dims=shape, data_location=TensorProto.EXTERNAL)
        for key, value in (("location", "data"), ("offset", str(offset)), ("length", str(length))):
            tensor.external_data.add(key=key, value=value)
        return tensor

    kind = TensorProto.FLOAT16 if half else TensorProto.FLOAT
    stored = [external("codes", codes.shape, TensorProto.UINT8, 0, codes.nbytes)]
    stored.append(external("scales", scales.shape, kind, codes.nbytes, scales.nbytes))
    nodes, looked_up, wide = [], "lookup_codes", "scales"
    if layout == "reshape":
        stored.append(numpy_helper.from_array(np.array([rows, -1], np.int64), "shape"))
        nodes.append(helper.make_node("Reshape", ["codes", "shape"], ["lookup_codes"]))
    else:
        stored.append(external("lookup_codes", (rows, blocks * BLOCK // 2), TensorProto.UINT8, 0, codes.nbytes))
    if half:
        wide = "wide"
        nodes.append(helper.make_node("Cast", ["scales"], ["wide"], to=TensorProto.FLOAT))
    options = {"domain": "com.microsoft", "bits": 4, "block_size": BLOCK}
    indices, row_scales, result = "ids", wide, "rows"
    quantize_axis = 1
    if layout.startswith(("rows first", "pieces")):
        stored += [
            numpy_helper.from_array(np.array(value, np.int64), name) for name, value in (("first", [0]), ("only", 0))
        ]
        nodes += [
            helper.make_node("Unsqueeze", ["ids", "first"], ["leading"]),
            helper.make_node("Gather", ["lookup_codes", "leading"], ["codes_of_rows"]),
            helper.make_node("Gather", ["scales", "leading"], ["half_of_rows"]),
            helper.make_node("Cast", ["half_of_rows"], ["scales_of_rows"], to=TensorProto.FLOAT),
        ]
        looked_up, indices, row_scales, quantize_axis = "codes_of_rows", "only", "scales_of_rows", 3
    nodes += [
        helper.make_node(
            "GatherBlockQuantized",
            [looked_up, indices, row_scales],
            [result],
            gather_axis=0,
            quantize_axis=quantize_axis,
            **options,
        ),
    ]
    pieces = 4 if layout.startswith("pieces") else 1
    step, row_codes, row_scale = rows // pieces, codes[0].nbytes, scales[0].nbytes
    for number in range(pieces):
        own = f"codes.{number}", f"scales.{number}", f"wide.{number}", f"logits.{number}"
        read = "codes", wide
        if pieces > 1:
            place = number * step
            stored.append(
                external(own[0], (step, *codes.shape[1:]), TensorProto.UINT8, place * row_codes, step * row_codes)
            )
            stored.append(external(own[1], (step, blocks), kind, codes.nbytes + place * row_scale, step * row_scale))
            nodes.append(helper.make_node("Cast", [own[1]], [own[2]], to=TensorProto.FLOAT))
            read = own[0], own[2]
        attributes = {"K": COLUMNS, "N": step, "accuracy_level": 4, **options}
        nodes.append(helper.make_node("MatMulNBits", ["rows", *read], [own[3]], **attributes))
    nodes.append(helper.make_node("Concat", [f"logits.{number}" for number in range(pieces)], ["logits"], axis=-1))
    ids = helper.make_tensor_value_info("ids", TensorProto.INT64, ["batch", "length"])
    logits = helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", "length", rows])
    graph = helper.make_graph(nodes, "table", [ids], [logits], stored)
    imports = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    path = folder / "model.onnx"
    onnx.save(helper.make_model(graph, opset_imports=imports, ir_version=10), str(path))
    return path


_STEP = """
import json, sys, time
import numpy as np, onnxruntime as ort
def resident():
    lines = dict(line.split(":", 1) for line in open("/proc/self/status") if ":" in line)
    return [int(lines[key].split()[0]) * 1024 for key in ("VmRSS", "RssAnon", "VmHWM")]
options = ort.SessionOptions()
options.intra_op_num_threads = 2
before = resident()
session = ort.InferenceSession(sys.argv[1], options, providers=["CPUExecutionProvider"])
feed = {"ids": np.array([[5]])}
session.run(None, feed)
after = resident()
times = []
for _ in range(40):
    start = time.perf_counter()
    session.run(None, feed)
    times.append(time.perf_counter() - start)
added = {"added": after[0] - before[0], "anonymous": after[1] - before[1], "peak": after[2] - before[0]}
print(json.dumps({**added, "step": sorted(times)[20]}))
"""


def _run(path: Path) -> dict[str, float]:
    made = subprocess.run([sys.executable, "-c", _STEP, path], check=True, capture_output=True, text=True)
    found: dict[str, float] = json.loads(made.stdout)
    return found


def measure(rounds: int = 3) -> dict[str, Any]:
    """Bytes added and seconds a step by layout, medians of alternating rounds."""
    found: dict[str, list[dict[str, float]]] = {layout: [] for layout in LAYOUTS}
    with tempfile.TemporaryDirectory() as scratch:
        for number in range(rounds):
            for place, layout in enumerate(LAYOUTS):
                folder = Path(scratch) / f"{number}-{place}"
                folder.mkdir()
                own = _run(write(layout, folder, _FEW))
                for file in folder.iterdir():
                    file.unlink()
                whole = _run(write(layout, folder, ROWS))
                taken = {key: whole[key] - own[key] for key in ("added", "anonymous", "peak")}
                size = sum(file.stat().st_size for file in folder.iterdir())
                found[layout].append({**taken, "step": whole["step"], "file": size})
                shutil.rmtree(folder)
    table = ROWS * COLUMNS // 2 + ROWS * COLUMNS // BLOCK * 4
    medians = {
        layout: {key: float(np.median([row[key] for row in rows])) for key in rows[0]} for layout, rows in found.items()
    }
    return {"table_bytes": table, "layouts": {k: {**v, "of_table": v["added"] / table} for k, v in medians.items()}}


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.table_memory", description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    found = measure()
    parser.parse_args().out.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
