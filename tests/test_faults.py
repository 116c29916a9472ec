"""Inputs that break tied-model tools in public: each is refused with one sentence, or exported right."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import tiny
import torch
from damage import doubled_gguf, rewrite_gguf
from gguf import GGUFReader
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM

from tieq.errors import RefusedError, TieqError
from tieq.pipeline import ExportResult, export
from tieq.prepare import prepare
from tieq.source.locate import open_source
from tieq.source.tie import tie_graph

HEAD, TABLE = "lm_head.weight", "model.embed_tokens.weight"
Edit = Callable[[dict[str, torch.Tensor]], None]


def copy(checkpoint: Path, target: Path) -> Path:
    """A checkpoint that a test may change."""
    shutil.copytree(checkpoint, target)
    return target


def edit_config(folder: Path, **changes: Any) -> None:
    """Change configuration keys; None removes one."""
    path = folder / "config.json"
    content = json.loads(path.read_text())
    for key, value in changes.items():
        content.pop(key, None) if value is None else content.update({key: value})
    path.write_text(json.dumps(content))


def edit_weights(folder: Path, edit: Edit) -> None:
    """Rewrite the weights."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    edit(tensors)
    save_file({name: tensor.contiguous().clone() for name, tensor in tensors.items()}, path)


def refused(folder: Path | str, tmp_path: Path, **options: Any) -> str:
    """Export, expect a refusal, and return its message; nothing may have been written."""
    out = tmp_path / "must-not-exist" / "artifact"
    with pytest.raises(TieqError) as caught:
        export(str(folder), options.pop("recipe", tiny.recipe()), out, **options)
    assert not out.parent.exists()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def exported(folder: Path, tmp_path: Path, **options: Any) -> ExportResult:
    """Export into a new folder and expect every gate to hold."""
    result = export(str(folder), options.pop("recipe", tiny.recipe()), tmp_path / "artifact", **options)
    assert result.passed, [check for check in result.checks["checks"] if not check["passed"]]
    return result


def copies(result: ExportResult) -> set[int]:
    """Copies of the table, over the containers."""
    return {entry["table"]["copies_in_file"] for entry in result.manifest["containers"].values()}


def is_shared(result: ExportResult) -> bool:
    """Whether each container has one table for both roles."""
    return all(container["shared"] for container in result.checks["containers"])


def container_bytes(result: ExportResult) -> dict[str, bytes]:
    """The containers' bytes by file name."""
    names = ("onnx/model.onnx", "onnx/model.onnx_data", "gguf/model.gguf")
    return {name: (result.folder / name).read_bytes() for name in names}


class TestRowsAndTokenizer:
    """Kind 2."""

    def test_padding_rows_are_kept_and_do_not_count(self, tmp_path):
        folder = tiny.save(tmp_path / "llama", vocab_size=384, tokenizer=False)
        tiny.save_byte_level(folder, 327)
        result = exported(folder, tmp_path)
        assert {c["rows"] for c in result.checks["containers"]} == {384}
        session_rows = GGUFReader(result.folder / "gguf" / "model.gguf").tensors
        assert next(t for t in session_rows if t.name == "token_embd.weight").shape[1] == 384
        # Padded ids are masked: their logits change nothing. The same export with garbage in those rows:
        garbage = copy(folder, tmp_path / "garbage")
        edit_weights(garbage, lambda tensors: tensors[TABLE][327:].mul_(50))
        other = export(str(garbage), tiny.recipe(), tmp_path / "other")
        for left, right in zip(result.checks["runtimes"], other.checks["runtimes"], strict=True):
            assert left["scores"]["kl"]["value"] == pytest.approx(right["scores"]["kl"]["value"], rel=1e-3)

    def test_a_tokenizer_beyond_the_table_is_refused_with_the_ids(self, tmp_path):
        folder = tiny.save(tmp_path / "llama", tokenizer=False)
        tiny.save_byte_level(folder, 326)
        message = refused(folder, tmp_path)
        assert "6 ids" in message
        assert "320, 321, 322, 323, 324, 325" in message

    def test_rows_win_over_a_configured_vocabulary_that_matches_nothing(self, tiny_checkpoint, tmp_path):
        folder = copy(tiny_checkpoint(), tmp_path / "llama")
        edit_config(folder, vocab_size=400)
        result = exported(folder, tmp_path)
        assert {c["rows"] for c in result.checks["containers"]} == {320}
        assert any("400 rows, the table has 320" in note for note in result.manifest["notes"])

    def test_a_resized_embedding_exports_its_padded_rows(self, tmp_path):
        model = tiny.model("llama")
        model.resize_token_embeddings(333, pad_to_multiple_of=64)
        model.save_pretrained(tmp_path / "resized")
        tiny.save_byte_level(tmp_path / "resized", 333)
        result = exported(tmp_path / "resized", tmp_path)
        assert {c["rows"] for c in result.checks["containers"]} == {384}
        assert copies(result) == {1}

    @pytest.mark.parametrize("bad", [-1, 320])
    def test_ids_that_are_no_rows_are_refused_by_the_runtimes(self, bad, tiny_export):
        from tieq.runtimes import runtime

        folder = tiny_export().folder
        for name, file in (("onnxruntime", "onnx/model.onnx"), ("llama.cpp", "gguf/model.gguf")):
            for _, opened in runtime(name).modes(folder / file):
                with opened as session, pytest.raises(TieqError, match=f"token id {bad} is not a row"):
                    session.logits(np.array([3, bad, 5]))


