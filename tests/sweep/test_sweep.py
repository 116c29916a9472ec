"""Sweeps as a user runs them: what is run, what is run again, exit codes, the table."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from sweep.helpers import STUB, WATCHING_STUB, is_gone, wait_for

from tieq.cli import main
from tieq.errors import TieqError
from tieq.runtimes.base import Availability
from tieq.runtimes.llama_cpp import LlamaCpp
from tieq.sweep import table
from tieq.sweep.engines import LocalEngine
from tieq.sweep.run import sweep


@pytest.fixture
def run(matrix, monkeypatch, capsys, stubbed):
    def command(*arguments: object) -> tuple[int, str, str]:
        said = ["tieq", "sweep", str(matrix.models), *map(str, arguments), "--out", str(matrix.out)]
        monkeypatch.setattr(sys, "argv", said)
        with pytest.raises(SystemExit) as caught:
            main()
        captured = capsys.readouterr()
        return int(caught.value.code or 0), captured.out, captured.err

    return command


def record(matrix, cell: str) -> dict:
    return json.loads((matrix.out / "cells" / cell / "cell.json").read_text())


def test_a_second_run_runs_nothing_and_a_changed_recipe_its_own_cell(matrix, run):
    one, two = matrix.recipe("one"), matrix.recipe("two")
    names = [f"{model}-{recipe}" for model in ("smollm2-135m", "gpt2") for recipe in ("one", "two")]
    code, out, _ = run(one, two)
    assert code == 0, out
    assert "4 of 4 cells done, all gates hold" in out
    assert [matrix.runs(name) for name in names] == [1, 1, 1, 1]
    assert run(one, two)[0] == 0
    assert [matrix.runs(name) for name in names] == [1, 1, 1, 1]
    matrix.recipe("two", more="body: {scheme: q8_0}\n")
    code, out, err = run(one, two, "--json")
    assert code == 0
    assert "2 done before, 2 to run" in err
    assert [matrix.runs(name) for name in names] == [1, 2, 1, 2]
    document = json.loads(out)
    assert document == json.loads((matrix.out / "sweep.json").read_text())
    assert [cell["name"] for cell in document["cells"]] == names
    row = document["rows"][0]
    assert (row["model"], row["recipe"], row["container"], row["copies"]) == ("smollm2-135m", "one", "gguf", 1)
    assert (row["megabytes"], row["bits_per_weight"], row["kl"]["value"]) == (12.34, [4.5], 0.25)
    assert row["tokens"] == 2 * 64
    page = (matrix.out / "sweep.md").read_text()
    assert "| smollm2-135m | one | gguf | 12.34 | 4.50 | 1 | llama.cpp | 0.2500 +- 0.0100 |" in page
    # A result whose artifact is gone, or whose record is damaged, is none.
    (matrix.out / "cells" / names[0] / "artifact" / "manifest.json").unlink()
    (matrix.out / "cells" / names[1] / "cell.json").write_text("{")
    assert run(one, two)[0] == 0
    assert [matrix.runs(name) for name in names] == [2, 3, 1, 2]


def test_cells_that_ran_other_text_than_the_first_are_named():
    def cell(name: str, sequences: int) -> dict:
        used = {"description": "some text", "sequences": sequences, "length": 64}
        checks: dict = {"containers": [], "checks": []}
        return {"name": name, "state": "done", "passed": True, "evaluation": used, "checks": checks}

    text = table.markdown({"cells": [cell("a", 2), cell("b", 8), cell("c", 2)], "rows": []})
    assert "on 2 sequences of 64 tokens: some text." in text
    assert text.endswith("\n\nb ran 8 sequences of 64 tokens.\n")


def test_a_failing_cell_does_not_stop_the_others_and_is_tried_again(matrix, run):
    recipes = matrix.recipe("bad", "fails in smollm2-135m-bad"), matrix.recipe("good")
    code, out, _ = run(*recipes)
    assert code == 2
    assert "FAILED smollm2-135m-bad: text: is empty. Give a file with text." in out
    assert "3 of 4 cells done, 1 failed, all gates hold" in out
    assert record(matrix, "smollm2-135m-bad")["state"] == "failed"
    assert "FAILED smollm2-135m-bad" in (matrix.out / "sweep.md").read_text()
    assert run(*recipes)[0] == 2
    assert [matrix.runs(name) for name in ("smollm2-135m-bad", "smollm2-135m-good")] == [2, 1]


def test_a_gate_that_does_not_hold_is_a_result(matrix, run):
    strict = matrix.recipe("strict", "gate fails")
    code, out, _ = run(strict)
    assert code == 1
    assert "GATE gpt2-strict, KL (llama.cpp): 0.25, wanted at most 0.1" in out
    assert "gates do not hold in 2" in out
    assert run(strict)[0] == 1
    assert matrix.runs("gpt2-strict") == 1
    assert run(strict, matrix.recipe("bad", "fails"))[0] == 2


def test_a_crash_is_run_again_and_then_recorded(matrix, run):
    code, out, _ = run(
        matrix.recipe("once", "crashes once in gpt2-once"), matrix.recipe("ever", "crashes in gpt2-ever")
    )
    assert code == 2
    assert record(matrix, "gpt2-once")["attempts"] == 2
    assert record(matrix, "gpt2-once")["state"] == "done"
    failed = record(matrix, "gpt2-ever")
    assert (failed["state"], failed["attempts"]) == ("failed", 2)
    assert "FAILED gpt2-ever (2 attempts): its process was ended by signal 9 (SIGKILL)" in out
    assert run(matrix.recipe("ever", "crashes in gpt2-ever"), "--retries", 0)[0] == 2
    assert record(matrix, "gpt2-ever")["attempts"] == 1


def test_a_timeout_ends_the_child_and_what_it_started(matrix, run):
    code, out, _ = run(matrix.recipe("slow", "hangs in gpt2-slow"), "--timeout", 4)
    assert code == 2
    assert "FAILED gpt2-slow: took longer than 4 s and was stopped (--timeout)." in out
    assert record(matrix, "gpt2-slow")["attempts"] == 1
    for pid in matrix.pids("gpt2-slow"):
        wait_for(lambda pid=pid: is_gone(pid))
    assert not list((matrix.out / "cells" / "gpt2-slow").glob(".artifact*"))
    assert record(matrix, "smollm2-135m-slow")["state"] == "done"


@pytest.fixture
def interruptible():
    """A shell starts what runs in its background with SIGINT ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_an_interrupt_keeps_what_is_done(matrix, run, interruptible):
    recipe = matrix.recipe("slow", "hangs once in gpt2-slow")
    pids: list[int] = []

    def interrupt() -> None:
        pids.extend(matrix.pids("gpt2-slow"))
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt).start()
    code, out, _ = run(recipe)
    assert code == 130
    assert "1 of 2 cells done, 1 pending" in out
    for pid in pids:
        wait_for(lambda pid=pid: is_gone(pid))
    assert not (matrix.out / "cells" / "gpt2-slow" / "cell.json").exists()
    assert run(recipe)[0] == 0
    assert [matrix.runs(f"{model}-slow") for model in ("smollm2-135m", "gpt2")] == [1, 2]


