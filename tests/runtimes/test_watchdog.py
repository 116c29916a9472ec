"""A runtime in tieq's own process that never answers."""

from __future__ import annotations

import subprocess
import sys

from tieq.runtimes.watchdog import watched

HANGING = """
import time
from pathlib import Path
import numpy as np
from tieq.runtimes import runtime
from tieq.validate import measure

class Hanging:
    def logits(self, ids):
        time.sleep(60)

measure._LIMIT, measure._LIMIT_PER_TOKEN = 0.2, 0.01
run = measure._Run(Path("a.onnx"), runtime("onnxruntime"), "1", "", None, "")
measure._logits(run, Hanging(), np.arange(8))
"""


def test_a_runtime_that_gives_no_answer_ends_tieq_with_a_sentence():
    done = subprocess.run([sys.executable, "-c", HANGING], capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("tieq: onnxruntime: gave no answer within 0 s and was ended.")


def test_what_ends_in_time_goes_on():
    with watched("onnxruntime", 60):
        value = 1
    assert value == 1
