from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tieq.errors import RefusedError
from tieq.source.checkpoint import INDEX, CheckpointSource

Maker = Callable[..., Path]
TABLE, HEAD, BODY = "model.embed_tokens.weight", "lm_head.weight", "model.layers.0.mlp.up_proj.weight"


def numbers(rows: int = 6, columns: int = 4, start: int = 0) -> np.ndarray:
    return np.arange(start, start + rows * columns, dtype=np.float32).reshape(rows, columns)


def refuse(folder: Path, match: str) -> None:
    with pytest.raises(RefusedError, match=match):
        CheckpointSource(folder)


def test_a_single_file_is_read_lazily_by_name_and_rows(checkpoint: Maker) -> None:
    source = CheckpointSource(checkpoint({TABLE: numbers(), BODY: numbers(3, 4, 100)}))
    assert sorted(source.names()) == [TABLE, BODY]
    assert np.array_equal(source.read(TABLE), numbers())
    assert np.array_equal(source.read(TABLE, slice(2, 100)), numbers()[2:])
    assert np.array_equal(source.read(TABLE, slice(-2, None)), numbers()[-2:])
    assert (source.info(TABLE).shape, source.info(TABLE).dtype, source.info(TABLE).nbytes) == ((6, 4), "F32", 96)
    assert source.parameters() == 6 * 4 + 3 * 4
    assert source.label == "checkpoint"


def test_a_sharded_checkpoint_reads_each_tensor_from_its_shard(checkpoint: Maker) -> None:
    folder = checkpoint(
        shards={
            "model-00001-of-00002.safetensors": {TABLE: numbers()},
            "model-00002-of-00002.safetensors": {HEAD: numbers(6, 4, 50), BODY: numbers(3, 4, 9)},
        }
    )
    source = CheckpointSource(folder)
    for name, expected in ((TABLE, numbers()), (HEAD, numbers(6, 4, 50)), (BODY, numbers(3, 4, 9))):
        assert np.array_equal(source.read(name), expected)
    assert [info.name for info in source.role_tensors() if info] == [TABLE, HEAD]


def test_a_missing_shard_is_named(checkpoint: Maker) -> None:
    folder = checkpoint(shards={"a.safetensors": {TABLE: numbers()}, "b.safetensors": {BODY: numbers()}})
    (folder / "b.safetensors").unlink()
    refuse(folder, r"shards are missing: b\.safetensors")


def test_a_shard_that_only_the_index_knows_is_named(checkpoint: Maker) -> None:
    index = {"weight_map": {TABLE: "a.safetensors", BODY: "phantom.safetensors"}}
    refuse(checkpoint(shards={"a.safetensors": {TABLE: numbers()}}, index=index), r"missing: phantom\.safetensors")


@pytest.mark.parametrize(
    "weight_map",
    [
        {TABLE: "a.safetensors", BODY: "b.safetensors", "model.phantom.weight": "a.safetensors"},  # not stored
        {TABLE: "a.safetensors", BODY: "a.safetensors", "x": "b.safetensors"},  # stored in another shard
        {TABLE: "a.safetensors"},  # a shard alone knows the tensor, and b is not opened
    ],
    ids=["phantom tensor", "wrong shard", "tensor not in the index"],
)
def test_an_index_that_disagrees_with_the_shards_is_refused(weight_map: dict[str, str], checkpoint: Maker) -> None:
    shards = {"a.safetensors": {TABLE: numbers(), "model.y": numbers()}, "b.safetensors": {BODY: numbers()}}
    refuse(checkpoint(shards=shards, index={"weight_map": weight_map}), r"the index and the shards disagree about")


