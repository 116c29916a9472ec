from __future__ import annotations

import math

import numpy as np
import pytest

from tieq.metrics import SequenceScore, log_softmax, mean, score_sequence, summarize


def logits(length: int = 70, vocab: int = 11, seed: int = 0) -> np.ndarray:
    """Longer than two of the pieces that are compared at a time (32 positions)."""
    return (3 * np.random.default_rng(seed).standard_normal((length, vocab))).astype(np.float32)


def tokens(length: int = 70, vocab: int = 11) -> np.ndarray:
    return np.random.default_rng(9).integers(0, vocab, length)


def probabilities(row: np.ndarray) -> list[float]:
    """Softmax in another way: by exponentials and exact sums of Python floats."""
    powers = [math.exp(float(value)) for value in row]
    total = math.fsum(powers)
    return [power / total for power in powers]


def by_hand(
    ids: np.ndarray, reference: np.ndarray, found: np.ndarray, allowed: list[int]
) -> tuple[float, int, float, float]:
    """KL, equal best tokens, and both negative log-likelihoods over the allowed ids, position by position."""
    kl, same, nll, nll_reference = [], 0, [], []
    for at in range(len(ids)):
        p, q = probabilities(reference[at][allowed]), probabilities(found[at][allowed])
        kl.append(math.fsum(a * (math.log(a) - math.log(b)) for a, b in zip(p, q, strict=True)))
        same += p.index(max(p)) == q.index(max(q))
        if at + 1 < len(ids):
            target = allowed.index(int(ids[at + 1]))
            nll.append(-math.log(q[target]))
            nll_reference.append(-math.log(p[target]))
    return math.fsum(kl), same, math.fsum(nll), math.fsum(nll_reference)


# Two ways to add some thousand terms of size one in float64: 2**-52 relative, times ten operations a term.
CLOSE = 1e-12


def test_kl_top1_and_likelihoods_are_those_of_another_computation() -> None:
    ids, reference, found = tokens(), logits(), logits(seed=1)
    [score] = score_sequence(ids, reference, [found], np.ones(11, bool))
    kl, same, nll, nll_reference = by_hand(ids, reference, found, list(range(11)))
    assert score.kl == pytest.approx(kl, rel=CLOSE)
    assert score.same_top == same
    assert 0 < same < 70
    assert score.nll == pytest.approx(nll, rel=CLOSE)
    assert score.nll_reference == pytest.approx(nll_reference, rel=CLOSE)
    assert (score.positions, score.predictions) == (70, 69)


def test_two_positions_worked_out_by_hand() -> None:
    # Position 0: reference (1/2, 1/2), candidate (3/4, 1/4): KL = ln(2 / sqrt(3)). Position 1: both (4/5, 1/5): 0.
    # The one prediction is token 1 at position 0: ln 2 and ln 4, so the perplexity ratio is 2.
    reference = np.log(np.array([[0.5, 0.5], [0.8, 0.2]], np.float32))
    found = np.log(np.array([[0.75, 0.25], [0.8, 0.2]], np.float32))
    scores = summarize(score_sequence(np.array([0, 1]), reference, [found], np.ones(2, bool)))
    # The logarithms are rounded to float32: 2**-24 of values below 2.
    assert scores.kl.value == pytest.approx(math.log(2 / math.sqrt(3)) / 2, abs=2.0**-22)
    assert scores.perplexity_ratio.value == pytest.approx(2.0, abs=2.0**-20)
    assert scores.reference_perplexity == pytest.approx(2.0, abs=2.0**-20)
    # A tie at position 0 goes to the first token in both.
    assert scores.top1.value == 1.0
    assert (scores.sequences, scores.tokens) == (1, 2)


