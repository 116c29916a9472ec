"""Runtime adapters, one module a runtime."""

from __future__ import annotations

from tieq.errors import TieqError
from tieq.runtimes.base import Runtime
from tieq.runtimes.llama_cpp import LlamaCpp
from tieq.runtimes.onnxruntime import OnnxRuntime


def runtimes() -> dict[str, Runtime]:
    """Every known runtime by name."""
    return {runtime.name: runtime for runtime in (OnnxRuntime(), LlamaCpp())}


def runtime(name: str) -> Runtime:
    """The runtime of that name.

    Raises:
        TieqError: listing the names that exist.
    """
    known = runtimes()
    if name not in known:
        raise TieqError(f"--runtime '{name}' is not known.", todo=f"Use one of {', '.join(known)}.")
    return known[name]
