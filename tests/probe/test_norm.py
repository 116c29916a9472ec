from __future__ import annotations

import numpy as np
import pytest

from tieq.probe import column_moments, norm_effect, top_column_share


def states(columns: int = 200, seed: int = 0) -> list[np.ndarray]:
    random = np.random.default_rng(seed)
    return [random.standard_normal((50, columns)).astype(np.float32) for _ in range(2)]


def normed(values: np.ndarray, gain: np.ndarray) -> np.ndarray:
    return (values / np.sqrt(np.square(values).mean(axis=1, keepdims=True)) * gain).astype(np.float32)


def test_a_gain_of_one_leaves_the_columns_as_they_are() -> None:
    before = [7 * values for values in states()]
    found = norm_effect(before, [normed(values, np.ones(200)) for values in before])
    for key in ("kurtosis", "participation", "top_share"):
        assert found["after"][key] == pytest.approx(found["before"][key], rel=1e-4)
    # 10,000 squares per side and column: the RMS is known to a percent.
    assert found["before"]["rms"] == pytest.approx(7, rel=0.02)
    assert found["after"]["rms"] == pytest.approx(1, rel=1e-5)
    assert found["top_columns"] == 2


def test_a_gain_that_shrinks_large_columns_evens_them_out_and_one_that_raises_some_sharpens() -> None:
    size = np.ones(200, np.float32)
    size[[3, 8]] = 30
    peaked = [values * size for values in states()]
    evened = norm_effect(peaked, [normed(values, 1 / size) for values in peaked])
    assert evened["before"]["participation"] < 10 < 100 < evened["after"]["participation"]
    assert evened["before"]["top_share"] > 0.8
    assert evened["after"]["top_share"] < 0.05
    assert evened["before"]["kurtosis"] > evened["after"]["kurtosis"]
    assert "evens the columns out" in evened["sentence"]
    plain = states()
    sharpened = norm_effect(plain, [normed(values, size) for values in plain])
    assert "sharpens the columns" in sharpened["sentence"]
    assert "the largest 2 of 200" in sharpened["sentence"]


def test_the_participation_of_equal_columns_is_their_number_and_of_one_is_one() -> None:
    flat = [np.ones((3, 10), np.float32)]
    alone = [np.eye(1, 10, dtype=np.float32)]
    assert norm_effect(flat, alone)["before"]["participation"] == pytest.approx(10)
    assert norm_effect(flat, alone)["after"]["participation"] == pytest.approx(1)


def test_shares_of_the_largest_columns_and_moments_by_hand() -> None:
    assert top_column_share(np.array([1.0, 2.0, 7.0])) == pytest.approx(0.7)
    assert top_column_share(np.zeros(3)) == 0.0
    assert top_column_share(np.ones(200)) == pytest.approx(0.01)
    values = [np.array([[3.0, 4.0]], np.float32), np.array([[0.0, 2.0]], np.float32)]
    assert column_moments(values, equal_tokens=False).tolist() == [4.5, 10.0]
    # Each token to RMS 1: squares (18, 32) / 25 and (0, 2).
    assert column_moments(values, equal_tokens=True) == pytest.approx([0.36, 1.64])