@pytest.mark.parametrize("shard", ["../x.safetensors", "/x.safetensors", "sub/x.safetensors", "..", "", ".", 7])
def test_an_index_that_leaves_its_folder_is_refused(shard: Any, checkpoint: Maker, tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    save_file({TABLE: numbers()}, tmp_path / "x.safetensors")
    folder = checkpoint(index={"weight_map": {TABLE: shard}})
    (folder / "sub").mkdir()
    save_file({TABLE: numbers()}, folder / "sub" / "x.safetensors")
    refuse(folder, r"(names the shard .* outside its folder|shards are missing)")


@pytest.mark.parametrize("weight_map", [{TABLE: ["a.safetensors"]}, {TABLE: {}}, {TABLE: "a.safetensors", BODY: 7}])
def test_an_index_whose_shards_are_no_strings_is_refused(weight_map: dict[str, Any], checkpoint: Maker) -> None:
    refuse(
        checkpoint(shards={"a.safetensors": {TABLE: numbers()}}, index={"weight_map": weight_map}), "names the shard"
    )


@pytest.mark.parametrize("content", ["", "{", "[]", "null", '"x"', "{}", '{"weight_map": []}', '{"weight_map": null}'])
def test_an_index_without_a_weight_map_is_refused(content: str, checkpoint: Maker) -> None:
    folder = checkpoint({TABLE: numbers()})
    (folder / INDEX).write_text(content)
    refuse(folder, r"(cannot be read as JSON|is no JSON object|has no 'weight_map')")


def test_truncated_safetensors_are_refused_wherever_they_are_cut(checkpoint: Maker) -> None:
    folder = checkpoint({TABLE: numbers()})
    file = folder / "model.safetensors"
    content = file.read_bytes()
    for length in range(len(content)):
        file.write_bytes(content[:length])
        refuse(folder, r"model\.safetensors: cannot be read as safetensors")
    file.write_bytes(content)
    assert CheckpointSource(folder).names() == [TABLE]


def test_a_safetensors_header_with_a_false_length_is_refused(checkpoint: Maker) -> None:
    folder = checkpoint({TABLE: numbers()})
    content = (folder / "model.safetensors").read_bytes()
    for length in (2**63 - 1, 2**64 - 1, 0):
        (folder / "model.safetensors").write_bytes(length.to_bytes(8, "little") + content[8:])
        refuse(folder, "cannot be read as safetensors")


@pytest.mark.parametrize("shape", [(0,), (0, 4), (6, 0)])
def test_an_empty_tensor_is_named(shape: tuple[int, ...], checkpoint: Maker) -> None:
    refuse(checkpoint({TABLE: numbers(), HEAD: np.zeros(shape, np.float32)}), rf"'{HEAD}' is empty \(shape")


@pytest.mark.parametrize("file", ["pytorch_model.bin", "model.pt", "consolidated.00.pth"])
def test_pickled_weights_are_refused_unread(file: str, checkpoint: Maker, tmp_path: Path) -> None:
    # A pickle that would leave a file behind if anything loaded it.
    marker = tmp_path / "unpickled"
    folder = checkpoint()
    (folder / file).write_bytes(b"cposix\nsystem\n(S'touch " + str(marker).encode() + b"'\ntR.")
    refuse(folder, rf"the weights are pickled \({file}\)")
    assert not marker.exists()


def test_a_folder_without_weights_says_what_is_expected(checkpoint: Maker) -> None:
    refuse(checkpoint(), r"no model\.safetensors and no index were found")


def test_one_file_of_another_name_is_taken_and_two_are_not(checkpoint: Maker) -> None:
    folder = checkpoint({TABLE: numbers()})
    (folder / "model.safetensors").rename(folder / "weights.safetensors")
    assert CheckpointSource(folder).names() == [TABLE]
    (folder / "other.safetensors").write_bytes((folder / "weights.safetensors").read_bytes())
    refuse(folder, "no index were found")


@pytest.mark.parametrize(
    ("config", "method"),
    [
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "gptq"),
        ({"quantization_config": {"bits": 4}}, "unknown"),
        ({"quantization_config": "awq"}, "awq"),
        ({"quantization_config": {"quant_method": "fp8"}, "text_config": {"model_type": "llama"}}, "fp8"),
        (
            {"text_config": {"model_type": "llama", "quantization_config": {"quant_method": "bitsandbytes"}}},
            "bitsandbytes",
        ),
    ],
)
def test_a_quantized_checkpoint_is_refused_with_its_method(config: dict, method: str, checkpoint: Maker) -> None:
    refuse(checkpoint({TABLE: numbers()}, **config), rf"already quantized \(method '{method}'\)")