class TestFlagAgainstBytes:
    """Kinds 3, 4 and 5."""

    @pytest.mark.parametrize("rows", [1, 320])
    def test_a_tied_flag_with_another_head_is_untied(self, rows, tiny_checkpoint, tmp_path):
        folder = copy(tiny_checkpoint(), tmp_path / "llama")

        def differ(tensors: dict[str, torch.Tensor]) -> None:
            tensors[HEAD] = tensors[TABLE].clone()
            tensors[HEAD][:rows] += 0.25

        edit_weights(folder, differ)
        graph = tie_graph(open_source(str(folder)))
        assert not graph.tied
        assert graph.difference is not None
        assert graph.difference.rows == rows
        assert graph.difference.max_abs == pytest.approx(0.25, abs=1e-6)
        assert any(f"{rows} rows differ" in note and "flag says tied" in note for note in graph.notes)
        assert "were to share one table" in refused(folder, tmp_path, tie=True)
        if rows == 1:
            result = exported(folder, tmp_path)
            assert not is_shared(result)
            assert result.manifest["tied"] is False

    def test_an_untied_flag_without_a_head_is_refused(self, tiny_checkpoint, tmp_path):
        folder = copy(tiny_checkpoint(), tmp_path / "llama")
        edit_config(folder, tie_word_embeddings=False)
        message = refused(folder, tmp_path)
        assert "logits head is not stored" in message
        assert "random" in message

    def test_an_absent_flag_follows_the_architecture(self, tiny_checkpoint, tmp_path):
        llama = copy(tiny_checkpoint("llama"), tmp_path / "llama")
        edit_config(llama, tie_word_embeddings=None)
        assert "logits head is not stored" in refused(llama, tmp_path)
        gemma = copy(tiny_checkpoint("gemma3_text"), tmp_path / "gemma")
        edit_config(gemma, tie_word_embeddings=None)
        job = prepare(str(gemma), tiny.recipe(), ("onnx",))
        assert job.graph.tied
        assert any("absent; the architecture assumes true" in note for note in job.notes)

    def test_an_untied_flag_with_an_equal_head_is_an_offer(self, tiny_checkpoint, tiny_export, tmp_path):
        folder = copy(tiny_checkpoint(), tmp_path / "llama")
        edit_weights(folder, lambda tensors: tensors.update({HEAD: tensors[TABLE].clone()}))
        edit_config(folder, tie_word_embeddings=False)
        apart = exported(folder, tmp_path)
        assert not is_shared(apart)
        assert any("--tie shares them" in note for note in apart.manifest["notes"])
        tied = export(str(folder), tiny.recipe(), tmp_path / "tied", tie=True)
        assert is_shared(tied)
        assert container_bytes(tied) == container_bytes(tiny_export())

    def test_a_redundant_equal_head_exports_the_same_bytes_and_reports_the_saving(
        self, tiny_checkpoint, tiny_export, tmp_path
    ):
        folder = copy(tiny_checkpoint(), tmp_path / "llama")
        edit_weights(folder, lambda tensors: tensors.update({HEAD: tensors[TABLE].clone()}))
        result = exported(folder, tmp_path)
        assert container_bytes(result) == container_bytes(tiny_export())
        assert any("MB are saved" in note for note in result.manifest["notes"])


