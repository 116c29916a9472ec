from __future__ import annotations

import io
import json
import random
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
from tokenizers import Tokenizer

from tieq.errors import TieqError
from tieq.source.gguf_file import GgufFile
from tieq.source.gguf_tokenizer import _SPLITS, write_tokenizer
from tieq.source.tokenizer import TextTokenizer

Maker = Callable[..., Path]
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
# What llama.cpp wants to know before it reads a vocabulary.
SHAPE = {
    "llama.context_length": 128, "llama.embedding_length": 64, "llama.block_count": 1, "llama.feed_forward_length": 64,
    "llama.attention.head_count": 4, "llama.attention.layer_norm_rms_epsilon": 1e-5,
}  # fmt: skip
TEXTS = [
    "", " ", "  ", "\n", "hello", " hello", "the quick brown fox", "trailing   ", "\ttabs\tand\r\nlines\n\n\n x",
    "I'll say it's 12345 o'clock, DON'T 'LL y'all", "1 22 333 4444 55555 1,234.5", "(foo)[bar]{baz} !=== +-",
    "été naïve Straße \u017f \u212a", "漢字かな 한국어", "😀👍🏽 👨‍👩‍👧", "e\u0301 n\u0303", "a\u00a0b\u3000c\u200bd",
    "٣ Ⅷ ½ ²", "\U0001d518\U0001d52b\U0001d526", "\x00\x01\x7f", "\ufeffbom", "▁ raw", "<0x0A> <s> </s>",
]  # fmt: skip
_PARTS = [
    "the ",
    "quick",
    " dog",
    " ",
    "  ",
    "\n",
    "\n\n",
    "'s",
    "'LL",
    "12",
    "345",
    "é",
    "日",
    "😀",
    "!",
    "?!",
    ")",
    "\t",
]


def texts() -> list[str]:
    """Chosen texts and 500 random joins of awkward parts."""
    choose = random.Random(0)
    return TEXTS + ["".join(choose.choices(_PARTS, k=choose.randrange(1, 14))) for _ in range(500)]


@pytest.fixture(scope="module")
def byte_level() -> Tokenizer:
    return tiny.byte_level_tokenizer()


def byte_level_metadata(tokenizer: Tokenizer, **changes: Any) -> dict[str, Any]:
    """What llama.cpp's converter writes of a byte-level tokenizer; None leaves a key out."""
    content = json.loads(tokenizer.to_str())
    tokens = [token for token, _ in sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])]
    merges = [" ".join(merge) for merge in content["model"]["merges"]]
    values = {
        "model": "gpt2", "pre": "gpt-2", "tokens": tokens, "merges": merges,
        "token_type": [CONTROL, CONTROL] + [NORMAL] * (len(tokens) - 2), "bos_token_id": 0, "eos_token_id": 1,
        **changes,
    }  # fmt: skip
    return {f"tokenizer.ggml.{key}": value for key, value in values.items() if value is not None}


@pytest.fixture
def rebuilt(gguf_file: Maker, tmp_path: Path) -> Callable[[dict[str, Any]], TextTokenizer]:
    """The tokenizer that is rebuilt from a GGUF file with this metadata."""

    def make(metadata: dict[str, Any]) -> TextTokenizer:
        write_tokenizer(GgufFile(gguf_file(metadata=metadata)), tmp_path)
        return TextTokenizer(tmp_path, "here")

    return make


def test_a_byte_level_tokenizer_survives_gguf_with_the_same_ids(
    byte_level: Tokenizer, rebuilt: Callable[..., TextTokenizer]
) -> None:
    found = rebuilt(byte_level_metadata(byte_level))
    for text in texts():
        expected = byte_level.encode(text, add_special_tokens=False).ids
        assert found.encode(text) == expected, text
        assert found.decode(expected) == byte_level.decode(expected)
    assert found.ids == set(byte_level.get_vocab().values())


@pytest.mark.parametrize("pre", _SPLITS)
def test_every_pre_tokenizer_gives_the_ids_of_llama_cpp(
    pre: str, byte_level: Tokenizer, rebuilt: Callable[..., TextTokenizer], tmp_path: Path
) -> None:
    import llama_cpp

    found = rebuilt({**SHAPE, **byte_level_metadata(byte_level, pre=pre)})
    reference = llama_cpp.Llama(str(tmp_path / "model.gguf"), vocab_only=True, verbose=False)
    for text in texts():
        if "\x00" in text or "<s>" in text:  # not in llama.cpp's C strings; special tokens are tested below
            continue
        # Qwen's own tokenizer normalizes to NFC and llama.cpp does not.
        plain = unicodedata.normalize("NFC", text) if pre == "qwen2" else text
        assert found.encode(text) == reference.tokenize(plain.encode(), add_bos=False, special=False), text