@pytest.mark.parametrize(
    "content", ["", "[]", "3", "{", "\x00", '{"model_type": "llama"', '{"a": 1}', '{"model_type": ""}']
)
def test_a_configuration_that_names_no_model_is_refused(content: str, checkpoint: Maker) -> None:
    folder = checkpoint({TABLE: numbers()})
    (folder / "config.json").write_text(content)
    refuse(folder, r"config\.json: (cannot be read as JSON|is no JSON object|the configuration has no 'model_type')")


def test_a_configuration_in_other_bytes_than_utf8_is_refused(checkpoint: Maker) -> None:
    folder = checkpoint({TABLE: numbers()})
    (folder / "config.json").write_bytes(b'{"model_type": "ll\xe4ma"}')
    refuse(folder, "cannot be read as JSON")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_every_half_precision_value_is_read_exactly(dtype: str, checkpoint: Maker) -> None:
    import torch
    from safetensors.torch import save_file

    # All 65,536 bit patterns, and torch's own widening, which is exact.
    patterns = torch.arange(-(2**15), 2**15).to(torch.int16).view(getattr(torch, dtype)).reshape(256, 256)
    folder = checkpoint()
    save_file({TABLE: patterns}, folder / "model.safetensors")
    source = CheckpointSource(folder)
    found, expected = source.read(TABLE), patterns.float().numpy()
    finite = ~np.isnan(expected)
    assert found.dtype == np.float32
    assert np.array_equal(found.view(np.uint32)[finite], expected.view(np.uint32)[finite])
    assert np.array_equal(np.isnan(found), ~finite)
    assert source.info(TABLE).nbytes == 2 * 65536


def test_double_precision_is_rounded_to_float32(checkpoint: Maker) -> None:
    table = np.random.default_rng(0).standard_normal((4, 4))
    source = CheckpointSource(checkpoint({TABLE: table}))
    assert np.array_equal(source.read(TABLE), table.astype(np.float32))
    assert source.info(TABLE).nbytes == 8 * 16


