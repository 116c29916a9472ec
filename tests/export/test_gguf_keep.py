"""Exports that keep a GGUF file's body: bytes by gguf-py's reader, tables by their codes, errors by their sentence."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import tiny
from gguf import GGUFReader
from gguf.quants import dequantize
from safetensors.numpy import load_file, save_file

from tieq import api, text
from tieq.errors import TieqError
from tieq.metrics import log_softmax
from tieq.pipeline import ExportResult, export
from tieq.quantize import QuantizedCheckpoint
from tieq.recipe import GgufOptions, Precision
from tieq.runtimes import runtime
from tieq.source.gguf_file import GgufFile
from tieq.source.locate import open_source
from tieq.source.tokenizer import TextTokenizer

LOOKUP, LOGITS = "token_embd.weight", "output.weight"
# The GGUF file's metadata are kept, so no pre-tokenizer is named.
OPTIONS = {"gguf": GgufOptions()}
Maker = Callable[[str], Path]


@pytest.fixture(scope="module")
def quantized(tmp_path_factory: pytest.TempPathFactory, tiny_checkpoint: Callable[..., Path]) -> Maker:
    """Make (once) a tiny GGUF file as llama.cpp quantizes it, by how it stores its tables."""
    folder = tmp_path_factory.mktemp("quantized")
    made: dict[str, Path] = {}

    def untied(name: str, *, equal: bool) -> Path:
        checkpoint = tiny.save(folder / f"{name}-checkpoint", tie_word_embeddings=False)
        if equal:
            path = checkpoint / "model.safetensors"
            tensors = load_file(path)
            tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
            save_file(tensors, path, metadata={"format": "pt"})
        return tiny.to_gguf(checkpoint, folder / f"{name}-float.gguf")

    def make(name: str) -> Path:
        if name not in made:
            if name in ("equal copies", "two precisions"):
                source = untied(name, equal=True)
            elif name == "different":
                source = untied(name, equal=False)
            else:
                family = "gemma3_text" if name == "gemma" else "llama"
                source = tiny.to_gguf(tiny_checkpoint(family), folder / f"{name}-float.gguf")
            made[name] = tiny.quantize_gguf(source, folder / f"{name}.gguf", pure=name == "equal copies")
            if name == "aligned":
                made[name] = realigned(made[name], folder / "realigned.gguf", 128)
        return made[name]

    return make


def realigned(path: Path, target: Path, alignment: int) -> Path:
    """The same file with another alignment, and a metadata value that gguf-py would store in another type."""
    source = GgufFile(path)
    writer = gguf.GGUFWriter(target, source.architecture)
    for key, entry in source.metadata.items():
        if key != "general.architecture":
            element = None if entry.element_kind is None else gguf.GGUFValueType(entry.element_kind)
            writer.add_key_value(key, entry.value, gguf.GGUFValueType(entry.kind), sub_type=element)
    writer.add_custom_alignment(alignment)
    writer.add_key_value("tiny.odd", [1.5, float("nan")], gguf.GGUFValueType.ARRAY, gguf.GGUFValueType.FLOAT64)
    for name, tensor in source.tensors.items():
        if tensor.kind == "f32":
            writer.add_tensor(name, source.read(name))
        else:
            writer.add_tensor(name, source.raw(name), raw_dtype=gguf.GGMLQuantizationType[tensor.kind.upper()])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


def kept(path: Path, out: Path, bits: int = 4, **options: Any) -> ExportResult:
    """Export with the body kept and expect every gate to hold."""
    recipe = tiny.recipe(bits, **{**OPTIONS, **options.pop("recipe", {})})
    result = api.export(path, out, recipe=recipe, keep_body=True, **options)
    assert result.passed, [check for check in result.checks["checks"] if not check["passed"]]
    return result


def stored(path: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Every tensor by gguf-py's reader: type, extents and bytes, in file order."""
    return {
        tensor.name: (tensor.tensor_type.name, tuple(tensor.shape.tolist()), tensor.data.tobytes())
        for tensor in GGUFReader(path).tensors
    }


def fields(path: Path) -> dict[str, list[bytes]]:
    """Every metadata entry by gguf-py's reader: the bytes of its parts, counts of the header left out."""
    found = GGUFReader(path).fields
    return {key: [part.tobytes() for part in found[key].parts] for key in found if not key.startswith("GGUF.")}


