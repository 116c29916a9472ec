"""Speed and memory beside the peers, all in one go: `make bench`. Writes docs/benchmarks.md and its figures as JSON.

    python -m benchmarks.speed --work FOLDER --page docs/benchmarks.md --out benchmarks/results.json

Files of ours and of the peers run alternately, each in a process of its own, on two threads. Where tokens are decoded
all are loaded and take turns of a few tokens, so that a machine whose speed drifts drifts for all. Rates are medians
with the quartiles over rounds (turns), and a ratio is the median of their ratios. The machine has to be idle otherwise.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import statistics
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks import gguf_memory, random_checkpoint, table_memory
from benchmarks.speed import page, peers
from benchmarks.speed.command import Asked, Cost, run
from tieq.report.manifest import versions
from tieq.source.locate import open_source
from tieq.source.reference import load_model
from tieq.source.tie import table_name, tie_graph

HERE = Path(__file__).parent
TIEQ = Path(sys.executable).parent / "tieq"
# How often files are loaded for a decode rate, by how much a load takes: where weights come to lie in memory changes
# the rate by several per cent, and what is loaded later tends to be the faster one.
LOADS = {"onnx smollm2": 36, "onnx 1b": 12, "onnx gemma": 4, "gguf smollm2": 10, "gguf gemma": 10}
TURNS = 12
# Seconds before a turn: the other side's threads wait for work by spinning for a while.
PAUSE = 0.1
SIZES = ("135m", "500m", "llama-3.2-1b", "llama-3.2-3b")


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.speed", description=__doc__)
    parser.add_argument("--work", type=Path, default=Path("artifacts/bench"))
    parser.add_argument("--page", type=Path, default=Path("docs/benchmarks.md"))
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results.json"))
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--resume", action="store_true", help="keep the steps that an interrupted run has finished")
    arguments = parser.parse_args()
    found: dict[str, Any] = {"versions": versions("numba", "llama-cpp-python"), "peers": list(peers.PACKAGES)}
    found["machine"] = {"processor": _processor(), "cores": os.cpu_count()}
    kept = arguments.work / "results.json"
    if arguments.resume and kept.exists():
        found = {**json.loads(kept.read_text(encoding="utf-8")), "resumed": True}
    done = found.setdefault("seconds", {})
    for step in (_prepare, _exports, _streaming, _decode, _memory, _repacking, _start_up):
        name = step.__name__.strip("_")
        if name in done:
            continue
        begun = time.perf_counter()
        step(arguments.work, found, arguments.rounds)
        done[name] = time.perf_counter() - begun
        kept.write_text(json.dumps(found), encoding="utf-8")
        print(f"{name}: {done[name]:.0f} s", file=sys.stderr, flush=True)
    found["minutes"] = sum(done.values()) / 60
    arguments.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    arguments.page.write_text(page.text(found), encoding="utf-8")


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


def _prepare(work: Path, found: dict[str, Any], rounds: int) -> None:
    """Checkpoints that both sides start from."""
    work.mkdir(parents=True, exist_ok=True)
    if not (work / "smollm2" / "config.json").exists():
        source = open_source("smollm2-135m")
        graph = tie_graph(source)
        source.config["vocab_size"], source.config["tie_word_embeddings"] = graph.rows, graph.tied
        model = load_model(source, tied=graph.tied, table=table_name(source, graph))
        model.module.save_pretrained(work / "smollm2")
        folder = source.tokenizer_folder()
        assert folder is not None
        for file in folder.glob("tokenizer*"):
            (work / "smollm2" / file.name).write_bytes(file.read_bytes())
    for size in SIZES:
        if not (work / size / "config.json").exists():
            random_checkpoint.write(size, work / size)


def _tieq(model: str | Path, out: Path, *wish: str) -> Cost:
    """An export by ``wish``, or at 4 bits. The effort changes the numbers in the files, not the layout."""
    asked = wish or ("--bits", "4")
    return run([TIEQ, "export", "--model", model, *asked, "--effort", "quick", "--no-evaluation", "--out", out])


def _exports(work: Path, found: dict[str, Any], rounds: int) -> None:
    """Our files and the peers', with what making them took."""
    python = peers.environment(work / "peers")
    made = {"tieq smollm2": _tieq(work / "smollm2", work / "out-smollm2")}
    made["tieq gemma"] = _tieq("gemma-3-270m", work / "out-gemma")
    for size in ("smollm2", "llama-3.2-1b"):
        _tieq(work / size, work / f"fast-{size}", "--recipe", "fast", "--format", "onnx")
    made["builder smollm2"] = peers.build_int4(python, work / "smollm2", work / "builder-smollm2")
    made["builder 1b"] = peers.build_int4(python, work / "llama-3.2-1b", work / "builder-1b")
    peers.quantize(open_source("smollm2-135m").path, work / "smollm2-q4_0.gguf")
    peers.quantize(open_source("gemma-3-270m").path, work / "gemma-q4_0.gguf")
    try:
        folder = work / "gemma"
        source = open_source("gemma-3-270m")
        model = load_model(source, tied=True, table=table_name(source, tie_graph(source)))
        model.module.save_pretrained(folder)
        peers.build_int4(python, folder, work / "builder-gemma")
        found["builder on gemma"] = "built"
    except RuntimeError as error:
        found["builder on gemma"] = str(error).strip().splitlines()[-1]
    found["exports"] = {name: {"seconds": cost.seconds, "peak": cost.peak} for name, cost in made.items()}


