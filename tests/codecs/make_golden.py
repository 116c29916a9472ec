"""Write golden.json: block bytes encoded and decoded by implementations other than tieq's codecs.

Q4_0 and Q8_0 are encoded and decoded by gguf-py, the others by the ggml library (gguf-py has no Q2_0). The weights are
levels times a scale, chosen so that each encoder finds exactly that scale:

- ggml's Q5_0 scale is the weight of largest magnitude over -16, so every block holds the level -16;
- gguf-py's Q4_0 scale is the weight of largest magnitude over -8, so every block holds the level -8 (and zero is -0);
- gguf-py's Q8_0 scale is the largest magnitude over 127, so every block holds 127 or -127 and a positive scale;
- ggml's Q4_1 and Q5_1 minimum is the smallest weight, and their scale the range over the highest level, so every block
  holds both ends;
- ggml's Q2_0 scale is the largest magnitude, and it uses three of the four levels, so every block holds 1 or -1.
  Its scale is positive where tieq's, for the mirrored codes, is negative.

Run it with ``python tests/codecs/make_golden.py``; ``golden.json`` is committed, and a test compares the two.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from tieq.codecs import ggml

GOLDEN = Path(__file__).with_name("golden.json")
# Scheme: weights in a block, lowest and highest level, the level that every block must hold, sign of the scales.
SHAPES = {
    "q4_0": (32, -8, 7, -8, 0),
    "q4_1": (32, 0, 15, 15, 1),
    "q5_0": (32, -16, 15, -16, 0),
    "q5_1": (32, 0, 31, 31, 1),
    "q8_0": (32, -127, 127, 127, 1),
    "q2_0": (64, -1, 1, 1, -1),
}
WITH_GGML = ("q4_1", "q5_0", "q5_1", "q2_0")
# Minima of the affine schemes, one a scale; multiples of the scale, so that float32 holds all weights exactly.
MINIMA = {"q4_1": (-6.0, 0.0, 2.0**-22, -(2.0**-17), -2.5, -65504.0)}
MINIMA["q5_1"] = MINIMA["q4_1"]
# All exact in fp16: ordinary, the smallest subnormal, a subnormal, the largest, zero.
SCALES = (0.75, 0.0103302001953125, 2.0**-24, 2.0**-20, 0.0, 65504.0)


def encode(scheme: str, weights: np.ndarray) -> np.ndarray:
    """Rows of bytes by the independent implementation."""
    if scheme in WITH_GGML:
        return ggml.encode(weights, scheme)
    return gguf.quants.quantize(weights, gguf.GGMLQuantizationType[scheme.upper()])


def decode(scheme: str, rows: np.ndarray) -> np.ndarray:
    """Float32 values by the independent implementation."""
    if scheme in WITH_GGML:
        return ggml.decode(rows, scheme)
    return gguf.quants.dequantize(rows, gguf.GGMLQuantizationType[scheme.upper()])


def make() -> dict[str, list[dict[str, Any]]]:
    """Per scheme a list of blocks: levels, scale, bytes and decoded float32 as hexadecimal."""
    golden: dict[str, list[dict[str, Any]]] = {}
    for scheme, (block, low, high, forced, sign) in SHAPES.items():
        random = np.random.default_rng(2)
        golden[scheme] = []
        for number, magnitude in enumerate(SCALES):
            levels = random.integers(low, high + 1, block)
            levels[number] = forced
            alternating = 1 if number % 2 else -1
            scale = magnitude * (sign or alternating)
            if not magnitude:
                levels[:] = 0
            minimum = 0.0
            if scheme in MINIMA:
                minimum = MINIMA[scheme][number]
                levels[number + 1] = low
            weights = (levels * scale + minimum + 0.0).astype(np.float32)[None]  # no negative zeros
            rows = encode(scheme, weights)
            golden[scheme].append(
                {
                    "levels": levels.tolist(),
                    "scale": [scale, minimum] if scheme in MINIMA else scale,
                    "bytes": rows.tobytes().hex(),
                    "decoded": decode(scheme, rows).astype("<f4").tobytes().hex(),
                }
            )
    return golden


def text(golden: dict[str, list[dict[str, Any]]]) -> str:
    """The content of golden.json, a block a line."""
    schemes = (f'"{name}": [\n' + ",\n".join(map(json.dumps, blocks)) + "\n]" for name, blocks in golden.items())
    return "{" + ",\n".join(schemes) + "}\n"


if __name__ == "__main__":
    GOLDEN.write_text(text(make()), encoding="utf-8")
