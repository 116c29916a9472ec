"""llama.cpp on the CPU, through llama-cpp-python."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tieq.errors import TieqError
from tieq.runtimes.base import Availability, Runtime, Session, check_ids

# ``GGML_LOG_LEVEL_ERROR``.
_LOG_ERROR = 4


class LlamaCpp(Runtime):
    """Runs GGUF files."""

    name = "llama.cpp"
    suffixes = (".gguf",)
    purpose = "GGUF on the CPU"

    def availability(self) -> Availability:
        """Whether llama-cpp-python is installed."""
        try:
            version = importlib.metadata.version("llama-cpp-python")
        except importlib.metadata.PackageNotFoundError:
            return Availability(False, "", "pip install llama-cpp-python (compiles for about five minutes)")
        return Availability(True, f"llama-cpp-python {version}", "")

    def modes(self, path: Path) -> Iterator[tuple[str, contextlib.AbstractContextManager[Session]]]:
        """The one way."""
        yield "", _open(path)


@contextlib.contextmanager
def _open(path: Path) -> Iterator[Session]:
    session = _LlamaSession(path)
    try:
        yield session
    finally:
        session.close()


class _LlamaSession:
    """Loads the model at the first sequence, whose length sets the context; longer ones load it again."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._model: Any = None
        self._length = 0

    def close(self) -> None:
        """Free the model."""
        if self._model is not None:
            self._model.close()
            self._model = None

    def logits(self, ids: NDArray[np.int64]) -> NDArray[np.float32]:
        """Logits ``[length, vocab]`` of one sequence."""
        if len(ids) > self._length:
            self._load(len(ids))
        check_ids(ids, self._model.n_vocab())
        self._model.reset()
        self._model.eval(ids.tolist())
        return np.array(self._model.scores[: len(ids)], dtype=np.float32)

    def decode(self, prompt: NDArray[np.int64], steps: int) -> float:
        """Seconds of greedy steps after a prompt."""
        if len(prompt) + steps > self._length:
            self._load(len(prompt) + steps)
        self._model.reset()
        self._model.eval(prompt.tolist())
        start = time.perf_counter()
        for _ in range(steps):
            self._model.eval([int(self._model.scores[self._model.n_tokens - 1].argmax())])
        return time.perf_counter() - start

    def _load(self, length: int) -> None:
        import llama_cpp

        self.close()
        threads = os.cpu_count() or 1
        with _error_log() as said:
            try:
                self._model = llama_cpp.Llama(
                    str(self._path),
                    n_ctx=length,
                    n_batch=length,
                    n_ubatch=length,
                    logits_all=True,
                    verbose=False,
                    n_threads=threads,
                    n_threads_batch=threads,
                )
            except (ValueError, RuntimeError, OSError) as error:
                reason = " ".join(said) or str(error)
                raise TieqError(f"llama.cpp cannot load the file ({reason}).", where=str(self._path)) from error
        self._length = length


@contextlib.contextmanager
def _error_log() -> Iterator[list[str]]:
    """Collect llama.cpp's error lines, so that a refusal to load carries its reason."""
    import ctypes

    import llama_cpp
    from llama_cpp import _logger

    lines: list[str] = []

    def keep(level: int, text: bytes, data: Any) -> None:
        if level == _LOG_ERROR:
            lines.append(text.decode("utf-8", errors="replace").strip())

    callback = llama_cpp.llama_log_callback(keep)
    llama_cpp.llama_log_set(callback, ctypes.c_void_p(0))
    try:
        yield lines
    finally:
        llama_cpp.llama_log_set(_logger.llama_log_callback, ctypes.c_void_p(0))
