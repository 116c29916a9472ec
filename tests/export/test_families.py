"""Every family through the real pipeline: logits against transformers, equal weights in both containers."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import tiny
import torch
from conversion import get_model_class
from gguf import GGMLQuantizationType, GGUFReader
from gguf.quants import dequantize
from onnx import numpy_helper
from transformers import AutoModelForCausalLM

from tieq.pipeline import ExportResult, export
from tieq.recipe import Precision
from tieq.source.checkpoint import CheckpointSource
from tieq.source.reference import inventory

FAMILIES = sorted(tiny.FAMILIES)
IDS = np.random.default_rng(1).integers(2, tiny.ROWS, 48)


def onnx_matrices(path: Path) -> dict[str, np.ndarray]:
    """Decode every quantized matrix of an ONNX file with the onnx library and plain arithmetic: [rows, columns].

    Matrices that are one product carry their names with a plus: their rows are taken apart again.
    """
    model = onnx.load(str(path))
    stored = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    casts = {node.output[0]: node.input[0] for node in model.graph.node if node.op_type == "Cast"}
    sizes = {matrix.name: matrix.rows for matrix in _parts(path).body}
    found = {}
    for node in model.graph.node:
        if node.op_type != "MatMulNBits":
            continue
        options = {attribute.name: attribute.i for attribute in node.attribute}
        assert options["bits"] == 4
        packed, scales = stored[node.input[1]], stored[casts[node.input[2]]]
        codes = np.stack([packed & 15, packed >> 4], axis=-1).reshape(options["N"], -1, options["block_size"])
        values = (codes.astype(np.float32) - 8) * scales.astype(np.float32).reshape(options["N"], -1, 1)
        values = values.reshape(options["N"], -1)[:, : options["K"]]
        name = node.input[1].removesuffix(".codes")
        if "+" not in name:
            found[name] = values
            continue
        before, middle, after = re.fullmatch(r"(.*\.)([^.]*\+[^.]*)(\..*)", name).groups()
        names = [f"{before}{part}{after}" for part in middle.split("+")]
        ends = np.cumsum([sizes[each] for each in names])
        assert ends[-1] == options["N"]
        found |= dict(zip(names, np.split(values, ends[:-1]), strict=True))
    return found


def _parts(path: Path) -> Any:
    return inventory(json.loads((path.parent / "config.json").read_text()))


def gguf_tensors(path: Path) -> dict[str, np.ndarray]:
    """Decode every tensor of a GGUF file with gguf-py."""
    return {tensor.name: dequantize(tensor.data, tensor.tensor_type) for tensor in GGUFReader(path).tensors}


def session(folder: Path, level: int = 0) -> onnxruntime.InferenceSession:
    """Open the exported model at an accuracy level."""
    model = onnx.load(str(folder / "model.onnx"), load_external_data=False)
    for node in model.graph.node:
        for attribute in node.attribute:
            if attribute.name == "accuracy_level":
                attribute.i = level
    options = onnxruntime.SessionOptions()
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(folder))
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def run(opened: onnxruntime.InferenceSession, ids: np.ndarray, past: dict[str, np.ndarray] | None = None) -> dict:
    """One step; ``past`` are the earlier step's outputs."""
    seen = 0
    feed: dict[str, Any] = {}
    for item in opened.get_inputs():
        if "past" in item.name:
            if past is None:
                shape = [extent if isinstance(extent, int) else 0 for extent in item.shape]
                feed[item.name] = np.zeros([ids.shape[0], *shape[1:]], np.float32)
            else:
                feed[item.name] = past[item.name.replace("past_key_values", "present")]
            seen = feed[item.name].shape[2]
    positions = np.arange(seen, seen + ids.shape[1], dtype=np.int64)
    feed["input_ids"] = ids
    feed["attention_mask"] = np.ones((ids.shape[0], seen + ids.shape[1]), np.int64)
    feed["position_ids"] = np.repeat(positions[None], ids.shape[0], 0)
    names = [item.name for item in opened.get_outputs()]
    wanted = {item.name for item in opened.get_inputs()}
    return dict(zip(names, opened.run(names, {k: v for k, v in feed.items() if k in wanted}), strict=True))