def _streaming(work: Path, found: dict[str, Any], rounds: int) -> None:
    """The export of random checkpoints by size, and llama.cpp's converter and quantizer on the 1B shape."""
    rows = {}
    for size in SIZES:
        cost = _tieq(work / size, work / f"out-{size}")
        rows[size] = {"seconds": cost.seconds, "peak": cost.peak, "parameters": random_checkpoint.parameters(size)}
    found["streaming"] = rows
    whole, small = work / "1b.gguf", work / "1b-q4_0.gguf"
    steps = [peers.convert(work / "llama-3.2-1b", whole), peers.quantize(whole, small)]
    found["llama.cpp 1b"] = {
        "convert": steps[0].seconds,
        "quantize": steps[1].seconds,
        "peak": max(step.peak for step in steps),
        "bytes": small.stat().st_size,
    }
    whole.unlink()


def _decode(work: Path, found: dict[str, Any], rounds: int) -> None:
    """Decode and prefill, alternating."""
    python = work / "peers" / "bin" / "python"
    genai = {
        "smollm2": (work / "out-smollm2" / "onnx", work / "fast-smollm2" / "onnx", work / "builder-smollm2"),
        "1b": (work / "out-llama-3.2-1b" / "onnx", work / "fast-llama-3.2-1b" / "onnx", work / "builder-1b"),
    }
    genai_script = HERE / "run_genai.py"
    for name, folders in genai.items():
        _read_anew(folders)
        rates = _turns([[python, genai_script, f, "decode"] for f in folders], LOADS[f"onnx {name}"])
        count = rounds if name == "smollm2" else max(3, rounds // 3)
        times = _alternate([[python, genai_script, f, "prefill"] for f in folders], count)
        for at, label in enumerate((name, f"{name} fast")):
            found[f"onnx decode {label}"] = _compared("rate", rates, at, -1)
            found[f"onnx prefill {label}"] = _compared("seconds", times, at, -1)
    _read_anew([work / "out-gemma" / "onnx"])
    rates = _turns([[python, genai_script, work / "out-gemma" / "onnx", "decode"]], LOADS["onnx gemma"])
    found["onnx decode gemma"] = _compared("rate", rates, 0)
    gguf = {
        "smollm2": (work / "out-smollm2" / "gguf" / "model.gguf", work / "smollm2-q4_0.gguf"),
        "gemma": (work / "out-gemma" / "gguf" / "model.gguf", work / "gemma-q4_0.gguf"),
    }
    for name, files in gguf.items():
        _read_anew(files)
        rates = _turns([[sys.executable, HERE / "run_gguf.py", f] for f in files], LOADS[f"gguf {name}"])
        found[f"gguf decode {name}"] = _compared("rate", rates, 0, 1)
    found["bytes"] = {
        str(path.relative_to(work)): _size(path)
        for path in (*(f for several in genai.values() for f in several), *(f for pair in gguf.values() for f in pair))
    }


def _read_anew(paths: Iterable[Path]) -> None:
    """Have files in memory as the disk gives them: how a file was written decides how much a first touch maps."""
    for path in paths:
        for file in [path] if path.is_file() else sorted(path.iterdir()):
            with file.open("rb") as opened:
                os.fsync(opened.fileno())
                os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                while opened.read(1 << 20):
                    pass


def _size(path: Path) -> int:
    """Bytes of a file, or of a folder's model: data and the graph that is run."""
    if path.is_file():
        return path.stat().st_size
    document = json.loads((path / "genai_config.json").read_text())
    name = document["model"]["decoder"]["filename"]
    return (path / name).stat().st_size + sum(file.stat().st_size for file in path.glob("model.onnx?data"))


@dataclasses.dataclass(frozen=True)
class Measured:
    """What was measured of each command, round by round, and the peaks of its processes."""

    taken: list[list[float]]
    peaks: list[list[float]]


def _alternate(commands: list[list[Any]], rounds: int) -> Measured:
    """Seconds of commands in turn."""
    found = Measured([[] for _ in commands], [[] for _ in commands])
    for number in range(rounds):
        for at in _order(len(commands), number):
            timed, last = map(json.loads, run(commands[at]).output.strip().splitlines()[-2:])
            found.taken[at].append(timed["seconds"])
            found.peaks[at].append(last["peak"])
    return found


def _turns(commands: list[list[Any]], loads: int) -> Measured:
    """Rates of processes that are loaded side by side and take turns."""
    found = Measured([[] for _ in commands], [[] for _ in commands])
    for loaded in range(loads):
        with contextlib.ExitStack() as stack:
            # What is loaded first may decode slower, whichever it is.
            asked = {at: stack.enter_context(Asked(commands[at])) for at in _order(len(commands), loaded)}
            for number in range(TURNS):
                for at in _order(len(commands), number + loaded // 2):
                    time.sleep(PAUSE)
                    found.taken[at].append(asked[at].ask())
            for at, process in asked.items():
                found.peaks[at].append(process.peak())
    return found


def _order(count: int, number: int) -> list[int]:
    """Who is first changes, and in which direction: what the one before leaves behind meets all alike."""
    order = list(range(count))
    start = number // 2 % count
    turned = order[start:] + order[:start]
    return turned if number % 2 == 0 else turned[::-1]


def _compared(unit: str, found: Measured, own: int, peer: int | None = None) -> dict[str, Any]:
    """One command's figures, beside a peer's where there is one."""
    sides, chosen = [], [own] if peer is None else [own, peer]
    for at in chosen:
        low, middle, high = statistics.quantiles(found.taken[at], n=4)
        sides.append({"median": middle, "low": low, "high": high, "peak": statistics.median(found.peaks[at])})
    made: dict[str, Any] = {"unit": unit, "rounds": len(found.taken[own]), "sides": sides}
    if peer is not None:
        pairs = zip(found.taken[own], found.taken[peer], strict=True)
        low, made["ratio"], high = statistics.quantiles([a / b if unit == "rate" else b / a for a, b in pairs], n=4)
        made["ratio_low"], made["ratio_high"] = low, high
        made["peak_ratio"] = sides[0]["peak"] / sides[1]["peak"]
    return made


def _memory(work: Path, found: dict[str, Any], rounds: int) -> None:
    """The shared table alone."""
    found["table"] = table_memory.measure()


def _repacking(work: Path, found: dict[str, Any], rounds: int) -> None:
    """Our GGUF files with llama.cpp's repacking and without it."""
    names = ("smollm2", "gemma")
    found["repacking"] = {name: gguf_memory.measure(work / f"out-{name}" / "gguf" / "model.gguf") for name in names}


def _start_up(work: Path, found: dict[str, Any], rounds: int) -> None:
    """Medians of five starts."""
    commands = {"tieq --help": [TIEQ, "--help"], "tieq inspect (1B)": [TIEQ, "inspect", work / "llama-3.2-1b"]}
    costs = {name: [run(command) for _ in range(5)] for name, command in commands.items()}
    found["start-up"] = {
        name: {"seconds": statistics.median(c.seconds for c in each), "peak": max(c.peak for c in each)}
        for name, each in costs.items()
    }


if __name__ == "__main__":
    main()
