"""The fused graph against transformers: every family, with and without a past, batches, padding on either side."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import tiny
import torch
from transformers import AutoModelForCausalLM

from tieq.quantize import QuantizedCheckpoint
from tieq.source.decoder import decoder
from tieq.source.reference import inventory

DESCRIBED = sorted(({*tiny.FAMILIES} | {*tiny.ONNX_ONLY}) - {"gpt2"})
LENGTH = 24


def transformers_model(checkpoint: Path, folder: Path) -> Any:
    """The float model with the decoded quantized weights in it."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32, attn_implementation="eager").eval()
    stored = QuantizedCheckpoint(folder / "quantized.safetensors")
    model.load_state_dict({name: torch.from_numpy(stored.decode(name)) for name in stored.matrices}, strict=False)
    model.tie_weights()
    return model


def open_graph(path: Path) -> Any:
    """A session at accuracy level 0."""
    import onnxruntime

    model = onnx.load(str(path), load_external_data=False)
    for node in model.graph.node:
        for attribute in node.attribute:
            if attribute.name == "accuracy_level":
                attribute.i = 0
    options = onnxruntime.SessionOptions()
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(path.parent))
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def positions_of(mask: np.ndarray) -> np.ndarray:
    """Positions as transformers counts them under padding."""
    return np.maximum(mask.cumsum(1) - 1, 0)


def run(session: Any, ids: np.ndarray, mask: np.ndarray, past: dict[str, Any] | None = None, **more: Any) -> dict:
    """One step."""
    feed: dict[str, Any] = {"input_ids": ids, "attention_mask": mask, **more}
    for item in session.get_inputs():
        if item.name == "position_ids":  # generation counts for itself
            feed[item.name] = positions_of(mask)[:, -ids.shape[1] :]
        if item.name.startswith("past_key_values"):
            empty = np.zeros((len(ids), item.shape[1], 0, item.shape[3]), np.float32)
            feed[item.name] = empty if past is None else past[item.name.replace("past_key_values", "present")]
    names = [item.name for item in session.get_outputs()]
    return dict(zip(names, session.run(names, feed), strict=True))


def batch_of(count: int, padding: str) -> tuple[np.ndarray, np.ndarray]:
    """Ids and mask; the second and third sequence are padded by five and two tokens."""
    ids = np.random.default_rng(count).integers(2, tiny.ROWS, (count, LENGTH))
    mask = np.ones_like(ids)
    for row, width in ((1, 5), (2, 2)):
        if padding == "left":
            mask[row, :width] = 0
        if padding == "right":
            mask[row, -width:] = 0
    return ids, mask


@pytest.fixture(scope="module")
def onnx_only(tmp_path_factory):
    """Exports of the families that go to ONNX alone."""
    from tieq.pipeline import export

    made: dict[str, tuple[Path, Path]] = {}

    def get(family: str) -> tuple[Path, Path]:
        if family not in made:
            base = tmp_path_factory.mktemp(family)
            checkpoint = tiny.save(base / "model", family)
            result = export(str(checkpoint), tiny.recipe(), base / "out", ("onnx",))
            assert result.manifest["onnx_graph"] == "fused"
            made[family] = checkpoint, result.folder
        return made[family]

    return get


@pytest.fixture(params=DESCRIBED)
def pair(request, tiny_export, tiny_checkpoint, onnx_only):
    """The model in transformers and the artifact's folder."""
    if request.param in tiny.ONNX_ONLY:
        checkpoint, folder = onnx_only(request.param)
    else:
        checkpoint, folder = tiny_checkpoint(request.param), tiny_export(request.param).folder
    return transformers_model(checkpoint, folder), folder