class TestSharingLostOnTheWay:
    """Kind 6."""

    def test_the_runtimes_own_optimization_keeps_one_payload(self, tiny_export, tmp_path):
        import onnxruntime

        from tieq.validate.structure import prove

        folder = copy(tiny_export().folder / "onnx", tmp_path / "onnx")
        options = onnxruntime.SessionOptions()
        # The default level is what a session does to the graph in memory; saved, it can be looked at.
        options.optimized_model_filepath = str(folder / "optimized.onnx")
        onnxruntime.InferenceSession(str(folder / "model.onnx"), options, providers=["CPUExecutionProvider"])
        structure = prove(folder / "optimized.onnx")
        assert len(structure.payloads) == 1
        assert structure.shared
        floats = [
            tensor
            for tensor in onnx.load(str(folder / "optimized.onnx"), load_external_data=False).graph.initializer
            if tensor.data_type == onnx.TensorProto.FLOAT and np.prod(tensor.dims) >= 320 * 64
        ]
        assert not floats

    def test_the_ort_format_keeps_one_payload(self, tiny_checkpoint, tmp_path):
        result = exported(tiny_checkpoint(), tmp_path, formats=("ort", "gguf"))
        assert copies(result) == {1}
        assert not (result.folder / "onnx").exists()
        size = (result.folder / "ort" / "model.ort").stat().st_size
        # One table of 320 x 64 codes at 4 bits takes 10,240 bytes; what a default conversion adds is a second one.
        names = [payload["names"] for payload in result.checks["containers"][0]["payloads"]]
        assert len(names) == 1
        assert size < 250_000

    def test_a_default_ort_conversion_is_caught(self, tiny_export, tmp_path):
        import onnxruntime

        from tieq.validate.gates import structure_checks
        from tieq.validate.structure import prove

        options = onnxruntime.SessionOptions()
        options.optimized_model_filepath = str(tmp_path / "model.ort")
        options.add_session_config_entry("session.save_model_format", "ORT")
        file = tiny_export().folder / "onnx" / "model.onnx"
        onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
        (check,) = structure_checks(prove(tmp_path / "model.ort"), True)[:1]
        assert not check.passed
        assert check.value == 2

    def test_a_duplicated_table_fails_validation_and_is_located(self, tiny_export, tmp_path):
        from tieq.revalidate import validate_path

        folder = copy(tiny_export().folder, tmp_path / "artifact")
        duplicate_table(folder / "onnx" / "model.onnx")
        found = validate_path(folder / "onnx" / "model.onnx")
        assert not found["passed"]
        check = next(check for check in found["checks"] if not check["passed"])
        assert check["name"] == "table copies"
        assert check["value"] == 2
        assert "second.data at byte 0" in check["detail"]

    def test_a_second_output_matrix_in_gguf_fails_validation(self, tiny_export, tmp_path):
        from tieq.validate.gates import structure_checks
        from tieq.validate.structure import prove

        doubled = doubled_gguf(tiny_export().folder / "gguf" / "model.gguf", tmp_path / "doubled.gguf")
        (check,) = structure_checks(prove(doubled), None)
        assert not check.passed
        assert check.value == 2
        assert "output.weight" in check.detail


