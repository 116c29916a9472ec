from __future__ import annotations

import math

import pytest

from tieq.errors import TieqError
from tieq.records import Role, RoleUse
from tieq.source.families import _table, family, family_of_gguf

ENTRIES = sorted(_table())
TINY = {
    "vocab_size": 48, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 2, "head_dim": 16, "ffn_dim": 32, "word_embed_proj_dim": 32, "n_embd": 32, "n_layer": 1,
    "n_head": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


@pytest.mark.parametrize("model_type", ENTRIES)
def test_every_entry_names_the_architecture_that_transformers_gives_its_model_type(model_type: str) -> None:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    assert MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type] == family(model_type).architecture


@pytest.mark.parametrize("model_type", ENTRIES)
def test_every_tie_default_is_that_of_transformers(model_type: str) -> None:
    from transformers import CONFIG_MAPPING

    assert CONFIG_MAPPING[model_type]().tie_word_embeddings is family(model_type).tie_default


@pytest.mark.parametrize("model_type", ENTRIES)
def test_every_entry_names_the_role_tensors_that_the_model_has(model_type: str) -> None:
    from tieq.source.reference import inventory

    parts = inventory({"model_type": model_type, **TINY, "tie_word_embeddings": False})
    found = family(model_type)
    assert (parts.lookup, parts.logits) == (found.lookup_name, found.logits_name)
    assert found.logits_bias == (found.logits_name.replace(".weight", ".bias") in parts.shapes)


@pytest.mark.parametrize("model_type", ENTRIES)
def test_every_config_key_for_scaling_is_one_that_the_configuration_has(model_type: str) -> None:
    from transformers import CONFIG_MAPPING

    entry = family(model_type)
    keys = {entry.lookup_multiplier, entry.logits_multiplier, entry.logits_divisor, entry.softcap}
    config = CONFIG_MAPPING[model_type]()
    for key in keys - {None, "sqrt_hidden_size"}:
        assert hasattr(config, key), key


@pytest.mark.parametrize("model_type", [name for name in ENTRIES if family(name).gguf])
def test_every_gguf_name_is_what_llama_cpp_writes_for_the_architecture(model_type: str) -> None:
    import gguf
    from conversion import get_model_class

    written = gguf.MODEL_ARCH_NAMES[get_model_class(family(model_type).architecture).model_arch]
    assert written == family(model_type).gguf


def use(model_type: str, role: Role, **config: object) -> RoleUse:
    return family(model_type).use(role, "t", config)


@pytest.mark.parametrize("model_type", ["gemma", "gemma2", "gemma3_text"])
def test_gemma_multiplies_looked_up_rows_by_the_root_of_the_hidden_size(model_type: str) -> None:
    assert use(model_type, Role.LOOKUP, hidden_size=640) == RoleUse(Role.LOOKUP, "t", math.sqrt(640))
    assert use(model_type, Role.LOGITS, hidden_size=640).multiplier == 1.0


def test_granite_multiplies_the_lookup_and_divides_the_logits() -> None:
    config = {"embedding_multiplier": 12.0, "logits_scaling": 8.0}
    assert use("granite", Role.LOOKUP, **config).multiplier == 12.0
    assert use("granite", Role.LOGITS, **config).multiplier == 0.125


def test_cohere_multiplies_the_logits_only() -> None:
    assert use("cohere", Role.LOGITS, logit_scale=0.0625).multiplier == 0.0625
    assert use("cohere", Role.LOOKUP, logit_scale=0.0625).multiplier == 1.0


def test_softcap_is_taken_from_the_configuration() -> None:
    assert use("gemma2", Role.LOGITS, final_logit_softcapping=30.0).softcap == 30.0
    assert use("gemma3_text", Role.LOGITS, final_logit_softcapping=None).softcap is None
    assert use("llama", Role.LOGITS, final_logit_softcapping=30.0).softcap is None


@pytest.mark.parametrize(("model_type", "expected"), [("gemma2", (1.0, 30.0)), ("cohere", (0.0625, None))])
def test_scaling_that_the_configuration_leaves_out_is_the_default_of_the_architecture(
    model_type: str, expected: tuple[float, float | None]
) -> None:
    found = use(model_type, Role.LOGITS)
    assert (found.multiplier, found.softcap) == expected


def test_phi_has_a_bias_on_its_logits() -> None:
    assert use("phi", Role.LOGITS).bias
    assert not use("phi", Role.LOOKUP).bias
    assert not use("llama", Role.LOGITS).bias


def test_an_unknown_model_type_has_the_common_names_and_no_scaling() -> None:
    entry = family("brand_new")
    assert (entry.lookup_name, entry.logits_name) == ("model.embed_tokens.weight", "lm_head.weight")
    assert (entry.architecture, entry.gguf, entry.tie_default) == (None, None, None)
    assert use("brand_new", Role.LOOKUP, hidden_size=9) == RoleUse(Role.LOOKUP, "t")
    assert use("brand_new", Role.LOGITS, logit_scale=9) == RoleUse(Role.LOGITS, "t")


def test_the_default_tie_of_a_known_type_is_the_entry_and_of_others_that_of_transformers() -> None:
    from transformers import CONFIG_MAPPING

    from tieq.source.reference import default_tie

    assert default_tie("llama") is False
    assert default_tie("gemma2") is True
    for other in ("starcoder2", "falcon", "stablelm"):
        assert other not in ENTRIES
        assert default_tie(other) is CONFIG_MAPPING[other]().tie_word_embeddings


def test_a_model_type_that_transformers_does_not_know_is_refused() -> None:
    from tieq.source.reference import default_tie

    with pytest.raises(TieqError, match="transformers does not know the model type 'brand_new'"):
        default_tie("brand_new")


def test_gguf_architectures_map_back_to_one_family() -> None:
    names = [entry.gguf for entry in _table().values() if entry.gguf]
    assert len(names) == len(set(names))
    for name in names:
        assert family_of_gguf(name).gguf == name


@pytest.mark.parametrize("architecture", ["", "bert", "LLAMA", "None"])
def test_an_unknown_gguf_architecture_is_refused_with_the_known_ones(architecture: str) -> None:
    with pytest.raises(TieqError, match=rf"'{architecture}' cannot be mapped back .*gemma3, .*llama"):
        family_of_gguf(architecture)


def test_gpt2_has_its_own_gguf_keys_and_the_others_the_common_ones() -> None:
    assert family("gpt2").gguf_keys()["embedding_length"] == ["n_embd"]
    assert "attention.head_count_kv" not in family("gpt2").gguf_keys()
    assert family("qwen3").gguf_keys()["attention.key_length"] == ["head_dim"]
    assert family("qwen3").gguf_keys()["embedding_length"] == ["hidden_size"]