def decoded(path: Path, name: str) -> np.ndarray:
    """A tensor's values by gguf-py."""
    tensor = next(tensor for tensor in GGUFReader(path).tensors if tensor.name == name)
    return dequantize(tensor.data, tensor.tensor_type)


@pytest.mark.parametrize("name", ["tied", "equal copies", "two precisions", "aligned", "gemma"])
def test_all_but_the_table_keeps_its_bytes_and_the_table_is_single(name, quantized, tmp_path):
    original = quantized(name)
    result = kept(original, tmp_path / "out")
    file = result.folder / "gguf" / "model.gguf"
    before, after = stored(original), stored(file)
    body = [key for key in before if key not in (LOOKUP, LOGITS)]
    assert list(after) == [key for key in before if key != LOGITS]
    assert {key: after[key] for key in body} == {key: before[key] for key in body}
    assert after[LOOKUP][:2] == ("Q4_0", before[LOOKUP][1])
    assert fields(file) == fields(original)
    alignment = 128 if name == "aligned" else 32
    assert all(tensor.data_offset % alignment == 0 for tensor in GGUFReader(file).tensors)
    assert file.stat().st_size < original.stat().st_size

    table = result.manifest["containers"]["gguf"]["table"]
    assert (table["copies_in_file"], table["readers"]) == (1, [["lookup", "logits"]])
    (entry,) = QuantizedCheckpoint(result.folder / "quantized.safetensors").matrices
    assert set(load_file(result.folder / "quantized.safetensors")) == {f"{entry}.codes", f"{entry}.scales"}
    found = {check["name"]: check["value"] for check in result.checks["checks"]}
    assert found["kept tensors"] == f"{len(body)} of {len(body)} equal"
    assert found["kept metadata"] == f"{len(fields(file))} of {len(fields(file))} equal"
    assert (result.manifest["formats"], result.manifest["body"]) == (["gguf"], "kept")
    again = api.validate(result.folder)
    assert again["passed"]
    assert (again["runtimes"], again["input"]) == (result.checks["runtimes"], result.checks["input"])


def test_the_table_is_the_one_that_a_full_export_makes(quantized, tmp_path):
    best = {"effort": "best"}
    alone = kept(quantized("tied"), tmp_path / "alone", recipe=best)
    full = export(str(quantized("tied")), tiny.recipe(**OPTIONS, **best), tmp_path / "full", ("gguf",))
    tables = [stored(result.folder / "gguf" / "model.gguf")[LOOKUP] for result in (alone, full)]
    assert tables[0] == tables[1]
    assert (full.manifest["body"], "input" in full.checks) == ("quantized", False)


def test_copies_in_two_precisions_are_made_again_from_the_better_one(quantized, tmp_path):
    original = quantized("two precisions")
    result = kept(original, tmp_path / "out", 8, recipe={"effort": "quick"})
    table = decoded(result.folder / "gguf" / "model.gguf", LOOKUP)
    gaps = {name: np.abs(table - decoded(original, name)).max() for name in (LOOKUP, LOGITS)}
    # The head is stored in Q8_0, the lookup in Q4_0 with steps 16 times as wide.
    assert gaps[LOGITS] < gaps[LOOKUP] / 4
    assert any("the better copy is shared" in note for note in result.manifest["notes"])


@pytest.mark.parametrize(("name", "options"), [("different", {}), ("two precisions", {"tie": False})])
def test_tables_kept_apart_are_each_solved_for_their_role(name, options, quantized, tmp_path):
    original = quantized(name)
    precisions = {"lookup": Precision(scheme="q8_0"), "effort": "best"}
    result = kept(original, tmp_path / "out", recipe=precisions, **options)
    file = result.folder / "gguf" / "model.gguf"
    before, after = stored(original), stored(file)
    assert list(after) == list(before)
    assert {key: after[key] for key in before if key not in (LOOKUP, LOGITS)} == {
        key: before[key] for key in before if key not in (LOOKUP, LOGITS)
    }
    assert (after[LOOKUP][0], after[LOGITS][0]) == ("Q8_0", "Q4_0")
    assert result.manifest["tied"] is False
    assert api.validate(result.folder)["passed"]


