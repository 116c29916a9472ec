"""Run a command and say what it took."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path


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
        process = subprocess.Popen(
            [str(part) for part in command], stdout=said, stderr=subprocess.STDOUT, env={**os.environ, **environment}
        )
        _, status, usage = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - start
        process.returncode = os.waitstatus_to_exitcode(status)
        said.seek(0)
        output = said.read().decode(errors="replace")
    if process.returncode:
        raise RuntimeError(f"{command[0]} failed: {output[-2000:]}")
    return Cost(seconds, usage.ru_maxrss * 1024, output)
