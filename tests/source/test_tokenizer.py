from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, processors

from tieq.errors import RefusedError, TieqError
from tieq.source.tokenizer import TextTokenizer, check_rows

Maker = Callable[..., TextTokenizer]


@pytest.fixture
def tokenizer(tmp_path: Path) -> Maker:
    """A word tokenizer with these ids, saved and loaded again."""

    def make(
        vocabulary: dict[str, int], *, added: tuple[str, ...] = (), processor: Any = None, config: Any = None
    ) -> TextTokenizer:
        made = Tokenizer(models.WordLevel(vocabulary, unk_token=next(iter(vocabulary))))
        made.pre_tokenizer = pre_tokenizers.Whitespace()
        made.add_special_tokens([AddedToken(token, special=True) for token in added])
        if processor is not None:
            made.post_processor = processor
        made.save(str(tmp_path / "tokenizer.json"))
        if config is not None:
            (tmp_path / "tokenizer_config.json").write_text(config if isinstance(config, str) else json.dumps(config))
        return TextTokenizer(tmp_path, "here")

    return make


WORDS = {"<unk>": 0, "a": 1, "b": 2, "<s>": 3, "</s>": 4}


def template(single: str) -> processors.TemplateProcessing:
    return processors.TemplateProcessing(single=single, special_tokens=[("<s>", 3), ("</s>", 4)])


def test_text_becomes_ids_without_special_tokens_and_back(tokenizer: Maker) -> None:
    made = tokenizer(WORDS, processor=template("<s> $A </s>"))
    assert made.encode("b a b zzz") == [2, 1, 2, 0]
    assert made.encode("") == []
    assert made.decode([2, 1]) == "b a"


@pytest.mark.parametrize("count", [1, 2, 63, 64, 65, 400])
@pytest.mark.parametrize("start", [0, 2, 777, 1998])
def test_the_first_ids_of_a_text_are_those_of_the_whole_text(start: int, count: int, tokenizer: Maker) -> None:
    made = tokenizer(WORDS)
    text = "a b " * 500
    ids, end = made.encode_first(text, start, count)
    assert ids == made.encode(text[start:])[:count]
    # What was used up to the position after it gives the same ids, and the rest goes on from there.
    assert made.encode(text[start:end]) == ids
    assert ids + made.encode(text[end:]) == made.encode(text[start:])


def test_the_first_ids_of_a_text_that_has_none_are_none(tokenizer: Maker) -> None:
    made = tokenizer(WORDS)
    assert made.encode_first("a b", 3, 5) == ([], 3)
    assert made.encode_first("", 0, 5) == ([], 0)


def test_ids_include_added_tokens_and_keep_their_holes(tokenizer: Maker) -> None:
    made = tokenizer({"<unk>": 0, "a": 5, "b": 9}, added=("<extra>",))
    # The library numbers an added token with the size of the vocabulary, here 3.
    assert made.ids == {0, 5, 9, 3}


def test_rows_for_every_id_are_enough(tokenizer: Maker) -> None:
    made = tokenizer({"<unk>": 0, "a": 9})
    check_rows(made, 10, "here")
    check_rows(made, 10_000, "here")


def test_ids_beyond_the_table_are_named(tokenizer: Maker) -> None:
    made = tokenizer({"<unk>": 0, "a": 5, "b": 9})
    with pytest.raises(
        RefusedError, match=r"^m: the tokenizer emits 2 ids that the table of 5 rows does not have: 5, 9\."
    ):
        check_rows(made, 5, "m")
    with pytest.raises(RefusedError, match=r"emits 1 ids .* 9\. Resize the embedding"):
        check_rows(made, 9, "m")


def test_many_ids_beyond_the_table_are_counted_and_the_first_eight_named(tokenizer: Maker) -> None:
    made = tokenizer({f"w{number}": number for number in range(100)})
    with pytest.raises(RefusedError, match=r"emits 90 ids .*: 10, 11, 12, 13, 14, 15, 16, 17 \.\.\.\."):
        check_rows(made, 10, "m")


