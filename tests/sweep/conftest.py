"""Two models; cells that are played by a stub."""

from __future__ import annotations

from pathlib import Path

import pytest
from sweep.helpers import STUB, Matrix


@pytest.fixture
def matrix(tmp_path: Path) -> Matrix:
    made = Matrix(tmp_path, tmp_path / "out")
    made.models.write_text("- smollm2-135m\n- {model: openai-community/gpt2, name: gpt2}\n")
    return made


@pytest.fixture
def stubbed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cells that name no command are run by the stub."""
    from tieq.sweep import child

    monkeypatch.setattr(child, "COMMAND", STUB)
