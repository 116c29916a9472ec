from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch

from tieq.errors import RefusedError
from tieq.source.converter import Converter, Placement
from tieq.source.families import family
from tieq.source.reference import inventory

Shapes = dict[str, tuple[int, ...]]


def config(name: str) -> dict[str, Any]:
    return {**tiny.config(name).to_dict(), "architectures": [family(name).architecture]}


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Gemma 3's converter cuts its table to the tokenizer's ids, and wants to see them."""
    folder = tmp_path_factory.mktemp("tokenizer")
    tiny.save_byte_level(folder)
    return folder


@pytest.fixture(params=sorted(tiny.FAMILIES))
def oracle(request: pytest.FixtureRequest, tokenizer_folder: Path) -> Iterator[tuple[str, Converter, Shapes]]:
    """A family's converter, and the shapes of its model's tensors but the tables."""
    settings = config(request.param)
    parts = inventory(settings)
    shapes = {name: shape for name, shape in parts.shapes.items() if name not in (parts.lookup, parts.logits)}
    with Converter(settings, tokenizer_folder, name="tiny") as converter:
        yield request.param, converter, shapes


def converted(converter: Converter, name: str, values: np.ndarray) -> list[tuple[str, np.ndarray]]:
    """What llama.cpp's converter itself makes of a tensor."""
    block = next((int(part) for part in name.split(".") if part.isdecimal()), None)
    made = converter._model.modify_tensors(torch.from_numpy(values.copy()), name, block)
    return [(new_name, tensor.numpy()) for new_name, tensor in made]


def weights(shape: tuple[int, ...]) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


def test_every_tensor_goes_where_the_converter_puts_it(oracle: tuple[str, Converter, Shapes]) -> None:
    _, converter, shapes = oracle
    assert shapes
    for name, shape in shapes.items():
        [(expected_name, expected)] = converted(converter, name, weights(shape))
        placement = converter.place(name, shape)
        assert placement.name == expected_name
        # Moved values are the same bits; an offset is one float32 addition in both.
        assert np.array_equal(placement.to_gguf(weights(shape)), expected), name


def test_placements_are_inverted_exactly_but_for_the_rounding_of_an_offset(
    oracle: tuple[str, Converter, Shapes],
) -> None:
    _, converter, shapes = oracle
    for name, shape in shapes.items():
        placement, values = converter.place(name, shape), weights(shape)
        restored = placement.from_gguf(placement.to_gguf(values))
        # |x| < 7 here, so x + 1 is below 8: rounded to a multiple of 2**-21, that is by at most 2**-22; taking 1 off
        # again is exact or rounds finer.
        allowed = 2.0**-22 + 2.0**-24 if placement.offset else 0.0
        assert np.abs(restored - values).max() <= allowed, name


def test_no_two_tensors_go_to_the_same_place(oracle: tuple[str, Converter, Shapes]) -> None:
    _, converter, shapes = oracle
    places = [converter.place(name, shape).name for name, shape in shapes.items()]
    assert len(places) == len(set(places))


def test_tables_keep_their_rows(oracle: tuple[str, Converter, Shapes]) -> None:
    name, converter, _ = oracle
    entry = family(name)
    assert converter.place(entry.lookup_name, (tiny.ROWS, 64), table=True) == Placement("token_embd.weight")
    if not name.startswith("gemma"):
        assert converter.place(entry.logits_name, (tiny.ROWS, 64), table=True) == Placement("output.weight")


def test_a_head_that_the_architecture_has_no_place_for_is_refused() -> None:
    with Converter(config("gemma2"), None, name="tiny") as converter, pytest.raises(RefusedError):
        converter.place("lm_head.weight", (tiny.ROWS, 64), table=True)


@pytest.fixture
def llama() -> Iterator[Converter]:
    with Converter(config("llama"), None, name="tiny") as converter:
        yield converter


def test_llama_queries_and_keys_are_interleaved_by_head(llama: Converter) -> None:
    # 64 rows in 4 heads of 16: rows j and j + 8 of a head stand side by side.
    rows = [head * 16 + half * 8 + j for head in range(4) for j in range(8) for half in range(2)]
    placement = llama.place("model.layers.0.self_attn.q_proj.weight", (64, 64))
    assert placement.rows is not None
    assert placement.rows.tolist() == rows
    # Keys have 2 heads of 16 here.
    placement = llama.place("model.layers.1.self_attn.k_proj.weight", (32, 64))
    assert placement.name == "blk.1.attn_k.weight"
    assert placement.rows is not None
    assert placement.rows.tolist() == rows[:32]


@pytest.mark.parametrize("part", ["self_attn.v_proj", "self_attn.o_proj", "mlp.up_proj"])
def test_other_llama_matrices_keep_their_rows(part: str, llama: Converter) -> None:
    placement = llama.place(f"model.layers.0.{part}.weight", (64, 64))
    assert (placement.rows, placement.transposed, placement.offset) == (None, False, 0.0)


@pytest.mark.parametrize("name", ["gemma2", "gemma3_text"])
def test_gemma_norms_are_shifted_by_one_and_its_matrices_are_not(name: str) -> None:
    with Converter(config(name), None, name="tiny") as converter:
        for norm in ("model.norm.weight", "model.layers.0.input_layernorm.weight"):
            placement = converter.place(norm, (64,))
            assert (placement.offset, placement.rows) == (1.0, None)
        assert converter.place("model.layers.0.self_attn.q_proj.weight", (64, 64)).offset == 0.0


