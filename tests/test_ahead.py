"""Results in order, few at a time."""

from __future__ import annotations

import os
import threading
import time

import pytest

from tieq.ahead import ahead


def test_results_come_in_the_order_of_the_items():
    def slow_first(number: int) -> int:
        time.sleep(0.05 if number == 0 else 0)
        return number * number

    assert list(ahead(slow_first, range(20))) == [number * number for number in range(20)]
    assert list(ahead(slow_first, [])) == []


def test_no_more_are_under_way_than_processors_and_one_that_is_taken():
    begun: list[int] = []
    results = ahead(lambda number: begun.append(number) or number, range(1000))
    assert next(results) == 0
    time.sleep(0.05)
    assert len(begun) <= (os.cpu_count() or 1) + 1
    results.close()
    time.sleep(0.05)
    assert len(begun) <= (os.cpu_count() or 1) + 1


def test_an_exception_stands_where_its_result_would():
    def refuse_three(number: int) -> int:
        if number == 3:
            raise ValueError("three")
        return number

    results = ahead(refuse_three, range(10))
    assert [next(results) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(ValueError, match="three"):
        next(results)


def test_items_run_beside_each_other(monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    both = threading.Barrier(2, timeout=10)
    assert len(list(ahead(lambda number: both.wait(), range(2)))) == 2
