"""Quantize a model's GGUF file with llama.cpp's own quantizer: the peer that the README compares with.

Usage: python benchmarks/quantize_with_llama_cpp.py smollm2-135m out.gguf q4_0
"""

from __future__ import annotations

import sys

import llama_cpp

from tieq.source.locate import open_source

# llama.cpp's LlamaFileType numbers.
TYPES = {"q4_0": 2, "q8_0": 7, "q4_k_m": 15, "q5_k_m": 17, "q6_k": 18, "iq4_nl": 25}


def main() -> int:
    """Run the quantizer; its exit code."""
    if len(sys.argv) != 4 or sys.argv[3] not in TYPES:
        print(f"{__doc__}\nTypes: {', '.join(TYPES)}", file=sys.stderr)
        return 2
    model, target, name = sys.argv[1:]
    source = open_source(model).path
    if source.suffix != ".gguf":
        print(f"{source} is no GGUF file; convert it first.", file=sys.stderr)
        return 2
    options = llama_cpp.llama_model_quantize_default_params()
    options.allow_requantize = True
    options.ftype = TYPES[name]
    return int(llama_cpp.llama_model_quantize(str(source).encode(), target.encode(), options))


if __name__ == "__main__":
    sys.exit(main())
