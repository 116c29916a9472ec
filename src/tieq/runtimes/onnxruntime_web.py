"""onnxruntime-web (WebAssembly) in Node.js and in headless Chromium: what mobile browsers and hybrid apps run.

It has no int8 kernels for ``MatMulNBits``: whatever accuracy level a file asks for, it computes in float.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from tieq.runtimes.base import Session
from tieq.runtimes.browser import Browser
from tieq.runtimes.install import node_command
from tieq.runtimes.onnxruntime import FLOAT_SUBJECT, external_files, output_rows
from tieq.runtimes.parts import FetchedRuntime, part
from tieq.runtimes.process import WORKERS, Channel, RemoteSession, Worker

_LOAD_SECONDS = 300.0
_TOKEN_SECONDS = 10.0
_FLOAT_KL = 1e-4


class OnnxRuntimeWeb(FetchedRuntime):
    """Runs ONNX files in Node.js."""

    name = "onnxruntime-web"
    suffixes = (".onnx",)
    purpose = "ONNX in WebAssembly, Node.js"
    tokens = 512
    platform = "WebAssembly, Node.js"

    def bound(self, mode: str, first: str) -> float | None:
        """Float against float is far below the gates' bound; 4e-11 was measured."""
        return _FLOAT_KL if first == FLOAT_SUBJECT else None

    def modes(self, path: Path) -> Iterator[tuple[str, contextlib.AbstractContextManager[Session]]]:
        """The one way: float, on one thread."""
        yield "", self._open(path)

    @contextlib.contextmanager
    def _open(self, path: Path) -> Iterator[Session]:
        channel = self._start(path)
        try:
            opening = {
                "model": self._model(path),
                "folder": str(path.parent),
                "external": external_files(path),
                "libraries": str(_libraries()),
            }
            yield RemoteSession(channel, opening, _LOAD_SECONDS, _TOKEN_SECONDS, output_rows(path))
        finally:
            channel.close()

    def _start(self, path: Path) -> Channel:
        return Worker(self.name, [*node_command(part("node").folder), str(WORKERS / "ort_node.mjs")])

    def _model(self, path: Path) -> str:
        return str(path)


class OnnxRuntimeWebChromium(OnnxRuntimeWeb):
    """Runs ONNX files on a page in headless Chromium."""

    name = "onnxruntime-web-chromium"
    purpose = "ONNX in WebAssembly, Chromium"
    platform = "WebAssembly, Chromium"

    def _start(self, path: Path) -> Channel:
        folders = {"libraries": _libraries(), "model": path.parent}
        return Browser(self.name, part("chromium").folder, "ort_page.mjs", folders)

    def _model(self, path: Path) -> str:
        return path.name


def _libraries() -> Path:
    return part("onnxruntime-web").folder / "node_modules"
