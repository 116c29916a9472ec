from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file

from tieq.calibrate import RowUse, Statistics, TableCost, usable_importance
from tieq.codecs import ggml
from tieq.codecs.k_quants import LAYOUTS
from tieq.codecs.schemes import SCHEMES, dequantize, ggml_kind, pack_codes
from tieq.errors import RefusedError, TieqError
from tieq.plan import Plan
from tieq.quantize import QuantizedCheckpoint, quantize
from tieq.records import BandDecision, Decision
from tieq.solve import SOLVERS
from tieq.source.checkpoint import CheckpointSource

ROWS, COLUMNS = 12, 256
TABLE, BODY, CONV, NORM = "model.embed_tokens.weight", "model.up.weight", "model.conv.weight", "model.norm.weight"
HEAD = "lm_head.weight"


def weights(seed: int = 0, rows: int = ROWS) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal((rows, COLUMNS)) * 0.05).astype(np.float32)


def decision(name: str, scheme: str, role: str = "body", **changes: Any) -> Decision:
    values = {"solver": "scale-search", "rows": ROWS, "columns": COLUMNS, "reason": "recipe", "bits_per_weight": 0.0}
    return Decision(name=name, stored=name, role=role, scheme=scheme, **{**values, **changes})


@pytest.fixture
def source(tmp_path: Path) -> Callable[[dict[str, np.ndarray]], CheckpointSource]:
    """A checkpoint with these tensors."""

    def make(tensors: dict[str, np.ndarray]) -> CheckpointSource:
        folder = tmp_path / "checkpoint"
        folder.mkdir()
        (folder / "config.json").write_text('{"model_type": "llama"}')
        save_file(
            {name: np.ascontiguousarray(values) for name, values in tensors.items()}, folder / "model.safetensors"
        )
        return CheckpointSource(folder)

    return make


Maker = Callable[..., QuantizedCheckpoint]