def quantized_transformers(checkpoint: Path, result: ExportResult) -> Any:
    """The transformers model with the weights that were decoded from the ONNX file put in."""
    # Eager attention: torch's own leaves out Gemma 2's cap on the scores.
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32, attn_implementation="eager").eval()
    parts = inventory(CheckpointSource(checkpoint).config)
    transposed = {matrix.name for matrix in parts.body if matrix.transposed}
    decoded = onnx_matrices(result.folder / "onnx" / "model.onnx")
    state = {name: torch.from_numpy(v.T if name in transposed else v) for name, v in decoded.items()}
    lookup = gguf_tensors(result.folder / "gguf" / "model.gguf")["token_embd.weight"]
    state[parts.lookup] = torch.from_numpy(lookup.copy())
    missing = set(state) - set(model.state_dict())
    assert not missing
    model.load_state_dict(state, strict=False)
    return model


@pytest.mark.parametrize("family", FAMILIES)
def test_onnx_logits_equal_transformers_with_the_decoded_weights(family, tiny_export, tiny_checkpoint):
    result = tiny_export(family)
    model = quantized_transformers(tiny_checkpoint(family), result)
    with torch.no_grad():
        expected = model(torch.from_numpy(IDS)[None]).logits[0].numpy()
    found = run(session(result.folder / "onnx"), IDS[None])["logits"][0]
    # float32 sums of up to 256 products in another order, through at most six layers: about 1e-5 of the range.
    assert np.abs(found - expected).max() < 1e-4 * np.abs(expected).max()


@pytest.mark.parametrize("family", FAMILIES)
def test_decoding_with_past_equals_running_everything_at_once(family, tiny_export):
    opened = session(tiny_export(family).folder / "onnx")
    batch = np.stack([IDS, IDS[::-1]])
    whole = run(opened, batch)["logits"]
    past = run(opened, batch[:, :40])
    # One token a step: that is what the attention operator takes from several sequences with a past.
    for step in range(40, 48):
        past = run(opened, batch[:, step : step + 1], past)
        assert np.abs(past["logits"][:, 0] - whole[:, step]).max() < 1e-4 * np.abs(whole).max()
    first = run(opened, batch[:1, :40])
    second = run(opened, batch[:1, 40:], first)["logits"]
    assert np.abs(second - whole[:1, 40:]).max() < 1e-4 * np.abs(whole).max()


@pytest.mark.parametrize("family", FAMILIES)
def test_every_matrix_is_bit_identical_in_onnx_and_gguf(family, tiny_export, tiny_checkpoint, tmp_path):
    result = tiny_export(family)
    onnx_side = onnx_matrices(result.folder / "onnx" / "model.onnx")
    gguf_side = gguf_tensors(result.folder / "gguf" / "model.gguf")
    checkpoint = tiny_checkpoint(family)
    parts = inventory(CheckpointSource(checkpoint).config)
    transposed = {matrix.name for matrix in parts.body if matrix.transposed}
    architecture = json.loads((checkpoint / "config.json").read_text())["architectures"][0]
    # llama.cpp's converter itself moves the decoded rows to where GGUF wants them.
    converter = get_model_class(architecture)(checkpoint, 0, tmp_path / "unused.gguf", eager=True)
    assert len(onnx_side) == len(parts.body) + 1
    for name, values in onnx_side.items():
        stored = np.ascontiguousarray(values.T if name in transposed else values)
        block = next((int(part) for part in name.split(".") if part.isdecimal()), None)
        ((gguf_name, placed),) = converter.modify_tensors(torch.from_numpy(stored), name, block)
        expected = np.ascontiguousarray(placed.numpy())
        assert np.array_equal(expected.view(np.uint32), gguf_side[gguf_name].view(np.uint32)), name


