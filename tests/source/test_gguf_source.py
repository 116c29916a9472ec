from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch

from tieq.errors import RefusedError, TieqError
from tieq.source.checkpoint import CheckpointSource
from tieq.source.gguf_source import GgufSource
from tieq.source.reference import inventory, load_model
from tieq.source.tie import tie_graph
from tieq.source.tokenizer import TextTokenizer

Maker = Callable[..., Path]
TABLE = np.random.default_rng(0).standard_normal((8, 32)).astype(np.float32)


Pair = tuple[CheckpointSource, GgufSource]


@pytest.fixture(scope="module")
def pairs(tiny_checkpoint: Maker, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Pair]:
    """Make (once) a family's checkpoint and the GGUF file that llama.cpp makes of it."""
    made: dict[str, Pair] = {}

    def make(family: str) -> Pair:
        if family not in made:
            folder = tiny_checkpoint(family)
            path = tiny.to_gguf(folder, tmp_path_factory.mktemp("gguf") / f"{family}.gguf")
            made[family] = CheckpointSource(folder), GgufSource(path)
        return made[family]

    return make


families = pytest.mark.parametrize(
    "family", ["llama", "qwen2", "qwen3", "smollm3", "gpt2", "gemma3_text", "gemma2", "phi3"]
)


@families
def test_a_gguf_file_gives_the_tensors_of_the_checkpoint_it_was_made_from(
    family: str, pairs: Callable[[str], Pair]
) -> None:
    checkpoint, file = pairs(family)
    for name in file.names():
        expected = checkpoint.read(name)
        # Gemma's norms have 1 added and taken off again: values below 2 round to 2**-23, by half of it at most, twice.
        allowed = 2.0**-23 if file.placements[name].offset else 0.0
        found = file.read(name)
        assert found.shape == expected.shape
        assert np.abs(found - expected).max() <= allowed, name
        if found.ndim > 1:
            assert np.array_equal(file.read(name, slice(1, 3)), found[1:3]), name
    wanted = set(inventory(checkpoint.config).shapes)
    tied = tie_graph(checkpoint).tied
    assert wanted - set(file.names()) == ({checkpoint.family.logits_name} if tied else set())


@families
def test_the_rebuilt_configuration_makes_the_same_model(family: str, pairs: Callable[[str], Pair]) -> None:
    checkpoint, file = pairs(family)
    table = checkpoint.family.lookup_name
    ids = np.random.default_rng(1).integers(0, tiny.ROWS, 24)
    tied = tie_graph(checkpoint).tied
    assert tie_graph(file).tied is tied
    expected = load_model(checkpoint, tied=tied, table=table if tied else None).logits(ids)
    found = load_model(file, tied=tied, table=table if tied else None).logits(ids)
    # The same float32 operations on the same weights; Gemma's norms are 2**-23 off and GGUF's epsilons are float32,
    # through a few layers that each add up some hundred terms.
    assert np.abs(found - expected).max() <= 2.0**-23 * 100 * np.abs(expected).max()


# Settings that a GGUF file holds and that differ from the family's defaults.
@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {"head_dim": 32}),
        ("llama", {"rope_theta": 5000.0, "rms_norm_eps": 1e-3}),
        ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}),
        ("llama", {"tie_word_embeddings": False}),
        pytest.param(
            "llama",
            {"attention_bias": True},
        ),
        pytest.param(
            "llama",
            {"mlp_bias": True},
        ),
        ("phi", {"tie_word_embeddings": True}),
        pytest.param(
            "phi",
            {"partial_rotary_factor": 0.25},
        ),
        pytest.param(
            "gemma3_text",
            {"rope_local_base_freq": 5000.0},
        ),
    ],
)
def test_settings_off_the_defaults_survive_gguf(family: str, changes: dict[str, Any], tmp_path: Path) -> None:
    folder = tiny.save(tmp_path / "checkpoint", family, tokenizer=False, **changes)
    tiny.save_byte_level(folder)
    checkpoint, file = CheckpointSource(folder), GgufSource(tiny.to_gguf(folder, tmp_path / "tiny.gguf"))
    tied = tie_graph(checkpoint).tied
    table = checkpoint.family.lookup_name if tied else None
    ids = np.random.default_rng(1).integers(0, tiny.ROWS, 60)
    try:
        found = load_model(file, tied=tied, table=table).logits(ids)
    except TieqError:  # a refusal is as good, but never another model
        return
    expected = load_model(checkpoint, tied=tied, table=table).logits(ids)
    # As above.
    assert np.abs(found - expected).max() <= 2.0**-23 * 100 * np.abs(expected).max()


