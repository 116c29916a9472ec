"""Build a Hugging Face ``tokenizer.json`` from the vocabulary inside a GGUF file.

Two vocabulary kinds are covered: byte-level BPE (``gpt2``) and SentencePiece BPE (``llama``). Built with the
``tokenizers`` library directly: going through transformers takes minutes for a large vocabulary.
Source: llama.cpp's ``src/llama-vocab.cpp`` for what each pre-tokenizer name means.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tieq.errors import TieqError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from tieq.source.gguf_file import GgufFile

_CONTROL, _USER_DEFINED = 3, 4
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
# Split expression per pre-tokenizer name; None stands for the expression that ByteLevel has built in.
_SPLITS: dict[str, str | None] = {
    "gpt-2": None,
    "smollm": None,
    "llama-bpe": _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + _TAIL,
    "smaug-bpe": _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + _TAIL,
    "qwen2": _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + _TAIL,
}
_SPACE = "\u2581"


def write_tokenizer(file: GgufFile, folder: Path) -> None:
    """Write ``tokenizer.json`` and ``tokenizer_config.json`` into ``folder``.

    Raises:
        TieqError: if the vocabulary kind or the pre-tokenizer is not one that can be rebuilt.
    """
    try:
        tokenizer, settings = _build(file), _settings(file)
    except TieqError:
        raise
    except Exception as error:  # lists of unequal length, ids beyond them, whatever the tokenizers library raises
        raise TieqError(
            f"the vocabulary contradicts itself ({type(error).__name__}: {error}).",
            where=str(file.path),
            todo="Convert the model again.",
        ) from error
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2, ensure_ascii=False))


def _build(file: GgufFile) -> Tokenizer:
    kind = file.get("tokenizer.ggml.model")
    tokens = file.get("tokenizer.ggml.tokens")
    if len(set(tokens)) < len(tokens):
        raise ValueError(f"{len(tokens) - len(set(tokens))} tokens appear twice")
    if kind == "gpt2":
        tokenizer = _byte_level(file)
    elif kind == "llama":
        tokenizer = _sentencepiece(file)
    else:
        raise TieqError(
            f"the tokenizer kind '{kind}' cannot be rebuilt from GGUF.",
            where=str(file.path),
            todo="Use the original checkpoint folder as the model.",
        )
    _add_special_tokens(file, tokenizer)
    # What llama.cpp does where the metadata does not say.
    begins = kind == "llama" or file.get("tokenizer.ggml.pre") == "llama-bpe"
    if file.get("tokenizer.ggml.add_bos_token", begins):
        _prepend_bos(file, tokenizer)
    return tokenizer


def _byte_level(file: GgufFile) -> Tokenizer:
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    name = file.get("tokenizer.ggml.pre", "gpt-2")
    if name not in _SPLITS:
        raise TieqError(
            f"the pre-tokenizer '{name}' is not known (known: {', '.join(_SPLITS)}).",
            where=str(file.path),
            todo="Use the original checkpoint folder as the model.",
        )
    tokens = file.get("tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ", 1)) for merge in file.get("tokenizer.ggml.merges", [])]
    split = _SPLITS[name]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={token: number for number, token in enumerate(tokens)},
            merges=merges,
            ignore_merges=name == "llama-bpe",
        )
    )
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split is None)
    if split is not None:
        first = pre_tokenizers.Split(Regex(split), behavior="isolated")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([first, byte_level])
    elif name == "smollm":
        digits = pre_tokenizers.Digits(individual_digits=True)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    else:
        tokenizer.pre_tokenizer = byte_level
    if name == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(file: GgufFile) -> Tokenizer:
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

    tokens, scores = file.get("tokenizer.ggml.tokens"), file.get("tokenizer.ggml.scores")
    vocabulary = {token: number for number, token in enumerate(tokens)}
    unknown = file.get("tokenizer.ggml.unknown_token_id", 0)
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocabulary,
            merges=_merges(tokens, scores, file.get("tokenizer.ggml.token_type"), vocabulary),
            unk_token=tokens[unknown],
            byte_fallback=True,
            fuse_unk=True,
        )
    )
    steps: list[Any] = [normalizers.Replace(" ", _SPACE)]
    if file.get("tokenizer.ggml.add_space_prefix", True):
        steps.insert(0, normalizers.Prepend(_SPACE))
    tokenizer.normalizer = normalizers.Sequence(steps)
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", behavior="merged_with_previous")
    tokenizer.decoder = decoders.Sequence([decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer


def _merges(
    tokens: list[str], scores: list[float], kinds: list[int], vocabulary: dict[str, int]
) -> list[tuple[str, str]]:
    """SentencePiece joins the adjacent pair whose piece scores best: every split of a piece is a merge."""
    found: list[tuple[float, int, str, str]] = []
    for number, token in enumerate(tokens):
        if kinds[number] != 1:
            continue
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in vocabulary and right in vocabulary:
                found.append((-scores[number], number, left, right))
    found.sort(key=lambda item: (item[0], item[1]))
    return [(left, right) for _, _, left, right in found]


def _add_special_tokens(file: GgufFile, tokenizer: Tokenizer) -> None:
    from tokenizers import AddedToken

    tokens, kinds = file.get("tokenizer.ggml.tokens"), file.get("tokenizer.ggml.token_type") or []
    special = [
        AddedToken(t, special=True, normalized=False) for t, k in zip(tokens, kinds, strict=False) if k == _CONTROL
    ]
    plain = [
        AddedToken(t, special=False, normalized=False)
        for t, k in zip(tokens, kinds, strict=False)
        if k == _USER_DEFINED
    ]
    tokenizer.add_special_tokens(special)
    tokenizer.add_tokens(plain)


def _prepend_bos(file: GgufFile, tokenizer: Tokenizer) -> None:
    from tokenizers import processors

    number = file.get("tokenizer.ggml.bos_token_id")
    if number is None:
        return
    token = file.get("tokenizer.ggml.tokens")[number]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=[token, "$A"], pair=[token, "$A", token, "$B"], special_tokens=[(token, number)]
    )


def _settings(file: GgufFile) -> dict[str, Any]:
    tokens = file.get("tokenizer.ggml.tokens")
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": file.get(f"{file.architecture}.context_length", 2048),
        "model_input_names": ["input_ids", "attention_mask"],
        "clean_up_tokenization_spaces": False,
        "add_bos_token": bool(file.get("tokenizer.ggml.add_bos_token", False)),
    }
    for role, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        number = file.get(f"tokenizer.ggml.{key}_token_id")
        if number is not None and number < len(tokens):
            settings[f"{role}_token"] = tokens[number]
    if template := file.get("tokenizer.chat_template"):
        settings["chat_template"] = template
    return settings
