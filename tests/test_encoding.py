from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import tieq.encoding
from tieq.encoding import decode, encode, round_trip
from tieq.records import Decision

WEIGHTS = np.random.default_rng(0).standard_normal((80, 256)).astype(np.float32)
FACTOR = np.random.default_rng(1).standard_normal((256, 300)).astype(np.float32)
COST = FACTOR @ FACTOR.T / 300 + 0.1 * np.eye(256, dtype=np.float32)


def decision(scheme: str = "q4_0", solver: str = "hessian") -> Decision:
    return Decision("m", "m", "table", 80, 256, scheme, solver, 4.5, "recipe")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("TIEQ_NO_CACHE")
    monkeypatch.setenv("TIEQ_CACHE", str(tmp_path))
    return tmp_path / "solved"


@pytest.fixture
def no_solving(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> None:
        raise AssertionError("solved again")

    monkeypatch.setattr(tieq.encoding, "_solve", refuse)


CASES = [("q4_0", "hessian"), ("q4_1", "hessian"), ("q5_0", "scale-search"), ("q4_k", "hessian"), ("q6_k", "ggml"),
         ("f16", "cast"), ("q2_0", "nearest")]  # fmt: skip


@pytest.mark.parametrize(("scheme", "solver"), CASES)
def test_pieces_of_rows_give_what_the_whole_gives(scheme: str, solver: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = encode(decision(scheme, solver), WEIGHTS, COST)
    told: list[int] = []
    monkeypatch.setattr(tieq.encoding, "_PIECE_ROWS", 32)
    pieces = encode(decision(scheme, solver), WEIGHTS, COST, told.append)
    assert told == [32, 32, 16]
    assert whole.keys() == pieces.keys()
    assert all(np.array_equal(values, pieces[name]) for name, values in whole.items())
    assert np.array_equal(decode(decision(scheme, solver), whole), round_trip(decision(scheme, solver), WEIGHTS, COST))


@pytest.mark.parametrize("scheme", ["q4_0", "q4_1", "q4_k"])
def test_a_solution_is_found_again(scheme: str, cache: Path, request: pytest.FixtureRequest) -> None:
    first = encode(decision(scheme), WEIGHTS, COST)
    assert len(list(cache.glob("*.safetensors"))) == 1
    request.getfixturevalue("no_solving")
    told: list[int] = []
    again = encode(decision(scheme), WEIGHTS, COST, told.append)
    assert told == [80]
    assert {name: values.tobytes() for name, values in again.items()} == {n: v.tobytes() for n, v in first.items()}


def test_another_weight_cost_or_scheme_is_another_problem(cache: Path) -> None:
    encode(decision(), WEIGHTS, COST)
    encode(decision(), WEIGHTS + np.float32(0.01), COST)
    encode(decision(), WEIGHTS, COST + np.eye(256, dtype=np.float32))
    encode(decision("q5_0"), WEIGHTS, COST)
    encode(decision(), WEIGHTS, None)
    assert len(list(cache.glob("*.safetensors"))) == 5


def test_a_damaged_file_is_solved_again(cache: Path) -> None:
    first = encode(decision(), WEIGHTS, COST)
    (path,) = cache.glob("*.safetensors")
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    for wrong in (bytes(content), content[:40], b""):
        path.write_bytes(wrong)
        again = encode(decision(), WEIGHTS, COST)
        assert all(np.array_equal(values, again[name]) for name, values in first.items())


def test_quick_solvers_and_an_unwanted_cache_leave_no_file(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    encode(decision(solver="scale-search"), WEIGHTS, COST)
    monkeypatch.setenv("TIEQ_NO_CACHE", "1")
    encode(decision(), WEIGHTS, COST)
    assert not cache.exists()
