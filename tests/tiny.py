"""Tiny seeded models of each family, with real tokenizers, saved as checkpoints by transformers itself."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from tieq.recipe import BandWish, GgufOptions, Precision, Recipe, Sampling, recipe_for_bits

ROWS = 320
_COMMON = {
    "vocab_size": ROWS,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": None,
    "tie_word_embeddings": True,
    # Larger than the default, so that the logits are far from uniform and errors show in KL.
    "initializer_range": 0.1,
}
# What each family needs beyond the common settings.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"head_dim": 16},
    "gemma2": {
        "head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 8, "final_logit_softcapping": 5.0,
        "attn_logit_softcapping": 50.0,
    },
    "gemma3_text": {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 8, "num_hidden_layers": 6},
    # llama.cpp fixes which layers slide (five of six) and which have no rope (every fourth).
    "smollm3": {"num_hidden_layers": 4, "pad_token_id": 1},
    "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128, "n_ctx": 128},
    "phi": {
        "tie_word_embeddings": False, "num_attention_heads": 2, "partial_rotary_factor": 0.5, "intermediate_size": 256,
    },
    "phi3": {"original_max_position_embeddings": 128, "sliding_window": None},
}  # fmt: skip
# Families that are exported to ONNX alone.
ONNX_ONLY: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": 8, "head_dim": 16},
    "gemma": {"head_dim": 16, "hidden_activation": "gelu_pytorch_tanh"},
    "granite": {
        "embedding_multiplier": 3.0, "logits_scaling": 2.0, "residual_multiplier": 0.5, "attention_multiplier": 0.2,
        "attention_bias": True,
    },
}  # fmt: skip
# Families whose GGUF form wants a SentencePiece model.
SENTENCEPIECE = ("gemma2", "phi3")
_TEXT = (
    "the quick brown fox jumps over the lazy dog and then the dog sleeps in the warm sun of the afternoon while "
    "people walk by and talk about the weather, the news and the price of bread. "
) * 40


def config(family: str, **changes: Any) -> Any:
    """Configuration of a tiny model; ``changes`` override any key."""
    settings = {**_COMMON, **{**FAMILIES, **ONNX_ONLY}[family], **changes}
    if family == "gpt2":
        hidden = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
        settings = {k: v for k, v in settings.items() if k not in (*hidden, "num_key_value_heads")}
        settings.pop("max_position_embeddings")
    return CONFIG_MAPPING[family](**settings)


def model(family: str, seed: int = 0, **changes: Any) -> Any:
    """A seeded float32 model."""
    torch.manual_seed(seed)
    made = AutoModelForCausalLM.from_config(config(family, **changes)).eval()
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.ndim == 1:  # norms and biases away from their neutral values, so that mistakes show
                parameter.add_(0.1 * torch.randn_like(parameter))
    return made


def byte_level_tokenizer(size: int = ROWS) -> Tokenizer:
    """Byte-level BPE with ``size`` ids, ``<s>`` and ``</s>`` first."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([_TEXT], trainer)
    assert tokenizer.get_vocab_size() == size, tokenizer.get_vocab_size()
    return tokenizer


def save_byte_level(folder: Path, size: int = ROWS) -> None:
    """Write ``tokenizer.json`` and its configuration."""
    byte_level_tokenizer(size).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}'
    )


def save_sentencepiece(folder: Path, size: int = ROWS) -> None:
    """Write ``tokenizer.model`` (trained here) and the matching ``tokenizer.json``."""
    import sentencepiece
    from transformers import LlamaTokenizerFast

    stream = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([_TEXT[:4000]]),
        model_writer=stream,
        vocab_size=size,
        model_type="bpe",
        byte_fallback=True,
        bos_id=0,
        eos_id=1,
        unk_id=2,
        pad_id=-1,
        # llama.cpp looks this token up in any model whose name contains "phi3".
        user_defined_symbols=["<|endoftext|>"],
        hard_vocab_limit=False,
        minloglevel=2,
    )
    (folder / "tokenizer.model").write_bytes(stream.getvalue())
    LlamaTokenizerFast(vocab_file=str(folder / "tokenizer.model"), legacy=False).save_pretrained(folder)


def save(folder: Path, family: str = "llama", *, tokenizer: bool = True, seed: int = 0, **changes: Any) -> Path:
    """Save a tiny checkpoint with its tokenizer and return its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    made = model(family, seed, **changes)
    made.save_pretrained(folder)
    if tokenizer:
        (save_sentencepiece if family in SENTENCEPIECE else save_byte_level)(folder)
    return folder


def to_gguf(checkpoint: Path, target: Path) -> Path:
    """Convert a checkpoint with llama.cpp's own converter, in float32."""
    import gguf
    from conversion import get_model_class

    architecture = json.loads((checkpoint / "config.json").read_text())["architectures"][0]
    made = get_model_class(architecture)(checkpoint, gguf.LlamaFileType.ALL_F32, target, eager=True)
    made.get_vocab_base_pre = lambda tokenizer: "gpt-2"  # the tiny tokenizer is none that it recognizes
    made.write()
    return target


def quantize_gguf(source: Path, target: Path, kind: int = 2, *, pure: bool = False) -> Path:
    """Quantize a GGUF file with llama.cpp's own quantizer; ``kind`` is its file type (2 is Q4_0)."""
    import llama_cpp

    options = llama_cpp.llama_model_quantize_default_params()
    options.allow_requantize, options.ftype, options.pure = True, kind, pure
    assert llama_cpp.llama_model_quantize(str(source).encode(), str(target).encode(), options) == 0
    return target


def recipe(bits: int = 4, **changes: Any) -> Recipe:
    """The recipe of ``--bits`` with little text, and the pre-tokenizer that llama.cpp cannot recognize here named."""
    few = Sampling(sequences=2, length=64)
    settings = {"calibration": few, "evaluation": few, "gguf": GgufOptions(pre_tokenizer="gpt-2"), **changes}
    return recipe_for_bits(bits).model_copy(update=settings)


def banded_recipe(**changes: Any) -> Recipe:
    """The 4-bit recipe with a band of 16 rows at 4 bits and one of 32 rows at 2 bits."""
    bands = (BandWish(share=0.05, scheme="q4_0"), BandWish(share=0.1, scheme="q2_0"))
    return recipe(table=Precision(scheme="q4_0", bands=bands), **changes)
