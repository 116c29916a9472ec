"""What llama.cpp's repacking does to a GGUF file in memory: a second, reordered copy of what it multiplies by.

    python -m benchmarks.gguf_memory FILE.gguf

Decode rate and peak memory with the extra buffer types that repack weights, and without them (`use_extra_bufts` of the
model's parameters, `--no-repack` of llama.cpp's programs); medians of alternating rounds.
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path

from benchmarks.speed.command import run

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
    rows: dict[str, list[dict[str, float]]] = {"with": [], "without": []}
    script = _RUN.replace("RUN_GGUF", repr(str(Path(__file__).parent / "speed" / "run_gguf.py")))
    for _ in range(rounds):
        for kind, found in rows.items():
            command = [sys.executable, "-c", script, file, kind]
            found.append(json.loads(run(command).output.strip().splitlines()[-1]))
    return {
        kind: {key: statistics.median(row[key] for row in found) for key in ("rate", "peak")}
        for kind, found in rows.items()
    }


def main() -> None:
    for kind, found in measure(Path(sys.argv[1])).items():
        print(f"{kind} repacking: {found['rate']:.1f} tokens/s, peak {found['peak'] / 1e6:.0f} MB")


if __name__ == "__main__":
    main()
