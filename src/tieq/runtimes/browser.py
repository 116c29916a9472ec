"""Headless Chromium on a page of our own: served from this machine to this machine, ended with its pipe."""

from __future__ import annotations

import contextlib
import http.server
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

from tieq.errors import TieqError
from tieq.runtimes.process import WORKERS

_TYPES = {".mjs": "text/javascript", ".js": "text/javascript", ".wasm": "application/wasm", ".html": "text/html"}
_SWITCHES = (
    "--headless=shell",
    "--no-sandbox",  # it opens nothing but our own page
    "--no-zygote",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--no-first-run",
    # A browser that is driven through a pipe ends when the pipe does, even if we are killed.
    "--remote-debugging-pipe",
)
# The browser expects its pipe at descriptors 3 and 4, which may be taken: both are moved out of the way first.
_LAUNCH = """
import os, sys
ends = [os.dup(int(each)) for each in sys.argv[1:3]]
ends = [os.dup(each) if each in (3, 4) else each for each in ends]
for end, place in zip(ends, (3, 4)):
    os.dup2(end, place)
os.execv(sys.argv[3], sys.argv[3:])
"""


class Browser:
    """A page that answers requests; see :class:`tieq.runtimes.process.Channel`.

    Args:
        label: what messages call it.
        chromium: folder with the ``chromium`` program and its libraries.
        script: the page's module, one of ``workers/``.
        folders: what is served, by the first part of the path.
    """

    def __init__(self, label: str, chromium: Path, script: str, folders: dict[str, Path]) -> None:
        self._label = label
        self._jobs: queue.Queue[bytes] = queue.Queue()
        self._answers: queue.Queue[bytes] = queue.Queue()
        self._profile = tempfile.TemporaryDirectory(prefix="tieq-page-", ignore_cleanup_errors=True)
        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), self._handler(script, folders))
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self._process, self._pipe = self._start(chromium)

    def request(self, document: dict[str, Any], seconds: float) -> tuple[dict[str, Any], bytes]:
        """See :meth:`tieq.runtimes.process.Channel.request`."""
        self._jobs.put(json.dumps(document).encode())
        left = seconds
        while True:
            try:
                content = self._answers.get(timeout=min(1.0, max(left, 0.01)))
                break
            except queue.Empty:
                left -= 1.0
            if self._process.poll() is not None:
                self.close()
                raise TieqError(f"ended by itself with code {self._process.returncode}.", where=self._label)
            if left <= 0:
                self.close()
                raise TieqError(
                    f"did not answer within {seconds:.0f} s and was ended.",
                    where=self._label,
                    todo="Run it alone, or with fewer --sequences.",
                )
        line, _, payload = content.partition(b"\n")
        header: dict[str, Any] = json.loads(line)
        if "error" in header:
            raise TieqError(f"{header['error']}.", where=self._label)
        return header, payload

    def close(self) -> None:
        """End the browser and the server, and delete its profile."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        while self._pipe:
            os.close(self._pipe.pop())
        self._server.shutdown()
        self._server.server_close()
        self._profile.cleanup()

    def _start(self, chromium: Path) -> tuple[subprocess.Popen[bytes], list[int]]:
        theirs_in, ours_out = os.pipe()
        ours_in, theirs_out = os.pipe()
        command = [str(chromium / "chromium"), *_SWITCHES, f"--user-data-dir={self._profile.name}"]
        try:
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _LAUNCH, str(theirs_in), str(theirs_out), *command],
                pass_fds=(theirs_in, theirs_out),
                start_new_session=True,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={
                    **os.environ,
                    "LD_LIBRARY_PATH": str(chromium / "lib"),
                    "FONTCONFIG_PATH": str(chromium),
                    "HOME": self._profile.name,
                },
            )
        finally:
            os.close(theirs_in)
            os.close(theirs_out)
        address = f"http://127.0.0.1:{self._server.server_address[1]}/"
        command_line = json.dumps({"id": 1, "method": "Target.createTarget", "params": {"url": address}})
        os.write(ours_out, command_line.encode() + b"\0")
        return process, [ours_out, ours_in]

    def _handler(self, script: str, folders: dict[str, Path]) -> type[http.server.BaseHTTPRequestHandler]:
        jobs, answers = self._jobs, self._answers
        page = f'<!doctype html><meta charset="utf-8"><title>tieq</title><script type="module" src="/workers/{script}">'
        served = {**folders, "workers": WORKERS}

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                if self.path == "/":
                    self._send(f"{page}</script>".encode(), "text/html")
                    return
                first, _, rest = self.path.lstrip("/").partition("/")
                root = served.get(first)
                file = None if root is None or ".." in rest.split("/") else root / rest
                if file is None or not file.is_file():
                    self.send_error(404)
                    return
                self._send(file.read_bytes(), _TYPES.get(file.suffix, "application/octet-stream"))

            def do_POST(self) -> None:
                content = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                if self.path == "/answer":
                    answers.put(content)
                    self._send(b"{}", "application/json")
                else:
                    self._send(jobs.get(), "application/json")

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class names it so
                """Say nothing."""

            def _send(self, content: bytes, kind: str) -> None:
                self.send_response(200)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(content)))
                self.send_header("Cross-Origin-Opener-Policy", "same-origin")
                self.send_header("Cross-Origin-Embedder-Policy", "require-corp")
                self.end_headers()
                with contextlib.suppress(ConnectionError):
                    self.wfile.write(content)

        return Handler
