"""A checkpoint of random bf16 weights in the shape of a known model, for measuring time and memory.

    python -m benchmarks.random_checkpoint llama-3.2-1b FOLDER

The tokenizer is SmolLM2's, whose ids every table here has. Weights are normal with a standard deviation of 0.02, the
same in every run.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from tieq.source.locate import open_source
from tieq.source.reference import inventory

_SHARD_BYTES = 1_000_000_000
_COMMON = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "tie_word_embeddings": True, "bos_token_id": 1,
           "eos_token_id": 2, "torch_dtype": "bfloat16", "max_position_embeddings": 8192}  # fmt: skip
# Hidden size, intermediate size, layers, heads, key-value heads, rows of the table.
_SHAPES = {
    "135m": (576, 1536, 30, 9, 3, 49152),
    "500m": (1024, 4096, 24, 16, 8, 128256),
    "llama-3.2-1b": (2048, 8192, 16, 32, 8, 128256),
    "llama-3.2-3b": (3072, 8192, 28, 24, 8, 128256),
}


def parameters(shape: str) -> int:
    """Parameters of a shape, the table counted once."""
    hidden, inner, layers, heads, kv_heads, rows = _SHAPES[shape]
    attention = hidden * hidden * 2 + 2 * hidden * (hidden // heads) * kv_heads
    return rows * hidden + layers * (attention + 3 * hidden * inner + 2 * hidden) + hidden


def write(shape: str, folder: Path) -> int:
    """Write the checkpoint; returns its parameters."""
    hidden, inner, layers, heads, kv_heads, rows = _SHAPES[shape]
    config = {
        **_COMMON,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": rows,
        "head_dim": hidden // heads,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    source = open_source("smollm2-135m")
    tokenizer = source.tokenizer_folder()
    assert tokenizer is not None
    for file in tokenizer.glob("tokenizer*"):
        shutil.copy(file, folder)
    parts = inventory(config)
    random = np.random.default_rng(0)
    shard: dict[str, np.ndarray] = {}
    where: dict[str, str] = {}
    count = 0

    def flush() -> None:
        name = f"model-{len(set(where.values())) + 1:05d}.safetensors"
        save_file(shard, folder / name)
        where.update(dict.fromkeys(shard, name))
        shard.clear()

    for name, extent in parts.shapes.items():
        if name == parts.logits:
            continue
        values = np.ones(extent, np.float32) if len(extent) == 1 else random.standard_normal(extent, np.float32) * 0.02
        shard[name] = values.astype(ml_dtypes.bfloat16)
        count += values.size
        if sum(value.nbytes for value in shard.values()) > _SHARD_BYTES:
            flush()
    flush()
    index = {"metadata": {"total_size": 2 * count}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return count


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.random_checkpoint", description=__doc__)
    parser.add_argument("shape", choices=_SHAPES)
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    print(f"{write(arguments.shape, arguments.folder):,} parameters in {arguments.folder}")


if __name__ == "__main__":
    main()