class TestGgufIn:
    """Kind 7."""

    @pytest.fixture
    def original(self, tiny_export) -> Path:
        return tiny_export("llama", 8).folder / "gguf" / "model.gguf"

    def test_one_matrix_in_two_types_is_measured_and_retied_on_request(self, original, tmp_path):
        from gguf import GGMLQuantizationType
        from gguf.quants import dequantize, quantize

        def worse_output(tensors: dict[str, Any]) -> None:
            data, kind = tensors["token_embd.weight"]
            values = dequantize(data, kind)
            tensors["output.weight"] = (data, kind)
            coarse = GGMLQuantizationType.Q4_0
            tensors["token_embd.weight"] = (quantize(values, coarse), coarse)

        doubled = rewrite_gguf(original, tmp_path / "two.gguf", worse_output)
        source = open_source(str(doubled))
        graph = tie_graph(source)
        assert graph.verdict.value == "stored twice, one matrix in two precisions"
        assert not graph.tied
        assert any("--tie keeps the better copy" in note for note in graph.notes)
        apart = exported(doubled, tmp_path)
        assert not is_shared(apart)
        retied = export(str(doubled), tiny.recipe(8), tmp_path / "retied", tie=True)
        assert is_shared(retied)
        assert retied.passed
        # The better copy is the Q8_0 one; at 8 bits it comes back exactly.
        from tieq.source.gguf_file import GgufFile

        kept = GgufFile(retied.folder / "gguf" / "model.gguf").read("token_embd.weight")
        assert np.array_equal(kept, GgufFile(original).read("token_embd.weight"))

    def test_two_different_matrices_are_never_shared(self, original, tmp_path):
        from gguf import GGMLQuantizationType
        from gguf.quants import quantize

        def another_output(tensors: dict[str, Any]) -> None:
            values = np.random.default_rng(0).standard_normal((320, 64)).astype(np.float32)
            kind = GGMLQuantizationType.Q8_0
            tensors["output.weight"] = (quantize(values, kind), kind)

        different = rewrite_gguf(original, tmp_path / "different.gguf", another_output)
        result = exported(different, tmp_path)
        assert not is_shared(result)
        assert any("320 rows differ" in note for note in result.manifest["notes"])
        assert "were to share one table" in refused(different, tmp_path, tie=True)


class TestColumns:
    """Kind 8."""

    @pytest.mark.parametrize(
        ("family", "changes"),
        [
            ("llama", {"hidden_size": 72, "head_dim": 16}),
            ("gpt2", {"n_embd": 72}),
        ],
    )
    def test_columns_that_no_block_divides_fall_back_by_name(self, family, changes, tmp_path):
        folder = tiny.save(tmp_path / family, family, **changes)
        result = exported(folder, tmp_path)
        assert copies(result) == {1}
        table = json.loads((result.folder / "plan.json").read_text())["decisions"][0]
        assert (table["scheme"], table["bits_per_weight"]) == ("f16", 16.0)
        assert "72 columns are not divisible by 32" in table["reason"]
        assert any("f16, 16.0 bits/weight" in note for note in result.manifest["notes"])
        assert result.manifest["containers"]["gguf"]["table"]["bits_per_weight"] == [16.0]

    @pytest.mark.parametrize("hidden", [96, 576])
    def test_odd_numbers_of_blocks_are_exact(self, hidden, tmp_path):
        folder = tiny.save(tmp_path / "llama", hidden_size=hidden, head_dim=16)
        result = exported(folder, tmp_path)
        assert copies(result) == {1}
        assert result.manifest["containers"]["gguf"]["table"]["bits_per_weight"] == [4.5]


class TestBands:
    """Row bands that a model or its effort cannot have."""

    def test_bands_of_an_untied_models_own_table_are_refused(self, tiny_checkpoint, tmp_path):
        recipe = tiny.banded_recipe()
        own = recipe.model_copy(update={"lookup": recipe.table})
        message = refused(tiny_checkpoint("phi"), tmp_path, recipe=own)
        assert "row bands refine a shared table" in message

    def test_effort_quick_is_refused(self, tiny_checkpoint, tmp_path):
        message = refused(tiny_checkpoint(), tmp_path, recipe=tiny.banded_recipe(effort="quick"))
        assert "nothing will be measured" in message

    def test_a_model_without_a_tokenizer_is_refused(self, tmp_path):
        folder = tiny.save(tmp_path / "llama", tokenizer=False)
        message = refused(folder, tmp_path, recipe=tiny.banded_recipe(), formats=("onnx",))
        assert "nothing will be measured" in message

    def test_a_band_without_a_row_is_refused(self, tiny_checkpoint, tmp_path):
        from tieq.recipe import BandWish, Precision

        recipe = tiny.recipe(table=Precision(bands=(BandWish(share=0.001),)))
        message = refused(tiny_checkpoint(), tmp_path, recipe=recipe)
        assert "a band of the share 0.001 has no row in a table of 320" in message

    def test_columns_that_only_the_table_can_have_are_refused(self, tmp_path):
        folder = tiny.save(tmp_path / "llama", hidden_size=96, head_dim=16)
        assert "divisible by 64, not 96" in refused(folder, tmp_path, recipe=tiny.banded_recipe())


