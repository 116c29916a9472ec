from __future__ import annotations

import importlib

import numpy as np
import pytest

from tieq.codecs import ggml
from tieq.codecs.schemes import SCHEMES, Scheme, dequantize
from tieq.solve import SOLVERS

# The package exports the function under the module's own name, so the module is fetched by import_module.
scale_search_module = importlib.import_module("tieq.solve.scale_search")

each_scheme = pytest.mark.parametrize("scheme", SCHEMES.values(), ids=list(SCHEMES))
# What ggml encodes too, for comparisons with it.
GGMLS = {name: scheme for name, scheme in SCHEMES.items() if name in ggml.GGML_TYPES}
SYMMETRIC = {name: scheme for name, scheme in SCHEMES.items() if not scheme.affine}
AFFINE = {name: scheme for name, scheme in SCHEMES.items() if scheme.affine}
each_solver = pytest.mark.parametrize("solver", SOLVERS.values(), ids=list(SOLVERS))


def normal(rows: int = 64, columns: int = 256, seed: int = 0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal((rows, columns)) * 0.02).astype(np.float32)


def uneven(columns: int = 256, seed: int = 1) -> np.ndarray:
    """Importance over four orders of magnitude, as second moments have."""
    return (10 ** np.random.default_rng(seed).uniform(-4, 0, columns)).astype(np.float32)


def block_errors(weights: np.ndarray, scheme: Scheme, found: tuple, importance: np.ndarray | None = None) -> np.ndarray:
    """Weighted squared error of each block in float64, ``[rows, blocks]``."""
    gap = np.square(dequantize(*found, scheme).astype(np.float64) - weights)
    gap = gap if importance is None else gap * importance
    return gap.reshape(found[0].shape).sum(axis=-1)


def slack(weights: np.ndarray, scheme: Scheme, importance: np.ndarray | None = None) -> np.ndarray:
    """How far the root of a block's error can be from the one the solver computes in float32.

    Each gap ``x - q s`` is formed with one rounding of ``q s`` and one of the difference, each below
    ``2**-24 * 2 max|x|``: ``2**-22 max|x|`` together, weighted and summed in quadrature over the block. The float32
    sum of squares itself is relative and far below the factor that the callers give.
    """
    blocks = np.abs(weights.reshape(weights.shape[0], -1, scheme.block)).max(axis=-1).astype(np.float64)
    weight = np.ones(weights.shape[1]) if importance is None else importance.astype(np.float64)
    return 2.0**-22 * blocks * np.sqrt(weight.reshape(-1, scheme.block).sum(axis=-1))


@pytest.mark.parametrize("weighted", [False, True], ids=["equal weights", "importance"])
@pytest.mark.parametrize(
    "scheme",
    [pytest.param(scheme, id=name) for name, scheme in SCHEMES.items()],
)
def test_scale_search_is_never_worse_than_nearest_in_any_block(scheme: Scheme, weighted: bool) -> None:
    weights = normal(rows=1000)
    importance = uneven() if weighted else None
    searched = block_errors(weights, scheme, SOLVERS["scale-search"](weights, scheme, importance), importance)
    nearest = block_errors(weights, scheme, SOLVERS["nearest"](weights, scheme), importance)
    # 2**-20: float32 sums of 64 terms, twice (2 * log2(64) roundings of 2**-24 are below it).
    assert (np.sqrt(searched) <= np.sqrt(nearest) * (1 + 2.0**-20) + 2 * slack(weights, scheme, importance)).all()


@pytest.mark.parametrize("weighted", [False, True], ids=["equal weights", "importance"])
@pytest.mark.parametrize("name", ["q4_0", "q4_1", "q5_0", "q2_0"])
def test_scale_search_lowers_the_error_of_the_whole_matrix(name: str, weighted: bool) -> None:
    weights, scheme = normal(), SCHEMES[name]
    importance = uneven() if weighted else None
    searched = block_errors(weights, scheme, SOLVERS["scale-search"](weights, scheme, importance), importance).sum()
    nearest = block_errors(weights, scheme, SOLVERS["nearest"](weights, scheme), importance).sum()
    # Gaussian blocks gain from 11% (q4_0) to 19% (q2_0); half of the former is far from chance.
    assert searched < 0.95 * nearest