@pytest.mark.parametrize("magnitude", [1.0, 1e4, 1e30])
def test_identical_logits_have_exactly_no_divergence(magnitude: float) -> None:
    reference = logits() * np.float32(magnitude)
    scores = score_sequence(tokens(), reference, [reference.copy(), reference.copy()], np.ones(11, bool))
    for score in scores:
        assert (score.kl, score.kl_to_first, score.same_top) == (0.0, 0.0, 70)
        assert score.nll == score.nll_reference


def test_adding_a_constant_to_all_logits_changes_nothing() -> None:
    # Multiples of 1/16 below 16, so that float32 adds 64 exactly; what differs is rounding in float64, some 2**-52 of
    # numbers below 100 in each of 70 x 11 terms.
    reference = np.round(logits() * 16) / 16
    [score] = score_sequence(tokens(), reference, [reference + np.float32(64)], np.ones(11, bool))
    assert abs(score.kl) < 70 * 11 * 100 * 2.0**-52
    assert score.same_top == 70


def test_masked_ids_do_not_matter_whatever_their_logits() -> None:
    allowed = np.ones(11, bool)
    allowed[[0, 4, 10]] = False
    kept = [1, 2, 3, 5, 6, 7, 8, 9]
    ids = np.array(kept)[np.random.default_rng(3).integers(0, 8, 70)]
    reference, found = logits(), logits(seed=1)
    [plain] = score_sequence(ids, reference, [found], allowed)
    kl, same, nll, nll_reference = by_hand(ids, reference, found, kept)
    assert plain.kl == pytest.approx(kl, rel=CLOSE)
    assert (plain.same_top, plain.nll) == (same, pytest.approx(nll, rel=CLOSE))
    assert plain.nll_reference == pytest.approx(nll_reference, rel=CLOSE)
    for value in (1e4, -1e4, np.inf, np.nan):
        spoiled_reference, spoiled = reference.copy(), found.copy()
        spoiled[:, ~allowed], spoiled_reference[:, [4]] = value, -value
        assert score_sequence(ids, spoiled_reference, [spoiled], allowed) == [plain]


def test_columns_beyond_the_vocabulary_are_ignored() -> None:
    reference, found = logits(), logits(seed=1)
    [plain] = score_sequence(tokens(), reference, [found], np.ones(11, bool))
    wide = np.concatenate([found, np.full((70, 5), 1e4, np.float32)], axis=1)
    wide_reference = np.concatenate([reference, np.full((70, 2), np.nan, np.float32)], axis=1)
    assert score_sequence(tokens(), wide_reference, [wide], np.ones(11, bool)) == [plain]


@pytest.mark.parametrize("length", [2, 31, 32, 33, 64, 65])
def test_lengths_around_the_piece_size_count_every_position_once(length: int) -> None:
    ids, reference, found = tokens(length), logits(length), logits(length, seed=1)
    [score] = score_sequence(ids, reference, [found], np.ones(11, bool))
    kl, same, nll, nll_reference = by_hand(ids, reference, found, list(range(11)))
    assert (score.kl, score.nll) == (pytest.approx(kl, rel=CLOSE), pytest.approx(nll, rel=CLOSE))
    assert score.nll_reference == pytest.approx(nll_reference, rel=CLOSE)
    assert score.same_top == same


def test_the_divergence_to_the_first_candidate_is_from_the_first_to_the_other() -> None:
    ids, first, second = tokens(), logits(seed=1), logits(seed=2)
    scores = score_sequence(ids, logits(), [first, second], np.ones(11, bool))
    [direct] = score_sequence(ids, first, [second], np.ones(11, bool))
    [back] = score_sequence(ids, second, [first], np.ones(11, bool))
    assert scores[0].kl_to_first == 0.0
    assert scores[1].kl_to_first == direct.kl
    # The other direction is another number, so the test can tell them apart.
    assert abs(back.kl - direct.kl) > 0.01 * direct.kl