# Phi-3 is left out: its tiny tokenizer.json puts no space in front, its tokenizer.model, which GGUF holds, does.
@pytest.mark.parametrize("family", ["llama", "qwen2", "gpt2", "gemma2", "gemma3_text"])
def test_the_rebuilt_tokenizer_gives_the_same_ids(family: str, pairs: Callable[[str], Pair]) -> None:
    original, rebuilt = (TextTokenizer(source.tokenizer_folder(), "x") for source in pairs(family))
    for text in ("the quick brown fox", " and the price of bread, 1234!", "unseen: é 日 😀\n"):
        assert rebuilt.encode(text) == original.encode(text)


def test_the_layout_of_a_gguf_file_is_its_own(pairs: Callable[[str], Pair]) -> None:
    _, file = pairs("llama")
    shapes = {name: file.info(name).shape for name in file.names()}
    layout = file.gguf_layout(shapes, set(), "qwen2")
    assert layout.placements == file.placements
    assert layout.metadata["tokenizer.ggml.pre"].value == "qwen2"
    assert file.file.get("tokenizer.ggml.pre") == "gpt-2"
    assert layout.extras == {}


def test_a_slice_of_a_vector_is_the_same_in_both_sources(pairs: Callable[[str], Pair]) -> None:
    checkpoint, file = pairs("llama")
    assert np.array_equal(
        file.read("model.norm.weight", slice(1, 3)), checkpoint.read("model.norm.weight", slice(1, 3))
    )


def small(maker: Maker, metadata: dict[str, Any] | None = None, **options: Any) -> GgufSource:
    tensors = options.pop("tensors", {"token_embd.weight": (TABLE, "q8_0")})
    return GgufSource(maker(tensors, {"llama.embedding_length": 32, **(metadata or {})}, **options))


def test_the_configuration_is_read_from_the_metadata(gguf_file: Maker) -> None:
    metadata = {
        "llama.context_length": 77, "llama.block_count": 3, "llama.feed_forward_length": 64,
        "llama.attention.head_count": 4, "llama.attention.head_count_kv": 2, "llama.rope.freq_base": 5000.0,
        "llama.attention.layer_norm_rms_epsilon": 0.5, "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2, "tokenizer.ggml.padding_token_id": 3,
    }  # fmt: skip
    config = small(gguf_file, metadata).config
    expected = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 8, "hidden_size": 32,
        "max_position_embeddings": 77, "num_hidden_layers": 3, "intermediate_size": 64, "num_attention_heads": 4,
        "num_key_value_heads": 2, "rope_theta": 5000.0, "rms_norm_eps": 0.5, "bos_token_id": 1, "eos_token_id": 2,
        "pad_token_id": 3, "tie_word_embeddings": True,
    }  # fmt: skip
    assert config.items() >= expected.items()


def test_a_file_with_a_head_of_its_own_is_flagged_untied(gguf_file: Maker) -> None:
    tensors = {"token_embd.weight": (TABLE, "q8_0"), "output.weight": (TABLE, "q4_0")}
    source = small(gguf_file, tensors=tensors)
    assert source.config["tie_word_embeddings"] is False
    assert source.parameters() == 2 * TABLE.size


def test_linear_rope_scaling_is_rebuilt_and_other_scaling_refused(gguf_file: Maker) -> None:
    metadata = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    assert small(gguf_file, metadata).config["rope_scaling"] == {"rope_type": "linear", "factor": 4.0}
    assert "rope_scaling" not in small(gguf_file, {"llama.rope.scaling.type": "none"}).config
    with pytest.raises(RefusedError, match="the rope scaling 'yarn' cannot be rebuilt from GGUF"):
        small(gguf_file, {"llama.rope.scaling.type": "yarn"})