def test_groups_have_one_scale_in_onnx_and_repeat_it_in_gguf(tiny_checkpoint, tmp_path):
    # 64 columns, which groups of 128 do not divide, except in down_proj: 128.
    recipe = tiny.recipe(table=Precision(scheme="int4_g64"), body=Precision(scheme="int4_g128"))
    result = export(str(tiny_checkpoint("llama")), recipe, tmp_path / "out", ("onnx", "gguf", "ort", "litert"))
    assert result.passed
    assert any("int4_g128 and int4_g64 as blocks of 32 that repeat" in note for note in result.manifest["notes"])
    same = [check for check in result.checks["checks"] if check["name"].startswith("decoded table")]
    assert len(same) == 6
    assert all(check["value"] == "bit-identical" for check in same)
    path = result.folder / "onnx" / "model.onnx"
    stored = {tensor.name: numpy_helper.to_array(tensor) for tensor in onnx.load(str(path)).graph.initializer}
    onnx_side = onnx_matrices(path)
    gguf_side = gguf_tensors(result.folder / "gguf" / "model.gguf")
    for number in range(2):
        name = f"model.layers.{number}.mlp.down_proj.weight"
        assert stored[f"{name}.scales"].size == 64 * 128 // 128
        found = gguf_side[f"blk.{number}.ffn_down.weight"]
        assert np.array_equal(onnx_side[name].view(np.uint32), found.view(np.uint32))
    kinds = {tensor.name: tensor.tensor_type for tensor in GGUFReader(result.folder / "gguf" / "model.gguf").tensors}
    assert {kinds["token_embd.weight"], kinds["blk.0.ffn_down.weight"]} == {GGMLQuantizationType.Q4_0}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_runtimes_agree_and_the_gates_hold(family, tiny_export):
    result = tiny_export(family)
    assert result.passed
    assert {item["runtime"] for item in result.checks["runtimes"]} == {"onnxruntime", "llama.cpp"}
    for item in result.checks["runtimes"][1:]:
        # int8 activations round each input to 1/127 of its block's largest: noise of well under 1e-2 in the logits'
        # scale, a few 1e-4 in KL. A wrong rope, row order or scale costs 1e-2 and more.
        assert item["kl_to_first"]["value"] < 2e-3, item


@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "phi"])
def test_tied_families_have_one_table_and_no_output_weight(family, tiny_export):
    result = tiny_export(family)
    for entry in result.manifest["containers"].values():
        assert entry["table"]["copies_in_file"] == 1
        assert entry["table"]["readers"] == [["lookup", "logits"]]
    names = {tensor.name for tensor in GGUFReader(result.folder / "gguf" / "model.gguf").tensors}
    assert "output.weight" not in names


def test_no_float_matrix_is_left_in_the_onnx_file(tiny_export):
    model = onnx.load(str(tiny_export("llama").folder / "onnx" / "model.onnx"))
    halves = [t.name for t in model.graph.initializer if t.data_type == onnx.TensorProto.FLOAT16]
    assert halves
    assert all(name.endswith(".scales") for name in halves)
    floats = [t for t in model.graph.initializer if t.data_type == onnx.TensorProto.FLOAT]
    assert all(np.prod(t.dims) <= 64 for t in floats)


def test_an_untied_llama_exports_two_tables_and_says_so(tmp_path):
    from tieq.pipeline import export

    checkpoint = tiny.save(tmp_path / "untied", tie_word_embeddings=False)
    result = export(str(checkpoint), tiny.recipe(), tmp_path / "out")
    assert result.passed
    assert result.manifest["tied"] is False
    for entry in result.manifest["containers"].values():
        assert [sorted(readers) for readers in entry["table"]["readers"]] in (
            [["lookup"], ["logits"]],
            [["logits"], ["lookup"]],
        )
    assert "a table for each role" in (result.folder / "report.md").read_text()
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    gguf_side = gguf_tensors(result.folder / "gguf" / "model.gguf")
    decoded = onnx_matrices(result.folder / "onnx" / "model.onnx")
    state = {name: torch.from_numpy(values) for name, values in decoded.items()}
    state["model.embed_tokens.weight"] = torch.from_numpy(gguf_side["token_embd.weight"].copy())
    model.load_state_dict(state, strict=False)
    with torch.no_grad():
        expected = model(torch.from_numpy(IDS)[None]).logits[0].numpy()
    found = run(session(result.folder / "onnx"), IDS[None])["logits"][0]
    assert np.abs(found - expected).max() < 1e-4 * np.abs(expected).max()


@pytest.mark.parametrize("bits", [2, 8])
def test_other_bit_widths_hold_the_same_gates(bits, tiny_export):
    result = tiny_export("llama", bits)
    assert result.passed
    kl = result.checks["runtimes"][0]["scores"]["kl"]["value"]
    # Steps of 1/127 of a block's largest weight against steps of half of it.
    assert kl < 1e-3 if bits == 8 else kl > 1e-2