@pytest.mark.parametrize("weighted", [False, True], ids=["equal weights", "importance"])
@pytest.mark.parametrize("scheme", SYMMETRIC.values(), ids=list(SYMMETRIC))
def test_the_scale_found_is_no_worse_than_any_candidate(scheme: Scheme, weighted: bool) -> None:
    weights = normal(rows=100)
    importance = uneven() if weighted else None
    reached = block_errors(weights, scheme, SOLVERS["scale-search"](weights, scheme, importance), importance)
    blocks = weights.reshape(len(weights), -1, scheme.block).astype(np.float64)
    extreme = np.take_along_axis(blocks, np.abs(blocks).argmax(-1)[..., None], -1)
    low, high = (end - scheme.zero_point for end in scheme.code_range)
    for end in (low, high):
        for landing in scale_search_module.LANDINGS[scheme.bits]:
            # In float32 and then fp16, as the solver rounds, so that the candidate is the same number.
            scale = (extreme.astype(np.float32) / np.float32(end * landing)).astype(np.float16).astype(np.float64)
            levels = np.clip(np.rint(blocks / scale), low, high)
            gap = np.square(levels * scale - blocks)
            gap = gap if importance is None else gap * importance.reshape(1, -1, scheme.block)
            candidate = np.sqrt(gap.sum(-1))
            # 2**-20 and the slack as above.
            assert (np.sqrt(reached) <= candidate * (1 + 2.0**-20) + 2 * slack(weights, scheme, importance)).all()


@pytest.mark.parametrize("weighted", [False, True], ids=["equal weights", "importance"])
@pytest.mark.parametrize("scheme", AFFINE.values(), ids=list(AFFINE))
def test_the_range_found_is_no_worse_than_any_candidate(scheme: Scheme, weighted: bool) -> None:
    weights = normal(rows=100)
    importance = uneven() if weighted else None
    reached = block_errors(weights, scheme, SOLVERS["scale-search"](weights, scheme, importance), importance)
    blocks = weights.reshape(len(weights), -1, scheme.block)
    high = np.float32(scheme.code_range[1])
    lowest, step = blocks.min(-1), (blocks.max(-1) - blocks.min(-1)) / high
    for below, above in scale_search_module.TRIMS:
        # In float32 and then fp16, as the solver rounds, so that the candidate is the same pair of numbers.
        scale = (step * np.float32(1 - (below + above) / high)).astype(np.float16).astype(np.float64)[..., None]
        minimum = (lowest + below * step).astype(np.float16).astype(np.float64)[..., None]
        levels = np.clip(np.rint((blocks - minimum) / scale), 0, high)
        gap = np.square(levels * scale + minimum - blocks)
        gap = gap if importance is None else gap * importance.reshape(1, -1, scheme.block)
        candidate = np.sqrt(gap.sum(-1))
        # As above; adding the minimum is one more rounding, of at most half of the slack.
        assert (np.sqrt(reached) <= candidate * (1 + 2.0**-20) + 3 * slack(weights, scheme, importance)).all()


def trained_like(seed: int, rows: int = 128, columns: int = 256) -> np.ndarray:
    """Rows and columns of uneven size and heavy tails, as in trained matrices."""
    random = np.random.default_rng(seed)
    sizes = np.exp(0.5 * random.standard_normal((rows, 1)) + 0.3 * random.standard_normal(columns))
    return (0.02 * random.standard_t(5, (rows, columns)) * sizes).astype(np.float32)


@pytest.mark.parametrize("make", [normal, trained_like])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("scheme", GGMLS.values(), ids=GGMLS)
def test_scale_search_is_never_worse_than_ggmls_own_encoder_with_the_same_importance(make, seed, scheme) -> None:
    weights, importance = make(seed=seed), uneven(seed=seed + 10)
    ours = block_errors(weights, scheme, SOLVERS["scale-search"](weights, scheme, importance), importance)
    theirs = ggml.decode(ggml.encode(weights, scheme.name, importance), scheme.name).astype(np.float64)
    # 2**-20 as above: where both round to nearest (q8_0), only the order of sums differs.
    assert ours.sum() <= (np.square(theirs - weights) * importance).sum() * (1 + 2.0**-20)


@pytest.mark.parametrize("scheme", GGMLS.values(), ids=GGMLS)
def test_nearest_is_never_worse_than_ggmls_own_encoder_in_any_block(scheme: Scheme) -> None:
    weights = normal(rows=500)
    theirs = np.square(ggml.decode(ggml.encode(weights, scheme.name), scheme.name).astype(np.float64) - weights)
    ours = block_errors(weights, scheme, SOLVERS["nearest"](weights, scheme))
    # The same scales; ggml picks codes with the scale before it was rounded to fp16, or without the last rounding.
    limit = np.sqrt(theirs.reshape(len(weights), -1, scheme.block).sum(-1))
    assert (np.sqrt(ours) <= limit * (1 + 2.0**-20) + 3 * slack(weights, scheme)).all()


