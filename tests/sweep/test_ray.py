"""Cells on Ray: two local workers, one of which is killed; and what a worker does by itself."""

from __future__ import annotations

import dataclasses
import os
import signal
import threading
from pathlib import Path

import pytest
from sweep.helpers import STUB, WATCHING_STUB, is_gone, wait_for

from tieq.errors import TieqError
from tieq.runtimes.base import Availability
from tieq.runtimes.llama_cpp import LlamaCpp
from tieq.sweep.matrix import Wishes, make_cells
from tieq.sweep.ray_engine import RayEngine, processors_each
from tieq.sweep.ray_worker import Order, look_around, unpack, work
from tieq.sweep.run import exit_code, sweep


def test_a_killed_worker_s_cell_is_run_again(matrix):
    pytest.importorskip("ray")
    recipes = [matrix.recipe("a", "hangs once in gpt2-a"), matrix.recipe("b"), matrix.recipe("c", "fails in gpt2-c")]
    killed: list[int] = []

    def kill() -> None:
        process, _ = matrix.pids("gpt2-a")
        killed.extend(matrix.pids("gpt2-a"))
        worker = int((matrix.out / "cells" / "gpt2-a" / "ran.txt").read_text().split()[1])
        assert Path(f"/proc/{worker}/cmdline").read_bytes().startswith(b"ray::work"), process
        os.kill(worker, signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    found = sweep(matrix.models, recipes, matrix.out, engine=RayEngine(workers=2, command=WATCHING_STUB))
    killer.join(timeout=1)
    assert exit_code(found) == 2
    attempts = {cell["name"]: (cell["state"], cell["attempts"]) for cell in found["cells"]}
    assert attempts.pop("gpt2-a") == ("done", 2)
    assert attempts.pop("gpt2-c") == ("failed", 1)
    assert attempts == {f"{name}-{recipe}": ("done", 1) for name in ("smollm2-135m",) for recipe in "abc"} | {
        "gpt2-b": ("done", 1)
    }
    # The worker is dead, so is what it watched over, and Ray is gone.
    for pid in killed:
        wait_for(lambda pid=pid: is_gone(pid))
    import ray

    assert not ray.is_initialized()
    assert not [path for path in matrix.out.glob(".*") if path.name != ".lock"]
    again = sweep(matrix.models, recipes[:2], matrix.out, engine=RayEngine(workers=2))
    assert exit_code(again) == 0
    assert not ray.is_initialized()


def test_where_nobody_listens_is_said_at_once(matrix):
    pytest.importorskip("ray")
    engine = RayEngine("127.0.0.1:9")
    with pytest.raises(TieqError, match=r"--address 127.0.0.1:9: no Ray cluster can be joined"):
        sweep(matrix.models, [matrix.recipe("a")], matrix.out, engine=engine)
    assert matrix.runs("gpt2-a") == 0


@pytest.fixture
def order(matrix) -> Order:
    (cell, _) = make_cells(matrix.models, [matrix.recipe("a")], Wishes())
    token = matrix.folder / "token"
    token.write_text("secret")
    folder = matrix.out / "cells" / cell.name
    return Order(cell.to_json(), str(folder), (str(token), "secret"), None, STUB, collect=False)


def test_a_worker_writes_into_a_folder_that_it_shares_and_into_no_other(order):
    outcome, files = work(order)
    assert (outcome.state, files) == ("done", None)
    assert (Path(order.folder) / "artifact" / "manifest.json").exists()
    for token in ((order.token[0], "another"), ("/nowhere/token", "secret")):
        outcome, _ = work(dataclasses.replace(order, token=token))
        assert outcome.state == "failed"
        assert "is not the same folder on the worker" in outcome.error
        assert "--collect" in outcome.error


def test_collected_files_come_back_as_bytes(order):
    folder = Path(order.folder)
    outcome, files = work(dataclasses.replace(order, collect=True))
    assert outcome.state == "done"
    assert files is not None
    assert set(files) == {"artifact/manifest.json", "log.txt", "ran.txt"}
    assert not folder.exists()
    unpack(files, folder)
    assert (folder / "artifact" / "manifest.json").read_text() == "{}"
    assert (folder / "log.txt").exists()
    # A cell that failed brings a log alone, and nothing of an earlier result stays.
    unpack({"log.txt": b"why"}, folder)
    assert [path.name for path in folder.iterdir()] == ["log.txt"]


def test_a_worker_tells_what_it_lacks(order, monkeypatch):
    found = look_around(["llama.cpp"], order.token)
    assert (found["missing"], found["shared"]) == ("", True)
    monkeypatch.setattr(LlamaCpp, "availability", lambda self: Availability(False, "", "pip install it"))
    assert "pip install it" in look_around(["llama.cpp"], ("/nowhere", ""))["missing"]


def test_processors_are_shared_out():
    assert processors_each([2], 2) == 1
    assert processors_each([16], 3) == 5
    assert processors_each([8, 8], 2) == 8
    assert processors_each([8, 8], 3) == 4
    assert processors_each([4], 9) == 1
    assert processors_each([], 1) == 1
