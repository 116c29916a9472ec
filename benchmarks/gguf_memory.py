"""What llama.cpp's repacking does to a GGUF file in memory: a second, reordered copy of what it multiplies by.

    python -m benchmarks.gguf_memory FILE.gguf

Decode rate and peak memory with the extra buffer types that repack weights, and without them (`use_extra_bufts` of the
model's parameters, `--no-repack` of llama.cpp's programs); medians of alternating rounds.
"""

from __future__ import annotations

import statistics
import sys
from pathlib import Path

from benchmarks.speed.command import Asked

TURNS = 4

_RUN = """
import sys, runpy
import llama_cpp.llama_cpp as native
default = native.llama_model_default_params
def without():
    found = default()
    found.use_extra_bufts = False
    return found
if sys.argv[2] == "without":
    native.llama_model_default_params = without
sys.argv = sys.argv[1:2] * 2
runpy.run_path(RUN_GGUF, run_name="__main__")
"""


def measure(file: Path, rounds: int = 5) -> dict[str, dict[str, float]]:
    """Tokens a second and peak bytes, ``with`` repacking and ``without``."""
    rates: dict[str, list[float]] = {"with": [], "without": []}
    peaks: dict[str, list[float]] = {"with": [], "without": []}
    script = _RUN.replace("RUN_GGUF", repr(str(Path(__file__).parent / "speed" / "run_gguf.py")))
    for _ in range(rounds):
        for kind in rates:
            with Asked([sys.executable, "-c", script, file, kind]) as process:
                rates[kind] += [process.ask() for _ in range(TURNS)]
                peaks[kind].append(process.peak())
    return {kind: {"rate": statistics.median(rates[kind]), "peak": statistics.median(peaks[kind])} for kind in rates}


def main() -> None:
    for kind, found in measure(Path(sys.argv[1])).items():
        print(f"{kind} repacking: {found['rate']:.1f} tokens/s, peak {found['peak'] / 1e6:.0f} MB")


if __name__ == "__main__":
    main()
