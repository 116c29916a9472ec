from __future__ import annotations

import hashlib
import importlib.util
import itertools
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, processors

from tieq.errors import TieqError
from tieq.source.tokenizer import TextTokenizer
from tieq.text import _CODE_MODULES, CALIBRATION, EVALUATION, Corpus, cut_sequences, default_corpus, file_corpus

PASSAGE = 200


@pytest.fixture(scope="module")
def parts() -> tuple[Corpus, Corpus]:
    return default_corpus(CALIBRATION), default_corpus(EVALUATION)


def shared_passage(first: str, second: str) -> str | None:
    """A passage that both texts hold, or None.

    Any such passage covers one of the half-length pieces that ``first`` is cut into, so only around those of
    them that ``second`` holds is there anything to look for.
    """
    half = PASSAGE // 2
    pieces = {first[start : start + half] for start in range(0, len(first) - half + 1, half)}
    for at in range(len(second) - half + 1):
        if second[at : at + half] in pieces:
            for start in range(max(0, at - half), at + 1):
                passage = second[start : start + PASSAGE]
                if len(passage) == PASSAGE and passage in first:
                    return passage
    return None


def test_a_shared_passage_is_found_wherever_it_is_and_no_shorter_one() -> None:
    own, other, quoted = letters(900), letters(3000)[2000:], letters(5000)[-PASSAGE:]
    for offset in (0, 1, 57, 99, 100, 101, 555, 900):
        first, second = own[:offset] + quoted + own[offset:], other[:321] + quoted + other[321:]
        assert shared_passage(first, second) == quoted
        assert shared_passage(first.replace(quoted, quoted[1:] + "!"), second) is None
    assert shared_passage(quoted, quoted) == quoted
    assert shared_passage(own, other) is None


@pytest.mark.parametrize("domain", ["prose", "code"])
def test_the_two_parts_share_no_passage(domain: str, parts: tuple[Corpus, Corpus]) -> None:
    calibration, evaluation = parts
    assert shared_passage(calibration.domains[domain], evaluation.domains[domain]) is None


def test_no_module_is_in_both_parts(parts: tuple[Corpus, Corpus]) -> None:
    calibration, evaluation = parts
    whole = 0
    for name in _CODE_MODULES:
        spec = importlib.util.find_spec(name)
        assert spec is not None
        if spec.origin is None or not spec.origin.endswith(".py"):  # frozen into the interpreter
            continue
        source = Path(spec.origin).read_text(encoding="utf-8")
        whole += source in evaluation.domains["code"]
        # Every module begins with a line of its own; of the calibration's, shared passages are cut out.
        assert not (source in evaluation.domains["code"] and source in calibration.domains["code"]), name
    assert 10 < whole < len(_CODE_MODULES) - 10


def test_no_topic_is_in_both_parts(parts: tuple[Corpus, Corpus]) -> None:
    from pydoc_data import topics

    for name, text in topics.topics.items():
        if len(text) >= PASSAGE:
            assert not all(text in part.domains["prose"] for part in parts), name


def test_each_part_is_long_and_says_what_it_is(parts: tuple[Corpus, Corpus]) -> None:
    for part, name in zip(parts, (CALIBRATION, EVALUATION), strict=True):
        assert list(part.domains) == ["prose", "code"]
        assert name in part.description
        # 16 sequences of 256 tokens are asked for by default, at about 4 characters a token.
        assert min(len(text) for text in part.domains.values()) > 16 * 256 * 4
    assert parts[0].sha256 != parts[1].sha256


def test_the_default_text_is_the_same_each_time(parts: tuple[Corpus, Corpus]) -> None:
    assert default_corpus(CALIBRATION) == parts[0]


# Hash of a corpus


def test_the_hash_is_over_names_and_texts_with_zero_bytes_between() -> None:
    expected = hashlib.sha256("a\0été\0b\0x\0".encode()).hexdigest()
    assert Corpus({"a": "été", "b": "x"}, "any").sha256 == expected


def test_the_hash_tells_names_texts_and_order_apart() -> None:
    corpora = [{"a": "b"}, {"b": "a"}, {"a": "b", "c": "d"}, {"c": "d", "a": "b"}, {"ab": ""}, {}]
    assert len({Corpus(domains, "").sha256 for domains in corpora}) == len(corpora)


# The user's own files


def test_each_file_is_a_domain(tmp_path: Path) -> None:
    for name, text in (("one.txt", "first\n"), ("two.md", "zweite Ümläute 😀")):
        (tmp_path / name).write_text(text, encoding="utf-8")
    corpus = file_corpus([tmp_path / "one.txt", tmp_path / "two.md"])
    assert corpus.domains == {"one.txt": "first\n", "two.md": "zweite Ümläute 😀"}
    assert str(tmp_path / "two.md") in corpus.description


@pytest.mark.parametrize("content", [b"", b" \n\t\r\n "])
def test_an_empty_file_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(content)
    with pytest.raises(TieqError, match=r"a\.txt: is empty\. Give a file with text"):
        file_corpus([tmp_path / "a.txt"])


@pytest.mark.parametrize("content", [b"\x89PNG\r\n\x1a\n\xff", b"caf\xe9", b"\xff\xfeh\x00i\x00", b"ok \xc3"])
def test_a_file_that_is_no_utf8_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(content)
    with pytest.raises(TieqError, match=r"a\.txt: cannot be read as UTF-8 text"):
        file_corpus([tmp_path / "a.txt"])


