"""The LiteRT container against transformers and the other containers: every described family, schemes, refusals."""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from safetensors.numpy import load_file, save_file
from transformers import AutoModelForCausalLM

from tieq.codecs.schemes import SCHEMES
from tieq.errors import MissingRuntimeError, RefusedError
from tieq.export import litert_products
from tieq.export.litert import write_litert
from tieq.quantize import QuantizedCheckpoint
from tieq.recipe import LitertOptions, Precision
from tieq.runtimes import runtime
from tieq.solve import SOLVERS
from tieq.validate.gates import equality_checks
from tieq.validate.litert_graph import Graph
from tieq.validate.structure import first_difference, prove

DESCRIBED = sorted(({*tiny.FAMILIES} | {*tiny.ONNX_ONLY}) - {"gpt2"})
INTEGER = LitertOptions(activations="int8")
TABLE = "model.embed_tokens.weight"
# float32 sums in another order come to 1e-6 of the range here.
CLOSE = 2e-5


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[Path, Path]]:
    """Export (once) a tiny model to LiteRT: the checkpoint and the artifact's folder."""
    from tieq.pipeline import export

    known: dict[Any, tuple[Path, Path]] = {}

    def get(family: str = "llama", bits: int = 4, litert: LitertOptions | None = None, **changes: Any) -> Any:
        key = (family, bits, litert, tuple(changes.items()))
        if key not in known:
            base = tmp_path_factory.mktemp(family)
            checkpoint = tiny.save(base / "model", family, **changes)
            recipe = tiny.recipe(bits, effort="quick", evaluation=None, litert=litert or LitertOptions())
            known[key] = checkpoint, export(str(checkpoint), recipe, base / "out", ("litert",)).folder
        return known[key]

    return get


def model_of(folder: Path) -> Path:
    return folder / "litert" / "model.tflite"


def expected(checkpoint: Path, folder: Path, ids: np.ndarray) -> np.ndarray:
    """Logits of transformers with the decoded quantized weights."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32, attn_implementation="eager").eval()
    stored = QuantizedCheckpoint(folder / "quantized.safetensors")
    model.load_state_dict({name: torch.from_numpy(stored.decode(name)) for name in stored.matrices}, strict=False)
    model.tie_weights()
    with torch.no_grad():
        return model(torch.from_numpy(ids[None])).logits[0].numpy()


def logits(path: Path, *sequences: np.ndarray) -> dict[str, list[np.ndarray]]:
    """Logits of the sequences, one after the other in one session, by the runtime's mode."""
    found = {}
    for mode, opened in runtime("litert").modes(path):
        with opened as session:
            found[mode] = [session.logits(ids) for ids in sequences]
    return found


