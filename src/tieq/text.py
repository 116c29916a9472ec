"""Text for calibration and evaluation that every machine has, in two parts that never overlap.

Prose is Python's own language reference (``pydoc_data.topics``), code is the standard library's source. Documents
go to one part or the other by the parity of their name's hash, so that no document serves both.
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

CALIBRATION, EVALUATION = "calibration", "evaluation"
_CODE_MODULES = (
    "argparse", "ast", "calendar", "cmd", "codecs", "configparser", "copy", "csv", "dataclasses", "datetime", "difflib",
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


def default_corpus(part: str) -> Corpus:
    """The default text of one part, ``calibration`` or ``evaluation``."""
    wanted = 0 if part == CALIBRATION else 1
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    return Corpus(
        {"prose": _prose(wanted), "code": _code(wanted)},
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
        domains[path.name] = text
    return Corpus(domains, f"text files {', '.join(str(path) for path in paths)}")


def cut_sequences(corpus: Corpus, tokenizer: TextTokenizer, count: int, length: int) -> Sequences:
    """Cut ``count`` sequences of ``length`` tokens, spread evenly over each domain, domains in turn.

    Each begins with BOS where the tokenizer puts one.

    Raises:
        TieqError: if the text is too short for even one sequence a domain; shorter text gives fewer sequences.
    """
    bos = [] if tokenizer.bos is None else [tokenizer.bos]
    body = length - len(bos)
    names = list(corpus.domains)
    rows, domains = [], []
    for position, (name, text) in enumerate(corpus.domains.items()):
        ids = tokenizer.encode(text)
        possible = len(ids) // body
        if possible == 0:
            raise TieqError(
                f"the text '{name}' has {len(ids)} tokens, fewer than one sequence of {length}.",
                where=corpus.description,
                todo="Give more text or a shorter sequence.",
            )
        share = count // len(names) + (position < count % len(names))
        for which in range(min(share, possible)):
            start = which * possible // min(share, possible) * body
            rows.append(bos + ids[start : start + body])
            domains.append(name)
    return Sequences(np.array(rows, dtype=np.int64), tuple(domains), bool(bos))


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
