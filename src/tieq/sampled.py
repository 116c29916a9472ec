"""What a job is calibrated and evaluated on: sequences of its texts, and how they are described."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tieq import text
from tieq.calibrate import Calibration, Request, calibrate, request, usable_cache
from tieq.prepare import Job
from tieq.recipe import Sampling
from tieq.source.base import ModelSource
from tieq.source.reference import ReferenceModel
from tieq.source.tokenizer import TextTokenizer

RANDOM_IDS = "random ids"
_OWN_TEXT = "text that the model wrote itself (samples)"


def allowed_ids(tokenizer: TextTokenizer | None, rows: int) -> NDArray[np.bool_]:
    """Ids that the tokenizer can emit, ``[rows]``; all of them without a tokenizer."""
    if tokenizer is None:
        return np.ones(rows, dtype=bool)
    mask = np.zeros(rows, dtype=bool)
    mask[sorted(tokenizer.ids)] = True
    return mask


def describe_sequences(sequences: text.Sequences, corpus: text.Corpus) -> dict[str, Any]:
    """What was run, for the manifest."""
    count, length = sequences.ids.shape
    is_text = RANDOM_IDS not in sequences.domains
    own = "; " + _OWN_TEXT if corpus.domains and text.SAMPLES in sequences.domains else ""
    description = corpus.description + own
    return {
        "description": description if is_text else "random token ids",
        "sha256": corpus.sha256 if is_text else None,
        "sequences": count,
        "length": length,
        "has_bos": sequences.has_bos,
        "domains": list(dict.fromkeys(sequences.domains)),
    }


def make_sequences(
    source: ModelSource, tokenizer: TextTokenizer | None, rows: int, corpus: text.Corpus, sampling: Sampling
) -> text.Sequences:
    """Sequences of the text, no longer than the model's context; seeded random ids where there is no tokenizer."""
    length = sequence_length(source, sampling)
    if tokenizer is not None:
        return text.cut_sequences(corpus, tokenizer, sampling.sequences, length)
    ids = np.random.default_rng(0).integers(0, rows, (sampling.sequences, length))
    return text.Sequences(ids, (RANDOM_IDS,) * sampling.sequences, False)


def more_sequences(job: Job, corpus: text.Corpus, count: int) -> text.Sequences:
    """As :func:`make_sequences` for the job's evaluation, another number of them."""
    assert job.recipe.evaluation is not None
    sampling = Sampling(sequences=count, length=job.recipe.evaluation.length)
    return make_sequences(job.source, job.tokenizer, job.graph.rows, corpus, sampling)


def sequence_length(source: ModelSource, sampling: Sampling) -> int:
    """Tokens in a sequence, no more than the model's context."""
    limit = int(source.config.get("max_position_embeddings") or source.config.get("n_positions") or 1 << 20)
    return min(sampling.length, limit)


def calibration_request(job: Job, corpus: text.Corpus) -> Request | None:
    """What is to be measured on, before the model is loaded; None where the effort or the tokenizer leaves nothing.

    Raises:
        TieqError: if a text is too short or repeats a few tokens.
    """
    if job.recipe.effort == "quick" or job.tokenizer is None:
        return None
    sampling = job.recipe.calibration_sampling
    return request(corpus, job.tokenizer, job.graph.rows, sampling.sequences, sequence_length(job.source, sampling))


def calibrate_job(
    job: Job, wanted: Request, load: Callable[[], ReferenceModel], *, full: bool | None = None, cache: bool = True
) -> Calibration:
    """Measure for a job, or take what an earlier command measured; ``full`` follows from the effort where not given."""
    identity = {"fingerprint": job.source.fingerprint(), "tied": job.graph.tied, "table": job.table}
    ranked = any(decision.bands for decision in job.plan.tables)
    full = ranked or job.recipe.effort == "best" if full is None else full
    return calibrate(wanted, load, full=full, model=identity, cache=usable_cache(cache))
