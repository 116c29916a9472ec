"""Text for calibration and evaluation that every machine has, in two parts that never overlap.

Prose is Python's own language reference (``pydoc_data.topics``), code is the standard library's source. Documents
go to one part or the other by the parity of their name's hash, so that no document serves both; passages that two
documents share are left to the evaluation part. The calibration part has a third domain, text that the model writes
itself (:mod:`tieq.calibrate.generate`). Prose in other languages is not among it; ``--calibration FILE`` takes any.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib.util
import sys
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tieq.errors import TieqError
from tieq.source.tokenizer import TextTokenizer

# How far on a passage may begin in order to begin with a line, in characters.
_LINE = 1000
_RUN_LINES, _RUN_CHARACTERS = 4, 60
# Tokens are counted over this many characters of a text at most, taken in pieces from all over it.
_COUNTED_CHARACTERS, _PIECE = 4_000_000, 10_000
CALIBRATION, EVALUATION = "calibration", "evaluation"
SAMPLES = "samples"
# Fewer different tokens than this, or than a sixteenth of all, are no text to learn anything from.
_FEWEST_TOKENS = 16
_CODE_MODULES = (
    "argparse", "ast", "calendar", "cmd", "configparser", "copy", "csv", "dataclasses", "datetime", "difflib",
    "doctest", "enum", "fractions", "ftplib", "functools", "gettext", "gzip", "heapq", "inspect", "ipaddress",
    "locale", "mailbox", "mimetypes", "optparse", "pathlib", "pickle", "platform", "plistlib", "random", "shlex",
    "shutil", "smtplib", "socket", "statistics", "string", "subprocess", "tarfile", "tempfile", "textwrap",
    "threading", "tokenize", "traceback", "typing", "uuid", "weakref", "zipfile",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Text by domain, with the sentence that says what it is and a SHA-256 over all of it.

    With ``samples``, text that the model writes itself is one domain more; it is made when the model is there.
    """

    domains: dict[str, str]
    description: str
    samples: bool = False

    @property
    def sha256(self) -> str:
        """Hash over domain names and texts."""
        digest = hashlib.sha256()
        for name, text in self.domains.items():
            digest.update(name.encode() + b"\0" + text.encode("utf-8", "surrogatepass") + b"\0")
        return digest.hexdigest()

    def shares(self, count: int) -> dict[str, int]:
        """How many of ``count`` sequences each domain gives, the model's own samples last."""
        names = [*self.domains, *([SAMPLES] if self.samples else [])]
        return {name: count // len(names) + (number < count % len(names)) for number, name in enumerate(names)}


@dataclasses.dataclass(frozen=True)
class Sequences:
    """Token ids ``[sequences, length]`` int64 and the domain of each sequence."""

    ids: NDArray[np.int64]
    domains: tuple[str, ...]
    has_bos: bool

    def spread(self, tokens: int) -> NDArray[np.int64]:
        """Whole sequences, evenly spaced over all of them, of about ``tokens`` tokens together."""
        every = max(1, -(-self.ids.size // tokens))
        return self.ids[::every]

    @property
    def weights(self) -> NDArray[np.float64]:
        """What each sequence counts for, ``[sequences]``, mean one: every domain counts for the same."""
        sizes = {name: self.domains.count(name) for name in self.domains}
        return np.array([len(self.domains) / len(sizes) / sizes[name] for name in self.domains])

    @property
    def sha256(self) -> str:
        """Hash over shape, ids and domains."""
        digest = hashlib.sha256(f"{self.ids.shape} {self.domains}".encode())
        digest.update(np.ascontiguousarray(self.ids, dtype="<i8").data)
        return digest.hexdigest()


@functools.cache
def default_corpus(part: str) -> Corpus:
    """The default text of one part, ``calibration`` (with the model's own samples) or ``evaluation``."""
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    domains = {}
    for name, documents in (("prose", _prose), ("code", _code)):
        text = documents(1)
        # Documents quote each other; what the evaluation part holds is cut out of the calibration part.
        domains[name] = text if part == EVALUATION else _without_shared(documents(0), text)
    return Corpus(
        domains,
        f"Python {version} language reference (prose) and standard library source (code), {part} part",
        samples=part == CALIBRATION,
    )


def calibration_corpus(wanted: Iterable[str | Path]) -> Corpus:
    """The calibration text that the user named, or the default one where nothing is named.

    Args:
        wanted: text files; the string ``samples`` stands for text that the model writes itself (a file of that name is
            given as ``./samples`` or as a ``Path``).

    Raises:
        TieqError: see :func:`file_corpus`.
    """
    names = list(wanted)
    if not names:
        return default_corpus(CALIBRATION)
    paths = [Path(name) for name in names if name != SAMPLES]
    files = file_corpus(paths) if paths else Corpus({}, "text that the model wrote itself")
    return dataclasses.replace(files, samples=SAMPLES in names)


def file_corpus(paths: list[Path]) -> Corpus:
    """The user's own text files, one domain a file.

    Raises:
        TieqError: if a file cannot be read as UTF-8 or is empty.
    """
    domains = {}
    for path in paths:
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise TieqError(f"cannot be read as UTF-8 text ({error}).", where=str(path)) from error
        if not text.strip():
            raise TieqError("is empty.", where=str(path), todo="Give a file with text.")
        domains[path.name if path.name not in domains else str(path)] = text
    return Corpus(domains, f"text files {', '.join(str(path) for path in paths)}")


def cut_sequences(corpus: Corpus, tokenizer: TextTokenizer, count: int, length: int) -> Sequences:
    """Cut ``count`` sequences of ``length`` tokens, spread evenly over each domain and never overlapping.

    Each begins at the start of a line, and with BOS where the tokenizer puts one.

    Raises:
        TieqError: if the text is too short for even one sequence a domain; shorter text gives fewer sequences.
    """
    bos = [] if tokenizer.bos is None else [tokenizer.bos]
    shares = corpus.shares(count)
    rows, domains = [], []
    for name, text in corpus.domains.items():
        passages = _passages(text, tokenizer, shares[name], length - len(bos))
        if not passages and shares[name]:
            raise TieqError(
                f"the text '{name}' has {len(tokenizer.encode(text))} tokens, fewer than one sequence of {length}.",
                where=corpus.description,
                todo="Give more text or a shorter sequence.",
            )
        rows += [bos + passage for passage in passages]
        domains += [name] * len(passages)
    return Sequences(np.array(rows, dtype=np.int64).reshape(-1, length), tuple(domains), bool(bos))


def token_shares(corpus: Corpus, tokenizer: TextTokenizer, rows: int, length: int) -> NDArray[np.float64]:
    """How often each id occurs in the whole text and not in the cut sequences alone, ``[rows]``; sums to one.

    Every domain weighs the same; BOS counts once in ``length`` where the tokenizer puts one.
    """
    found = np.zeros(rows)
    for text in corpus.domains.values():
        key = (hashlib.sha256(text.encode()).hexdigest(), tokenizer.sha256, rows)
        if key not in _counted:
            while len(_counted) >= _KEPT_COUNTS:
                del _counted[next(iter(_counted))]
            _counted[key] = _count(text, tokenizer, rows)
        counts = _counted[key]
        found += counts / (np.sum(counts) * len(corpus.domains))
    if tokenizer.bos is not None:
        found *= 1 - 1 / length
        found[tokenizer.bos] += 1 / length
    return found


# Counts of this process by text, tokenizer and rows, oldest first: several jobs on one text count it once.
_counted: dict[tuple[str, str, int], NDArray[np.int64]] = {}
_KEPT_COUNTS = 16


def _count(text: str, tokenizer: TextTokenizer, rows: int) -> NDArray[np.int64]:
    step = _PIECE * max(1, len(text) // _COUNTED_CHARACTERS)
    counts = np.zeros(rows, np.int64)
    for start in range(0, len(text), step):
        counts += np.bincount(tokenizer.encode(text[start : start + _PIECE]), minlength=rows)
    return counts


def monotonous_domains(sequences: Sequences) -> dict[str, int]:
    """Domains that repeat a few tokens, with the number of different ones: nothing can be calibrated on them."""
    found = {}
    for name in dict.fromkeys(sequences.domains):
        ids = sequences.ids[[domain == name for domain in sequences.domains]][:, int(sequences.has_bos) :]
        different = len(np.unique(ids))
        if different < min(_FEWEST_TOKENS, ids.size // 16):
            found[name] = different
    return found


def _passages(text: str, tokenizer: TextTokenizer, count: int, tokens: int) -> list[list[int]]:
    """Up to ``count`` passages of exactly ``tokens`` tokens; only these parts of the text are tokenized."""
    found: list[list[int]] = []
    end = 0
    for number in range(count):
        start = max(number * len(text) // count, end)
        line = text.find("\n", start - 1) + 1 if start else 0
        ids, end = tokenizer.encode_first(text, line if line and line - start < _LINE else start, tokens)
        if len(ids) < tokens:
            break
        found.append(ids)
    return found


def _without_shared(text: str, other: str) -> str:
    """Drop runs of up to four lines, of 60 characters and more, that ``other`` has too."""
    lines, theirs = text.split("\n"), other.split("\n")
    dropped = [False] * len(lines)
    for size in range(1, _RUN_LINES + 1):
        known = {run for run in _runs(theirs, size) if len(run) >= _RUN_CHARACTERS}
        for start, run in enumerate(_runs(lines, size)):
            if run in known:
                dropped[start : start + size] = [True] * size
    return "\n".join(line for line, gone in zip(lines, dropped, strict=True) if not gone)


def _runs(lines: list[str], size: int) -> list[str]:
    return ["\n".join(lines[start : start + size]) for start in range(len(lines) - size + 1)]


def _parity(name: str) -> int:
    return hashlib.sha256(name.encode()).digest()[0] & 1


def _prose(wanted: int) -> str:
    from pydoc_data import topics

    chosen = [text for name, text in sorted(topics.topics.items()) if _parity(name) == wanted]
    return "\n".join(chosen)


def _code(wanted: int) -> str:
    sources = []
    for name in _CODE_MODULES:
        spec = importlib.util.find_spec(name) if _parity(name) == wanted else None
        if spec is not None and spec.origin and spec.origin.endswith(".py"):
            sources.append(Path(spec.origin).read_text(encoding="utf-8"))
    return "\n".join(sources)