def test_a_sweep_killed_halfway_takes_its_child_along_and_is_gone_on_with(matrix, run):
    recipe = matrix.recipe("slow", "hangs once in gpt2-slow")
    code = (
        "import sys; from tieq.sweep import child; from tieq.cli import main\n"
        f"child.COMMAND = {WATCHING_STUB!r}; sys.argv = {['tieq', 'sweep', str(matrix.models), str(recipe)]!r}\n"
        f"sys.argv += ['--out', {str(matrix.out)!r}]; main()"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as killed:
        pids = matrix.pids("gpt2-slow")
        with pytest.raises(TieqError, match="another sweep is at work"):
            sweep(matrix.models, [recipe], matrix.out)
        killed.kill()
    for pid in pids:
        wait_for(lambda pid=pid: is_gone(pid))
    assert record(matrix, "smollm2-135m-slow")["state"] == "done"
    assert not (matrix.out / "cells" / "gpt2-slow" / "cell.json").exists()
    assert run(recipe)[0] == 0
    assert [matrix.runs(f"{model}-slow") for model in ("smollm2-135m", "gpt2")] == [1, 2]


@pytest.mark.parametrize("wished", [(), ("--runtime", "llama.cpp")])
def test_a_missing_runtime_is_said_before_anything_runs(matrix, run, monkeypatch, wished):
    recipe = matrix.recipe("one")
    assert run(recipe, *wished)[0] == 0
    before = record(matrix, "gpt2-one")
    matrix.recipe("one", more="body: {scheme: q8_0}\n")
    monkeypatch.setattr(LlamaCpp, "availability", lambda self: Availability(False, "", "pip install it"))
    code, _, err = run(recipe, *wished)
    assert code == 3
    assert "runtime llama.cpp: is not installed. Get llama.cpp: pip install it." in err
    assert matrix.runs("gpt2-one") == 1
    assert record(matrix, "gpt2-one") == before
    # A recipe that runs nothing needs no runtime, unless one is named.
    matrix.recipe("one", more="evaluation: null\n")
    assert run(recipe, *wished)[0] == (3 if wished else 0)


def test_without_ray_its_engine_says_how_to_get_it(matrix, run, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    code, _, err = run("smallest", "--engine", "ray")
    assert code == 3
    assert err == "tieq: --engine ray: is not installed. Get it: pip install 'tieq[ray]'.\n"
    assert not matrix.out.exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--engine", "spark"), "--engine 'spark' is not known"),
        (("--workers", 2), "--workers is for a cluster"),
        (("--timeout", 0), "--timeout 0 is no time"),
        (("--runtime", "tensorrt"), "--runtime 'tensorrt' is not known"),
        (("--runtime", "llama.cpp", "--format", "onnx"), "runs .gguf files, and the cells write .onnx"),
        (("--format", "pt"), "--format 'pt' is no container"),
        (("--effort", "max"), "--effort 'max' is no effort"),
        (("--text", "missing.txt"), "missing.txt: cannot be read"),
    ],
)
def test_bad_input_is_one_sentence_and_runs_nothing(matrix, run, arguments, said):
    code, _, err = run("smallest", *arguments)
    assert code == 2
    assert said in err
    assert err.count("\n") == 1
    assert not matrix.out.exists()


