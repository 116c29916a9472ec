"""Work on the next items while the results of earlier ones are taken, in order and a few at a time."""

from __future__ import annotations

import collections
import concurrent.futures
import os
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


def ahead(work: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
    """Results of ``work`` in the order of its items, with as many under way as there are processors.

    What waits to be taken is bounded by that number, so results may be large. An exception of ``work`` is raised where
    its result would have come.
    """
    workers = os.cpu_count() or 1
    waiting: collections.deque[concurrent.futures.Future[Result]] = collections.deque()
    with concurrent.futures.ThreadPoolExecutor(workers) as pool:
        try:
            for item in items:
                waiting.append(pool.submit(work, item))
                if len(waiting) > workers:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            pool.shutdown(wait=True, cancel_futures=True)
