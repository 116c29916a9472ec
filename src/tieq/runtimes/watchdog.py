"""A time limit for a runtime inside tieq's own process, where native code can only be ended with the process."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator

# Like bad input: whoever waits for the exit code learns that nothing was proved.
_EXIT_CODE = 2


@contextlib.contextmanager
def watched(where: str, seconds: float) -> Iterator[None]:
    """End the process with a sentence and exit code 2 where the block takes longer than ``seconds``.

    An export that ends so leaves its unfinished folder, which the next one beside it removes; workers end with their
    pipe.
    """
    timer = threading.Timer(seconds, _end, (where, seconds))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _end(where: str, seconds: float) -> None:
    said = f"\ntieq: {where}: gave no answer within {seconds:.0f} s and was ended. Try a shorter --length.\n"
    os.write(2, said.encode())
    os._exit(_EXIT_CODE)