class TestTokenizers:
    """Kind 10."""

    def test_only_tokenizer_json_is_enough(self, tiny_checkpoint, tmp_path):
        folder = copy(tiny_checkpoint(), tmp_path / "llama")
        (folder / "tokenizer_config.json").unlink()
        assert copies(exported(folder, tmp_path)) == {1}

    def test_an_unknown_pre_tokenizer_is_refused_before_the_weights_and_can_be_overridden(
        self, tiny_checkpoint, tmp_path
    ):
        from tieq.recipe import GgufOptions

        message = refused(tiny_checkpoint(), tmp_path, recipe=tiny.recipe(gguf=GgufOptions()))
        assert "pre-tokenizer" in message
        assert "--pre-tokenizer" in message
        result = export(str(tiny_checkpoint()), tiny.recipe(gguf=GgufOptions()), tmp_path / "onnx", ("onnx",))
        assert result.passed

    def test_word_level_without_merges_is_refused_for_gguf_and_exports_to_onnx(self, tiny_checkpoint, tmp_path):
        folder = copy(tiny_checkpoint(), tmp_path / "llama")
        words = {f"word{number}": number for number in range(300)}
        tokenizer = Tokenizer(models.WordLevel(words, unk_token="word0"))
        tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
        tokenizer.save(str(folder / "tokenizer.json"))
        assert "merges" in refused(folder, tmp_path)
        # None of its words is in the default text, so there is nothing to calibrate on.
        with pytest.raises(TieqError, match="different tokens, which is nothing to calibrate on"):
            export(str(folder), tiny.recipe(), tmp_path / "onnx", ("onnx",))
        result = export(str(folder), tiny.recipe(effort="quick"), tmp_path / "onnx", ("onnx",))
        assert result.passed

    def test_ids_with_holes_are_kept_and_masked(self, tiny_checkpoint, tmp_path):
        folder = copy(tiny_checkpoint(), tmp_path / "llama")
        tokenizer = tiny.byte_level_tokenizer(300)
        content = json.loads(tokenizer.to_str())
        vocabulary = content["model"]["vocab"]
        # The last merged piece moves beyond a hole of ten ids.
        last = max(vocabulary, key=vocabulary.get)
        vocabulary[last] += 10
        (folder / "tokenizer.json").write_text(json.dumps(content))
        result = exported(folder, tmp_path)
        assert {c["rows"] for c in result.checks["containers"]} == {320}
        assert result.manifest["containers"]["gguf"]["table"]["copies_in_file"] == 1

    def test_no_tokenizer_is_refused_for_gguf_and_exports_to_onnx(self, tmp_path):
        folder = tiny.save(tmp_path / "llama", tokenizer=False)
        assert "no tokenizer" in refused(folder, tmp_path)
        result = export(str(folder), tiny.recipe(), tmp_path / "onnx", ("onnx",))
        assert result.passed
        assert result.manifest["evaluation"]["description"] == "random token ids"
        assert result.manifest["calibration"]["description"] == "none"

    def test_added_tokens_beyond_the_rows_are_refused(self, tiny_checkpoint, tmp_path):
        folder = copy(tiny_checkpoint(), tmp_path / "llama")
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        tokenizer.add_tokens([AddedToken("<extra>")])
        tokenizer.save(str(folder / "tokenizer.json"))
        assert "1 ids that the table of 320 rows does not have: 320" in refused(folder, tmp_path)


