"""Row bands as numbers: how many rows and bytes, which rows, what they hold."""

from __future__ import annotations

import numpy as np
import pytest

from tieq.bands import Band, decide_bands, encode_bands, rank_rows
from tieq.calibrate import RowUse, Statistics, TableCost
from tieq.codecs.schemes import SCHEMES, dequantize, pack_codes, unpack_codes
from tieq.errors import RefusedError
from tieq.recipe import BandWish
from tieq.records import BandDecision, Decision
from tieq.solve import SOLVERS

ROWS, COLUMNS = 64, 128
TABLE = "model.embed_tokens.weight"


def weights(rows: int = ROWS) -> np.ndarray:
    return (np.random.default_rng(0).standard_normal((rows, COLUMNS)) * 0.05).astype(np.float32)


def statistics(lookups: np.ndarray | None = None) -> Statistics:
    used = np.full(ROWS, 1 / ROWS, np.float32) if lookups is None else lookups.astype(np.float32)
    identity = np.eye(COLUMNS, dtype=np.float32)
    return Statistics({}, 100, TableCost(identity, identity), RowUse(used, used, used))


def decision(*bands: BandDecision, solver: str = "scale-search") -> Decision:
    return Decision(TABLE, TABLE, "table", ROWS, COLUMNS, "q4_0", solver, 4.5, "recipe", bands=bands)


def decoded_base(values: np.ndarray) -> np.ndarray:
    return dequantize(*SOLVERS["scale-search"](values, SCHEMES["q4_0"]), SCHEMES["q4_0"])


def wishes(*shares: float, scheme: str = "q4_0") -> tuple[BandWish, ...]:
    return tuple(BandWish(share=share, scheme=scheme) for share in shares)


# Rows and bytes


def test_bands_take_their_shares_and_bytes() -> None:
    found = decide_bands((BandWish(share=0.02), BandWish(share=0.06, scheme="q2_0")), TABLE, 49_152, 576, "q4_0")
    assert [(band.scheme, band.rows) for band in found] == [("q4_0", 983), ("q2_0", 2949)]
    # 576 columns at 4.5 and 2.25 bits are 324 and 162 bytes, and 4 bytes are a row number.
    assert [band.nbytes for band in found] == [983 * (324 + 4), 2949 * (162 + 4)]
    # The zero row besides; 4 bytes a column of the logits; 2 bytes a row of the map.
    assert [band.onnx_bytes for band in found] == [984 * 328 + 2 * 49_152, 2950 * 166 + 2 * 49_152]


def test_a_map_into_more_rows_than_16_bits_count_takes_four_bytes() -> None:
    (small,) = decide_bands(wishes(65_535 / 262_144), TABLE, 262_144, 64, "q4_0")
    (large,) = decide_bands(wishes(0.25), TABLE, 262_144, 64, "q4_0")
    assert (small.rows, large.rows) == (65_535, 65_536)
    assert small.onnx_bytes == 65_536 * (36 + 4) + 2 * 262_144
    assert large.onnx_bytes == 65_537 * (36 + 4) + 4 * 262_144


def test_the_shares_of_a_whole_table_leave_no_row_out() -> None:
    found = decide_bands(wishes(*[0.1] * 10), TABLE, 333, 64, "q4_0")
    assert sum(band.rows for band in found) == 333
    (whole,) = decide_bands(wishes(1.0), TABLE, 320, 64, "q8_0")
    assert whole.rows == 320
    assert whole.onnx_bytes == 320 * (32 + 4 + 4) + 2 * 320  # no zero row


def test_no_wishes_are_no_bands_whatever_the_table() -> None:
    assert decide_bands((), TABLE, 320, 72, "f16") == ()


@pytest.mark.parametrize(
    ("bands", "columns", "base", "message"),
    [
        (
            wishes(0.001),
            64,
            "q4_0",
            r"a band of the share 0\.001 has no row in a table of 320\. Use a share of at least",
        ),
        (wishes(0.1, scheme="q2_0"), 96, "q4_0", "a q2_0 band needs columns divisible by 64, not 96"),
        (wishes(0.1), 64, "f16", "row bands refine a table in .*, not in f16"),
        (wishes(0.1), 256, "q4_k", "row bands refine a table in .*, not in q4_k"),
    ],
)
def test_bands_that_cannot_be_are_refused(bands: tuple[BandWish, ...], columns: int, base: str, message: str) -> None:
    with pytest.raises(RefusedError, match=f"^{TABLE}: {message}"):
        decide_bands(bands, TABLE, 320, columns, base)


# Which rows