def test_without_a_reference_only_the_likelihood_is_scored() -> None:
    [score] = score_sequence(tokens(), None, [logits(seed=1)], np.ones(11, bool))
    [full] = score_sequence(tokens(), logits(), [logits(seed=1)], np.ones(11, bool))
    assert score.nll == full.nll
    assert (score.kl, score.same_top, score.nll_reference) == (0.0, 0, 0.0)


def test_scoring_changes_no_logits() -> None:
    reference, found = logits(), logits(seed=1)
    reference.flags.writeable = found.flags.writeable = False
    score_sequence(tokens(), reference, [found], np.ones(11, bool))
    assert np.array_equal(reference, logits())
    assert np.array_equal(found, logits(seed=1))


def test_log_softmax_survives_logits_that_overflow_exp() -> None:
    found = log_softmax(np.array([[1e4, 1e4, -1e4], [3e38, 0, 0]], np.float32))
    expected = np.array([[-math.log(2), -math.log(2), -2e4 - math.log(2)], [0, -3e38, -3e38]])
    # One rounding in the subtraction and one in float32's 3e38.
    assert np.allclose(found, expected, rtol=2.0**-24, atol=0)
    assert np.isfinite(found).all()


def test_the_mean_and_its_standard_error_are_those_of_the_formula() -> None:
    # Mean 3, squared deviations 4 + 1 + 1 + 4 = 10, sample variance 10/3, standard error sqrt(10/3/4).
    found = mean([1.0, 2.0, 4.0, 5.0])
    assert (found.value, found.standard_error) == (3.0, pytest.approx(math.sqrt(10 / 12), rel=1e-15))
    assert mean([7.0]).standard_error is None
    assert mean([2.0, 2.0]).standard_error == 0.0


def score(nll: float, nll_reference: float, kl: float, same: int, positions: int = 5) -> SequenceScore:
    return SequenceScore(positions, positions - 1, nll, nll_reference, kl, same)


def test_the_summary_averages_over_sequences() -> None:
    # Per-prediction gaps (8-4)/4 = 1 and (20-8)/4 = 3: mean 2, standard error 1 (two values one away from the mean).
    found = summarize([score(8, 4, 1.0, 5), score(20, 8, 2.0, 2)])
    assert found.perplexity_ratio.value == pytest.approx(math.exp(2), rel=1e-15)
    # Delta method: the ratio times the error of its logarithm.
    assert found.perplexity_ratio.standard_error == pytest.approx(math.exp(2) * 1.0, rel=1e-15)
    # KL 0.2 and 0.4 a token, top-1 1 and 0.4.
    assert found.kl.value == pytest.approx(0.3, rel=1e-15)
    assert found.kl.standard_error == pytest.approx(0.1, rel=1e-14)
    assert found.top1.value == pytest.approx(0.7, rel=1e-15)
    assert found.top1.standard_error == pytest.approx(0.3, rel=1e-14)
    assert found.reference_perplexity == pytest.approx(math.exp(12 / 8), rel=1e-15)
    assert (found.sequences, found.tokens) == (2, 10)


def test_the_perplexity_ratio_of_equal_likelihoods_is_exactly_one() -> None:
    found = summarize([score(7.3, 7.3, 0, 5), score(1.1, 1.1, 0, 5)])
    assert (found.perplexity_ratio.value, found.perplexity_ratio.standard_error) == (1.0, 0.0)


def test_a_hopeless_candidate_has_an_infinite_ratio_and_does_not_raise() -> None:
    # 1,000 nats a token: logits of a broken graph reach that easily.
    assert summarize([score(4000.0, 4.0, 5000.0, 0)] * 2).perplexity_ratio.value == math.inf


def test_a_target_that_the_tokenizer_cannot_emit_is_not_scored_as_another() -> None:
    allowed = np.ones(11, bool)
    allowed[10] = False
    with pytest.raises((ValueError, IndexError)):
        score_sequence(np.array([1, 10, 2]), logits(3), [logits(3, seed=1)], allowed)