LLAMA3 = {
    "llama.context_length": 128, "llama.block_count": 2, "llama.feed_forward_length": 64,
    "llama.attention.head_count": 4, "llama.rope.freq_base": 500_000.0, "llama.rope.dimension_count": 16,
}  # fmt: skip


def llama3_factors(factor: float) -> np.ndarray:
    """The published rule: slow rotations by the factor, fast ones not, those between in proportion."""
    frequencies = 500_000.0 ** (-np.arange(0, 16, 2) / 16)
    turns = 8192 * frequencies / (2 * np.pi)  # in the context of training
    share = np.clip((turns - 1) / (4 - 1), 0, 1)
    return (1 / (share + (1 - share) / factor)).astype(np.float32)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_rope_factors_are_recognized(factor: float, gguf_file: Maker) -> None:
    tensors = {"token_embd.weight": (TABLE, "q8_0"), "rope_freqs.weight": (llama3_factors(factor), "f32")}
    scaling = small(gguf_file, LLAMA3, tensors=tensors).config["rope_scaling"]
    assert (scaling["rope_type"], scaling["factor"]) == ("llama3", factor)


def test_rope_factors_of_no_published_model_are_refused(gguf_file: Maker) -> None:
    tensors = {"token_embd.weight": (TABLE, "q8_0"), "rope_freqs.weight": (llama3_factors(17.0), "f32")}
    with pytest.raises(RefusedError, match="belong to no published Llama 3 scaling"):
        small(gguf_file, LLAMA3, tensors=tensors)


def test_a_file_without_a_table_is_refused(gguf_file: Maker) -> None:
    with pytest.raises(RefusedError, match="has no vocabulary table"):
        small(gguf_file, tensors={"blk.0.ffn_up.weight": (TABLE, "q8_0")})


def test_an_architecture_without_a_family_is_refused(gguf_file: Maker) -> None:
    with pytest.raises(TieqError, match="'mamba' cannot be mapped back to a checkpoint"):
        small(gguf_file, architecture="mamba")


def test_a_file_without_a_vocabulary_has_no_tokenizer(gguf_file: Maker) -> None:
    assert small(gguf_file).tokenizer_folder() is None


def test_the_fingerprint_is_the_hash_of_the_file(gguf_file: Maker) -> None:
    source = small(gguf_file)
    assert source.fingerprint() == hashlib.sha256(source.path.read_bytes()).hexdigest()


# The reference model


@pytest.mark.parametrize("family", ["llama", "gpt2", "phi"])
def test_the_reference_model_is_the_model_that_transformers_loads(family: str, tiny_checkpoint: Maker) -> None:
    from transformers import AutoModelForCausalLM

    folder = tiny_checkpoint(family)
    source = CheckpointSource(folder)
    tied = tie_graph(source).tied
    found = load_model(source, tied=tied, table=source.family.lookup_name if tied else None)
    loaded = AutoModelForCausalLM.from_pretrained(folder, torch_dtype=torch.float32).eval()
    ids = np.random.default_rng(2).integers(0, tiny.ROWS, 24)
    with torch.no_grad():
        expected = loaded(torch.from_numpy(ids)[None]).logits[0].numpy()
    assert np.array_equal(found.logits(ids), expected)
    for name, parameter in loaded.named_parameters():
        assert torch.equal(dict(found.module.named_parameters())[name], parameter), name


def edited(tiny_checkpoint: Maker, target: Path, edit: Callable[[dict[str, np.ndarray]], None]) -> CheckpointSource:
    from safetensors.numpy import load_file, save_file

    folder = tiny_checkpoint("llama")
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file({name: np.ascontiguousarray(values) for name, values in tensors.items()}, target / "model.safetensors")
    (target / "config.json").write_text((folder / "config.json").read_text())
    return CheckpointSource(target)


