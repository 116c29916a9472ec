"""Makers of small inputs: checkpoint folders written with safetensors, GGUF files written with gguf-py."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

Tensors = dict[str, np.ndarray]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Callable[..., Path]:
    """Write a checkpoint folder: one file, or named shards with an index over them."""
    from safetensors.numpy import save_file

    def make(
        tensors: Tensors | None = None,
        *,
        shards: dict[str, Tensors] | None = None,
        index: Any = None,
        name: str = "checkpoint",
        **config: Any,
    ) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps({"model_type": "llama", **config}), encoding="utf-8")
        files = shards or ({} if tensors is None else {"model.safetensors": tensors})
        for file, content in files.items():
            save_file({key: np.ascontiguousarray(value) for key, value in content.items()}, folder / file)
        if shards is not None and index is None:
            index = {"weight_map": {key: file for file, content in shards.items() for key in content}}
        if index is not None:
            (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
        return folder

    return make


@pytest.fixture
def gguf_file(tmp_path: Path) -> Callable[..., Path]:
    """Write a GGUF file: float32 tensors by name with the ggml type to store them in, and metadata by key."""
    import gguf

    from tieq.codecs import ggml

    def make(
        tensors: dict[str, tuple[np.ndarray, str]] | None = None,
        metadata: dict[str, Any] | None = None,
        *,
        architecture: str = "llama",
        alignment: int | None = None,
        name: str = "model.gguf",
    ) -> Path:
        path = tmp_path / name
        writer = gguf.GGUFWriter(str(path), architecture)
        if alignment is not None:
            writer.add_custom_alignment(alignment)
        for key, value in (metadata or {}).items():
            if isinstance(value, tuple):  # value, type and, for arrays, element type
                writer.add_key_value(key, *value)
            elif type(value) is int:  # llama.cpp insists on unsigned
                writer.add_uint32(key, value)
            else:
                kind = gguf.GGUFValueType.get_type(value)
                element = gguf.GGUFValueType.get_type(value[0]) if isinstance(value, list) else None
                writer.add_key_value(key, value, kind, element)
        for key, (values, kind) in (tensors or {}).items():
            if kind == "f32":
                writer.add_tensor(key, values.astype(np.float32))
            else:
                rows = ggml.encode(values.astype(np.float32), kind)
                writer.add_tensor(key, rows, raw_dtype=gguf.GGMLQuantizationType[kind.upper()])
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    return make