class TestContainers:
    """Kind 12."""

    def test_only_the_heads_name_on_disk_is_the_same_export(self, tiny_checkpoint, tiny_export, tmp_path):
        folder = copy(tiny_checkpoint(), tmp_path / "llama")
        edit_weights(folder, lambda tensors: tensors.update({HEAD: tensors.pop(TABLE)}))
        result = exported(folder, tmp_path)
        assert container_bytes(result)["gguf/model.gguf"] == container_bytes(tiny_export())["gguf/model.gguf"]
        assert copies(result) == {1}
        assert any(f"only the head '{HEAD}'" in note for note in result.manifest["notes"])

    def test_keys_without_the_prefix_are_the_same_export(self, tiny_checkpoint, tiny_export, tmp_path):
        folder = copy(tiny_checkpoint(), tmp_path / "llama")

        def strip(tensors: dict[str, torch.Tensor]) -> None:
            for name in list(tensors):
                tensors[name.removeprefix("model.")] = tensors.pop(name)

        edit_weights(folder, strip)
        assert container_bytes(exported(folder, tmp_path)) == container_bytes(tiny_export())

    def test_shards_are_the_same_export(self, tiny_checkpoint, tiny_export, tmp_path):
        folder = copy(tiny_checkpoint(), tmp_path / "llama")
        (folder / "model.safetensors").unlink()
        AutoModelForCausalLM.from_pretrained(tiny_checkpoint()).save_pretrained(folder, max_shard_size="100KB")
        assert len(list(folder.glob("*.safetensors"))) > 2
        assert container_bytes(exported(folder, tmp_path)) == container_bytes(tiny_export())
        shards = sorted(folder.glob("*.safetensors"))
        truncated = shards[0].read_bytes()[:-100]
        shards[0].write_bytes(truncated)
        assert "truncated or damaged" in refused(folder, tmp_path)
        shards[0].unlink()
        assert f"shards are missing: {shards[0].name}" in refused(folder, tmp_path)

    def test_a_missing_body_tensor_is_refused(self, tiny_checkpoint, tmp_path):
        folder = copy(tiny_checkpoint(), tmp_path / "llama")
        edit_weights(folder, lambda tensors: tensors.__delitem__("model.layers.1.mlp.up_proj.weight"))
        assert "model.layers.1.mlp.up_proj.weight" in refused(folder, tmp_path)

    def test_a_tensor_the_index_promises_but_no_shard_holds_is_refused(self, tiny_checkpoint, tmp_path):
        folder = copy(tiny_checkpoint(), tmp_path / "llama")
        names = dict.fromkeys(load_file(folder / "model.safetensors"), "model.safetensors")
        index = {"weight_map": {**names, "model.phantom.weight": "model.safetensors"}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        assert "model.phantom.weight" in refused(folder, tmp_path)

    def test_an_empty_tensor_is_refused(self, tiny_checkpoint, tmp_path):
        folder = copy(tiny_checkpoint(), tmp_path / "llama")
        edit_weights(folder, lambda tensors: tensors.update({"model.norm.weight": torch.zeros(0)}))
        assert "'model.norm.weight' is empty (shape [0])" in refused(folder, tmp_path)

    def test_quantized_checkpoints_are_refused_by_method(self, tiny_checkpoint, tmp_path):
        folder = copy(tiny_checkpoint(), tmp_path / "llama")
        edit_config(folder, quantization_config={"quant_method": "gptq", "bits": 4})
        assert "already quantized (method 'gptq')" in refused(folder, tmp_path)

    def test_pickled_weights_are_refused(self, tiny_checkpoint, tmp_path):
        folder = copy(tiny_checkpoint(), tmp_path / "llama")
        torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
        (folder / "model.safetensors").unlink()
        message = refused(folder, tmp_path)
        assert "pytorch_model.bin" in message
        assert "unpickling can run code" in message


def test_refusals_are_of_the_error_family():
    assert issubclass(RefusedError, TieqError)
    assert RefusedError.exit_code == 2


def duplicate_table(path: Path) -> None:
    """Give the logits a copy of the table in a data file of its own, as an untying tool would."""
    model = onnx.load(str(path), load_external_data=False)
    tensor = next(t for t in model.graph.initializer if t.name.endswith("embed_tokens.weight.codes"))
    entries = {entry.key: entry.value for entry in tensor.external_data}
    offset, length = int(entries["offset"]), int(entries["length"])
    content = (path.parent / entries["location"]).read_bytes()[offset : offset + length]
    (path.parent / "second.data").write_bytes(content)
    for entry in tensor.external_data:
        if entry.key == "location":
            entry.value = "second.data"
        if entry.key == "offset":
            entry.value = "0"
    onnx.save(model, str(path))