def test_a_missing_file_and_a_folder_are_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "missing.txt", tmp_path):
        with pytest.raises(TieqError, match="cannot be read as UTF-8 text"):
            file_corpus([path])


def test_one_bad_file_among_good_ones_is_named(tmp_path: Path) -> None:
    (tmp_path / "good.txt").write_text("text")
    (tmp_path / "bad.txt").write_text("")
    with pytest.raises(TieqError, match=r"bad\.txt: is empty"):
        file_corpus([tmp_path / "good.txt", tmp_path / "bad.txt"])


def test_files_of_the_same_name_in_two_folders_are_both_used(tmp_path: Path) -> None:
    paths = [tmp_path / folder / "text.txt" for folder in ("a", "b")]
    for path in paths:
        path.parent.mkdir()
        path.write_text(f"this is {path.parent.name}")
    assert sorted(file_corpus(paths).domains.values()) == ["this is a", "this is b"]


# Sequences


@pytest.fixture
def tokenizer(tmp_path: Path) -> Callable[..., TextTokenizer]:
    """A token a character, A to Z and the end of a line, with or without a BOS."""

    def make(*, bos: bool) -> TextTokenizer:
        vocabulary = {character: number for number, character in enumerate(ALPHABET)}
        made = Tokenizer(models.WordLevel({**vocabulary, "<s>": 27, "?": 28}, unk_token="?"))
        made.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
        if bos:
            made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 27)])
        made.save(str(tmp_path / "tokenizer.json"))
        return TextTokenizer(tmp_path, "here")

    return make


ALPHABET = "ABCDEFGHIJKLMNOPQRSTUVWXYZ\n"


def letters(count: int) -> str:
    """Letters that never repeat a run of ten."""
    return "".join(ALPHABET[number] for number in np.random.default_rng(0).integers(0, 26, count))


def starts(rows: np.ndarray, text: str) -> list[int]:
    return [text.index("".join(ALPHABET[number] for number in row)) for row in rows]


def test_sequences_are_spread_evenly_and_do_not_overlap(tokenizer: Callable[..., TextTokenizer]) -> None:
    text = letters(1000)
    found = cut_sequences(Corpus({"d": text}, "x"), tokenizer(bos=False), 5, 20)
    assert (found.ids.shape, found.ids.dtype, found.has_bos) == ((5, 20), np.int64, False)
    assert found.domains == ("d",) * 5
    assert starts(found.ids, text) == [0, 200, 400, 600, 800]


def test_each_sequence_begins_with_bos_and_keeps_its_length(tokenizer: Callable[..., TextTokenizer]) -> None:
    text = letters(1000)
    found = cut_sequences(Corpus({"d": text}, "x"), tokenizer(bos=True), 5, 21)
    assert found.has_bos
    assert (found.ids[:, 0] == 27).all()
    assert found.ids.shape == (5, 21)
    assert (found.ids[:, 1:] < 27).all()
    assert starts(found.ids[:, 1:], text) == [0, 200, 400, 600, 800]


@pytest.mark.parametrize("count", [1, 3, 8, 20])
def test_sequences_begin_with_a_line_and_never_overlap(count: int, tokenizer: Callable[..., TextTokenizer]) -> None:
    run = letters(4000)
    lengths = np.random.default_rng(1).integers(5, 60, 100)
    ends = np.cumsum(lengths)
    text = "\n".join(run[end - length : end] for end, length in zip(ends, lengths, strict=True))
    found = cut_sequences(Corpus({"d": text}, "x"), tokenizer(bos=False), count, 30)
    at = starts(found.ids, text)
    # The text holds at least a hundred times 30 characters, and a line ends at the latest after 60.
    assert len(at) >= count - 1
    assert all(start == 0 or text[start - 1] == "\n" for start in at)
    assert at[0] == 0
    assert all(after - before >= 30 for before, after in itertools.pairwise(at))
    # Spread: each begins within two lines of its share of the text.
    assert all(0 <= start - number * len(text) // count <= 120 for number, start in enumerate(at))


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7])
def test_domains_share_the_sequences_evenly(count: int, tokenizer: Callable[..., TextTokenizer]) -> None:
    corpus = Corpus({"a": letters(500), "b": letters(800), "c": letters(300)}, "x")
    found = cut_sequences(corpus, tokenizer(bos=False), count, 10)
    assert len(found.ids) == len(found.domains) == count
    shares = [found.domains.count(name) for name in "abc"]
    assert max(shares) - min(shares) <= 1
    assert shares == sorted(shares, reverse=True)


def test_short_text_gives_fewer_sequences_and_never_the_same_twice(tokenizer: Callable[..., TextTokenizer]) -> None:
    text = letters(59)
    found = cut_sequences(Corpus({"d": text}, "x"), tokenizer(bos=False), 100, 20)
    assert starts(found.ids, text) == [0, 20]


def test_text_shorter_than_a_sequence_is_refused_with_its_name(tokenizer: Callable[..., TextTokenizer]) -> None:
    corpus = Corpus({"long": letters(100), "short": letters(19)}, "my files")
    with pytest.raises(TieqError, match=r"^my files: the text 'short' has 19 tokens, fewer than one sequence of 20\."):
        cut_sequences(corpus, tokenizer(bos=False), 4, 20)


def test_bos_counts_towards_the_length_that_text_must_fill(tokenizer: Callable[..., TextTokenizer]) -> None:
    corpus = Corpus({"d": letters(19)}, "x")
    assert cut_sequences(corpus, tokenizer(bos=True), 4, 20).ids.shape == (1, 20)
