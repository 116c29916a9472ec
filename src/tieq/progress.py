"""Progress on stderr: bars on a terminal, plain lines elsewhere. Results never go through here."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator

_PLAIN_SECONDS = 10.0


def say(text: str) -> None:
    """Print one line of progress."""
    print(text, file=sys.stderr, flush=True)


@contextlib.contextmanager
def stage(text: str) -> Iterator[None]:
    """Announce a stage whose steps cannot be counted, with a running clock on a terminal, and its time at the end."""
    start = time.monotonic()
    if sys.stderr.isatty():
        from rich.console import Console

        with Console(stderr=True).status(text):
            yield
    else:
        say(f"{text} ...")
        yield
    say(f"{text}: {time.monotonic() - start:.1f} s")


@contextlib.contextmanager
def counter(text: str, total: int, unit: str) -> Iterator[Callable[[int], None]]:
    """Show a bar with rate and remaining time; yields the function that advances it."""
    if sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            TaskProgressColumn(show_speed=True),
            TextColumn(f"{{task.completed:.0f}}/{{task.total:.0f}} {unit}"),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=Console(stderr=True)) as progress:
            task = progress.add_task(text, total=total)
            yield lambda count: progress.advance(task, count)
        return
    yield _PlainCounter(text, total, unit).advance


class _PlainCounter:
    """A line now and then, with rate and remaining time; and one at the end."""

    def __init__(self, text: str, total: int, unit: str) -> None:
        self.text, self.total, self.unit = text, total, unit
        self.done = 0
        self.finished = False
        self.start = self.last = time.monotonic()

    def advance(self, count: int) -> None:
        if self.finished:  # counts that were rounded up reach the total early
            return
        self.done += count
        self.finished = self.done >= self.total
        now = time.monotonic()
        if now - self.last < _PLAIN_SECONDS and self.done < self.total:
            return
        self.last = now
        elapsed = max(now - self.start, 1e-9)
        rate = self.done / elapsed
        left = (self.total - self.done) / rate if rate else float("inf")
        rest = f", {left:.0f} s left" if self.done < self.total else f" in {elapsed:.1f} s"
        say(f"{self.text}: {self.done}/{self.total} {self.unit}, {rate:.1f} {self.unit}/s{rest}")