@pytest.mark.parametrize("kind", [np.float32, np.float16, ml_dtypes.bfloat16, np.float64])
def test_rows_with_nan_or_infinity_are_found_across_pieces(
    kind: Any, checkpoint: Maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = numbers(11, 4)
    table[0, 1], table[3, 3], table[10, 0] = np.nan, np.inf, -np.inf
    table[5, 2] = 65000  # close to the largest number that fp16 has
    source = CheckpointSource(checkpoint({TABLE: table.astype(kind)}))
    for pieces in (4, 12, 1 << 20):
        monkeypatch.setattr("tieq.source.checkpoint._PIECE_WEIGHTS", pieces)
        assert source.bad_rows(source.info(TABLE), pieces // 4) == [0, 3, 10]


@pytest.mark.parametrize(
    ("model_type", "stored", "canonical"),
    [
        ("llama", "embed_tokens.weight", TABLE),
        ("llama", "layers.0.mlp.up_proj.weight", BODY),
        ("llama", TABLE, TABLE),
        ("llama", HEAD, HEAD),
        ("llama", "model.lm_head.weight", HEAD),
        ("llama", "language_model.model.embed_tokens.weight", TABLE),
        ("llama", "model.language_model.embed_tokens.weight", TABLE),
        ("llama", "language_model.model.layers.0.mlp.up_proj.weight", BODY),
        ("llama", "model.language_model.layers.0.mlp.up_proj.weight", BODY),
        ("llama", "language_model.lm_head.weight", HEAD),
        ("phi", "lm_head.bias", "lm_head.bias"),
        ("gpt2", "wte.weight", "transformer.wte.weight"),
        ("gpt2", "transformer.h.0.attn.c_attn.weight", "transformer.h.0.attn.c_attn.weight"),
        ("gpt2", HEAD, HEAD),
        ("gpt_neox", "gpt_neox.embed_in.weight", "gpt_neox.embed_in.weight"),
        ("gpt_neox", "embed_out.weight", "embed_out.weight"),
        ("opt", "decoder.embed_tokens.weight", "model.decoder.embed_tokens.weight"),
    ],
)
def test_stored_names_become_those_of_the_causal_language_model(
    model_type: str, stored: str, canonical: str, checkpoint: Maker
) -> None:
    source = CheckpointSource(checkpoint({stored: numbers()}, model_type=model_type))
    assert source.names() == [canonical]
    assert source.info(canonical).name == stored
    assert np.array_equal(source.read(canonical), numbers())


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_the_text_part_of_a_multimodal_checkpoint_is_found(prefix: str, checkpoint: Maker) -> None:
    folder = checkpoint(
        {
            prefix + "embed_tokens.weight": numbers(),
            prefix + "norm.weight": numbers(1, 4)[0],
            "vision_tower.embed_tokens.weight": numbers(3, 3, 70),
        },
        model_type="gemma3",
        tie_word_embeddings=True,
        text_config={"model_type": "gemma3_text", "hidden_size": 4, "vocab_size": 6},
    )
    source = CheckpointSource(folder)
    assert source.config["model_type"] == "gemma3_text"
    assert source.config["tie_word_embeddings"] is True
    assert source.full_config["model_type"] == "gemma3"
    lookup, logits = source.role_tensors()
    assert lookup is not None
    assert logits is None
    assert lookup.name == prefix + "embed_tokens.weight"
    assert np.array_equal(source.read("model.norm.weight"), numbers(1, 4)[0])


def test_the_inner_tie_flag_wins_over_the_outer_one(checkpoint: Maker) -> None:
    inner = {"model_type": "llama", "tie_word_embeddings": False}
    source = CheckpointSource(checkpoint({TABLE: numbers()}, tie_word_embeddings=True, text_config=inner))
    assert source.config["tie_word_embeddings"] is False


@pytest.mark.parametrize("stored", [(TABLE, "embed_tokens.weight"), (HEAD, "model.lm_head.weight")])
def test_two_stored_tensors_of_one_canonical_name_are_refused(stored: tuple[str, str], checkpoint: Maker) -> None:
    refuse(checkpoint({name: numbers(start=number) for number, name in enumerate(stored)}), "both")


def test_a_tensor_stored_in_two_shards_is_refused(checkpoint: Maker) -> None:
    shards = {"a.safetensors": {TABLE: numbers()}, "b.safetensors": {TABLE: numbers(start=9), BODY: numbers()}}
    index = {"weight_map": {TABLE: "b.safetensors", BODY: "b.safetensors", "model.z": "a.safetensors"}}
    shards["a.safetensors"]["model.z"] = numbers()
    refuse(checkpoint(shards=shards, index=index), TABLE)


def test_only_the_head_stored_is_the_logits_role(checkpoint: Maker) -> None:
    lookup, logits = CheckpointSource(checkpoint({HEAD: numbers()})).role_tensors()
    assert lookup is None
    assert logits is not None
    assert logits.name == HEAD


def test_the_fingerprint_is_over_the_configuration_and_the_shards_in_order(checkpoint: Maker) -> None:
    folder = checkpoint(shards={"b.safetensors": {TABLE: numbers()}, "a.safetensors": {BODY: numbers()}})
    files = ("config.json", "a.safetensors", "b.safetensors")
    expected = hashlib.sha256(b"".join((folder / file).read_bytes() for file in files)).hexdigest()
    assert CheckpointSource(folder).fingerprint() == expected
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "rope_theta": 1.0}))
    assert CheckpointSource(folder).fingerprint() != expected


def test_the_tokenizer_folder_is_the_checkpoint_where_it_has_one(checkpoint: Maker) -> None:
    folder = checkpoint({TABLE: numbers()})
    assert CheckpointSource(folder).tokenizer_folder() is None
    (folder / "tokenizer.json").write_text("{}")
    assert CheckpointSource(folder).tokenizer_folder() == folder


def test_gguf_without_a_tokenizer_is_refused(checkpoint: Maker) -> None:
    source = CheckpointSource(checkpoint({TABLE: numbers()}))
    with pytest.raises(RefusedError, match="no tokenizer was found, and a GGUF file needs one"):
        source.gguf_layout({TABLE: (6, 4)}, {TABLE}, None)
