"""Text that the model itself writes: the domain that fits every model, whatever it was trained on (Liu et al. 2023).

A language model's own distribution is what its quantized copy has to keep, and text sampled from it reaches tokens
that no fixed prose or code holds (LLM-QAT, arXiv 2305.17888).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tieq.progress import counter
from tieq.source.reference import ReferenceModel

# Sequences in one batch: the logits of Gemma's 262,144 rows take 1 MB each.
_BATCH = 32


def generate(
    model: ReferenceModel, starts: NDArray[np.int64], length: int, allowed: NDArray[np.bool_], seed: int = 0
) -> NDArray[np.int64] | None:
    """Sample sequences at temperature 1, each from its own random numbers.

    Args:
        model: the float model.
        starts: the first token of each sequence, ``[sequences]``.
        length: tokens in each sequence, the first included.
        allowed: ids that may follow, ``[rows]``: no padding row, no end of text, so that each sequence is full.
        seed: of the random numbers; the same ones give the same tokens.

    Returns:
        ``[sequences, length]``, or None where the model's probabilities are not finite.
    """
    made = []
    with counter("the model's own samples", length - 1, "tokens a sequence") as advance:
        for first in range(0, len(starts), _BATCH):
            batch = range(first, min(first + _BATCH, len(starts)))
            chances = np.stack([np.random.default_rng([seed, number]).random(length - 1) for number in batch])
            ids = _continue(model.module, starts[first : batch.stop], chances, allowed, advance)
            if ids is None:
                return None
            made.append(ids)
            advance = _silent
    return np.concatenate(made)


def _silent(count: int) -> None:
    """Later batches are as long as the first, which the bar has shown."""


def _continue(
    module: Any, starts: NDArray[np.int64], chances: NDArray[np.float64], allowed: NDArray[np.bool_], advance: Any
) -> NDArray[np.int64] | None:
    import torch

    ids, cache = [starts], None
    forbidden = torch.from_numpy(~allowed)
    with torch.no_grad():
        for step in range(chances.shape[1]):
            made = module(torch.from_numpy(ids[-1])[:, None], past_key_values=cache, use_cache=True)
            cache = made.past_key_values
            logits = made.logits[:, -1].double().masked_fill_(forbidden, -torch.inf)
            # The inverse of the cumulative distribution: one uniform number decides each token.
            reached = logits.softmax(-1).cumsum(-1)
            if not reached[:, -1].isfinite().all():
                return None
            wanted = torch.from_numpy(chances[:, step, None]) * reached[:, -1:]
            ids.append(torch.searchsorted(reached, wanted, right=True)[:, 0].numpy())
            advance(1)
    return np.stack(ids, axis=1)