def test_rows_are_ranked_by_use_and_error_and_ties_by_number() -> None:
    errors = np.ones((ROWS, COLUMNS), np.float32)
    assert rank_rows(errors, statistics()).tolist() == list(range(ROWS))
    used = np.full(ROWS, 1 / (2 * ROWS))
    used[[40, 7]] = 0.25
    assert rank_rows(errors, statistics(used)).tolist()[:4] == [7, 40, 0, 1]
    errors[20] *= 10  # a hundred times the cost, more than the 32 times of the frequent rows
    assert rank_rows(errors, statistics(used)).tolist()[:4] == [20, 7, 40, 0]


# What they hold


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("scheme", ["q2_0", "q4_0", "q8_0"])
def test_a_band_holds_the_solvers_residuals_of_the_most_costly_rows(scheme: str, solver: str) -> None:
    values = weights()
    used = np.full(ROWS, 1e-6)
    used[[5, 50, 33]] = [0.5, 0.3, 0.2]
    importance = np.linspace(1, 2, COLUMNS, dtype=np.float32)
    made = decision(BandDecision(0.02, scheme, 2, 0, 0), BandDecision(0.01, "q2_0", 1, 0, 0), solver=solver)
    base = decoded_base(values)
    found = encode_bands(made, values, base, statistics(used), importance)
    assert found[f"{TABLE}.band0.rows"].tolist() == [5, 50]
    assert found[f"{TABLE}.band1.rows"].tolist() == [33]
    assert found[f"{TABLE}.band0.rows"].dtype == np.int32
    codes, scales = SOLVERS[solver](values[[5, 50]] - base[[5, 50]], SCHEMES[scheme], importance)
    assert np.array_equal(unpack_codes(found[f"{TABLE}.band0.codes"], SCHEMES[scheme].bits), codes)
    assert np.array_equal(found[f"{TABLE}.band0.scales"], scales)
    band = Band(scheme, *(found[f"{TABLE}.band0.{key}"] for key in ("rows", "codes", "scales")))
    before, after = values - base, values - base
    after[band.rows] -= band.decode()
    assert (np.square(after[[5, 50]]).sum(axis=1) < np.square(before[[5, 50]]).sum(axis=1)).all()
    untouched = np.setdiff1d(np.arange(ROWS), band.rows)
    assert np.array_equal(after[untouched], before[untouched])


@pytest.mark.parametrize("measured", [None, Statistics({}, 100)])
def test_bands_without_a_full_measurement_are_refused(measured: Statistics | None) -> None:
    values = weights()
    with pytest.raises(RefusedError, match="cost and use, which were not measured"):
        encode_bands(decision(BandDecision(0.1, "q4_0", 6, 0, 0)), values, decoded_base(values), measured, None)


@pytest.mark.parametrize("scheme", ["q2_0", "q4_0", "q8_0"])
@pytest.mark.parametrize("rows", [[0], [3, 9, 63], list(range(ROWS))])
def test_looking_up_through_the_map_and_scattering_to_the_columns_give_the_band(scheme: str, rows: list[int]) -> None:
    geometry = SCHEMES[scheme]
    numbers = np.array(rows, np.int32)
    codes, scales = SOLVERS["nearest"](weights(len(rows)), geometry)
    band = Band(scheme, numbers, pack_codes(codes, geometry.bits), scales)
    expected = np.zeros((ROWS, COLUMNS), np.float32)
    expected[numbers] = dequantize(codes, scales, geometry)
    packed, wide, columns = band.padded(ROWS)
    assert len(packed) == len(wide) == len(columns) == len(rows) + (len(rows) < ROWS)
    centred = unpack_codes(packed, geometry.bits).astype(np.float32) - geometry.zero_point
    padded = (centred * wide[..., None]).reshape(len(packed), -1)
    assert np.array_equal(padded[band.row_map(ROWS)], expected)
    scattered = np.zeros_like(expected)
    np.add.at(scattered, columns, padded)
    assert np.array_equal(scattered, expected)


def test_the_map_is_as_narrow_as_its_band_allows() -> None:
    def made(count: int, total: int) -> np.ndarray:
        empty = np.zeros((count, 1, 16), np.uint8), np.zeros((count, 1), np.float16)
        return Band("q4_0", np.arange(count, dtype=np.int32), *empty).row_map(total)

    assert made(65_535, 65_600).dtype == np.uint16
    assert made(65_535, 65_600)[-1] == 65_535
    assert made(65_536, 65_600).dtype == np.int32
    assert made(65_536, 65_600)[-1] == 65_536


def test_a_decision_counts_its_bands() -> None:
    made = decision(BandDecision(0.5, "q4_0", 32, 32 * (72 + 4), 0))
    assert made.total_bits_per_weight == 4.5 + 32 * 76 * 8 / (ROWS * COLUMNS)
    assert decision().total_bits_per_weight == 4.5