def test_a_folder_of_something_else_is_left_alone(matrix, run):
    matrix.out.mkdir()
    (matrix.out / "letter.txt").write_text("dear")
    code, _, err = run("smallest")
    assert code == 2
    assert "is not empty and holds no sweep" in err
    assert [path.name for path in matrix.out.iterdir()] == ["letter.txt"]


def test_nothing_heavy_for_the_help():
    code = (
        "import sys, tieq.cli\nheavy = {'numpy', 'pydantic', 'ray', 'torch'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_real_cell_in_a_process_of_its_own(matrix, tiny_checkpoint):
    import tiny

    from tieq.recipe import dump_recipe

    matrix.models.write_text(f"- model: {tiny_checkpoint('llama')}\n  name: tiny\n")
    recipe = matrix.folder / "four.yaml"
    recipe.write_text(dump_recipe(tiny.recipe(effort="quick")))
    found = sweep(matrix.models, [recipe], matrix.out, formats=("gguf",), engine=LocalEngine(timeout=300))
    (cell,) = found["cells"]
    assert cell["state"] == "done", Path(matrix.out / "cells" / "tiny-four" / "log.txt").read_text()
    assert cell["passed"]
    (row,) = found["rows"]
    assert (row["container"], row["runtime"], row["copies"], row["bits_per_weight"]) == ("gguf", "llama.cpp", 1, [4.5])
    assert row["kl"]["value"] > 0
    assert (matrix.out / "cells" / "tiny-four" / "artifact" / "manifest.json").exists()
    assert sweep(matrix.models, [recipe], matrix.out, formats=("gguf",), engine=LocalEngine(command=STUB)) == found
    assert matrix.runs("tiny-four") == 0