def expected_logits(model: Any, ids: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Logits of transformers."""
    tensors = {"attention_mask": mask, "position_ids": positions_of(mask)}
    with torch.no_grad():
        return model(torch.from_numpy(ids), **{k: torch.from_numpy(v) for k, v in tensors.items()}).logits.numpy()


def test_the_described_families_get_a_fused_graph(tiny_export):
    for family in tiny.FAMILIES:  # the others' fixture looks for itself
        kind = tiny_export(family).manifest["onnx_graph"]
        assert kind == "fused" if family in DESCRIBED else kind.startswith("optimum (no layer description"), family


@pytest.mark.parametrize(("count", "padding"), [(1, "none"), (3, "none"), (3, "left"), (3, "right")])
def test_logits_equal_transformers(pair, count, padding):
    model, folder = pair
    ids, mask = batch_of(count, padding)
    expected = expected_logits(model, ids, mask)
    session = open_graph(folder / "onnx" / "model.onnx")
    found = run(session, ids, mask)["logits"]
    # float32 sums in another order come to 1e-6 of the range here; the bar for a graph is 1e-3.
    assert np.abs(found - expected)[mask > 0].max() < 2e-5 * np.abs(expected).max()
    if padding != "right":  # then the last column is no sequence's next token
        past = run(session, ids[:, :-2], mask[:, :-2])
        for step in (-2, -1):
            end = None if step == -1 else step + 1
            past = run(session, ids[:, step:end], mask[:, :end], past)
            assert np.abs(past["logits"][:, 0] - expected[:, step]).max() < 2e-5 * np.abs(expected).max()


def test_as_many_positions_get_logits_as_are_asked_for(pair):
    _, folder = pair
    ids, mask = batch_of(3, "left")
    session = open_graph(folder / "onnx" / "model.onnx")
    whole = run(session, ids, mask)["logits"]
    for number in (1, 3, LENGTH):
        kept = run(session, ids, mask, num_logits_to_keep=np.array(number))["logits"]
        assert kept.shape == (3, number, tiny.ROWS)
        assert np.abs(kept - whole[:, -number:]).max() < 1e-5 * np.abs(whole).max()


def test_the_graph_for_generation_gives_the_last_positions_logits_from_the_same_bytes(pair):
    _, folder = pair
    ids, mask = batch_of(3, "none")
    whole = run(open_graph(folder / "onnx" / "model.onnx"), ids, mask)
    session = open_graph(folder / "onnx" / "model_generate.onnx")
    assert session.get_outputs()[0].shape[1] == 1
    kept = run(session, ids, mask)
    assert np.abs(kept["logits"][:, 0] - whole["logits"][:, -1]).max() < 1e-5 * np.abs(whole["logits"]).max()


def test_generation_takes_batches_padded_on_the_right(pair):
    """As onnxruntime-genai feeds them: the padding stays in the mask, new tokens come after it."""
    model, folder = pair
    session = open_graph(folder / "onnx" / "model_generate.onnx")
    ids, mask = batch_of(3, "right")
    past = run(session, ids, mask)
    lengths = mask.sum(1)
    for step in range(3):
        new = np.full((3, 1), 7 + step)
        alone = [np.concatenate([ids[row, : lengths[row]], np.arange(7, 7 + step)])[None] for row in range(3)]
        for row, sequence in enumerate(alone):
            expected = expected_logits(model, sequence, np.ones_like(sequence))[0, -1]
            assert np.abs(past["logits"][row, 0] - expected).max() < 2e-5 * np.abs(expected).max(), (step, row)
        mask = np.concatenate([mask, np.ones((3, 1), np.int64)], axis=1)
        past = run(session, new, mask, past)


def test_both_graphs_read_the_same_places(tiny_export):
    folder = tiny_export("llama").folder / "onnx"
    places = []
    for name in ("model.onnx", "model_generate.onnx"):
        model = onnx.load(str(folder / name), load_external_data=False)
        places.append({t.name: [(e.key, e.value) for e in t.external_data] for t in model.graph.initializer})
    shared = set(places[0]) & set(places[1])
    assert {"model.embed_tokens.weight.codes", "model.embed_tokens.weight.lookup_codes"} <= shared
    assert all(places[0][name] == places[1][name] for name in shared)


def test_long_rotary_scalings_are_left_to_optimum():
    config = tiny.config("llama", rope_scaling={"rope_type": "dynamic", "factor": 2.0}).to_dict()
    from tieq.errors import RefusedError

    with pytest.raises(RefusedError, match="depend on the length"):
        decoder(config, inventory(config).shapes)


def test_llama_3_scaling_is_carried(tmp_path):
    from tieq.pipeline import export

    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    }
    checkpoint = tiny.save(tmp_path / "scaled", rope_scaling=scaling)
    result = export(str(checkpoint), tiny.recipe(), tmp_path / "out", ("onnx",))
    assert result.manifest["onnx_graph"] == "fused"
    ids, mask = batch_of(1, "none")
    expected = expected_logits(transformers_model(checkpoint, result.folder), ids, mask)
    found = run(open_graph(result.folder / "onnx" / "model.onnx"), ids, mask)["logits"]
    assert np.abs(found - expected).max() < 2e-5 * np.abs(expected).max()


@pytest.mark.skipif(sys.version_info < (3, 11), reason="onnxruntime-genai needs an onnxruntime for Python 3.11")
def test_onnxruntime_genai_loads_the_folder_and_writes_the_same_tokens(tiny_export):
    import onnxruntime_genai as genai

    folder = tiny_export("llama").folder / "onnx"
    model = genai.Model(str(folder))
    settings = genai.GeneratorParams(model)
    settings.set_search_options(max_length=LENGTH + 8, do_sample=False)
    generator = genai.Generator(model, settings)
    prompt = batch_of(1, "none")[0][0]
    generator.append_tokens(prompt.astype(np.int32))
    while not generator.is_done():
        generator.generate_next_token()
    written = list(generator.get_sequence(0))[LENGTH:]
    import onnxruntime

    session = onnxruntime.InferenceSession(str(folder / "model.onnx"))
    ids, ends = prompt.tolist(), json.loads((folder / "genai_config.json").read_text())["model"]["eos_token_id"]
    ours: list[int] = []
    while len(ours) < 8 and (not ours or ours[-1] != ends):
        row = np.array([ids + ours])
        ours.append(int(run(session, row, np.ones_like(row))["logits"][0, -1].argmax()))
    assert written == ours


def test_optimum_loads_the_folder_and_generates_from_a_padded_batch(tiny_export):
    from optimum.onnxruntime import ORTModelForCausalLM

    folder = tiny_export("llama").folder / "onnx"
    model = ORTModelForCausalLM.from_pretrained(folder, file_name="model.onnx")
    ids, mask = batch_of(3, "left")
    settings = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    both = {"input_ids": torch.from_numpy(ids), "attention_mask": torch.from_numpy(mask)}
    found = model.generate(**both, **settings)[:, LENGTH:].numpy()
    alone = torch.from_numpy(ids[1:2, 5:])
    assert np.array_equal(found[1], model.generate(alone, **settings)[0, alone.shape[1] :].numpy())


def test_the_graph_for_generation_is_no_file_to_measure(tiny_export):
    from tieq.errors import TieqError
    from tieq.revalidate import validate_path

    result = tiny_export("llama")
    with pytest.raises(TieqError, match="the last position alone"):
        validate_path(result.folder / "onnx" / "model_generate.onnx")


def test_files_are_named_as_optimum_and_transformers_js_look_for_them(tiny_export):
    folder = tiny_export("llama").folder
    model = onnx.load(str(folder / "onnx" / "model.onnx"), load_external_data=False)
    places = {entry.value for t in model.graph.initializer for entry in t.external_data if entry.key == "location"}
    assert places == {"model.onnx_data"}
    settings = json.loads((folder / "onnx" / "config.json").read_text())["transformers.js_config"]
    assert settings == {"dtype": "fp32", "use_external_data_format": {"model.onnx": 1}}
    assert (folder / "gguf" / "Modelfile").read_text() == "FROM ./model.gguf\n"


def test_nothing_is_run_where_nothing_is_asked_for(tmp_path, tiny_checkpoint, monkeypatch):
    import tieq.pipeline

    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("the float model was loaded")

    monkeypatch.setattr(tieq.pipeline, "load_model", never)
    text = tmp_path / "mine.txt"
    text.write_text("a text of mine that nobody reads")
    recipe = tiny.recipe(effort="quick", evaluation=None)
    result = tieq.pipeline.export(str(tiny_checkpoint("llama")), recipe, tmp_path / "out", calibration=[text])
    assert result.passed
    assert any("the calibration text is not used" in note for note in result.manifest["notes"])
    assert result.checks["runtimes"] == []
    assert any("nothing was run" in note for note in result.manifest["notes"])
    assert "Nothing was run." in (result.folder / "report.md").read_text()
    names = {check["name"] for check in result.checks["checks"]}
    assert {"table copies", "decoded table, lookup", "decoded table, logits"} <= names
    from tieq.revalidate import validate_path

    again = validate_path(result.folder, evaluate=False)
    assert again["passed"]
    assert {check["name"] for check in again["checks"]} == {*names, "files"}


def test_a_graph_for_generation_that_reads_other_bytes_fails_its_gate(tiny_export, tmp_path):
    from tieq.validate.gates import generation_checks
    from tieq.validate.structure import prove

    folder = tmp_path / "onnx"
    shutil.copytree(tiny_export("llama").folder / "onnx", folder)
    (found,) = generation_checks(prove(folder / "model.onnx"))
    assert found.passed
    model = onnx.load(str(folder / "model_generate.onnx"), load_external_data=False)
    shutil.copy(folder / "model.onnx_data", folder / "second.data")
    for tensor in model.graph.initializer:
        if tensor.name == "model.embed_tokens.weight.codes":
            tensor.external_data[0].value = "second.data"
    onnx.save(model, str(folder / "model_generate.onnx"))
    (found,) = generation_checks(prove(folder / "model.onnx"))
    assert not found.passed
    assert "second.data" in str(found.value)


def test_a_tied_head_keeps_its_bias(tmp_path):
    from tieq.pipeline import export

    checkpoint = tiny.save(tmp_path / "phi", "phi", tie_word_embeddings=True)
    result = export(str(checkpoint), tiny.recipe(), tmp_path / "out", ("onnx",))
    ids, mask = batch_of(1, "none")
    expected = expected_logits(transformers_model(checkpoint, result.folder), ids, mask)
    found = run(open_graph(result.folder / "onnx" / "model.onnx"), ids, mask)["logits"]
    assert np.abs(found - expected).max() < 2e-5 * np.abs(expected).max()


def test_the_models_own_ends_of_turns_reach_both_configurations(tmp_path):
    from tieq.pipeline import export

    checkpoint = tiny.save(tmp_path / "chat")
    (checkpoint / "generation_config.json").write_text('{"eos_token_id": [1, 7], "temperature": 0.6}')
    folder = export(str(checkpoint), tiny.recipe(effort="quick", evaluation=None), tmp_path / "out").folder / "onnx"
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == [1, 7]
    found = json.loads((folder / "genai_config.json").read_text())
    assert found["model"]["eos_token_id"] == [1, 7]
    assert found["search"]["temperature"] == 0.6


def test_a_size_is_a_gate_without_evaluation_and_a_kl_is_refused(tiny_export):
    from tieq.cli.options import refuse_unmeasured
    from tieq.errors import TieqError
    from tieq.recipe import Gates
    from tieq.revalidate import validate_path

    found = validate_path(tiny_export("llama").folder, gates=Gates(max_bytes=1), evaluate=False)
    assert {check["name"] for check in found["checks"] if not check["passed"]} == {"file size"}
    with pytest.raises(TieqError, match="measures nothing"):
        refuse_unmeasured(True, 0.1)


@pytest.fixture(scope="module")
def in_pieces(tmp_path_factory):
    """Exports whose table counts as large: generation reads it in pieces and gathers rows before it decodes them."""
    from tieq.export import onnx_products
    from tieq.pipeline import export

    made: dict[str, Path] = {}

    def make(kind: str = "tied") -> Path:
        if kind not in made:
            folder = tmp_path_factory.mktemp(kind)
            checkpoint = tiny.save(folder / "model", tie_word_embeddings=kind != "untied")
            recipe = tiny.banded_recipe() if kind == "banded" else tiny.recipe()
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(onnx_products, "_PIECE_BYTES", 3000)
                made[kind] = export(str(checkpoint), recipe, folder / "out", ("onnx",)).folder
        return made[kind]

    return make


def pieces_of_the_head(path: Path) -> list[Any]:
    """The products that stand side by side before the logits."""
    nodes = onnx.load(str(path), load_external_data=False).graph.node
    sides = [name for node in nodes if node.op_type == "Concat" and "lm_head" in node.name for name in node.input]
    return [node for node in nodes if node.output[0] in sides]


@pytest.mark.parametrize("kind", ["tied", "untied", "banded"])
def test_generation_reads_a_large_table_in_pieces_of_the_same_bytes(in_pieces, kind):
    from tieq.revalidate import validate_path

    folder = in_pieces(kind) / "onnx"
    pieces = pieces_of_the_head(folder / "model_generate.onnx")
    sizes = [attribute.i for node in pieces for attribute in node.attribute if attribute.name == "N"]
    assert len(sizes) > 1
    assert sum(sizes) == tiny.ROWS
    assert pieces_of_the_head(folder / "model.onnx") == []
    ids, mask = batch_of(3, "none")
    whole = run(open_graph(folder / "model.onnx"), ids, mask)["logits"]
    kept = run(open_graph(folder / "model_generate.onnx"), ids, mask)["logits"]
    assert np.abs(kept[:, 0] - whole[:, -1]).max() < 1e-5 * np.abs(whole).max()
    checked = validate_path(in_pieces(kind), evaluate=False)
    assert checked["passed"]
    (found,) = [check for check in checked["checks"] if check["name"] == "graph for generation"]
    assert found["value"] == "the same bytes"


@pytest.mark.parametrize("part", ["codes", "scales"])
@pytest.mark.parametrize("damage", ["another file", "another row"])
def test_a_piece_of_other_bytes_fails_the_gate(in_pieces, tmp_path, part, damage):
    from tieq.validate.gates import generation_checks
    from tieq.validate.structure import prove

    folder = tmp_path / "onnx"
    shutil.copytree(in_pieces() / "onnx", folder)
    shutil.copy(folder / "model.onnx_data", folder / "second.data")
    model = onnx.load(str(folder / "model_generate.onnx"), load_external_data=False)
    second = pieces_of_the_head(folder / "model_generate.onnx")[1]
    widened = {node.output[0]: node.input[0] for node in model.graph.node if node.op_type == "Cast"}
    name = second.input[1] if part == "codes" else widened[second.input[2]]
    (tensor,) = [tensor for tensor in model.graph.initializer if tensor.name == name]
    for entry in tensor.external_data:
        if entry.key == "location" and damage == "another file":
            entry.value = "second.data"
        if entry.key == "offset" and damage == "another row":
            entry.value = str(int(entry.value) - 64)
    onnx.save(model, str(folder / "model_generate.onnx"))
    (found,) = generation_checks(prove(folder / "model.onnx"))
    assert not found.passed
    assert "inside as" in str(found.value)


@pytest.mark.parametrize("damage", ["another entry", "another axis"])
def test_rows_that_are_decoded_by_another_index_are_no_lookup(in_pieces, tmp_path, damage):
    from tieq.errors import TieqError
    from tieq.validate.structure import prove

    folder = tmp_path / "onnx"
    shutil.copytree(in_pieces() / "onnx", folder)
    model = onnx.load(str(folder / "model_generate.onnx"), load_external_data=False)
    kind, at = ("GatherBlockQuantized", 1) if damage == "another entry" else ("Unsqueeze", 1)
    (node,) = [node for node in model.graph.node if node.op_type == kind and node.name.startswith("embed_tokens")]
    (stored,) = [tensor for tensor in model.graph.initializer if tensor.name == node.input[at]]
    other = onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(stored) + 1, "other")
    model.graph.initializer.append(other)
    node.input[at] = "other"
    onnx.save(model, str(folder / "model_generate.onnx"))
    with pytest.raises(TieqError, match="no lookup"):
        prove(folder / "model_generate.onnx")


def test_scales_of_one_role_alone_fail_the_gate(tiny_export, tmp_path):
    from tieq.validate.gates import structure_checks
    from tieq.validate.structure import prove

    folder = tmp_path / "onnx"
    shutil.copytree(tiny_export("llama").folder / "onnx", folder)
    assert all(check.passed for check in structure_checks(prove(folder / "model.onnx"), expect_tied=True))
    model = onnx.load(str(folder / "model.onnx"), load_external_data=False)
    shutil.copy(folder / "model.onnx_data", folder / "second.data")
    (scales,) = [t for t in model.graph.initializer if t.name == "model.embed_tokens.weight.scales"]
    own = onnx.TensorProto()
    own.CopyFrom(scales)
    own.name, own.external_data[0].value = "own.scales", "second.data"
    model.graph.initializer.append(own)
    at, head = next((i, node) for i, node in enumerate(model.graph.node) if node.name == "lm_head")
    head.input[2] = "own.wide"
    cast = onnx.helper.make_node("Cast", ["own.scales"], ["own.wide"], to=onnx.TensorProto.FLOAT)
    model.graph.node.insert(at, cast)
    onnx.save(model, str(folder / "model.onnx"))
    failed = [check for check in structure_checks(prove(folder / "model.onnx"), expect_tied=True) if not check.passed]
    assert [check.name for check in failed] == ["table scales"]
    assert "second.data" in str(failed[0].value)
