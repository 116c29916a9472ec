"""llama.cpp in WebAssembly, as wllama carries it, on a page in headless Chromium."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from tieq.runtimes.base import Session
from tieq.runtimes.browser import Browser
from tieq.runtimes.parts import FetchedRuntime, part
from tieq.runtimes.process import RemoteSession

_LOAD_SECONDS = 300.0
_TOKEN_SECONDS = 20.0
_LENGTH = 512


class Wllama(FetchedRuntime):
    """Runs GGUF files; gives log-probabilities, which are logits up to a constant a position."""

    name = "llama.cpp-wasm"
    suffixes = (".gguf",)
    purpose = "GGUF in WebAssembly, Chromium"
    tokens = 64
    platform = "WebAssembly, Chromium"

    def modes(self, path: Path) -> Iterator[tuple[str, contextlib.AbstractContextManager[Session]]]:
        """The one way: one thread, one token at a time."""
        yield "", self._open(path)

    @contextlib.contextmanager
    def _open(self, path: Path) -> Iterator[Session]:
        folders = {"libraries": part("wllama").folder / "node_modules", "model": path.parent}
        channel = Browser(self.name, part("chromium").folder, "wllama_page.mjs", folders)
        try:
            opening = {"model": path.name, "length": _LENGTH}
            yield RemoteSession(channel, opening, _LOAD_SECONDS, _TOKEN_SECONDS)
        finally:
            channel.close()