def tokens(length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(2, tiny.ROWS, length)


def gap(found: np.ndarray, wanted: np.ndarray) -> float:
    """Largest difference as a share of the largest logit."""
    assert found.shape == wanted.shape
    return float(np.abs(found - wanted).max() / np.abs(wanted).max())


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("family", DESCRIBED)
def test_logits_equal_transformers_at_any_length(family, bits, made):
    checkpoint, folder = made(family, bits)
    sequences = [tokens(24), tokens(5, 1), tokens(1, 2), tokens(40, 3)]
    (found,) = logits(model_of(folder), *sequences).values()
    for ids, each in zip(sequences, found, strict=True):
        assert gap(each, expected(checkpoint, folder, ids)) < CLOSE


@pytest.mark.parametrize(
    ("bits", "changes"),
    [
        (2, {}),
        (4, {"hidden_size": 48, "head_dim": 16}),  # no block divides 48 columns: fp16
        (4, {"tie_word_embeddings": False}),
        (4, {"attention_bias": True, "mlp_bias": True}),
    ],
)
def test_other_schemes_and_models(bits, changes, made):
    checkpoint, folder = made("llama", bits, **changes)
    (found,) = logits(model_of(folder), tokens(24)).values()
    assert gap(found[0], expected(checkpoint, folder, tokens(24))) < CLOSE
    structure = prove(model_of(folder))
    stored = QuantizedCheckpoint(folder / "quantized.safetensors")
    assert np.array_equal(structure.read_lookup(slice(None)), stored.decode(TABLE))
    head = TABLE if structure.shared else "lm_head.weight"
    assert np.array_equal(structure.read_logits(slice(7, 300)), stored.decode(head)[7:300])


def test_integer_products_read_groups_too(tiny_checkpoint, tmp_path):
    from tieq.pipeline import export

    recipe = tiny.recipe(
        effort="quick", evaluation=None, litert=INTEGER,
        table=Precision(scheme="int4_g64"), body=Precision(scheme="int4_g128"),
    )  # fmt: skip
    checkpoint = tiny_checkpoint("llama")
    folder = export(str(checkpoint), recipe, tmp_path / "out", ("litert",)).folder
    stored = QuantizedCheckpoint(folder / "quantized.safetensors")
    assert {stored.scheme(name) for name in stored.matrices} == {"int4_g64", "int4_g128"}
    assert all((stored.scales(name) > 0).all() for name in stored.matrices)
    assert [operator.kind for operator in Graph(model_of(folder)).operators].count("EMBEDDING_LOOKUP") == 1
    found = logits(model_of(folder), tokens(24))
    wanted = expected(checkpoint, folder, tokens(24))
    assert gap(found["float activations"][0], wanted) < CLOSE
    assert CLOSE < gap(found["int8 activations"][0], wanted) < 0.05


@pytest.mark.parametrize("bits", [4, 8])
def test_a_table_in_pieces_gives_the_same_logits_from_the_same_bytes(bits, made, tmp_path, monkeypatch):
    checkpoint, folder = made("llama", bits)
    monkeypatch.setattr(litert_products, "_WIDENED", 100 * 64)  # 320 rows in four pieces, the last of 20
    stored = QuantizedCheckpoint(folder / "quantized.safetensors")
    config = {**tiny.config("llama").to_dict(), "vocab_size": tiny.ROWS}
    path = write_litert(config, stored, tmp_path, lookup=TABLE, logits="lm_head.weight", tied=True)
    assert [len(op.inputs) for op in Graph(path).operators if op.kind == "CONCATENATION"][-1] == 4
    (found,) = logits(path, tokens(24)).values()
    assert gap(found[0], expected(checkpoint, folder, tokens(24))) < CLOSE
    structure = prove(path)
    assert structure.shared
    assert len(structure.payloads) == 1
    for piece in (slice(0, 320), slice(99, 101), slice(250, 320)):
        assert np.array_equal(structure.read_logits(piece), stored.decode(TABLE)[piece])


def test_integer_products_read_the_table_itself_and_its_scales_are_positive(made):
    checkpoint, folder = made("llama", 4, INTEGER)
    stored = QuantizedCheckpoint(folder / "quantized.safetensors")
    assert all((stored.scales(name) > 0).all() for name in stored.matrices)
    assert "4 bits have no negative scales here" in (folder / "manifest.json").read_text()
    graph = Graph(model_of(folder))
    table = next(tensor.index for tensor in graph.tensors if tensor.name == TABLE)
    assert [operator.kind for operator in graph.consumers(table)] == ["EMBEDDING_LOOKUP", "FULLY_CONNECTED"]
    assert [operator.kind for operator in graph.operators].count("EMBEDDING_LOOKUP") == 1
    found = logits(model_of(folder), tokens(24))
    wanted = expected(checkpoint, folder, tokens(24))
    assert gap(found["float activations"][0], wanted) < CLOSE
    assert CLOSE < gap(found["int8 activations"][0], wanted) < 0.05


def test_float_products_keep_the_codes_that_the_other_containers_have_alone(made):
    stored = QuantizedCheckpoint(made("llama", 4)[1] / "quantized.safetensors")
    assert (stored.scales(TABLE) < 0).any()


@pytest.mark.parametrize("solver", sorted(SOLVERS))
def test_solvers_leave_negative_scales_out_where_they_are_asked_to(solver):
    weights = np.random.default_rng(0).standard_normal((70, 96)).astype(np.float32)
    weights[3] = 0
    usual, positive = SCHEMES["q4_0"], dataclasses.replace(SCHEMES["q4_0"], positive=True)
    assert (SOLVERS[solver](weights, usual)[1] < 0).any()
    codes, scales = SOLVERS[solver](weights, positive)
    assert (scales >= 0).all()
    error = (codes.astype(np.float32) - 8) * scales.astype(np.float32)[..., None] - weights.reshape(70, 3, 32)
    assert np.square(error).mean() < 0.015  # 0.010 with either sign


def test_blocks_of_zeros_run(made, tmp_path):
    """XNNPACK refuses a scale of zero."""
    checkpoint, folder = made("llama", 4, INTEGER)
    values = load_file(folder / "quantized.safetensors")
    values[f"{TABLE}.scales"][5] = 0
    metadata = metadata_of(folder / "quantized.safetensors")
    save_file(values, tmp_path / "quantized.safetensors", metadata=metadata)
    stored = QuantizedCheckpoint(tmp_path / "quantized.safetensors")
    roles = {"lookup": TABLE, "logits": "lm_head.weight"}
    path = write_litert(tiny.config("llama").to_dict(), stored, tmp_path, tied=True, integer=True, **roles)
    assert not prove(path).read_lookup(slice(5, 6)).any()
    found = logits(path, np.array([5, 6, 7]))
    assert gap(found["float activations"][0], expected(checkpoint, tmp_path, np.array([5, 6, 7]))) < CLOSE
    assert not found["int8 activations"][0][:, 5].any()


def metadata_of(path: Path) -> dict[str, str]:
    from safetensors import safe_open

    with safe_open(str(path), framework="numpy") as file:
        return dict(file.metadata())


@pytest.mark.parametrize("bits", [4, 8])
def test_all_containers_hold_the_same_table_and_runtimes_agree(bits, tiny_checkpoint, tmp_path):
    from tieq.pipeline import export

    result = export(str(tiny_checkpoint()), tiny.recipe(bits), tmp_path / "out", ("onnx", "gguf", "litert"))
    assert result.passed
    checks = {(check["name"], check["subject"]): check["value"] for check in result.checks["checks"]}
    assert checks["table copies", "tflite"] == 1
    assert checks["decoded table, lookup", "onnx = tflite"] == "bit-identical"
    assert checks["decoded table, logits", "onnx = tflite"] == "bit-identical"
    assert abs(checks["KL to onnxruntime, accuracy level 0", "litert"]) < 1e-9
    sizes = {item["container"]: item["table_bytes"] for item in result.checks["containers"]}
    assert 0 <= sizes["tflite"] - sizes["gguf"] <= 12  # q8_0: the scale and zero point that the kernel wants
    assert {path.name for path in (result.folder / "litert").iterdir()} >= {"model.tflite", "tokenizer.json"}
    from tieq.revalidate import validate_path

    assert validate_path(result.folder)["passed"]
    assert validate_path(model_of(result.folder), reference=str(tiny_checkpoint()))["passed"]


def test_a_wrong_scale_is_another_table_and_another_distribution(made, tmp_path):
    _, folder = made("llama", 4)
    path = tmp_path / "model.tflite"
    path.write_bytes(model_of(folder).read_bytes())
    graph = Graph(path)
    place = next(tensor.place for tensor in graph.tensors if tensor.name == f"{TABLE}.scales")
    assert place is not None
    with path.open("r+b") as file:
        scales = np.memmap(file, np.float16, "r+", place.offset, (tiny.ROWS, 2))
        scales[200:210] *= np.float16(-1)
        scales.flush()
    original, changed = prove(model_of(folder)), prove(path)
    assert first_difference(original.read_lookup, changed.read_lookup, tiny.ROWS) == 200
    assert [check.value for check in equality_checks([original, changed])] == ["row 200 differs"] * 2
    before, after = (next(iter(logits(each, tokens(24)).values()))[0] for each in (model_of(folder), path))
    chances = [np.exp(each - np.logaddexp.reduce(each, axis=1, keepdims=True)) for each in (before, after)]
    divergence = (chances[0] * np.log(chances[0] / chances[1])).sum(axis=1).mean()
    assert divergence > 0.02  # the gate between runtimes


def test_what_has_no_layer_description_is_refused_in_a_sentence(tiny_checkpoint, tmp_path):
    from tieq.pipeline import export

    with pytest.raises(RefusedError, match=r"--format litert: the LiteRT graph cannot be built: no layer .*'gpt2'"):
        export(str(tiny_checkpoint("gpt2")), tiny.recipe(), tmp_path / "out", ("litert",))
    assert not (tmp_path / "out").exists()
    assert RefusedError.exit_code == 2


def test_row_bands_and_other_schemes_are_refused(tiny_checkpoint, tmp_path):
    from tieq.pipeline import export

    with pytest.raises(RefusedError, match="row bands are not carried"):
        export(str(tiny_checkpoint()), tiny.banded_recipe(), tmp_path / "out", ("litert",))
    recipe = tiny.recipe(table=Precision(scheme="q5_0"))
    with pytest.raises(RefusedError, match="LiteRT operators cannot hold q5_0"):
        export(str(tiny_checkpoint()), recipe, tmp_path / "out", ("litert",))


def test_a_missing_library_is_said_before_any_work(tiny_checkpoint, tmp_path, monkeypatch):
    from tieq.pipeline import export

    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "ai_edge_litert" else real(name))
    with pytest.raises(MissingRuntimeError, match=r"pip install 'tieq\[litert\]'"):
        export(str(tiny_checkpoint()), tiny.recipe(), tmp_path / "out", ("litert",))


def test_ids_beyond_the_table_are_refused(made):
    from tieq.errors import TieqError

    with pytest.raises(TieqError, match="token id 320 is not a row"):
        logits(model_of(made()[1]), np.array([3, tiny.ROWS]))


def test_constants_are_aligned(made):
    places = [tensor.place for tensor in Graph(model_of(made()[1])).tensors if tensor.place is not None]
    assert all(place.offset % 16 == 0 for place in places)
