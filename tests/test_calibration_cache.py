"""Calibrations that are kept: equal when they come back, used for their own model and text only, bounded."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny

from tieq.calibrate import Calibration, CalibrationCache, Request, Statistics, calibrate, measure, usable_cache
from tieq.calibrate import cache as cache_module
from tieq.errors import TieqError
from tieq.source.reference import ReferenceModel
from tieq.text import Sequences

IDS = np.random.default_rng(0).integers(0, tiny.ROWS, (4, 24))
TEXT = Sequences(IDS, ("prose", "prose", "prose", "code"), False)
MODEL = {"fingerprint": "abc", "tied": True, "table": "model.embed_tokens.weight"}


@pytest.fixture(scope="module")
def model() -> ReferenceModel:
    return ReferenceModel(tiny.model("llama"))


@pytest.fixture
def cache(tmp_path: Path) -> CalibrationCache:
    return CalibrationCache(tmp_path / "kept")


def wanted(text: Sequences = TEXT, samples: int = 2) -> Request:
    allowed = np.ones(tiny.ROWS, dtype=bool)
    allowed[:2] = False
    return Request(text, np.arange(5, 5 + samples), allowed)


def never() -> ReferenceModel:
    raise AssertionError("the model was loaded")


def same(first: Statistics, second: Statistics) -> bool:
    one, two = first.tensors(whole=True), second.tensors(whole=True)
    return (
        one.keys() == two.keys()
        and first.tokens == second.tokens
        and all(one[name].dtype == two[name].dtype and np.array_equal(one[name], two[name]) for name in one)
    )


@pytest.mark.parametrize("full", [False, True])
def test_a_file_gives_back_what_was_saved(full: bool, model: ReferenceModel, tmp_path: Path) -> None:
    made = measure(model, TEXT, full=full)
    made.save(tmp_path / "file", {"model": "m"}, whole=True)
    found, about = Statistics.load(tmp_path / "file")
    assert same(found, made)
    assert about == {"model": "m"}
    assert (found.table is None, found.rows is None, found.sample is None) == (not full,) * 3


def test_the_artifacts_file_is_small_and_can_be_read_too(model: ReferenceModel, tmp_path: Path) -> None:
    made = measure(model, TEXT, full=True)
    made.save(tmp_path / "small", {})
    made.save(tmp_path / "whole", {}, whole=True)
    assert (tmp_path / "small").stat().st_size < (tmp_path / "whole").stat().st_size
    found, _ = Statistics.load(tmp_path / "small")
    assert found.sample is None
    assert found.gradients == {}
    assert found.table is not None
    for name, value in made.second_moments.items():
        assert np.array_equal(found.second_moments[name], value)


@pytest.mark.parametrize("full", [False, True])
def test_a_second_calibration_loads_no_model_and_is_equal(
    full: bool, model: ReferenceModel, cache: CalibrationCache, capsys: pytest.CaptureFixture
) -> None:
    first = calibrate(wanted(), lambda: model, full=full, model=MODEL, cache=cache)
    assert "reused" not in capsys.readouterr().err
    second = calibrate(wanted(), never, full=full, model=MODEL, cache=cache)
    assert "calibration: reused from 20" in capsys.readouterr().err
    alone = calibrate(wanted(), lambda: model, full=full, model=MODEL)
    for other in (second, alone):
        assert same(first.statistics, other.statistics)
        assert np.array_equal(first.sequences.ids, other.sequences.ids)
        assert (first.sequences.domains, first.notes) == (other.sequences.domains, other.notes)
    assert first.sequences.domains[-2:] == ("samples", "samples")


def changed_identity(name: str) -> dict[str, Any]:
    other = dataclasses.replace(TEXT, ids=(IDS + 1) % tiny.ROWS)
    calls: dict[str, dict[str, Any]] = {
        "text": {"wanted": wanted(other)},
        "domains": {"wanted": wanted(dataclasses.replace(TEXT, domains=("prose", "prose", "code", "code")))},
        "samples": {"wanted": wanted(samples=3)},
        "allowed": {"wanted": dataclasses.replace(wanted(), allowed=np.ones(tiny.ROWS, dtype=bool))},
        "model": {"model": {**MODEL, "fingerprint": "abd"}},
        "tie": {"model": {**MODEL, "tied": False}},
        "kind": {"full": True},
    }
    return {"wanted": wanted(), "model": MODEL, "full": False, **calls[name]}


@pytest.mark.parametrize("name", ["text", "domains", "samples", "allowed", "model", "tie", "kind"])
def test_another_text_model_or_kind_is_measured_again(
    name: str, model: ReferenceModel, cache: CalibrationCache
) -> None:
    calibrate(wanted(), lambda: model, full=False, model=MODEL, cache=cache)
    settings = changed_identity(name)
    with pytest.raises(AssertionError, match="the model was loaded"):
        calibrate(settings["wanted"], never, full=settings["full"], model=settings["model"], cache=cache)


def test_another_version_of_a_library_is_measured_again(
    model: ReferenceModel, cache: CalibrationCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    calibrate(wanted(), lambda: model, full=False, model=MODEL, cache=cache)
    monkeypatch.setattr("tieq.calibrate.run.version", lambda name: "99")
    with pytest.raises(AssertionError, match="the model was loaded"):
        calibrate(wanted(), never, full=False, model=MODEL, cache=cache)


def damage(path: Path, how: str) -> None:
    content = bytearray(path.read_bytes())
    if how == "one bit":
        content[-3] ^= 1
    elif how == "truncated":
        del content[len(content) // 2 :]
    elif how == "empty":
        content.clear()
    elif how == "foreign":
        content[:] = b"not a calibration file at all"
    path.write_bytes(content)


@pytest.mark.parametrize("how", ["one bit", "truncated", "empty", "foreign"])
def test_a_damaged_file_is_said_and_rewritten(
    how: str, model: ReferenceModel, cache: CalibrationCache, capsys: pytest.CaptureFixture
) -> None:
    first = calibrate(wanted(), lambda: model, full=True, model=MODEL, cache=cache)
    (path,) = cache.folder.iterdir()
    damage(path, how)
    again = calibrate(wanted(), lambda: model, full=True, model=MODEL, cache=cache)
    assert "a kept file is not used" in capsys.readouterr().err
    assert same(again.statistics, first.statistics)
    assert same(calibrate(wanted(), never, full=True, model=MODEL, cache=cache).statistics, first.statistics)


def test_a_file_of_another_identity_under_this_name_is_not_trusted(
    model: ReferenceModel, cache: CalibrationCache, capsys: pytest.CaptureFixture
) -> None:
    calibrate(wanted(), lambda: model, full=False, model=MODEL, cache=cache)
    (path,) = cache.folder.iterdir()
    content = path.read_bytes()
    path.unlink()
    other = {**MODEL, "fingerprint": "abd"}
    calibrate(wanted(), lambda: model, full=False, model=other, cache=cache)
    (theirs,) = cache.folder.iterdir()
    theirs.write_bytes(content)
    with pytest.raises(AssertionError, match="the model was loaded"):
        calibrate(wanted(), never, full=False, model=other, cache=cache)
    assert "belongs to another model or text" in capsys.readouterr().err


def test_a_measurement_beyond_the_limit_is_not_kept(
    model: ReferenceModel, cache: CalibrationCache, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(cache_module, "LARGEST_FILE", 1000)
    calibrate(wanted(), lambda: model, full=False, model=MODEL, cache=cache)
    assert "not kept for reuse" in capsys.readouterr().err
    assert not cache.folder.exists()


def test_the_file_that_was_not_used_for_longest_goes_first(
    model: ReferenceModel, cache: CalibrationCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(fingerprint: str) -> Calibration:
        return calibrate(wanted(), lambda: model, full=False, model={**MODEL, "fingerprint": fingerprint}, cache=cache)

    paths = []
    for age, fingerprint in ((300, "a"), (200, "b")):
        before = set(cache.folder.glob("*"))
        run(fingerprint)
        (path,) = set(cache.folder.glob("*")) - before
        os.utime(path, (path.stat().st_mtime - age,) * 2)
        paths.append(path)
    run("a")  # used now, so that b is the oldest
    monkeypatch.setattr(cache_module, "LARGEST_FOLDER", 2 * paths[0].stat().st_size + 1)
    run("c")
    assert paths[0].exists()
    assert not paths[1].exists()
    assert len(list(cache.folder.iterdir())) == 2


def test_a_folder_that_cannot_be_written_costs_the_reuse_only(
    model: ReferenceModel, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    calibrate(wanted(), lambda: model, full=False, model=MODEL, cache=CalibrationCache(tmp_path / "file" / "kept"))
    assert "not kept for reuse" in capsys.readouterr().err


def test_the_environment_and_the_option_turn_it_off(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TIEQ_CACHE", str(tmp_path))
    assert usable_cache() is None
    monkeypatch.delenv("TIEQ_NO_CACHE")
    found = usable_cache()
    assert found is not None
    assert found.folder == tmp_path / "calibration"
    assert usable_cache(wanted=False) is None


@pytest.mark.parametrize("content", [b"", b"x" * 100])
def test_no_calibration_file_is_a_refusal(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(TieqError, match="is no calibration file"):
        Statistics.load(tmp_path / "file")


def test_an_export_with_kept_statistics_has_the_same_bytes(
    tiny_checkpoint: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    from test_determinism import digests

    from tieq.pipeline import export
    from tieq.recipe import Sampling

    monkeypatch.delenv("TIEQ_NO_CACHE")
    monkeypatch.setenv("TIEQ_CACHE", str(tmp_path / "cache"))
    chosen = tiny.recipe(effort="best", calibration=Sampling(sequences=3, length=32))
    made = []
    for name, cache in (("first", True), ("reused", True), ("without", False)):
        capsys.readouterr()
        made.append(digests(export(str(tiny_checkpoint()), chosen, tmp_path / name, ("gguf",), cache=cache).folder))
        assert ("calibration: reused" in capsys.readouterr().err) == (name == "reused")
    assert made[0] == made[1] == made[2]
