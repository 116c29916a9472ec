"""Run a command and say what it took, or keep it running and ask it for figures."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# A process begins with the peak of the one that it was forked from, so a small one stands between. It takes the time as
# well, which its own start is no part of.
_WITNESS = """
import resource, subprocess, sys, time
start = time.perf_counter()
code = subprocess.call(sys.argv[1:])
seconds = time.perf_counter() - start
print("\\n%d %f" % (resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss, seconds), flush=True)
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
        process = subprocess.run(
            [sys.executable, "-c", _WITNESS, *(str(part) for part in command)],
            stdout=said,
            stderr=subprocess.STDOUT,
            env={**os.environ, **environment},
            check=False,
        )
        said.seek(0)
        output, _, took = said.read().decode(errors="replace").rstrip().rpartition("\n")
    if process.returncode:
        raise RuntimeError(f"{command[0]} failed: {output[-2000:]}")
    peak, seconds = took.split()
    return Cost(float(seconds), int(peak) * 1024, output)


class Asked:
    """A process that loads a file, then measures whenever it is asked. A context manager.

    It says JSON objects, one a line: one when it is ready, one for each question, one with its peak at the end.
    """

    def __init__(self, command: Sequence[str | Path]) -> None:
        self._name = str(command[0])
        self._said = ""
        self._process = subprocess.Popen(
            [sys.executable, "-c", _WITNESS, *(str(part) for part in command)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def __enter__(self) -> Asked:
        self._answer()
        return self

    def ask(self) -> float:
        """The next figure.

        Raises:
            RuntimeError: with the end of what the process said, if it has ended.
        """
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return float(self._answer()["rate"])

    def peak(self) -> float:
        """End the process: its peak resident bytes."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        return float(self._answer()["peak"])

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                found: dict[str, Any] = json.loads(line)
                return found
            self._said += line
        raise RuntimeError(f"{self._name} ended: {self._said[-2000:]}")

    def __exit__(self, *_: object) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        self._process.wait()
