"""Row bands through the real pipeline: the ONNX file computes base plus residuals, GGUF holds the base."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import tiny
import torch
from gguf import GGUFReader
from gguf.quants import dequantize
from onnx import numpy_helper
from transformers import AutoModelForCausalLM

from tieq.pipeline import export
from tieq.quantize import QuantizedCheckpoint
from tieq.recipe import BandWish, Precision
from tieq.source.checkpoint import CheckpointSource
from tieq.source.reference import inventory

# Gemma scales the looked-up rows, GPT-2 adds positions to them and has no separate head module in its checkpoint.
FAMILIES = ["llama", "gemma3_text", "gpt2"]


def stored(path: Path) -> dict[str, np.ndarray]:
    """Every initializer, by the onnx library."""
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in onnx.load(str(path)).graph.initializer}


def decoded(codes: np.ndarray, scales: np.ndarray, bits: int) -> np.ndarray:
    """Plain arithmetic: ``[rows, columns]``."""
    lanes = [(codes >> shift) & ((1 << bits) - 1) for shift in range(0, 8, bits)]
    values = np.stack(lanes, axis=-1).reshape(*scales.shape, -1).astype(np.float32) - (1 << (bits - 1))
    return (values * scales[..., None]).reshape(len(codes), -1)


def refined_table(path: Path, name: str) -> tuple[np.ndarray, np.ndarray]:
    """The base table and the base with both bands, from the ONNX file alone, by the columns of the logits."""
    tensors = stored(path)
    base = decoded(tensors[f"{name}.codes"], tensors[f"{name}.scales"], 4)
    refined = base.copy()
    for number, bits in enumerate((4, 2)):
        band = f"{name}.band{number}"
        np.add.at(refined, tensors[f"{band}.rows"], decoded(tensors[f"{band}.codes"], tensors[f"{band}.scales"], bits))
    return base, refined


def logits(file: Path, ids: np.ndarray) -> np.ndarray:
    """One step of a batch, at accuracy level 0 where the file lets it be chosen."""
    options = onnxruntime.SessionOptions()
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(file.parent))
    content: Any = str(file)
    if file.suffix == ".onnx":
        model = onnx.load(str(file), load_external_data=False)
        for node in model.graph.node:
            for attribute in node.attribute:
                if attribute.name == "accuracy_level":
                    attribute.i = 0
        content = model.SerializeToString()
    opened = onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    feed: dict[str, np.ndarray] = {}
    for item in opened.get_inputs():
        if "past" in item.name:
            shape = [extent if isinstance(extent, int) else 0 for extent in item.shape]
            feed[item.name] = np.zeros([len(ids), *shape[1:]], np.float32)
    feed["input_ids"] = ids
    feed["attention_mask"] = np.ones_like(ids)
    feed["position_ids"] = np.repeat(np.arange(ids.shape[1])[None], len(ids), 0)
    wanted = {item.name for item in opened.get_inputs()}
    return opened.run(["logits"], {key: value for key, value in feed.items() if key in wanted})[0]


def digests(folder: Path) -> dict[str, str]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_of_a_batch_equal_transformers_with_the_refined_table(family, banded_export, tiny_checkpoint):
    folder = banded_export(family).folder
    checkpoint = QuantizedCheckpoint(folder / "quantized.safetensors")
    parts = inventory(CheckpointSource(tiny_checkpoint(family)).config)
    _, refined = refined_table(folder / "onnx" / "model.onnx", parts.lookup)
    transposed = {matrix.name for matrix in parts.body if matrix.transposed}
    state = {name: checkpoint.decode(name) for name in checkpoint.matrices}
    state = {name: torch.from_numpy(v.T.copy() if name in transposed else v) for name, v in state.items()}
    state[parts.lookup] = state[parts.logits] = torch.from_numpy(refined)
    model = AutoModelForCausalLM.from_pretrained(tiny_checkpoint(family), dtype=torch.float32).eval()
    assert not set(state) - set(model.state_dict())
    model.load_state_dict(state, strict=False)
    banded = np.concatenate([band.rows for band in checkpoint.bands(parts.lookup)])
    others = np.setdiff1d(np.arange(tiny.ROWS), banded)
    # Three sequences of 24 tokens, half of them in a band.
    random = np.random.default_rng(1)
    ids = random.permuted(np.concatenate([random.choice(banded, 36), random.choice(others, 36)])).reshape(3, 24)
    with torch.no_grad():
        expected = model(torch.from_numpy(ids.astype(np.int64))).logits.numpy()
    found = logits(folder / "onnx" / "model.onnx", ids.astype(np.int64))
    # float32 sums of up to 256 products in another order, through at most six layers: about 1e-5 of the range.
    assert np.abs(found - expected).max() < 1e-4 * np.abs(expected).max()


@pytest.mark.parametrize("family", FAMILIES)
def test_the_base_is_the_gguf_table_and_the_bands_are_the_checkpoints(family, banded_export, tiny_checkpoint):
    folder = banded_export(family).folder
    name = inventory(CheckpointSource(tiny_checkpoint(family)).config).lookup
    checkpoint = QuantizedCheckpoint(folder / "quantized.safetensors")
    base, refined = refined_table(folder / "onnx" / "model.onnx", name)
    tensors = {tensor.name: tensor for tensor in GGUFReader(folder / "gguf" / "model.gguf").tensors}
    held = tensors["token_embd.weight"]
    assert np.array_equal(dequantize(held.data, held.tensor_type).view(np.uint32), base.view(np.uint32))
    assert np.array_equal(refined, checkpoint.refined(name))
    rows = [band.rows for band in checkpoint.bands(name)]
    assert [len(each) for each in rows] == [16, 32]
    assert len(np.union1d(*rows)) == 48
    changed = np.flatnonzero((refined != base).any(axis=1))
    assert np.array_equal(changed, np.union1d(*rows))
    original = CheckpointSource(tiny_checkpoint(family)).read(name)
    assert (np.square(original - refined)[changed].sum(axis=1) < np.square(original - base)[changed].sum(axis=1)).all()


@pytest.mark.parametrize("family", FAMILIES)
def test_every_container_holds_one_table_and_each_band_once(family, banded_export):
    result = banded_export(family)
    assert result.passed, [check for check in result.checks["checks"] if not check["passed"]]
    onnx_side, ort_side, gguf_side = result.checks["containers"]
    for container in (onnx_side, ort_side):
        base, *bands = container["payloads"]
        assert (base["band_rows"], base["readers"]) == (None, ["lookup", "logits"])
        assert [(band["band_rows"], band["readers"], band["flaw"]) for band in bands] == [
            (16, ["lookup", "logits"], ""),
            (32, ["lookup", "logits"], ""),
        ]
        assert container["table_bytes"] == sum(payload["nbytes"] for payload in container["payloads"])
    (table,) = gguf_side["payloads"]
    assert table["band_rows"] is None
    assert {entry["table"]["copies_in_file"] for entry in result.manifest["containers"].values()} == {1}
    # The plan foresaw the bytes.
    decision = json.loads((result.folder / "plan.json").read_text())["decisions"][0]
    assert [band["onnx_bytes"] for band in decision["bands"]] == [
        payload["nbytes"] for payload in onnx_side["payloads"][1:]
    ]
    assert decision["onnx_bits_per_weight"] == 8 * onnx_side["table_bytes"] / (tiny.ROWS * 64)
    assert decision["total_bits_per_weight"] == pytest.approx(4.5 + 8 * (16 * 40 + 32 * 22) / (tiny.ROWS * 64))
    assert [band["rows"] for band in result.manifest["containers"]["onnx"]["table"]["bands"]] == [16, 32]


def test_a_container_is_compared_with_its_own_weights(banded_export):
    result = banded_export()
    assert any("GGUF holds one type a tensor; it takes the base table" in note for note in result.manifest["notes"])
    compared = {item["container"]: item["first"] for item in result.checks["runtimes"]}
    assert compared["gguf"] is None
    assert compared["ort"] == "onnxruntime, accuracy level 0"
    details = {c["subject"]: c["detail"] for c in result.checks["checks"] if c["name"] == "decoded table, logits"}
    assert details == {"onnx = ort": "", "onnx = gguf": "the base table, without row bands"}


def test_two_exports_with_bands_are_byte_identical(banded_export, tiny_checkpoint, tmp_path):
    # ONNX Runtime writes .ort files in an order that changes from run to run, and with it their size by some bytes; the
    # documents name the hash or the size.
    def own(folder: Path) -> dict[str, Any]:
        unstable = ("ort/model.ort", "manifest.json", "report.html", "report.md", "checks.json")
        checks = json.loads((folder / "checks.json").read_text())
        for container in checks["containers"]:
            if container["container"] == "ort":
                del container["file_bytes"]
        stable = {name: digest for name, digest in digests(folder).items() if name not in unstable}
        return {**stable, "checks.json": checks}

    again = export(str(tiny_checkpoint()), tiny.banded_recipe(), tmp_path / "again", ("onnx", "ort", "gguf"))
    assert own(again.folder) == own(banded_export().folder)
    assert {"onnx/model.onnx", "onnx/model.onnx_data", "quantized.safetensors"} <= set(own(again.folder))


def test_a_band_of_all_rows_is_no_copy(tiny_checkpoint, tmp_path):
    precision = Precision(scheme="q2_0", bands=(BandWish(share=1.0, scheme="q2_0"),))
    result = export(str(tiny_checkpoint()), tiny.recipe(table=precision), tmp_path / "all", ("onnx", "ort"))
    assert result.passed, [check for check in result.checks["checks"] if not check["passed"]]
    for container in result.checks["containers"]:
        base, band = container["payloads"]
        assert (base["band_rows"], band["band_rows"]) == (None, tiny.ROWS)
    plain = export(str(tiny_checkpoint()), tiny.recipe(table=Precision(scheme="q2_0")), tmp_path / "plain", ("onnx",))
    kl = [made.checks["runtimes"][0]["scores"]["kl"]["value"] for made in (result, plain)]
    assert kl[0] < 0.5 * kl[1]
