from __future__ import annotations

import numpy as np
import pytest

from tieq.metrics import SequenceScore, score_sequence
from tieq.probe.score import Expected

LENGTH, ROWS = 33, 4099
IDS = np.random.default_rng(9).integers(0, 50, LENGTH)


def logits(seed: int = 0, size: float = 4.0) -> np.ndarray:
    return (size * np.random.default_rng(seed).standard_normal((LENGTH, ROWS))).astype(np.float32)


def scored(reference: np.ndarray, found: np.ndarray, allowed: np.ndarray, step: int = LENGTH) -> SequenceScore:
    score = SequenceScore(LENGTH, LENGTH - 1)
    for start in range(0, LENGTH, step):
        piece = slice(start, start + step)
        Expected(reference[piece], IDS[start + 1 : start + 1 + step], allowed).add(score, found[piece])
    return score


def masks() -> dict[str, np.ndarray]:
    scattered = np.random.default_rng(4).random(ROWS) < 0.7
    scattered[:50] = True
    return {"all": np.ones(ROWS, bool), "first": np.arange(ROWS) < 3000, "scattered": scattered}


@pytest.mark.parametrize("mask", ["all", "first", "scattered"])
@pytest.mark.parametrize("size", [0.001, 0.05, 1.0])
def test_it_is_the_float64_score_to_a_hundred_thousandth_of_a_nat(mask: str, size: float) -> None:
    reference = logits()
    found = reference + logits(1, size)
    allowed = masks()[mask]
    (expected,) = score_sequence(IDS, reference, [found], allowed)
    score = scored(reference, found, allowed)
    assert score.kl / LENGTH == pytest.approx(expected.kl / LENGTH, abs=1e-5)
    # Logits below 20 are rounded to 2**-20 when the largest is taken off; means over thousands of them are closer.
    assert score.nll / LENGTH == pytest.approx(expected.nll / LENGTH, abs=1e-5)
    assert score.nll_reference / LENGTH == pytest.approx(expected.nll_reference / LENGTH, abs=1e-5)
    assert score.same_top == expected.same_top


def test_small_divergences_keep_three_digits() -> None:
    # KL of 5e-7 nats a token, less than any quantized table: what is rounded in float32 averages out.
    reference = logits()
    found = reference + logits(1, 0.001)
    (expected,) = score_sequence(IDS, reference, [found], np.ones(ROWS, bool))
    assert 1e-7 < expected.kl / LENGTH < 1e-6
    # Each of some 1,000 likely logits a position carries a rounding of about 2**-21 in either table; a mean over their
    # probabilities and 33 positions is good to about 2**-21 / sqrt(33 x 20), 2e-8.
    assert scored(reference, found, np.ones(ROWS, bool)).kl / LENGTH == pytest.approx(expected.kl / LENGTH, abs=6e-8)


def test_equal_logits_have_exactly_no_divergence() -> None:
    score = scored(logits(), logits(), np.ones(ROWS, bool))
    assert (score.kl, score.same_top) == (0.0, LENGTH)
    assert score.nll == score.nll_reference


@pytest.mark.parametrize("step", [1, 7, 8, 9, 32])
def test_pieces_of_any_size_give_the_same_score(step: int) -> None:
    reference, found, allowed = logits(), logits(1), masks()["scattered"]
    whole, parts = scored(reference, found, allowed), scored(reference, found, allowed, step)
    # The same float64 terms in another order.
    assert parts.kl == pytest.approx(whole.kl, rel=1e-12)
    assert parts.nll == pytest.approx(whole.nll, rel=1e-12)
    assert parts.nll_reference == pytest.approx(whole.nll_reference, rel=1e-12)
    assert parts.same_top == whole.same_top


def test_ids_that_do_not_count_may_hold_anything_and_nothing_is_changed() -> None:
    allowed = masks()["scattered"]
    reference, found = logits(), logits(1)
    plain = scored(reference, found, allowed)
    reference[:, ~allowed], found[:, ~allowed] = np.nan, np.inf
    reference.flags.writeable = found.flags.writeable = False
    assert scored(reference, found, allowed) == plain