@each_solver
@each_scheme
def test_weights_on_the_grid_that_reach_its_ends_are_recovered_exactly(scheme: Scheme, solver) -> None:
    random = np.random.default_rng(3)
    low, high = scheme.code_range
    codes = random.integers(low, high + 1, (300, 4, scheme.block)).astype(np.uint8)
    codes[..., 5] = low
    scales = (random.standard_normal((300, 4)) * 10.0 ** random.integers(-4, 3, (300, 4))).astype(np.float16)
    if scheme.affine:
        codes[..., 6] = high
        # Minima of a few steps, so that float32 holds the weights exactly: 5 + 11 + 5 bits.
        scales = np.stack([np.abs(scales), scales * random.integers(-32, 32, scales.shape)], axis=-1).astype(np.float16)
    weights = dequantize(codes, scales, scheme)
    assert np.array_equal(dequantize(*solver(weights, scheme), scheme), weights)


@pytest.mark.parametrize("name", ["q4_0", "q2_0"])
@pytest.mark.parametrize("weighted", [False, True], ids=["equal weights", "importance"])
def test_scale_search_recovers_weights_on_the_grid_whatever_part_of_it_they_use(name: str, weighted: bool) -> None:
    scheme, random = SCHEMES[name], np.random.default_rng(4)
    codes = random.integers(*scheme.code_range, (500, 4, scheme.block), endpoint=True).astype(np.uint8)
    weights = dequantize(codes, random.uniform(0.001, 0.1, (500, 4)).astype(np.float16), scheme)
    found = SOLVERS["scale-search"](weights, scheme, uneven(weights.shape[1]) if weighted else None)
    assert np.array_equal(dequantize(*found, scheme), weights)


@each_solver
@each_scheme
@pytest.mark.parametrize("weighted", [False, True], ids=["equal weights", "importance"])
def test_blocks_of_zeros_decode_to_zeros(scheme: Scheme, solver, weighted: bool) -> None:
    weights = normal(rows=4)
    weights[1], weights[2, : scheme.block] = 0, -0.0
    codes, scales = solver(weights, scheme, uneven() if weighted else None)
    assert (codes[1] == scheme.zero_point).all()
    assert (scales[1] == 0).all()
    decoded = dequantize(codes, scales, scheme)
    assert not decoded[1].any()
    assert not decoded[2, : scheme.block].any()
    assert decoded[2, scheme.block :].any()


@each_solver
@each_scheme
def test_one_huge_row_changes_no_other_row(scheme: Scheme, solver) -> None:
    weights = normal()
    plain = solver(weights, scheme, uneven())
    weights[17] *= 10_000
    codes, scales = solver(weights, scheme, uneven())
    others = np.arange(len(weights)) != 17
    assert np.array_equal(codes[others], plain[0][others])
    assert np.array_equal(scales[others], plain[1][others])
    assert not np.array_equal(scales[17], plain[1][17])


@each_solver
@each_scheme
@pytest.mark.parametrize("largest", [1e6, 1e12, 1e18])
def test_huge_weights_saturate_to_finite_scales(scheme: Scheme, solver, largest: float) -> None:
    weights = normal(rows=2, columns=128)
    weights[0] = largest
    weights[0, 3] = -largest
    codes, scales = solver(weights, scheme)
    assert np.isfinite(scales).all()
    assert np.isfinite(dequantize(codes, scales, scheme)).all()
    assert np.array_equal(scales[1:], solver(weights[1:], scheme)[1])


@each_scheme
@pytest.mark.parametrize("largest", [1e20, 3e38])
@pytest.mark.parametrize(
    "solver",
    [
        SOLVERS["nearest"],
        pytest.param(
            SOLVERS["scale-search"],
        ),
    ],
    ids=["nearest", "scale-search"],
)
def test_weights_whose_squares_overflow_saturate_too(scheme: Scheme, solver, largest: float) -> None:
    weights = np.full((1, 128), -largest, np.float32)
    decoded = dequantize(*solver(weights, scheme), scheme)
    # Exactly the largest magnitude that the scheme has, on the side of the weights; the minimum alone if it has one.
    reach = 1 if scheme.affine else scheme.zero_point - scheme.code_range[0]
    assert np.array_equal(decoded, np.full((1, 128), np.float32(-65504) * reach))


