"""A runtime in a process of its own: one JSON line in, one JSON line and raw bytes out, with a time limit."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from tieq.errors import TieqError
from tieq.runtimes.base import check_ids

WORKERS = Path(__file__).with_name("workers")
# The descriptor that a worker writes its answers to: what a library prints on stdout must not get between them.
ANSWERS = "TIEQ_ANSWERS"
_MESSAGE = 800


class Channel(Protocol):
    """Something that answers requests one after another."""

    def request(self, document: dict[str, Any], seconds: float) -> tuple[dict[str, Any], bytes]:
        """The answer to a request: its JSON header and the bytes behind it.

        Raises:
            TieqError: if it fails, ends or takes longer than ``seconds``; what runs behind it is then killed.
        """
        ...

    def close(self) -> None:
        """End whatever runs behind it."""
        ...


class Worker:
    """A child process in a process group of its own, so that it is ended with everything that it started.

    Args:
        label: what messages call it.
        command: program and arguments.
        environment: variables besides the inherited ones.
    """

    def __init__(self, label: str, command: list[str], environment: dict[str, str] | None = None) -> None:
        self._label = label
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the process
        self._answers, theirs = os.pipe()
        os.set_inheritable(theirs, True)
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=self._log,
                stderr=self._log,
                pass_fds=(theirs,),
                start_new_session=True,
                env={**os.environ, **(environment or {}), ANSWERS: str(theirs)},
            )
        except OSError as error:
            os.close(self._answers)
            raise TieqError(f"cannot be started ({error}).", where=label) from error
        finally:
            os.close(theirs)
        self._buffer = bytearray()

    def request(self, document: dict[str, Any], seconds: float) -> tuple[dict[str, Any], bytes]:
        """See :meth:`Channel.request`."""
        deadline = time.monotonic() + seconds
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(document).encode() + b"\n")
            self._process.stdin.flush()
        except OSError:
            self._fail()
        while b"\n" not in self._buffer:
            self._read(deadline, seconds)
        line, _, rest = bytes(self._buffer).partition(b"\n")
        header: dict[str, Any] = json.loads(line)
        self._buffer = bytearray(rest)
        while len(self._buffer) < header.get("bytes", 0):
            self._read(deadline, seconds)
        payload = bytes(self._buffer[: header.get("bytes", 0)])
        del self._buffer[: len(payload)]
        if "error" in header:
            raise TieqError(f"{header['error']}.", where=self._label)
        return header, payload

    def close(self) -> None:
        """Kill the process group."""
        if self._log.closed:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        if self._process.stdin is not None:
            with contextlib.suppress(OSError):  # what it did not read is of no interest any more
                self._process.stdin.close()
        os.close(self._answers)
        self._log.close()

    def _read(self, deadline: float, seconds: float) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._answers, selectors.EVENT_READ)
            if not selector.select(max(0.0, deadline - time.monotonic())):
                self.close()
                raise TieqError(
                    f"did not answer within {seconds:.0f} s and was ended.",
                    where=self._label,
                    todo="Run it alone, or with fewer --sequences.",
                )
        block = os.read(self._answers, 1 << 20)
        if not block:
            self._fail()
        self._buffer += block

    def _fail(self) -> None:
        self._process.wait()
        self._log.seek(0, os.SEEK_END)
        self._log.seek(max(0, self._log.tell() - _MESSAGE))
        said = " ".join(self._log.read().decode(errors="replace").split())
        code = self._process.returncode
        self.close()
        raise TieqError(f"ended by itself with code {code} ({said or 'no message'}).", where=self._label)


class RemoteSession:
    """Logits through a channel.

    Args:
        channel: answers ``{"ids": [...]}`` with float32 logits ``[length, vocab]``.
        opening: the first request, which loads the model; its answer may hold the number of ``rows``.
        load_seconds: time limit of that one.
        token_seconds: time limit of a sequence, a token.
        rows: of the table, where the worker does not know them.
    """

    def __init__(
        self,
        channel: Channel,
        opening: dict[str, Any],
        load_seconds: float,
        token_seconds: float,
        rows: int | None = None,
    ) -> None:
        self._channel = channel
        self._token_seconds = token_seconds
        self.opened, _ = channel.request(opening, load_seconds)
        self._rows = rows or self.opened.get("rows")

    def logits(self, ids: NDArray[np.int64]) -> NDArray[np.float32]:
        """Logits ``[length, vocab]`` of one sequence."""
        if self._rows:
            check_ids(ids, self._rows)
        seconds = 60 + self._token_seconds * len(ids)
        _, payload = self._channel.request({"ids": ids.tolist()}, seconds)
        return np.frombuffer(payload, np.float32).reshape(len(ids), -1)
