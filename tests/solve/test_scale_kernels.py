"""The compiled scale search against the same search in plain numpy, and its rounding to fp16 against numpy's."""

from __future__ import annotations

import numpy as np
import pytest

from tieq.codecs.schemes import SCHEMES
from tieq.solve.grid import nearest_steps, signed_extreme, to_half
from tieq.solve.scale_kernels import _half
from tieq.solve.scale_search import LANDINGS, scale_search


def test_rounding_to_half_is_numpys():
    random = np.random.default_rng(0)
    values = np.concatenate(
        [
            (random.standard_normal(4000) * 10.0 ** random.uniform(-9, 5, 4000)).astype(np.float32),
            np.array([0, -0.0, 2**-14, 2**-24, 2**-25, 3 * 2**-25, 65504, 65519, 65520, 1e9, -1e9], np.float32),
            np.arange(2000, dtype=np.float32) * np.float32(0.5) + 2048,  # ties
        ]
    )
    found = np.array([_half(value) for value in values], np.float32)
    assert np.array_equal(found, to_half(values).astype(np.float32))


def plain(blocks: np.ndarray, scheme, weighting: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Best scale and its error by trying the candidates one after the other, in float64."""
    best = np.zeros(blocks.shape[:2], np.float16)
    error = (weighting * blocks.astype(np.float64) ** 2).sum(-1)

    def attempt(scale: np.ndarray) -> None:
        steps = nearest_steps(blocks, scale, scheme)
        gap = blocks - steps * scale[..., None].astype(np.float32)
        found = (weighting * gap.astype(np.float64) ** 2).sum(-1)
        better = found < error
        best[better], error[better] = scale[better], found[better]

    for end in (float(code - scheme.zero_point) for code in scheme.code_range):
        for landing in LANDINGS[scheme.bits]:
            attempt(to_half(signed_extreme(blocks) / np.float32(end * landing)))
    if scheme.bits < 8:
        steps = nearest_steps(blocks, best, scheme)
        power = (weighting * steps * steps).sum(-1)
        upper = (weighting * steps * blocks).sum(-1)
        attempt(to_half(np.divide(upper, power, out=np.zeros_like(upper), where=power > 0)))
    return best, error


@pytest.mark.parametrize("name", ["q2_0", "q4_0", "q5_0", "q8_0"])
@pytest.mark.parametrize("weighted", [False, True])
def test_the_search_finds_what_plain_arithmetic_finds(name, weighted):
    scheme = SCHEMES[name]
    random = np.random.default_rng(1)
    weights = random.standard_normal((37, 3 * scheme.block)).astype(np.float32)
    weights[5] = 0
    weights[6, :3] = 1e5
    importance = random.random(weights.shape[1]).astype(np.float32) if weighted else None
    blocks = weights.reshape(37, 3, scheme.block)
    weighting = np.ones_like(blocks) if importance is None else importance.reshape(3, scheme.block)[None]
    codes, scales = scale_search(weights, scheme, importance)
    _, error = plain(blocks, scheme, weighting)
    steps = codes.astype(np.float32) - scheme.zero_point
    own = (weighting * (blocks - steps * scales[..., None].astype(np.float32)).astype(np.float64) ** 2).sum(-1)
    # float32 sums may take the second of two candidates that are equal to seven digits.
    assert (own <= error * (1 + 1e-5) + 1e-12).all()
    assert np.array_equal(codes, (nearest_steps(blocks, scales, scheme) + scheme.zero_point).astype(np.uint8))
    low, high = scheme.code_range
    assert codes.min() >= low
    assert codes.max() <= high


def test_rows_are_independent():
    scheme = SCHEMES["q4_0"]
    weights = np.random.default_rng(2).standard_normal((50, 64)).astype(np.float32)
    codes, scales = scale_search(weights, scheme)
    for row in (0, 17, 49):
        alone_codes, alone_scales = scale_search(weights[row : row + 1].copy(), scheme)
        assert np.array_equal(alone_codes[0], codes[row])
        assert np.array_equal(alone_scales[0], scales[row])
