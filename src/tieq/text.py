"""Text for calibration and evaluation that every machine has, in two parts that never overlap.

Prose is Python's own language reference (``pydoc_data.topics``), code is the standard library's source. Documents
go to one part or the other by the parity of their name's hash, so that no document serves both; passages that two
documents share are left to the evaluation part.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.util
import sys
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tieq.errors import TieqError
from tieq.source.tokenizer import TextTokenizer

# How far on a passage may begin in order to begin with a line, in characters.
_LINE = 1000
_RUN_LINES, _RUN_CHARACTERS = 4, 60
CALIBRATION, EVALUATION = "calibration", "evaluation"
_CODE_MODULES = (
    "argparse", "ast", "calendar", "cmd", "configparser", "copy", "csv", "dataclasses", "datetime", "difflib",
    "doctest", "enum", "fractions", "ftplib", "functools", "gettext", "gzip", "heapq", "inspect", "ipaddress",
    "locale", "mailbox", "mimetypes", "optparse", "pathlib", "pickle", "platform", "plistlib", "random", "shlex",
    "shutil", "smtplib", "socket", "statistics", "string", "subprocess", "tarfile", "tempfile", "textwrap",
    "threading", "tokenize", "traceback", "typing", "uuid", "weakref", "zipfile",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Text by domain, with the sentence that says what it is and a SHA-256 over all of it."""

    domains: dict[str, str]
    description: str

    @property
    def sha256(self) -> str:
        """Hash over domain names and texts."""
        digest = hashlib.sha256()
        for name, text in self.domains.items():
            digest.update(name.encode() + b"\0" + text.encode("utf-8", "surrogatepass") + b"\0")
        return digest.hexdigest()


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


def default_corpus(part: str) -> Corpus:
    """The default text of one part, ``calibration`` or ``evaluation``."""
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    domains = {}
    for name, documents in (("prose", _prose), ("code", _code)):
        text = documents(1)
        # Documents quote each other; what the evaluation part holds is cut out of the calibration part.
        domains[name] = text if part == EVALUATION else _without_shared(documents(0), text)
    return Corpus(
        domains,
        f"Python {version} language reference (prose) and standard library source (code), {part} part",
    )


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
    names = list(corpus.domains)
    rows, domains = [], []
    for position, (name, text) in enumerate(corpus.domains.items()):
        share = count // len(names) + (position < count % len(names))
        passages = _passages(text, tokenizer, share, length - len(bos))
        if not passages and share:
            raise TieqError(
                f"the text '{name}' has {len(tokenizer.encode(text))} tokens, fewer than one sequence of {length}.",
                where=corpus.description,
                todo="Give more text or a shorter sequence.",
            )
        rows += [bos + passage for passage in passages]
        domains += [name] * len(passages)
    return Sequences(np.array(rows, dtype=np.int64), tuple(domains), bool(bos))


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
