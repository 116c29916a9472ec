"""A calibration from its text to its statistics: the model's own samples, the measurement, and both from the cache."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tieq.calibrate.cache import CalibrationCache
from tieq.calibrate.generate import generate
from tieq.calibrate.measure import measure
from tieq.calibrate.statistics import Statistics
from tieq.errors import TieqError
from tieq.progress import say
from tieq.source.reference import ReferenceModel
from tieq.source.tokenizer import TextTokenizer
from tieq.text import (
    CALIBRATION,
    SAMPLES,
    Corpus,
    Sequences,
    cut_sequences,
    default_corpus,
    monotonous_domains,
    token_shares,
)

_SEED = 0
# What computes: another version may round differently, and a kept measurement has to be the one that would be made.
_LIBRARIES = ("torch", "transformers", "numpy")


@dataclasses.dataclass(frozen=True)
class Request:
    """What is to be measured on: everything that is known before the model is loaded.

    Attributes:
        text: sequences of given text, perhaps none.
        starts: first token of each sequence that the model is to write, ``[samples]``, perhaps none.
        allowed: ids that it may write, ``[rows]``.
        shares: how often each id occurs in the whole text, ``[rows]``; None to count the sequences'.
    """

    text: Sequences
    starts: NDArray[np.int64]
    allowed: NDArray[np.bool_]
    shares: NDArray[np.float64] | None = None

    def identity(self) -> dict[str, Any]:
        """What the tokens follow from, as plain values."""
        return {
            "text": self.text.sha256,
            "starts": self.starts.tolist(),
            "allowed": hashlib.sha256(np.packbits(self.allowed).data).hexdigest(),
            "shares": None if self.shares is None else hashlib.sha256(self.shares.data).hexdigest(),
            "seed": _SEED,
        }


@dataclasses.dataclass(frozen=True)
class Calibration:
    """What was measured, on which tokens, and what had to be left out, one sentence each."""

    statistics: Statistics
    sequences: Sequences
    notes: tuple[str, ...]


def request(corpus: Corpus, tokenizer: TextTokenizer, rows: int, sequences: int, length: int) -> Request:
    """Cut the text and choose how the model's own samples begin: with BOS, else with a token of the text.

    Args:
        corpus: the text.
        tokenizer: the model's.
        rows: of the table.
        sequences: how many, all domains together.
        length: tokens in each.

    Raises:
        TieqError: if a text is shorter than a sequence or repeats a few tokens.
    """
    text = cut_sequences(corpus, tokenizer, sequences, length)
    for name, different in monotonous_domains(text).items():
        raise TieqError(
            f"the text '{name}' has only {different} different tokens, which is nothing to calibrate on.",
            where=corpus.description,
            todo="Give other text, or use `--effort quick`, which calibrates nothing.",
        )
    wanted = corpus.shares(sequences).get(SAMPLES, 0)
    allowed = np.zeros(rows, dtype=bool)
    allowed[sorted(tokenizer.ids - tokenizer.special_ids)] = True
    if tokenizer.bos is not None:
        starts = np.full(wanted, tokenizer.bos, dtype=np.int64)
    else:
        # Drawn as often as they occur.
        usual = text.ids if text.ids.size else cut_sequences(default_corpus(CALIBRATION), tokenizer, 2, length).ids
        starts = np.random.default_rng(_SEED).choice(usual.reshape(-1), wanted)
    shares = token_shares(corpus, tokenizer, rows, length) if corpus.domains else None
    return Request(text, starts, allowed, shares)


def calibrate(
    wanted: Request,
    load: Callable[[], ReferenceModel],
    *,
    full: bool,
    model: dict[str, Any],
    cache: CalibrationCache | None = None,
) -> Calibration:
    """Measure, or take the measurement of an earlier command from the cache; the result is the same, bit for bit.

    Args:
        wanted: what to measure on.
        load: gives the float model; called only where something is measured.
        full: the table's cost and use and output gradients as well.
        model: what identifies the model: the source's fingerprint, and whether its table is tied and where it is from.
        cache: where measurements are kept; None for none.
    """
    identity = {
        **wanted.identity(),
        "model": model,
        "full": full,
        "libraries": {name: version(name) for name in _LIBRARIES},
    }
    kept = cache.load(identity) if cache is not None else None
    if kept is not None:
        statistics, beside = kept
        written = np.array(beside["samples"], dtype=np.int64).reshape(-1, wanted.text.ids.shape[1])
        found = Calibration(statistics, _joined(wanted.text, written), tuple(beside["notes"]))
    else:
        reference = load()
        written, notes = _samples(wanted, reference)
        sequences = _joined(wanted.text, written)
        statistics = _count_all(measure(reference, sequences, full=full), wanted, written)
        notes += statistics.problems()
        if full and statistics.table is None:
            notes += ("hidden states, logits or gradients are not finite: the table's cost was not measured.",)
        found = Calibration(statistics, sequences, notes)
        if cache is not None:
            cache.save(statistics, identity, {"samples": written.tolist(), "notes": list(notes)})
    for note in found.notes:
        say(f"note: {note}")
    return found


def _count_all(statistics: Statistics, wanted: Request, written: NDArray[np.int64]) -> Statistics:
    """Lookups counted over the whole text: counting costs nothing, and the sequences hold a small part of the words."""
    if statistics.rows is None or wanted.shares is None:
        return statistics
    domains = len(set(wanted.text.domains))
    own = np.bincount(written.reshape(-1), minlength=len(wanted.shares)) / max(written.size, 1)
    lookups = (domains * wanted.shares + own) / (domains + bool(written.size))
    return dataclasses.replace(
        statistics, rows=dataclasses.replace(statistics.rows, lookups=lookups.astype(np.float32))
    )


def _samples(wanted: Request, model: ReferenceModel) -> tuple[NDArray[np.int64], tuple[str, ...]]:
    """What the model writes, ``[samples, length]``, or none of it with the reason."""
    length = wanted.text.ids.shape[1]
    nothing = np.empty((0, length), dtype=np.int64)
    if not wanted.starts.size:
        return nothing, ()
    written = generate(model, wanted.starts, length, wanted.allowed, _SEED)
    usable = written is not None and not monotonous_domains(Sequences(written, (SAMPLES,) * len(written), has_bos=True))
    if usable and written is not None:
        return written, ()
    why = "are not finite" if written is None else "repeat a few tokens"
    if not len(wanted.text.ids):
        raise TieqError(
            f"the model's own samples {why}, and they were the only calibration text.",
            where="--calibration samples",
            todo="Name a text file.",
        )
    return nothing, (f"the model's own samples {why}; calibrated on the text alone.",)


def _joined(text: Sequences, written: NDArray[np.int64]) -> Sequences:
    if not len(written):
        return text
    return Sequences(np.concatenate([text.ids, written]), text.domains + (SAMPLES,) * len(written), text.has_bos)