def test_a_missing_parameter_is_refused_and_never_drawn_at_random(tiny_checkpoint: Maker, tmp_path: Path) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    source = edited(tiny_checkpoint, tmp_path, lambda tensors: tensors.pop(name))
    with pytest.raises(RefusedError, match=f"the tensor '{name}' is missing, and a random one is never used"):
        load_model(source, tied=True, table="model.embed_tokens.weight")


def test_a_parameter_of_another_shape_is_refused_with_both(tiny_checkpoint: Maker, tmp_path: Path) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    source = edited(tiny_checkpoint, tmp_path, lambda tensors: tensors.update({name: tensors[name].T}))
    with pytest.raises(RefusedError, match=rf"'{name}' has shape \[64, 128\] where \[128, 64\] is expected"):
        load_model(source, tied=True, table="model.embed_tokens.weight")


@pytest.mark.parametrize(
    ("config", "match"),
    [
        ({"model_type": "brand_new"}, "transformers does not know the model type 'brand_new'"),
        ({"model_type": "llama", "hidden_size": "wide"}, "transformers makes no language model of this configuration"),
        ({}, "does not know the model type 'None'"),
    ],
)
def test_a_configuration_that_transformers_cannot_use_is_refused(config: dict[str, Any], match: str) -> None:
    with pytest.raises(RefusedError, match=match):
        inventory(config)


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "t5"},
        {"model_type": "clip"},
        {"model_type": "llama", "num_attention_heads": 0},
        {"model_type": "llama", "vocab_size": -1},
        {"model_type": "llama", "rope_scaling": {"rope_type": "unheard-of", "factor": 2.0}},
    ],
    ids=["encoder-decoder", "no text model", "no heads", "negative rows", "unknown rope"],
)
def test_a_configuration_that_makes_no_language_model_is_refused(config: dict[str, Any]) -> None:
    with pytest.raises(RefusedError):
        inventory(config)


def test_an_inventory_counts_a_tied_table_once_and_allocates_nothing() -> None:
    shape = {"vocab_size": 10**6, "hidden_size": 4096, "num_hidden_layers": 1, "num_attention_heads": 32}
    tied = inventory({"model_type": "llama", **shape, "tie_word_embeddings": True})
    untied = inventory({"model_type": "llama", **shape, "tie_word_embeddings": False})
    assert untied.parameters - tied.parameters == 10**6 * 4096
    assert (tied.tied_by_default, untied.tied_by_default) == (True, False)
    assert {matrix.name for matrix in tied.body} == {matrix.name for matrix in untied.body}
    assert "lm_head.weight" not in {matrix.name for matrix in tied.body}


@pytest.mark.parametrize(
    "metadata",
    [{}, {"phi2.embedding_length": 32, "phi2.attention.head_count": 0}, {"phi2.embedding_length": "wide"}],
    ids=["no shape", "no heads", "a word for a number"],
)
def test_metadata_without_the_shape_of_a_head_are_refused(metadata: dict[str, Any], gguf_file: Maker) -> None:
    with pytest.raises(TieqError):
        GgufSource(gguf_file({"token_embd.weight": (TABLE, "q8_0")}, metadata, architecture="phi2"))


def test_a_gemma3_file_without_a_vocabulary_is_read_or_refused(gguf_file: Maker) -> None:
    shape = {
        "embedding_length": 32, "block_count": 1, "attention.head_count": 2, "attention.head_count_kv": 1,
        "attention.key_length": 16, "feed_forward_length": 32,
    }  # fmt: skip
    metadata = {f"gemma3.{key}": value for key, value in shape.items()}
    source = GgufSource(gguf_file({"token_embd.weight": (TABLE, "q8_0")}, metadata, architecture="gemma3"))
    try:
        assert source.names() == ["model.embed_tokens.weight"]
    except TieqError:
        return


def test_a_special_id_that_is_no_number_is_refused(gguf_file: Maker) -> None:
    metadata = {
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": ["a", "b"], "tokenizer.ggml.eos_token_id": "b",
    }  # fmt: skip
    with pytest.raises(TieqError):
        small(gguf_file, metadata).tokenizer_folder()
