"""Workers: what they answer, what they say when they fail, and that they end in time, with all that they started."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from tieq.errors import TieqError
from tieq.runtimes.process import WORKERS, RemoteSession, Worker

BEGIN = f"import sys; sys.path.insert(0, {str(WORKERS)!r}); from frames import serve\n"
ECHO = BEGIN + (
    "import array\n"
    "def handle(document):\n"
    "    print('noise on stdout')\n"
    "    if 'model' in document: return {'rows': 10}, b''\n"
    "    if 'boom' in document: raise ValueError('no\\nsuch thing')\n"
    "    return {}, array.array('f', [float(i) for i in document['ids'] for _ in range(10)]).tobytes()\n"
    "serve(handle)\n"
)


def worker(script: str, **environment: str) -> Worker:
    return Worker("a worker", [sys.executable, "-c", script], environment)


def alive(process: int) -> bool:
    """Whether a process runs; a dead one that nobody has waited for yet does not."""
    try:
        state = Path(f"/proc/{process}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def ended(process: int, seconds: float = 5.0) -> bool:
    deadline = time.monotonic() + seconds
    while alive(process) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not alive(process)


@pytest.fixture
def echo():
    made = worker(ECHO)
    yield made
    made.close()


def test_logits_come_back_whatever_is_printed(echo):
    session = RemoteSession(echo, {"model": "m"}, 30, 1)
    ids = np.arange(7) % 10
    assert np.array_equal(session.logits(ids), np.repeat(ids, 10).reshape(7, 10).astype(np.float32))
    # More than a pipe holds at once.
    many = np.tile(ids, 3000)
    assert np.array_equal(session.logits(many)[:, 0], many.astype(np.float32))


def test_ids_that_are_no_rows_are_refused(echo):
    session = RemoteSession(echo, {"model": "m"}, 30, 1)
    with pytest.raises(TieqError, match="token id 10 is not a row"):
        session.logits(np.array([1, 10]))


def test_an_error_is_a_sentence_and_the_worker_goes_on(echo):
    with pytest.raises(TieqError, match="a worker: no such thing"):
        echo.request({"boom": 1}, 30)
    assert echo.request({"model": "m"}, 30)[0]["rows"] == 10


def test_a_worker_that_ends_is_quoted():
    made = worker("import sys; sys.stdin.readline(); print('the disk is on fire', file=sys.stderr); sys.exit(7)")
    with pytest.raises(TieqError, match=r"a worker: ended by itself with code 7 \(the disk is on fire\)"):
        made.request({"ids": []}, 30)


def test_a_program_that_is_not_there_is_a_sentence():
    with pytest.raises(TieqError, match="a worker: cannot be started"):
        Worker("a worker", ["/no/such/program"])


def test_a_slow_worker_is_ended_with_its_children(tmp_path):
    pids = tmp_path / "pids"
    script = (
        "import os, subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        f"open({str(pids)!r}, 'w').write(f'{{os.getpid()}} {{child.pid}}')\n"
        "time.sleep(600)\n"
    )
    made = worker(script)
    while not pids.exists() or len(pids.read_text().split()) < 2:
        time.sleep(0.02)
    with pytest.raises(TieqError, match="did not answer within 0 s and was ended"):
        made.request({"ids": []}, 0.2)
    assert all(ended(int(process)) for process in pids.read_text().split())
    made.close()  # again, which does nothing


def test_a_worker_ends_when_its_parent_is_killed(tmp_path):
    """Its requests end, and so does it."""
    pid = tmp_path / "pid"
    script = ECHO.replace("serve(handle)", f"import os; open({str(pid)!r}, 'w').write(str(os.getpid()))\nserve(handle)")
    parent = (
        "import os, signal, sys\n"
        "from tieq.runtimes.process import Worker\n"
        f"made = Worker('x', [sys.executable, '-c', {script!r}])\n"
        "made.request({'model': 'm'}, 30)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    os.spawnv(os.P_WAIT, sys.executable, [sys.executable, "-c", parent])
    assert ended(int(pid.read_text()))
