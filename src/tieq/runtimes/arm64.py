"""onnxruntime, llama.cpp and LiteRT as ARM64 binaries, under user-mode emulation on an x86-64 Linux machine."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tieq.runtimes.base import Session
from tieq.runtimes.onnxruntime import level_graphs
from tieq.runtimes.parts import FetchedRuntime, part
from tieq.runtimes.process import WORKERS, RemoteSession, Worker

# Processors by what their kernels may use: plain NEON; dot products; int8 matrix products and SVE.
CORES = ("cortex-a57", "cortex-a76", "neoverse-n2")
# Start-up alone takes ten seconds of one core.
_LOAD_SECONDS = 600.0
_TOKEN_SECONDS = 30.0
_WITHOUT = ", without KleidiAI"
_KLEIDIAI_KL = 0.15


class Emulated(FetchedRuntime):
    """What the emulated runtimes share."""

    tokens = 64
    platform = "Linux aarch64 (emulated)"


class OnnxRuntimeArm64(Emulated):
    """Runs ONNX files at accuracy level 4 on each processor: what phones do.

    Where there are dot products, onnxruntime takes KleidiAI's kernels by default, which round activations to int8 with
    one scale a row instead of one a block; one mode does without them. Without dot products it computes in float.
    """

    name = "onnxruntime-arm64"
    suffixes = (".onnx",)
    purpose = "ONNX on ARM64"

    def modes(self, path: Path) -> Iterator[tuple[str, contextlib.AbstractContextManager[Session]]]:
        """Processors, and one without KleidiAI."""
        level, content = list(level_graphs(path))[-1]
        suffix = "" if level is None else f", accuracy level {level}"
        for core in CORES:
            yield f"{core}{suffix}", self._open(path, core, content, {})
        if level is not None:
            yield f"{CORES[1]}{suffix}{_WITHOUT}", self._open(path, CORES[1], content, {"mlas.disable_kleidiai": "1"})

    def bound(self, mode: str, first: str) -> float | None:
        """KleidiAI's rounding is real, and far beyond what other kernels differ by: 0.064 on SmolLM2-135M."""
        rounded = not mode.endswith(_WITHOUT) and not mode.startswith(CORES[0])
        return _KLEIDIAI_KL if rounded else None

    @contextlib.contextmanager
    def _open(self, path: Path, core: str, content: bytes | None, options: dict[str, str]) -> Iterator[Session]:
        with tempfile.TemporaryDirectory(prefix="tieq-arm64-") as folder:
            model = path
            if content is not None:
                model = Path(folder) / path.name
                model.write_bytes(content)
            opening = {"model": str(model), "folder": str(path.parent), "threads": os.cpu_count() or 1}
            opening["options"] = options
            sites = [part("numpy-arm64").folder, part("onnxruntime-arm64").folder]
            with emulate(self.name, core, "onnxruntime_worker.py", sites, opening) as session:
                yield session


class LlamaCppArm64(Emulated):
    """Runs GGUF files on each processor, with the kernels that llama.cpp picks for it."""

    name = "llama.cpp-arm64"
    suffixes = (".gguf",)
    purpose = "GGUF on ARM64"

    def modes(self, path: Path) -> Iterator[tuple[str, contextlib.AbstractContextManager[Session]]]:
        """Processors."""
        libraries = part(self.name).folder / "node_modules" / "@node-llama-cpp" / "linux-arm64" / "bins" / "linux-arm64"
        opening = {"model": str(path.resolve()), "libraries": str(libraries), "length": self.tokens}
        for core in CORES:
            yield core, emulate(self.name, core, "llama_worker.py", [], opening | {"threads": os.cpu_count() or 1})


class LiteRtArm64(Emulated):
    """Runs TFLite files as they are, on one processor: float kernels are the same on all."""

    name = "litert-arm64"
    suffixes = (".tflite",)
    purpose = "TFLite on ARM64"

    def modes(self, path: Path) -> Iterator[tuple[str, contextlib.AbstractContextManager[Session]]]:
        """One processor with dot products."""
        sites = [part("numpy-arm64").folder, part(self.name).folder]
        opening = {"model": str(path.resolve()), "threads": os.cpu_count() or 1}
        yield CORES[1], emulate(self.name, CORES[1], "litert_worker.py", sites, opening)


@contextlib.contextmanager
def emulate(label: str, core: str, script: str, sites: list[Path], opening: dict[str, Any]) -> Iterator[Session]:
    """A session of a Python worker on an emulated processor.

    Args:
        label: what messages call it.
        core: a processor that QEMU knows.
        script: one of ``workers/``.
        sites: folders of its packages.
        opening: its first request.
    """
    root = part("arm64").folder
    command = [str(root / "tools" / "usr" / "bin" / "qemu-aarch64"), "-cpu", core, "-L", str(root / "root")]
    command += [str(root / "root" / "usr" / "bin" / "python3.13"), "-B", str(WORKERS / script)]
    worker = Worker(f"{label} on {core}", command, {"PYTHONPATH": os.pathsep.join(map(str, sites))})
    try:
        yield RemoteSession(worker, opening, _LOAD_SECONDS, _TOKEN_SECONDS)
    finally:
        worker.close()