@pytest.fixture
def quantized(source: Callable[..., CheckpointSource], tmp_path: Path) -> Maker:
    """Quantize tensors by these decisions and open the result."""

    def make(
        tensors: dict[str, np.ndarray],
        decisions: list[Decision],
        floats: list[str] | None = None,
        statistics: Statistics | None = None,
    ) -> QuantizedCheckpoint:
        path = tmp_path / "quantized.safetensors"
        plan = Plan(tuple(decisions), ("gguf",), "test")
        quantize(source(tensors), plan, floats or [], path, statistics, HEAD)
        return QuantizedCheckpoint(path)

    return make


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_an_integer_scheme_holds_the_solvers_codes_and_decodes_to_them(
    scheme: str, solver: str, quantized: Maker
) -> None:
    found = quantized({TABLE: weights()}, [decision(TABLE, scheme, "table", solver=solver)])
    codes, scales = SOLVERS[solver](weights(), SCHEMES[scheme])
    assert np.array_equal(found.codes(TABLE)[0], codes)
    assert np.array_equal(found.codes(TABLE)[1], scales)
    packed, stored_scales = found.packed(TABLE)
    assert np.array_equal(packed, pack_codes(codes, SCHEMES[scheme].bits))
    bits = 8 if SCHEMES[scheme].bits == 5 else SCHEMES[scheme].bits  # five bits are kept one code a byte
    assert packed.shape == (ROWS, COLUMNS // SCHEMES[scheme].block, SCHEMES[scheme].block * bits // 8)
    assert stored_scales.dtype == np.float16
    decoded = found.decode(TABLE)
    assert np.array_equal(decoded.view(np.uint32), dequantize(codes, scales, SCHEMES[scheme]).view(np.uint32))
    # The same codes as GGUF bytes decode to the same values (a zero may have the other sign).
    assert np.array_equal(ggml.decode(found.ggml_rows(TABLE), ggml_kind(scheme)), decoded)
    assert (found.matrices, found.scheme(TABLE), found.floats) == ([TABLE], scheme, [])


@pytest.mark.parametrize(
    "scheme", ["q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "iq4_nl", "iq4_xs", "mxfp4", "bf16", "q1_0"]
)
def test_other_ggml_types_hold_the_librarys_bytes(scheme: str, quantized: Maker) -> None:
    found = quantized({BODY: weights()}, [decision(BODY, scheme, solver="ggml")])
    expected = ggml.encode(weights(), scheme)
    assert np.array_equal(found.ggml_rows(BODY), expected)
    assert np.array_equal(found.decode(BODY), ggml.decode(expected, scheme))
    assert found.ggml_rows(BODY).nbytes * 8 / weights().size == ggml.bits_per_weight(scheme)


@pytest.mark.parametrize("scheme", LAYOUTS)
def test_the_full_solver_keeps_ggmls_scales_and_finds_cheaper_codes(scheme: str, quantized: Maker) -> None:
    random = np.random.default_rng(3)
    inputs = random.standard_normal((1024, COLUMNS)) @ random.standard_normal((COLUMNS, COLUMNS))
    moment = (inputs.T @ inputs / 1024).astype(np.float32)
    statistics = Statistics({BODY: moment}, tokens=1024)
    found = quantized({BODY: weights()}, [decision(BODY, scheme, solver="hessian")], statistics=statistics)
    cost = statistics.importance(BODY, "body", HEAD)
    assert cost is not None
    rows = ggml.encode(weights(), scheme, np.ascontiguousarray(cost.diagonal()))
    assert all(map(np.array_equal, LAYOUTS[scheme].scales(found.ggml_rows(BODY)), LAYOUTS[scheme].scales(rows)))
    errors = [weights().astype(np.float64) - decoded for decoded in (found.decode(BODY), ggml.decode(rows, scheme))]
    ours, theirs = (np.einsum("ri,ij,rj->", error, cost, error) for error in errors)
    assert ours < 0.9 * theirs


def test_f16_is_a_cast_that_saturates(quantized: Maker) -> None:
    values = weights()
    values[0, :6] = [65504, 65519, 65520, 1e30, -1e30, -65536]
    values[1, :3] = [2.0**-24, 2.0**-25, -0.0]
    found = quantized({BODY: values}, [decision(BODY, "f16", solver="cast")])
    decoded = found.decode(BODY)
    assert decoded[0, :6].tolist() == [65504, 65504, 65504, 65504, -65504, -65504]
    assert decoded[1, :2].tolist() == [2.0**-24, 0.0]
    assert np.array_equal(decoded[2:], values[2:].astype(np.float16).astype(np.float32))
    assert found.tensor(BODY).dtype == np.float16
    assert np.array_equal(found.ggml_rows(BODY).view(np.float16), found.tensor(BODY))


def test_a_matrix_of_another_width_in_f16_is_kept_too(quantized: Maker) -> None:
    values = weights()[:, :72]
    found = quantized({BODY: values}, [decision(BODY, "f16", columns=72)])
    assert np.array_equal(found.decode(BODY), values.astype(np.float16).astype(np.float32))


def test_floats_are_kept_in_full_under_their_own_names(quantized: Maker) -> None:
    norm = np.array([1e-30, 3.4e38, -0.0, np.pi], np.float32)
    found = quantized({TABLE: weights(), NORM: norm}, [decision(TABLE, "q4_0", "table")], [NORM])
    assert found.floats == [NORM]
    assert found.tensor(NORM).dtype == np.float32
    assert np.array_equal(found.tensor(NORM).view(np.uint32), norm.view(np.uint32))


def test_a_transposed_matrix_is_quantized_along_its_inputs(quantized: Maker) -> None:
    found = quantized({CONV: weights().T}, [decision(CONV, "q4_0", transposed=True)])
    assert np.array_equal(
        found.decode(CONV), dequantize(*SOLVERS["scale-search"](weights(), SCHEMES["q4_0"]), SCHEMES["q4_0"])
    )


def test_a_table_that_is_stored_under_another_name_is_written_under_its_own(quantized: Maker) -> None:
    plan = [Decision(TABLE, HEAD, "table", ROWS, COLUMNS, "q8_0", "nearest", 8.5, "recipe")]
    found = quantized({HEAD: weights()}, plan)
    assert found.matrices == [TABLE]
    # 127 steps reach the largest weight, so no weight is further off than half a step and fp16's 2**-11 of itself.
    limit = np.abs(weights()).max() / 127 / 2 + np.abs(weights()).max() * 2.0**-11
    assert np.abs(found.decode(TABLE) - weights()).max() <= limit


@pytest.mark.parametrize("scheme", ["q4_0", "q8_0", "f16", "q4_k"])
def test_rows_with_nan_or_infinity_are_listed_and_nothing_is_written(
    scheme: str, quantized: Maker, tmp_path: Path
) -> None:
    values = weights()
    values[0, 3], values[5, 0], values[11, 255] = np.nan, np.inf, -np.inf
    with pytest.raises(RefusedError, match=rf"^{TABLE}: 3 rows hold NaN or infinity: 0, 5, 11\. Repair the checkpoint"):
        quantized({TABLE: values}, [decision(TABLE, scheme, "table")])
    assert not (tmp_path / "quantized.safetensors").exists()


def test_many_bad_rows_are_counted_and_the_first_eight_listed(quantized: Maker) -> None:
    values = weights(rows=40)
    values[3:] = np.nan
    with pytest.raises(RefusedError, match=r"37 rows hold NaN or infinity: 3, 4, 5, 6, 7, 8, 9, 10 \.\.\.\."):
        quantized({TABLE: values}, [decision(TABLE, "q4_0", "table", rows=40)])


def test_a_float_tensor_with_nan_is_refused_too(quantized: Maker) -> None:
    norm = np.array([1.0, np.nan], np.float32)
    with pytest.raises(RefusedError, match=NORM):
        quantized({TABLE: weights(), NORM: norm}, [decision(TABLE, "q4_0", "table")], [NORM])


# Importance


def moments(seed: int) -> np.ndarray:
    return (10 ** np.random.default_rng(seed).uniform(-4, 0, COLUMNS)).astype(np.float32)


STATISTICS = Statistics({HEAD: moments(1), BODY: moments(2)}, tokens=100)


@pytest.mark.parametrize(
    ("name", "role", "statistic"),
    [(TABLE, "table", HEAD), (HEAD, "logits", HEAD), (BODY, "body", BODY), (TABLE, "lookup", None)],
)
@pytest.mark.parametrize("scheme", ["q4_0", "q4_k"])
def test_each_role_is_weighted_by_its_own_statistic(
    name: str, role: str, statistic: str | None, scheme: str, quantized: Maker
) -> None:
    found = quantized({name: weights()}, [decision(name, scheme, role)], statistics=STATISTICS)

    def expected(key: str | None) -> bytes:
        importance = None if key is None else usable_importance(STATISTICS.second_moments[key])
        if scheme == "q4_k":
            return ggml.encode(weights(), scheme, importance).tobytes()
        return SCHEMES[scheme].pack_gguf(*SOLVERS["scale-search"](weights(), SCHEMES[scheme], importance)).tobytes()

    assert found.ggml_rows(name).tobytes() == expected(statistic)
    # The three weightings give three results, so that the right one is not met by chance.
    assert len({expected(HEAD), expected(BODY), expected(None)}) == 3


def test_a_scheme_that_needs_importance_is_refused_without_statistics(quantized: Maker) -> None:
    with pytest.raises(TieqError, match="iq2_xxs needs importance weights"):
        quantized({BODY: weights()}, [decision(BODY, "iq2_xxs", solver="ggml")])


# The file


def test_the_bytes_are_the_same_each_time_and_for_any_number_of_threads(
    source: Callable[..., CheckpointSource], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = {TABLE: weights(), BODY: weights(1), NORM: weights(2)[0]}
    plan = Plan((decision(TABLE, "q4_0", "table"), decision(BODY, "q2_0")), ("gguf",), "test")
    opened = source(tensors)
    contents = set()
    for threads in (1, 2, 5):
        monkeypatch.setattr("os.cpu_count", lambda threads=threads: threads)
        path = tmp_path / f"{threads}.safetensors"
        quantize(opened, plan, [NORM], path, STATISTICS, HEAD)
        contents.add(path.read_bytes())
    assert len(contents) == 1


def test_the_header_says_the_scheme_and_the_shape_of_each(quantized: Maker, tmp_path: Path) -> None:
    quantized({TABLE: weights(), BODY: weights(1)}, [decision(TABLE, "q4_0", "table"), decision(BODY, "q6_k")])
    with safe_open(str(tmp_path / "quantized.safetensors"), framework="numpy") as file:
        header = json.loads(file.metadata()["tieq"])
        assert sorted(file.keys()) == [f"{TABLE}.codes", f"{TABLE}.scales", f"{BODY}.ggml"]
    assert header == {
        "version": 1,
        "tensors": {
            TABLE: {"scheme": "q4_0", "rows": ROWS, "columns": COLUMNS},
            BODY: {"scheme": "q6_k", "rows": ROWS, "columns": COLUMNS},
        },
    }


def write(path: Path, header: str | None) -> Path:
    metadata = None if header is None else {"tieq": header}
    save_file({"x": np.ones(2, np.float32)}, path, metadata=metadata)
    return path


@pytest.mark.parametrize("header", [None, "", "{"])
def test_another_safetensors_file_is_no_quantized_checkpoint(header: str | None, tmp_path: Path) -> None:
    path = write(tmp_path / "a.safetensors", header)
    with pytest.raises(TieqError, match=r"a\.safetensors: is no quantized checkpoint"):
        QuantizedCheckpoint(path)


@pytest.mark.parametrize("header", ["{}", "[]", "5", "null", '{"version": 1}', '{"version": 1, "tensors": []}'])
def test_a_header_without_its_keys_is_no_quantized_checkpoint(header: str, tmp_path: Path) -> None:
    with pytest.raises(TieqError, match="is no quantized checkpoint"):
        QuantizedCheckpoint(write(tmp_path / "a.safetensors", header))


def test_another_version_is_refused_with_both(tmp_path: Path) -> None:
    with pytest.raises(TieqError, match="has format version 2, this tieq reads 1"):
        QuantizedCheckpoint(write(tmp_path / "a.safetensors", '{"version": 2, "tensors": {}}'))


@pytest.mark.parametrize("content", [b"", b"x" * 7, b"\xff" * 100, (2**63 - 1).to_bytes(8, "little") + b"{}"])
def test_a_damaged_file_is_no_quantized_checkpoint(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "a.safetensors").write_bytes(content)
    with pytest.raises(TieqError, match="is no quantized checkpoint"):
        QuantizedCheckpoint(tmp_path / "a.safetensors")


def test_a_missing_file_is_no_quantized_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(TieqError, match="is no quantized checkpoint"):
        QuantizedCheckpoint(tmp_path / "missing.safetensors")


def test_a_truncated_checkpoint_is_refused(quantized: Maker, tmp_path: Path) -> None:
    quantized({TABLE: weights()}, [decision(TABLE, "q4_0", "table")])
    content = (tmp_path / "quantized.safetensors").read_bytes()
    for length in (len(content) - 1, len(content) // 2, 100, 8):
        (tmp_path / "cut.safetensors").write_bytes(content[:length])
        with pytest.raises(TieqError, match="is no quantized checkpoint"):
            QuantizedCheckpoint(tmp_path / "cut.safetensors")


# Row bands


def full_statistics() -> Statistics:
    used = np.linspace(1, 2, ROWS, dtype=np.float32) / ROWS
    identity = np.eye(COLUMNS, dtype=np.float32)
    return Statistics({HEAD: moments(1)}, 100, TableCost(identity, identity), RowUse(used, used, used))


def test_bands_stand_beside_their_table_and_leave_it_as_it_is(quantized: Maker, tmp_path: Path) -> None:
    bands = (BandDecision(0.25, "q4_0", 3, 0, 0), BandDecision(0.2, "q2_0", 2, 0, 0))
    tensors = {TABLE: weights(), NORM: weights(2)[0]}
    found = quantized(tensors, [decision(TABLE, "q4_0", "table", bands=bands)], [NORM], full_statistics())
    importance = full_statistics().importance(TABLE, "table", HEAD)
    codes, _ = SOLVERS["scale-search"](weights(), SCHEMES["q4_0"], importance)
    assert np.array_equal(found.codes(TABLE)[0], codes)
    assert (found.matrices, found.floats) == ([TABLE], [NORM])
    first, second = found.bands(TABLE)
    assert (first.scheme, len(first.rows), second.scheme, len(second.rows)) == ("q4_0", 3, "q2_0", 2)
    assert (first.rows.dtype, first.scales.dtype) == (np.int32, np.float16)
    assert (np.diff(first.rows) > 0).all()
    assert not set(first.rows) & set(second.rows)
    expected = found.decode(TABLE)
    expected[first.rows] += first.decode()
    expected[second.rows] += second.decode()
    assert np.array_equal(found.refined(TABLE), expected)
    assert np.array_equal(ggml.decode(found.ggml_rows(TABLE), "q4_0"), found.decode(TABLE))
    with safe_open(str(tmp_path / "quantized.safetensors"), framework="numpy") as file:
        header = json.loads(file.metadata()["tieq"])["tensors"][TABLE]
    assert header["bands"] == [{"scheme": "q4_0", "rows": 3}, {"scheme": "q2_0", "rows": 2}]


def test_a_matrix_without_bands_has_none(quantized: Maker) -> None:
    found = quantized({TABLE: weights()}, [decision(TABLE, "q4_0", "table")])
    assert found.bands(TABLE) == ()
    assert np.array_equal(found.refined(TABLE), found.decode(TABLE))