def test_tied_phi_is_refused_for_gguf_and_exports_to_onnx(tmp_path):
    from tieq.errors import RefusedError
    from tieq.pipeline import export

    checkpoint = tiny.save(tmp_path / "phi", "phi", tie_word_embeddings=True)
    with pytest.raises(RefusedError, match="insists on a second"):
        export(str(checkpoint), tiny.recipe(), tmp_path / "refused")
    assert not (tmp_path / "refused").exists()
    result = export(str(checkpoint), tiny.recipe(), tmp_path / "out", ("onnx",))
    assert result.passed
    assert result.manifest["containers"]["onnx"]["table"]["copies_in_file"] == 1


@pytest.mark.parametrize(
    "scheme", ["q4_1", "q5_0", "q5_1", "iq4_nl", "q2_k", "q4_k", "q6_k", "iq2_xxs", "iq3_s", "bf16"]
)
def test_every_kind_of_ggml_type_goes_into_gguf_and_runs(scheme, tmp_path_factory):
    from tieq.metrics import score_sequence
    from tieq.pipeline import export
    from tieq.recipe import Gates, Precision
    from tieq.runtimes import runtime
    from tieq.source.locate import open_source
    from tieq.source.reference import load_model

    base = tmp_path_factory.getbasetemp() / "wide"
    if not base.exists():
        tiny.save(base, hidden_size=256, intermediate_size=256, head_dim=64)
    precision = Precision(scheme=scheme)
    out = tmp_path_factory.mktemp("ggml") / scheme
    export(str(base), tiny.recipe(table=precision, body=precision, gates=Gates()), out, ("gguf",))
    file = out / "gguf" / "model.gguf"
    assert next(tensor.tensor_type.name.lower() for tensor in GGUFReader(file).tensors) == scheme
    # The file read back as a model and run in transformers, against llama.cpp running it: what differs is
    # llama.cpp's 8-bit activations, in blocks of up to 256.
    source = open_source(str(file))
    expected = load_model(source, tied=True, table="model.embed_tokens.weight").logits(IDS)
    ((_, opened),) = runtime("llama.cpp").modes(file)
    with opened as running:
        (score,) = score_sequence(IDS, expected, [running.logits(IDS)], np.ones(tiny.ROWS, dtype=bool))
    assert score.kl / score.positions < 5e-3


def test_a_type_that_needs_importance_is_refused_without_calibration(tmp_path):
    from tieq.errors import RefusedError
    from tieq.pipeline import export
    from tieq.recipe import Precision

    checkpoint = tiny.save(tmp_path / "wide", hidden_size=256, intermediate_size=256, head_dim=64)
    recipe = tiny.recipe(table=Precision(scheme="iq2_xxs"), effort="quick")
    with pytest.raises(RefusedError, match="only with importance weights"):
        export(str(checkpoint), recipe, tmp_path / "out", ("gguf",))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3_text"])
def test_best_effort_beats_quick_on_the_text_it_was_calibrated_for(family, tiny_checkpoint, tmp_path):
    from tieq.pipeline import export
    from tieq.recipe import Sampling

    checkpoint = str(tiny_checkpoint(family))
    more = {"calibration": Sampling(sequences=24, length=64), "evaluation": Sampling(sequences=12, length=64)}
    kl = {}
    for effort in ("quick", "best"):
        result = export(checkpoint, tiny.recipe(effort=effort, **more), tmp_path / effort, ("gguf",))
        assert result.passed
        kl[effort] = result.checks["runtimes"][0]["scores"]["kl"]["value"]
    assert kl["best"] < 0.8 * kl["quick"]


def test_an_untied_model_is_solved_for_each_role(tmp_path):
    from tieq.pipeline import export

    checkpoint = tiny.save(tmp_path / "untied", tie_word_embeddings=False)
    result = export(str(checkpoint), tiny.recipe(effort="best"), tmp_path / "out", ("gguf",))
    assert result.passed
    plan = json.loads((result.folder / "plan.json").read_text())
    assert {decision["solver"] for decision in plan["decisions"]} == {"hessian"}