def test_special_tokens_in_text_are_one_id_and_are_left_out_on_decoding(
    byte_level: Tokenizer, rebuilt: Callable[..., TextTokenizer]
) -> None:
    found = rebuilt(byte_level_metadata(byte_level))
    assert found.encode("<s></s>") == [0, 1]
    assert found.decode([0, *found.encode("dog"), 1]) == "dog"


@pytest.mark.parametrize(
    ("changes", "bos"),
    [
        ({"add_bos_token": True}, 0),
        ({"add_bos_token": False}, None),
        ({}, None),
        ({"add_bos_token": True, "bos_token_id": None}, None),
        ({"add_bos_token": True, "bos_token_id": 1}, 1),
    ],
)
def test_bos_of_a_byte_level_tokenizer_is_what_the_metadata_say(
    changes: dict[str, Any], bos: int | None, byte_level: Tokenizer, rebuilt: Callable[..., TextTokenizer]
) -> None:
    assert rebuilt(byte_level_metadata(byte_level, **changes)).bos == bos


def test_llama_bpe_begins_with_bos_unless_the_metadata_say_otherwise(
    byte_level: Tokenizer, rebuilt: Callable[..., TextTokenizer]
) -> None:
    assert rebuilt(byte_level_metadata(byte_level, pre="llama-bpe")).bos == 0


def test_the_settings_name_the_special_tokens_and_the_template(
    byte_level: Tokenizer, rebuilt: Callable[..., TextTokenizer], tmp_path: Path
) -> None:
    metadata = byte_level_metadata(byte_level, add_bos_token=True, padding_token_id=5, unknown_token_id=99_999)
    tokens = metadata["tokenizer.ggml.tokens"]
    rebuilt({**metadata, "tokenizer.chat_template": "{{ bos_token }}", "llama.context_length": 77})
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text(encoding="utf-8"))
    assert (settings["bos_token"], settings["eos_token"], settings["pad_token"]) == ("<s>", "</s>", tokens[5])
    assert "unk_token" not in settings  # its id is beyond the vocabulary
    assert (settings["chat_template"], settings["model_max_length"]) == ("{{ bos_token }}", 77)
    assert settings["add_bos_token"] is True


# SentencePiece

_USER_DEFINED_PIECE = "<|endoftext|>"


@pytest.fixture(scope="module")
def sentencepiece_model() -> Any:
    """BPE over the same text as tiny's, without normalization: llama.cpp has none either."""
    import sentencepiece

    stream = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([tiny._TEXT[:4000]]),
        model_writer=stream,
        vocab_size=tiny.ROWS,
        model_type="bpe",
        byte_fallback=True,
        bos_id=0,
        eos_id=1,
        unk_id=2,
        pad_id=-1,
        user_defined_symbols=[_USER_DEFINED_PIECE],
        hard_vocab_limit=False,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
    )
    return sentencepiece.SentencePieceProcessor(model_proto=stream.getvalue())


def sentencepiece_metadata(model: Any, **changes: Any) -> dict[str, Any]:
    """What llama.cpp's converter writes of a SentencePiece model; None leaves a key out."""
    numbers = range(model.get_piece_size())
    kinds = [
        UNKNOWN if model.is_unknown(n) else CONTROL if model.is_control(n) else BYTE if model.is_byte(n)
        else USER_DEFINED if model.id_to_piece(n) == _USER_DEFINED_PIECE else NORMAL
        for n in numbers
    ]  # fmt: skip
    values = {
        "model": "llama", "tokens": [model.id_to_piece(number) for number in numbers],
        "scores": [float(model.get_score(number)) for number in numbers], "token_type": kinds,
        "bos_token_id": 0, "eos_token_id": 1, "unknown_token_id": 2, **changes,
    }  # fmt: skip
    return {f"tokenizer.ggml.{key}": value for key, value in values.items() if value is not None}


def test_a_sentencepiece_tokenizer_survives_gguf_with_the_ids_of_its_library(
    sentencepiece_model: Any, rebuilt: Callable[..., TextTokenizer]
) -> None:
    found = rebuilt(sentencepiece_metadata(sentencepiece_model))
    for text in texts():
        if "\x00" in text or "<s>" in text:  # special tokens are text to the library unless it is told otherwise
            continue
        assert found.encode(text) == sentencepiece_model.encode(text), text
    assert found.ids == set(range(sentencepiece_model.get_piece_size()))
    assert found.bos == 0