@pytest.mark.parametrize(
    ("single", "bos"),
    [("<s> $A", 3), ("<s> $A </s>", 3), ("$A", None), ("$A </s>", None)],
    ids=["bos", "bos and eos", "nothing", "eos only"],
)
def test_bos_is_what_the_post_processor_puts_first(single: str, bos: int | None, tokenizer: Maker) -> None:
    assert tokenizer(WORDS, processor=template(single)).bos == bos


@pytest.mark.parametrize(
    ("config", "bos"),
    [
        (None, None),
        ({}, None),
        ({"bos_token": "<s>"}, None),  # named, but not put in front
        ({"bos_token": "<s>", "add_bos_token": False}, None),
        ({"bos_token": "<s>", "add_bos_token": True}, 3),
        ({"bos_token": {"content": "<s>"}, "add_bos_token": True}, 3),
        ({"bos_token": "<absent>", "add_bos_token": True}, None),
        ({"bos_token": None, "add_bos_token": True}, None),
        ({"add_bos_token": True}, None),
    ],
)
def test_without_a_post_processor_bos_is_what_the_settings_say(
    config: dict | None, bos: int | None, tokenizer: Maker
) -> None:
    assert tokenizer(WORDS, config=config).bos == bos


def test_the_post_processor_wins_over_the_settings(tokenizer: Maker) -> None:
    config = {"bos_token": "</s>", "add_bos_token": True}
    assert tokenizer(WORDS, processor=template("<s> $A"), config=config).bos == 3


@pytest.mark.parametrize("config", ["{", "[]", "3", '{"add_bos_token": true, "bos_token": 5}'])
def test_damaged_settings_are_refused(config: str, tokenizer: Maker) -> None:
    made = tokenizer(WORDS, config=config)
    with pytest.raises(TieqError, match="tokenizer_config"):
        _ = made.bos


def test_no_folder_is_refused() -> None:
    with pytest.raises(TieqError, match=r"^here: no tokenizer was found"):
        TextTokenizer(None, "here")


@pytest.mark.parametrize("content", ["", "{", "{}", "[]", '{"model": {"type": "Magic"}}'])
def test_a_damaged_tokenizer_json_is_refused_with_its_path(content: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(TieqError, match=r"tokenizer\.json: cannot be loaded"):
        TextTokenizer(tmp_path, "here")


def test_a_folder_without_tokenizer_json_is_read_by_transformers(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    (tmp_path / "vocab.json").write_text(json.dumps({"a": 0, "b": 1, "ab": 2, "<|endoftext|>": 3}))
    (tmp_path / "merges.txt").write_text("#version: 0.2\na b\n")
    made = TextTokenizer(tmp_path, "here")
    assert made.encode("abba") == [2, 1, 0]
    assert made.ids == {0, 1, 2, 3}


def test_a_folder_with_nothing_to_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    with pytest.raises(TieqError, match="its tokenizer cannot be loaded"):
        TextTokenizer(tmp_path, "here")


def test_code_that_a_checkpoint_brings_is_neither_run_nor_asked_about(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    remote = {"AutoTokenizer": ["evil.Evil", None]}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "evil", "auto_map": remote}))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "Evil", "auto_map": remote}))
    (tmp_path / "vocab.json").write_text('{"a": 0}')
    (tmp_path / "evil.py").write_text("class Evil: pass")
    asked: list[str] = []

    def answer(question: str = "") -> str:
        asked.append(question)
        return "n"

    monkeypatch.setattr("builtins.input", answer)
    with pytest.raises(TieqError):
        TextTokenizer(tmp_path, "here")
    assert asked == []


@pytest.mark.parametrize("family", ["llama", "phi3"])
def test_ids_are_counted_without_loading_the_tokenizer(family: str, tmp_path: Path) -> None:
    import tiny

    from tieq.source.tokenizer import count_ids

    (tiny.save_sentencepiece if family in tiny.SENTENCEPIECE else tiny.save_byte_level)(tmp_path)
    assert count_ids(tmp_path, "here") == len(TextTokenizer(tmp_path, "here").ids)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(TieqError):
        count_ids(tmp_path, "here")
