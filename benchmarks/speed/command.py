"""Run a command and say what it took."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

# A process begins with the peak of the one that it was forked from, so a small one stands between.
_WITNESS = """
import resource, subprocess, sys
code = subprocess.call(sys.argv[1:])
print("\\n%d" % resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss, flush=True)
sys.exit(code)
"""


@dataclasses.dataclass(frozen=True)
class Cost:
    """Wall-clock seconds and peak resident bytes of a process."""

    seconds: float
    peak: int
    output: str


def run(command: Sequence[str | Path], **environment: str) -> Cost:
    """Run a command to its end.

    Raises:
        RuntimeError: with the end of what it said, if it fails.
    """
    with tempfile.TemporaryFile() as said:
        start = time.perf_counter()
        process = subprocess.run(
            [sys.executable, "-c", _WITNESS, *(str(part) for part in command)],
            stdout=said,
            stderr=subprocess.STDOUT,
            env={**os.environ, **environment},
            check=False,
        )
        seconds = time.perf_counter() - start
        said.seek(0)
        output, _, peak = said.read().decode(errors="replace").rstrip().rpartition("\n")
    if process.returncode:
        raise RuntimeError(f"{command[0]} failed: {output[-2000:]}")
    return Cost(seconds, int(peak) * 1024, output)