def test_gpt2_matrices_are_transposed_and_its_tables_and_vectors_are_not() -> None:
    with Converter(config("gpt2"), None, name="tiny") as converter:
        placement = converter.place("transformer.h.0.attn.c_attn.weight", (64, 192))
        assert (placement.name, placement.transposed, placement.rows) == ("blk.0.attn_qkv.weight", True, None)
        values = weights((64, 192))
        assert np.array_equal(placement.to_gguf(values), values.T)
        assert not converter.place("transformer.wpe.weight", (128, 64)).transposed
        assert not converter.place("transformer.h.0.attn.c_attn.bias", (192,)).transposed


def test_row_orders_are_inverted_for_matrices_and_vectors() -> None:
    order = np.random.default_rng(1).permutation(50)
    placement = Placement("t", order)
    for shape in ((50,), (50, 7)):
        values = weights(shape)
        assert np.array_equal(placement.to_gguf(values), values[order])
        assert np.array_equal(placement.from_gguf(placement.to_gguf(values)), values)


def test_offsets_of_values_on_a_coarse_grid_are_inverted_exactly() -> None:
    values = np.arange(-64, 64, dtype=np.float32) / 32
    placement = Placement("t", offset=1.0)
    assert np.array_equal(placement.to_gguf(values), values + 1)
    assert np.array_equal(placement.from_gguf(placement.to_gguf(values)), values)


def test_placing_quantized_codes_moves_them_and_changes_none() -> None:
    codes = np.arange(24, dtype=np.uint8).reshape(6, 4)
    placed = Placement("t", np.array([5, 0, 1, 2, 3, 4])).to_gguf(codes)
    assert placed.dtype == np.uint8
    assert np.array_equal(placed, codes[[5, 0, 1, 2, 3, 4]])


@pytest.mark.parametrize("architecture", ["NoSuchForCausalLM", "", "../evil"])
def test_an_architecture_that_the_converter_does_not_know_is_refused(architecture: str) -> None:
    with pytest.raises(RefusedError, match=r"does not know the architecture .* `--format onnx` only"):
        Converter({**config("llama"), "architectures": [architecture]}, None, name="tiny")


@pytest.mark.parametrize("architectures", [None, []])
def test_a_configuration_without_architectures_is_refused(architectures: list[str] | None) -> None:
    with pytest.raises(RefusedError, match=r"does not know the architecture '\?'"):
        Converter({**config("llama"), "architectures": architectures}, None, name="tiny")


def test_keys_that_a_configuration_leaves_out_are_the_defaults_of_transformers() -> None:
    with Converter({"architectures": ["LlamaForCausalLM"], "model_type": "llama"}, None, name="tiny") as converter:
        # Llama's defaults are 32 heads and 4,096 columns: head 1 begins at row 128.
        placement = converter.place("model.layers.0.self_attn.q_proj.weight", (4096, 4096))
    assert placement.rows is not None
    assert placement.rows[[0, 1, 128]].tolist() == [0, 64, 128]


def test_a_matrix_that_the_converter_regroups_by_columns_is_placed_or_refused() -> None:
    name = "h.0.self_attention.query_key_value.weight"
    settings = {
        "architectures": ["BloomForCausalLM"],
        "model_type": "bloom",
        "n_head": 4,
        "hidden_size": 64,
        "n_layer": 2,
    }
    with Converter(settings, None, name="tiny") as converter:
        [(_, expected)] = converted(converter, name, weights((192, 64)))
        try:
            placement = converter.place(name, (192, 64))
        except RefusedError:
            return
        assert np.array_equal(placement.to_gguf(weights((192, 64))), expected)


def test_no_temporary_folder_stays(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with Converter(config("llama"), None, name="tiny"):
        assert len(list(tmp_path.iterdir())) == 1
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(RefusedError):  # a configuration that is no JSON, found after the folder was made
        Converter({**config("llama"), "x": object()}, None, name="tiny")
    assert list(tmp_path.iterdir()) == []


def test_metadata_of_a_tokenizer_that_is_missing_is_refused() -> None:
    with Converter(config("llama"), None, name="tiny") as converter, pytest.raises(RefusedError, match="tokenizer"):
        converter.metadata()


def test_metadata_hold_the_architecture_and_the_tokenizer(tokenizer_folder: Path) -> None:
    with Converter(config("llama"), tokenizer_folder, name="tiny", pre_tokenizer="gpt-2") as converter:
        found = converter.metadata()
    tokens = found["tokenizer.ggml.tokens"].value
    assert found["general.architecture"].value == "llama"
    assert found["llama.embedding_length"].value == 64
    assert found["tokenizer.ggml.pre"].value == "gpt-2"
    assert (len(tokens), tokens[:2]) == (tiny.ROWS, ["<s>", "</s>"])


def test_an_unrecognized_pre_tokenizer_says_how_to_name_one(tokenizer_folder: Path) -> None:
    with (
        Converter(config("llama"), tokenizer_folder, name="tiny") as converter,
        pytest.raises(RefusedError, match=r"does not recognize the pre-tokenizer .*--pre-tokenizer"),
    ):
        converter.metadata()


def test_llama3_rope_factors_are_extra_tensors() -> None:
    scaling = {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }  # fmt: skip
    settings = {**config("llama"), "rope_theta": 500_000.0, "rope_scaling": scaling}
    with Converter(settings, None, name="tiny") as converter:
        [(name, factors)] = converter.extra_tensors()
    assert (name, factors.shape) == ("rope_freqs.weight", (8,))
    # The fastest rotation is untouched and the slowest is slowed by the whole factor.
    assert (factors[0], factors[-1]) == (1.0, 8.0)
    with Converter(config("llama"), None, name="tiny") as converter:
        assert list(converter.extra_tensors()) == []