@each_solver
@each_scheme
def test_weights_below_the_smallest_scale_become_zero_without_a_warning(scheme: Scheme, solver) -> None:
    # Half of fp16's smallest subnormal times the smallest reach (1) is 2**-25; all of these are below.
    weights = (normal() * np.float32(2.0**-24)).astype(np.float32)
    assert np.abs(weights).max() < 2.0**-25
    codes, scales = solver(weights, scheme, uneven())
    assert np.isfinite(scales).all()
    assert np.abs(dequantize(codes, scales, scheme) - weights).max() < 2.0**-25


@each_solver
@each_scheme
def test_subnormal_scales_keep_the_error_within_half_a_step(scheme: Scheme, solver) -> None:
    # Levels times the smallest subnormal: as far down as the grid goes, and still exact.
    levels = np.arange(2 * scheme.block) % (scheme.code_range[1] - scheme.code_range[0] + 1)
    weights = ((levels + scheme.code_range[0] - scheme.zero_point) * 2.0**-24).astype(np.float32)[None]
    assert np.array_equal(dequantize(*solver(weights, scheme), scheme), weights)


@each_scheme
@pytest.mark.parametrize("threads", [1, 2, 7, None])
@pytest.mark.parametrize("piece", [1, 256 * 5, 1 << 30])
def test_results_depend_neither_on_threads_nor_on_the_piece_size(
    scheme: Scheme, threads: int | None, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights, importance = normal(rows=37), uneven()
    codes, scales = SOLVERS["scale-search"](weights, scheme, importance)
    monkeypatch.setattr("os.cpu_count", lambda: threads)
    monkeypatch.setattr(scale_search_module, "_PIECE_WEIGHTS", piece)
    again = SOLVERS["scale-search"](weights, scheme, importance)
    assert again[0].tobytes() == codes.tobytes()
    assert again[1].tobytes() == scales.tobytes()


@each_solver
@each_scheme
def test_inputs_are_not_modified_and_may_be_read_only_and_strided(scheme: Scheme, solver) -> None:
    weights, importance = normal().T.copy().T, uneven()  # column-major, as a transposed Conv1D is
    assert not weights.flags.c_contiguous
    kept = weights.copy()
    weights.flags.writeable = importance.flags.writeable = False
    found = solver(weights, scheme, importance)
    assert np.array_equal(weights, kept)
    assert np.array_equal(importance, uneven())
    plain = solver(np.ascontiguousarray(kept), scheme, importance)
    assert np.array_equal(found[0], plain[0])
    assert np.array_equal(found[1], plain[1])


@each_solver
@each_scheme
def test_codes_and_scales_have_the_documented_shapes_types_and_range(scheme: Scheme, solver) -> None:
    codes, scales = solver(normal(rows=3), scheme, uneven())
    assert (codes.shape, codes.dtype) == ((3, 256 // scheme.block, scheme.block), np.uint8)
    expected = (3, 256 // scheme.block, 2) if scheme.affine else (3, 256 // scheme.block)
    assert (scales.shape, scales.dtype) == (expected, np.float16)
    assert codes.min() >= scheme.code_range[0]
    assert codes.max() <= scheme.code_range[1]


@pytest.mark.parametrize("name", ["q4_0", "q2_0"])
def test_importance_lowers_the_error_of_the_columns_it_names(name: str) -> None:
    weights, scheme = normal(), SCHEMES[name]
    importance = np.ones(256, np.float32)
    importance[::4] = 100
    errors = [
        np.square(dequantize(*SOLVERS["scale-search"](weights, scheme, given), scheme) - weights)[:, ::4].sum()
        for given in (None, importance)
    ]
    # A quarter of the columns carries 97% of the weight; their error must fall clearly, not by chance.
    assert errors[1] < 0.95 * errors[0]


@pytest.mark.parametrize("name", SCHEMES)
def test_the_scale_of_all_importance_does_not_matter(name: str) -> None:
    # A power of two changes no rounding as long as nothing leaves the range of float32.
    scheme, importance = SCHEMES[name], uneven()
    plain = SOLVERS["scale-search"](normal(), scheme, importance)
    scaled = SOLVERS["scale-search"](normal(), scheme, importance * np.float32(2.0**20))
    assert plain[0].tobytes() == scaled[0].tobytes()
    assert plain[1].tobytes() == scaled[1].tobytes()


@each_solver
def test_columns_that_the_block_does_not_divide_are_refused(solver) -> None:
    with pytest.raises(ValueError, match="q2_0 needs columns divisible by 64, not 96"):
        solver(normal(rows=1, columns=96), SCHEMES["q2_0"])
