"""Runtime adapters, one module a runtime."""

from __future__ import annotations

from tieq.errors import MissingRuntimeError, TieqError
from tieq.runtimes.arm64 import LiteRtArm64, LlamaCppArm64, OnnxRuntimeArm64
from tieq.runtimes.base import Runtime
from tieq.runtimes.litert import LiteRt
from tieq.runtimes.llama_cpp import LlamaCpp
from tieq.runtimes.onnxruntime import OnnxRuntime
from tieq.runtimes.onnxruntime_web import OnnxRuntimeWeb, OnnxRuntimeWebChromium
from tieq.runtimes.parts import availability, settable
from tieq.runtimes.wllama import Wllama

# What stands for every runtime that there is.
ALL = "all"


def runtimes() -> dict[str, Runtime]:
    """Every known runtime by name."""
    known = (
        OnnxRuntime(),
        LlamaCpp(),
        OnnxRuntimeWeb(),
        OnnxRuntimeWebChromium(),
        OnnxRuntimeArm64(),
        LlamaCppArm64(),
        Wllama(),
        LiteRt(),
        LiteRtArm64(),
    )
    return {runtime.name: runtime for runtime in known}


def runtime(name: str) -> Runtime:
    """The runtime of that name.

    Raises:
        TieqError: listing the names that exist.
    """
    known = runtimes()
    if name not in known:
        raise TieqError(f"--runtime '{name}' is not known.", todo=f"Use one of {', '.join(known)}.")
    return known[name]


def check_ready(names: list[str]) -> None:
    """Refuse to start where a runtime is missing.

    Raises:
        MissingRuntimeError: naming all that are, with how to get them.
    """
    states = {name: runtime(name).availability() for name in names}
    missing = {name: state.how for name, state in states.items() if not state.ready}
    if missing:
        listed = " ".join(f"Get {name}: {how}." for name, how in missing.items())
        raise MissingRuntimeError("is not installed.", where=f"runtime {', '.join(missing)}", todo=listed)


def setup_names(wanted: list[str]) -> list[str]:
    """The runtimes that ``tieq runtimes setup`` is asked for; ``all`` is every one that this platform can have.

    Raises:
        TieqError: for a name that is unknown, or that comes with tieq or with pip.
    """
    able = settable()
    if wanted == [ALL]:
        return [name for name in able if availability(name).possible]
    for name in wanted:
        if name not in able:
            how = runtime(name).availability().how or "It is there already."
            raise TieqError("is not set up this way.", where=f"runtime {name}", todo=how)
    return list(dict.fromkeys(wanted))
