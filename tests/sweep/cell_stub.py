"""Stands for a cell's process: behaves as the recipe's description says, and is over in a moment."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path


def result(passed: bool) -> dict:
    estimate = {"value": 0.25, "standard_error": 0.01}
    payload = {"bits_per_weight": 4.5, "band_rows": None}
    scores = {"kl": estimate, "top1": estimate, "perplexity_ratio": estimate}
    checks = [
        {"name": "table copies", "subject": "gguf", "value": 1, "bound": "exactly 1", "passed": True, "detail": ""},
        {"name": "KL", "subject": "llama.cpp", "value": 0.25, "bound": "at most 0.1", "passed": passed, "detail": ""},
    ]
    return {
        "passed": passed,
        "checks": {
            "passed": passed,
            "checks": checks,
            "containers": [{"container": "gguf", "file_bytes": 12_340_000, "payloads": [payload]}],
            "runtimes": [{"runtime": "llama.cpp", "mode": "", "container": "gguf", "tokens": None, "scores": scores}],
        },
        "evaluation": {"description": "text", "sequences": 2, "length": 64},
    }


def main() -> None:
    order = json.loads(Path(sys.argv[-1]).read_text())
    name, says, target = order["cell"]["name"], order["cell"]["recipe"]["description"], Path(order["target"])
    with (target.parent / "ran.txt").open("a") as file:
        file.write(f"{os.getpid()} {os.getppid()}\n")
    first = len((target.parent / "ran.txt").read_text().splitlines()) == 1
    behaviour, _, of = says.partition(" in ")
    outcome = {"state": "done", "result": result(passed=behaviour != "gate fails")}
    if of in ("", name):
        if behaviour == "fails":
            outcome = {"state": "failed", "error": "text: is empty. Give a file with text."}
        elif behaviour == "crashes" or (behaviour == "crashes once" and first):
            os.kill(os.getpid(), signal.SIGKILL)
        elif behaviour == "hangs" or (behaviour == "hangs once" and first):
            (target.parent / ".artifact.partial-1-x").mkdir(parents=True)
            sleeper = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(300)"])
            if "watching" in sys.argv:
                from tieq.sweep.cell import end_with_parent

                end_with_parent()
            (target.parent / "pids.part").write_text(f"{os.getpid()} {sleeper.pid}")
            (target.parent / "pids.part").replace(target.parent / "pids.txt")
            time.sleep(300)
    if outcome["state"] == "done":
        target.mkdir(parents=True, exist_ok=True)
        (target / "manifest.json").write_text("{}")
    Path(order["outcome"]).write_text(json.dumps(outcome))


if __name__ == "__main__":
    main()
