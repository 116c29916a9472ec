from __future__ import annotations

import re
import sys

import pytest

from tieq import progress
from tieq.progress import counter, say, stage


class Terminal:
    """Standard error that says it is a terminal and keeps what is written."""

    encoding = "utf-8"

    def __init__(self) -> None:
        self.text = ""

    def write(self, text: str) -> int:
        self.text += text
        return len(text)

    def flush(self) -> None:
        """Nothing is buffered."""

    def isatty(self) -> bool:
        return True


def on_terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Put a terminal in place; called in the test itself, since pytest's capture sets stderr anew for each phase."""
    made = Terminal()
    monkeypatch.setattr(sys, "stderr", made)
    monkeypatch.setenv("TERM", "xterm")
    return made


def test_progress_goes_to_stderr_and_results_are_left_alone(capsys: pytest.CaptureFixture) -> None:
    say("hello")
    with stage("loading"), counter("work", 2, "steps") as advance:
        advance(2)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("hello\n")


def test_a_stage_says_that_it_begins_and_how_long_it_took(capsys: pytest.CaptureFixture) -> None:
    with stage("loading"):
        assert capsys.readouterr().err == "loading ...\n"
    assert re.fullmatch(r"loading: \d+\.\d s\n", capsys.readouterr().err)


def test_a_stage_that_fails_does_not_claim_to_be_done(capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(ValueError, match="stop"), stage("loading"):
        raise ValueError("stop")
    assert capsys.readouterr().err == "loading ...\n"


def test_a_plain_counter_reports_its_end_once(capsys: pytest.CaptureFixture) -> None:
    with counter("work", 100, "steps") as advance:
        for _ in range(100):
            advance(1)
    assert re.fullmatch(r"work: 100/100 steps, \d+\.\d steps/s in \d+\.\d s\n", capsys.readouterr().err)


def test_a_plain_counter_reports_rate_and_remaining_time_now_and_then(
    capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter([100.0, 105.0, 111.0, 112.0, 140.0])  # start, then at each step
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock))
    with counter("work", 8, "steps") as advance:
        for count in (1, 1, 1, 5):
            advance(count)
    # 5 s: silent. 11 s: 2 of 8 at 2/11 a second, 33 s left. 12 s: silent. 40 s: all 8, 0.2 a second.
    assert capsys.readouterr().err == (
        "work: 2/8 steps, 0.2 steps/s, 33 s left\nwork: 8/8 steps, 0.2 steps/s in 40.0 s\n"
    )


def test_a_plain_counter_of_nothing_does_not_divide_by_zero(capsys: pytest.CaptureFixture) -> None:
    with counter("work", 0, "steps") as advance:
        advance(0)
    assert capsys.readouterr().err.startswith("work: 0/0 steps")


def test_a_terminal_gets_a_bar_with_a_rate_and_the_count(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = on_terminal(monkeypatch)
    with counter("work", 3, "steps") as advance:
        for _ in range(3):
            advance(1)
    assert "work" in terminal.text
    assert "3/3 steps" in terminal.text


def test_a_terminal_gets_the_time_of_a_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = on_terminal(monkeypatch)
    with stage("loading"):
        pass
    assert re.search(r"loading: \d+\.\d s\n$", terminal.text)
    assert "loading ...\n" not in terminal.text