def test_a_sentencepiece_tokenizer_joins_like_its_library_on_random_words(
    sentencepiece_model: Any, rebuilt: Callable[..., TextTokenizer]
) -> None:
    found, choose = rebuilt(sentencepiece_metadata(sentencepiece_model)), random.Random(1)
    for _ in range(1000):
        text = "".join(choose.choices("aabcdeefghiklmnoprsttuwy  ", k=choose.randrange(1, 30)))
        assert found.encode(text) == sentencepiece_model.encode(text), text


def test_user_defined_tokens_are_cut_out_as_llama_cpp_does(
    sentencepiece_model: Any, rebuilt: Callable[..., TextTokenizer], tmp_path: Path
) -> None:
    import llama_cpp

    found = rebuilt({**SHAPE, **sentencepiece_metadata(sentencepiece_model)})
    reference = llama_cpp.Llama(str(tmp_path / "model.gguf"), vocab_only=True, verbose=False)
    for text in ("a<|endoftext|>b", "a <|endoftext|> b", "<|endoftext|>", "<|endoftext|><|endoftext|>c", "x<s>y</s>"):
        assert found.encode(text) == reference.tokenize(text.encode(), add_bos=False, special=True), text


@pytest.mark.parametrize("prefix", [True, False])
def test_the_space_prefix_follows_the_metadata(
    prefix: bool, sentencepiece_model: Any, rebuilt: Callable[..., TextTokenizer]
) -> None:
    found = rebuilt(sentencepiece_metadata(sentencepiece_model, add_space_prefix=prefix))
    first = sentencepiece_model.id_to_piece(found.encode("zoo")[0])
    assert first.startswith("\u2581") is prefix


# What cannot be rebuilt


@pytest.mark.parametrize("kind", ["bert", "t5", "rwkv", "", None])
def test_another_kind_of_vocabulary_is_refused(
    kind: str | None, byte_level: Tokenizer, rebuilt: Callable[..., TextTokenizer]
) -> None:
    with pytest.raises(TieqError, match=rf"the tokenizer kind '{kind}' cannot be rebuilt from GGUF"):
        rebuilt(byte_level_metadata(byte_level, model=kind))


def test_an_unknown_pre_tokenizer_is_refused_with_the_known_ones(
    byte_level: Tokenizer, rebuilt: Callable[..., TextTokenizer]
) -> None:
    with pytest.raises(TieqError, match=r"'tekken' is not known \(known: gpt-2, smollm, llama-bpe"):
        rebuilt(byte_level_metadata(byte_level, pre="tekken"))


def test_a_missing_pre_tokenizer_is_gpt_2(byte_level: Tokenizer, rebuilt: Callable[..., TextTokenizer]) -> None:
    found = rebuilt(byte_level_metadata(byte_level, pre=None))
    assert found.encode("it's 12 dogs") == byte_level.encode("it's 12 dogs", add_special_tokens=False).ids


@pytest.mark.parametrize(
    "changes",
    [
        {"merges": ["a nosuchtoken"]},
        {"merges": ["ab"]},
        {"tokens": None},
        {"bos_token_id": 99_999, "add_bos_token": True},
        {"model": "llama", "scores": None},
        {"model": "llama", "scores": [0.0] * tiny.ROWS, "token_type": None},
        {"model": "llama", "scores": [0.0] * tiny.ROWS, "unknown_token_id": 99_999},
        {"model": "llama", "scores": [0.0] * 3, "unknown_token_id": 0},
    ],
    ids=["merge of an unknown token", "merge of one", "no tokens", "bos beyond", "no scores", "no types",
         "unknown beyond", "too few scores"],
)  # fmt: skip
def test_a_vocabulary_that_contradicts_itself_is_refused(
    changes: dict[str, Any], byte_level: Tokenizer, rebuilt: Callable[..., TextTokenizer]
) -> None:
    with pytest.raises(TieqError):
        rebuilt(byte_level_metadata(byte_level, **changes))


def test_a_bos_token_with_a_space_is_put_in_front(byte_level: Tokenizer, rebuilt: Callable[..., TextTokenizer]) -> None:
    metadata = byte_level_metadata(byte_level, add_bos_token=True)
    metadata["tokenizer.ggml.tokens"][0] = "<begin of text>"
    assert rebuilt(metadata).bos == 0
