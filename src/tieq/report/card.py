"""What makes ``report.md`` a model card: front matter as the Hugging Face hub reads it, and how to run each file."""

from __future__ import annotations

import re
from io import StringIO
from pathlib import PurePosixPath
from typing import Any

# The sentence that names a hub model as origin begins like this; see tieq.source.locate.
_HUB_ORIGIN = re.compile(r"hub (?P<id>[\w.-]+/[\w.-]+), revision ")
# The hub's license ids are of this form; it refuses a card with another.
_LICENSE = re.compile(r"[a-z0-9][a-z0-9.-]*")
_PROMPT = "The capital of France is"


def front_matter(manifest: dict[str, Any]) -> str:
    """YAML between two rules: license and base model where the source says them, library, task, tags."""
    from ruamel.yaml import YAML

    source, formats = manifest["source"], list(manifest["formats"])
    content: dict[str, Any] = {}
    license_id = str(source.get("license") or "").lower()
    if _LICENSE.fullmatch(license_id):
        content["license"] = license_id
    if found := _HUB_ORIGIN.match(str(source["origin"])):
        content["base_model"] = found["id"]
        content["base_model_relation"] = "quantized"
    content["library_name"] = _library(formats)
    content["pipeline_tag"] = "text-generation"
    content["tags"] = ["tieq", "quantized", *formats]
    stream = StringIO()
    YAML().dump(content, stream)
    return f"---\n{stream.getvalue()}---"


def _library(formats: list[str]) -> str:
    """The library that the hub offers code for: it knows no onnxruntime-genai."""
    known = {"onnx": "transformers.js", "gguf": "gguf", "ort": "onnxruntime"}
    return next((library for name, library in known.items() if name in formats), formats[0])


def run_text(manifest: dict[str, Any]) -> str:
    """How to run each container, with the names of the files that are there."""
    files = [item["path"] for item in manifest["files"]]
    parts = []
    if model := _one(files, "gguf", ".gguf"):
        modelfile = _named(files, "gguf/Modelfile")
        ollama = f"; Ollama takes it by `ollama create NAME -f {modelfile}`" if modelfile else ""
        parts.append(f'llama.cpp runs `{model}`{ollama}:\n\n```sh\nllama-cli -m {model} -p "{_PROMPT}" -n 32\n```')
    if "onnx/model.onnx" in files:
        parts += _onnx_parts(files)
    if model := _one(files, "ort", ".ort"):
        parts.append(
            f"ONNX Runtime and its mobile builds run `{model}`:\n\n```python\nimport onnxruntime\n\n"
            f'session = onnxruntime.InferenceSession("{model}")\n```'
        )
    if model := _one(files, "litert", ".tflite"):
        parts.append(
            f"LiteRT runs `{model}`:\n\n```python\nfrom ai_edge_litert.interpreter import Interpreter\n\n"
            f'interpreter = Interpreter("{model}")\n```'
        )
    return "\n\n".join(parts)


def _onnx_parts(files: list[str]) -> list[str]:
    if "onnx/genai_config.json" in files:
        named = "onnx/model_generate.onnx" if "onnx/model_generate.onnx" in files else "onnx/model.onnx"
        first = f"""onnxruntime-genai runs `{named}`, which `onnx/genai_config.json` names:

```python
import onnxruntime_genai

model = onnxruntime_genai.Model("onnx")
tokenizer = onnxruntime_genai.Tokenizer(model)
parameters = onnxruntime_genai.GeneratorParams(model)
parameters.set_search_options(max_length=40)
generator = onnxruntime_genai.Generator(model, parameters)
generator.append_tokens(tokenizer.encode("{_PROMPT}"))
while not generator.is_done():
    generator.generate_next_token()
print(tokenizer.decode(generator.get_sequence(0)))
```"""
    else:
        first = """optimum runs `onnx/model.onnx`:

```python
from optimum.onnxruntime import ORTModelForCausalLM

model = ORTModelForCausalLM.from_pretrained("onnx", file_name="model.onnx")
```"""
    beside = sorted(path for path in files if PurePosixPath(path).parent.as_posix() == "onnx")
    json_files = ", ".join(f"`{path}`" for path in beside if path.endswith(".json") and "genai" not in path)
    weights = ", ".join(f"`{path}`" for path in beside if path.startswith("onnx/model.onnx"))
    script = (
        f"Transformers.js runs {weights} from a hub repository with copies of {json_files} at its root:"
        f'\n\n```js\nimport {{ pipeline }} from "@huggingface/transformers";\n\n'
        f'const generator = await pipeline("text-generation", "USER/REPOSITORY");\n'
        f'console.log(await generator("{_PROMPT}", {{ max_new_tokens: 32 }}));\n```'
    )
    return [first, script]


def _one(files: list[str], folder: str, suffix: str) -> str | None:
    return next((path for path in files if path.startswith(f"{folder}/") and path.endswith(suffix)), None)


def _named(files: list[str], path: str) -> str | None:
    return path if path in files else None