def test_the_input_file_is_run_beside_the_new_one(quantized, tmp_path):
    original = quantized("tied")
    result = kept(original, tmp_path / "out")
    (ours,), (theirs,) = result.checks["runtimes"], result.checks["input"]["runtimes"]
    assert theirs["against_input"] is None
    assert theirs["scores"]["kl"]["value"] < ours["scores"]["kl"]["value"]
    assert result.checks["input"]["container"]["file_bytes"] == original.stat().st_size
    report = (result.folder / "report.md").read_text()
    for row in ("| gguf, the input file |", "| llama.cpp, the input file |", "|   against the input file |"):
        assert row in report

    source = open_source(str(original))
    tokenizer = TextTokenizer(source.tokenizer_folder(), "tiny")
    corpus = text.default_corpus(text.EVALUATION)
    sampling = tiny.recipe().evaluation
    sequences = text.cut_sequences(corpus, tokenizer, sampling.sequences, sampling.length)
    gaps = []
    for ids in sequences.ids:
        expected, found = (log_softmax(logits(path, ids)) for path in (original, result.folder / "gguf" / "model.gguf"))
        gaps.append((np.exp(expected) * (expected - found)).sum(-1).mean())
    # The same float64 sums in another order.
    assert ours["against_input"]["kl"]["value"] == pytest.approx(np.mean(gaps), rel=1e-9)


def logits(path: Path, ids: np.ndarray) -> np.ndarray:
    """Logits of a GGUF file in llama.cpp."""
    ((_, opened),) = runtime("llama.cpp").modes(path)
    with opened as session:
        return session.logits(ids)


def test_a_changed_byte_in_the_body_is_found_again(quantized, tmp_path):
    result = kept(quantized("tied"), tmp_path / "out")
    file = result.folder / "gguf" / "model.gguf"
    tensor = next(tensor for tensor in GGUFReader(file).tensors if tensor.name == "blk.1.ffn_up.weight")
    content = np.fromfile(file, np.uint8)
    content[tensor.data_offset + 5] ^= 1
    content.tofile(file)
    found = api.validate(result.folder)
    (check,) = [check for check in found["checks"] if check["name"] == "kept tensors"]
    assert not check["passed"]
    assert check["detail"] == f"blk.1.ffn_up.weight: byte 5 of {tensor.n_bytes} differs"
    assert not found["passed"]


def refused(model: Path, out: Path, **options: Any) -> str:
    """Export with the body kept, expect a refusal in one sentence and nothing written."""
    with pytest.raises(TieqError) as caught:
        export(str(model), tiny.recipe(**{**OPTIONS, **options.pop("recipe", {})}), out, keep_body=True, **options)
    assert not out.exists()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_what_has_no_body_to_keep_or_asks_for_more_is_refused(quantized, tiny_checkpoint, tmp_path):
    out, file = tmp_path / "out", quantized("tied")
    assert "is no GGUF file" in refused(tiny_checkpoint(), out)
    assert "writes GGUF alone, not onnx and gguf" in refused(file, out, formats=("onnx", "gguf"))
    assert "writes GGUF alone, not ort" in refused(file, out, formats=("ort",))
    assert "no pre-tokenizer can be set" in refused(file, out, recipe={"gguf": GgufOptions(pre_tokenizer="gpt-2")})
    assert "--no-tie would only write it twice" in refused(file, out, tie=False)
    assert "rows differ between the copies" in refused(quantized("different"), out, tie=True)


def test_a_part_of_a_split_file_and_one_without_a_lookup_table_are_refused(gguf_parts, tmp_path):
    assert "is one of 3 parts of a split model. Join them" in refused(gguf_parts("split"), tmp_path / "out")
    assert "has no 'token_embd.weight', so llama.cpp does not run it" in refused(
        gguf_parts("headless"), tmp_path / "out"
    )


@pytest.fixture
def gguf_parts(tmp_path: Path) -> Maker:
    """A file that says it is a part of three, or one whose only table is the head's."""

    def make(kind: str) -> Path:
        path = tmp_path / f"{kind}.gguf"
        writer = gguf.GGUFWriter(path, "llama")
        writer.add_uint32("llama.embedding_length", 32)
        if kind == "split":
            writer.add_uint16("split.count", 3)
        writer.add_tensor(LOGITS if kind == "headless" else LOOKUP, np.ones((4, 32), np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    return make


def test_a_folder_that_holds_the_model_is_not_replaced(quantized, tmp_path):
    first = kept(quantized("tied"), tmp_path / "out")
    file = first.folder / "gguf" / "model.gguf"
    content = file.read_bytes()
    with pytest.raises(TieqError, match="holds the model that is exported, and would be replaced"):
        export(str(file), tiny.recipe(**OPTIONS), first.folder, keep_body=True)
    assert file.read_bytes() == content
